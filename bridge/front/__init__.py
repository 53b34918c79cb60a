"""The command line of a run: Hydra over the registry of recipes, decoded into a `ConfigContainer`.

    train.py            the script that trains: check, sync, record, train
    compare.py          the script that trains a sweep and judges the loss of each recipe
    main.py             a script under Hydra: refuse, run or sweep, and the exit code
      command_line.py   the flags and overrides of Hydra
      job.py            the run as Hydra calls it, in its run folder
      plain_config.py   the configs of a run as plain data, for its folder
      errors.py         Hydra's errors as errors of this package
    compose.py          one config of YAML files, recipes and overrides, and the origin of each key
      search.py         the folders of configs
      references.py     refuses references that would multiply the size of a config
    config_file.py      a file that describes a run, with overrides
    loader.py           `load_run`: the `Run` of a composed config or a file
      stated_precision.py   the precision of a run: its recipe, and the fields stated over it
      folders.py        the folder of the Hydra tree, and the file that a path names
    container.py        `build_container`: the `ConfigContainer` of a `Run`
      decode.py         plain data as the arguments of a dataclass
    python_check.py     `check` in Python
    file_runs.py        the runs of several files and folders
    nemo_run.py         a plugin of nemo-run that asks the check before it submits a task
    json_schema.py      the JSON Schema of the YAML that is read
    plugins/            the plugin by which other Hydra applications find the recipes

Configs are data. Nothing in them is instantiated. Every key is checked against the fields of the
class that it configures. The docstring of train.py has the stages of a run with their types.
"""

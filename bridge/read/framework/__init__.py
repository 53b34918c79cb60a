"""Frameworks that run on Megatron Core and whose files are read: a table each, and readers.

tables/NAME.yaml           the table of a framework: its settings, and the values that it sets at start
framework_table.py         `FrameworkTable`: a table in memory
framework_options.py       the options that only a framework has, and their effects
tree.py                    `read_tree`: a tree of settings as sections of a run, by a table
reading_from_tree.py       `build_reading_from_tree`: these sections with the model of the checkpoint
reading_from_arguments.py  `build_reading_from_arguments`: Megatron-LM's arguments that a framework
                           passes on
checkpoint.py              the checkpoint that decides a model's config; hf_config.py, its config.json
start_rows.py              values that a framework sets when the run starts
yaml_reader_registry.py    `read_framework`: a YAML file, by the reader of its framework
launch_reader_registry.py  `maybe_read_script`: a launch script, by the reader of its framework
nemo_rl.py, verl.py, ms_swift.py, roll.py  frameworks whose settings are a tree
npu.py                     the variables by which a run is known to train on NPUs of Ascend
primus.py, flagscale.py, miles.py     frameworks whose settings are Megatron-LM's arguments
primus_bridge.py           experiments of Primus on Megatron Bridge, whose recipe is a function
primus_presets.py          `PrimusPresets`: the module and model files of a clone of Primus
python_launcher.py         `maybe_read_launcher`: a Python launcher as the script that it stands for
launcher/                  `LauncherProgram`: a Python launcher, followed by its syntax

docs/howto/add-a-framework.md has the steps to add a framework.

A framework is added by its table, a row in `read/framework_signs.yaml`, and the readers of its files:

- Scripts with Megatron-LM's arguments need no module. The column `table` of the row names the table.
- YAML files whose settings are a tree: a module with `read_config`, and its line in `TREE_READERS` of
  yaml_reader_registry.py. Launches with settings of that tree: a function `read_launch`, and its
  line in `LAUNCH_READERS` of launch_reader_registry.py. The column `tree` of the row names the table.
- Other YAML files: a module with `is_of` and `read`, and its place in `EXPERIMENT_READERS` of
  yaml_reader_registry.py.
- Each kind of YAML file needs a key at its top in `FRAMEWORK_KEY_PATTERN` of read/run_file.py. Each
  kind of script needs a word in `SCRIPT_SIGNS` of launch_reader_registry.py. Files without
  them are not read by a framework's reader.
"""

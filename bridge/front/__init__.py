"""The command line of a run: Hydra over the registry of recipes, decoded into a `ConfigContainer`.

Configs are data. Nothing in them is instantiated; every key is checked against the real field of
the class it is for.

`compose.py` composes a tree, `files/` reads a file, `loader.py` makes the `Run` of either,
`decode.py` the container of these; `main.py` is the command line of a script, and `train.py` the
job of a run. `nemo_run.py` is a plugin of nemo-run that asks the check before it submits a task.
"""

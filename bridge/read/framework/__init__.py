"""Frameworks that run on Megatron Core and whose files are read: a table each, and readers.

NAME.yaml         the table of a framework: its settings, and the values that it sets at start
table.py          `FrameworkTable`, a table in memory; names.py, the rows about names of its own
tree.py           `read_tree`: a tree of settings as sections of a run, by a table
tree_run.py       `build_reading_from_tree`: the sections with the model of the checkpoint, as a run
arguments.py      arguments of Megatron-LM that a framework hands on
checkpoint.py     the checkpoint that a model's config is made of; hf_config.py, its config.json
start.py          values that a framework sets when the run starts
files.py          `read_framework`: a YAML file, by the reader of its framework
launches.py       `maybe_read_script`: a launch script, by the reader of its framework
nemo_rl.py, verl.py, ms_swift.py, roll.py  frameworks whose settings are a tree of their own
primus.py, flagscale.py, miles.py          frameworks whose settings are Megatron-LM's arguments

A framework is added by its table, a row in `read/rows/frameworks.yaml`, and what its files need:

- Scripts with Megatron-LM's arguments need no module. The column `table` of the row names the table.
- YAML files whose settings are a tree: a module with `read`, and its line in `TREES` of files.py.
  Launches with settings of that tree: a function `read_launch`, and its line in `READERS` of
  launches.py. The column `tree` of the row names the table.
- Other YAML files: a module with `is_of` and `read`, and its place in `READERS` of files.py.
- Each kind of YAML file needs a key at its top in `FRAMEWORK_KEY_PATTERN` of read/run_file.py, and each kind of
  script a word in `SIGNS` of launches.py. Files without them are not looked at.
"""

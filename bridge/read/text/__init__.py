"""Parses files and command lines of other systems into plain data.

document.py              `Document`: a file and its content
document_kind.py         the kind of a file: YAML, JSON, a shell script, ...
strict_json.py           JSON, in which no key may occur twice
checkpoint_arguments.py  the arguments of a run in a checkpoint of Megatron-LM
inherited_config.py      YAML that inherits from the files that `defaults` names
repository_files.py      files that a launch script names by a path in its repository
python_calls.py          the calls and assignments of a Python program
command_arguments.py     the options and overrides of a command line
hydra_overrides.py       overrides in Hydra's grammar, and their effect on a config
trainer_arguments.py     the arguments of transformers' Trainer
settings.py              the settings of a mapping, with their types
dotted.py                a value by its dotted key
"""

"""Files of other systems, read as data.

document.py        `Document`: a file, its kind (document_kind.py) and its content
strict_json.py     JSON without a key twice
checkpoint_arguments.py   the arguments of a run in a checkpoint of Megatron-LM
composed.py        YAML that names the files below it; neighbours.py, files near a file
python_calls.py    the calls and names of a Python program
command_words.py   words of a command line as options and overrides; hydra_words.py, Hydra's
settings.py        settings of a mapping with their types; dotted.py, a value by its dotted key
trainer_words.py   arguments of transformers' Trainer
"""

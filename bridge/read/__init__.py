"""Readers of files that describe a run or a precision, whatever program wrote them.

Runs, for `check`, `plan` and `memory`:

    run_file.py          `load_file_reading`: the `FileReading` of a file of any framework
    framework_signs.py   recognises the framework of a file or a launch
    framework/           frameworks on top of Megatron Core: a table of settings each, and their readers
    framework_fields.py  fields that a framework has and Megatron Core does not
    megatron_lm/         Megatron-LM's arguments, in scripts, files, logs and checkpoints
    megatron_bridge/     Megatron Bridge's configs, recipes and programs
    assumed_release.py   the release of Megatron Core that a file is for, by its fields
    layer_source.py      whether Megatron Core builds the layers; if not, they cannot be planned
    model_sizes.py       refuses a run without the sizes of its model
    startup_values.py    the values that a framework sets when a run starts; startup_rows.py, the
                         form of their tables
    debug_features.py    the features of Transformer Engine's debugger; debug_log.py, its log
    tokenizers.py        the vocabularies of published models
    run_keys.py          the sections of a run of ours; run_input.py, their values as they were read;
                         recipe_sources.py, the files with recipes that they name
    refusals.py          refuses a file that is not read, with a sentence about its system

Precisions, for `convert`:

    foreign/             `System`, which reads and writes a precision, and the engine of its table;
                         foreign/tables/, the tables: settings, fields and sentences of systems
    foreign_system_signs.py  recognises the system of a file
    nemo/                NeMo 1 and NeMo 2
    deepspeed.py         DeepSpeed's JSON
    command_lines.py     launches of programs other than Megatron-LM's; launch_arguments.py, their
                         options, and the records of those that are not read

Both rest on:

    launch/              shell scripts: the programs that they start
    text/                documents and command lines as plain data
    logs/                losses, gradient norms and throughput in the logs of other trainers

To add a framework on top of Megatron Core (`docs/howto/add-a-framework.md`):

- a table `framework/tables/NAME.yaml`: its fields, and the values set at start;
- a row in `framework_signs.yaml`: how a file or a launch is recognised;
- if its files are YAML, one of their keys in `FRAMEWORK_KEY_PATTERN` of run_file.py, and a reader in
  `framework/yaml_reader_registry.py`; `framework/__init__.py` names the mapping of readers;
- `scripts/frameworks.py NAME=CLONE` checks the table against a clone of the framework.

A system that does not run Megatron Core has a module in `bridge/convert/`, and a row in
`DOCUMENT_KINDS` of foreign_system_signs.py and in `SYSTEM_MODULES` of `bridge/convert/systems.py`.
"""

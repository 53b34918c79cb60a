"""Readers of files that describe a run or a precision, whatever program wrote them.

    run_file.py         `read_file`: a run of any framework, by the reader of its framework
    framework_signs.py  the framework of a file or a launch, by signs that no other one has
    framework/          frameworks on top of Megatron Core: a table each, and the readers of it
    megatron_lm/        Megatron-LM's arguments, in scripts, files, logs and checkpoints
    megatron_bridge/    Megatron Bridge's configs, recipes and programs
    logs/               what a run left: losses, norms and throughput in logs of other trainers
    set_at_start.py     values that a framework sets when the run starts; start.py, their rows
    refusals.py         files that are not read, each refused in a sentence

    foreign/            `System`, a pair of functions that read and write a precision, and its table
    rows/               tables of systems: settings, fields and sentences
    system_signs.py     the signs of the systems of `convert`
    nemo/               NeMo 1 and NeMo 2, systems that run Megatron Core
    deepspeed.py        DeepSpeed's JSON, which scripts of Megatron-LM's forks start their engine with

    launch/             shell scripts: the programs that they start, with arguments and environment
    command_lines.py    launches of programs that are not Megatron-LM's
    text/               documents: YAML, JSON, Python and logs as plain data

To add a framework on top of Megatron Core:

- a table `framework/NAME.yaml`: how a file is recognised, its fields, and the values set at start;
- a row in `rows/frameworks.yaml`;
- where its files are YAML, a key of them in `FRAMEWORK_KEY_PATTERN` of run_file.py, and a reader in
  `framework/files.py`; `framework/__init__.py` says in which mapping;
- `scripts/frameworks.py NAME=CLONE` checks the table against a clone of the framework.

A system that does not run Megatron Core has a file in `bridge/convert/`, and a row in
system_signs.py and in `bridge/convert/systems.py`.
"""

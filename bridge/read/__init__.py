"""Files that describe a run or a precision, each read by the table of the program that it is for.

    run_file.py        the framework that a run's file is for, and its reader
    system_signs.py    the signs of the systems of `convert`, a row each
    logs/              what a run left: losses, norms and throughput in logs of other trainers
    launch/            shell scripts: the programs that they start, with arguments and environment
    text/              documents: YAML, JSON, Python and logs as plain data
    rows/              the table of each system: settings, fields and sentences
    megatron_lm/       Megatron-LM's arguments, in scripts, files, logs and checkpoints
    megatron_bridge/   Megatron Bridge's configs and recipes
    framework/         frameworks on top of Megatron Core: a table each, and the readers of it

To add a framework on top of Megatron Core:

- a table `framework/NAME.yaml`: how a file is recognised, its fields, and the values set at start;
- a row in `rows/frameworks.yaml`;
- a module in `READERS` of `framework/files.py` where its files are YAML;
- `scripts/frameworks.py NAME=CLONE` checks the table against a clone of the framework.

A system that does not run Megatron Core has a file in `bridge/convert/`, and a row in system_signs.py and in
`bridge/convert/systems.py`.
"""

"""Megatron-LM: its arguments, from launch scripts, argument files, logs and checkpoints.

The arguments of a run pass through four stages: options as they are written, values by the names
of Megatron-LM's code, sections of Megatron's configs, and a reading or a precision.

The arguments of a run:

    recognition.py         whether a document or a launch is Megatron-LM's
    written_arguments.py   the options of a run as they are written
    printed_arguments.py   the arguments that a run printed into a log
    flags.py               the options of Megatron-LM's parser; their rows are in
                           bridge/read/foreign/tables/megatron_lm.yaml
    argument_values.py     the options by the names that Megatron-LM's code has for them
    parser_refusals.py     words of a command line that the parser refuses
    unread_options.py      options that no part of this reader reads, and the settings that they
                           may change

A file as a run, which `check`, `plan` and `memory` read:

    run_mode.py            `RunMode`: the mode, and the source that decides it
    run_reader.py          `make_file_reading`: the `FileReading` of a run
    file_arguments.py      the arguments of each run of a file, as they are written
    parsed_run.py          `ParsedRun`: a run with its arguments by their names
    sections.py            the sections of a run that the arguments become
    start_rows.py          the values that Megatron-LM sets when a run starts
    other_sources.py       settings that files, modules or an engine decide
    deepspeed/             DeepSpeed's engine and its JSON
    model_kind.py          models that are no language model
    open_points.py         sentences about everything that a file does not decide
    launches.py            the runs of the file, and the branches of a launch
    refusal_findings.py    findings about options that the parser refuses

A file as a precision, which `convert` reads and writes:

    importer.py            `SYSTEM`, and the precision that arguments state
    gradient_reduction.py  the dtype in which gradients are reduced
    effects.py             defaults that decide, and settings without effect
    exporter.py            a recipe as arguments
    module_recipe/         files for `--te-precision-config-file`: found, read and written
"""

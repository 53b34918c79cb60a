"""The command line `precision-bridge`: a module per command, with `add_arguments` and `run`.

    main.py             finds and runs the command; turns errors into one line and exit code 2
    commands.py         the table of commands by the moment of their use, and the names before 0.2
    parser.py           a parser that reports a mistake in one line
    run_arguments.py    the arguments that describe a run, and the run
    run_answer.py       answers about a run, with the decisive findings of its check
    many_runs.py        answers about several files: a line for each run
    described_logs.py   logs of other trainers, with the runs that their arguments describe
    debug_log.py        a log of Transformer Engine's debugger: a table and early warnings
    output.py           JSON, tables and files

A `run` gets the parsed arguments (`args`), calls a room below for a value, and prints the value: as
plain data under `--json`, else through `report`. It returns None or 0, or an exit code that its
help names. A command with several forms is a folder: compare/command.py, for example, has the
arguments and chooses, and the other files of compare/ are the forms. Nothing heavy is imported
before it is needed. The rooms that make the answer of a command:

    recipes explain                         precision, registry, sync.field_routes, rules, preflight
    check plan memory compare --twin        front (the run), sync (prediction), preflight, plan
    convert manifest                        read, convert
    rehearse compare quantisation-error     rehearse, training: these import Megatron
    report audit checkpoint                 runtime.audit, runtime.checkpoint: files of earlier runs
"""

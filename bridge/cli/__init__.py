"""The command line `precision-bridge`: a module per noun, each with its parsers and a function per command.

    main.py         finds the module of a command, imports it alone, and turns errors into one line and exit code 2
    arguments.py    the arguments of several commands, and the run, plan and prediction that they describe

A function gets the parsed arguments (`chosen`), asks a room below for its value, and prints it: as plain data under
`--json`, else through `report`. What a command answers with is made there:

    recipes show diff explain                      precision, registry, sync.routes, rules
    check support-matrix                           preflight
    plan align memory modules twin                 front (the run), sync.prediction, plan
    convert sources manifest                       interop
    rehearse gradients quantisation-error          rehearse, training: these import Megatron
    report audit watch checkpoint                  audit, checkpoint: files of runs that were made before

It returns None or 0, or an exit code that its help names. Nothing heavy is imported before it is asked for.
"""

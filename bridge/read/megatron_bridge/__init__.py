"""Megatron Bridge: its run configs, its recipes in Python, its launches and its precisions.

A run that a YAML states:

    saved_container.py     `read_saved_container`: the run of a saved `ConfigContainer`
    start_rows.py          the values that Megatron Bridge sets when a run starts

A run that a Python program or a launch states:

    program_file.py        `read_program`: a file whose functions make runs
    launch.py              `read_launch`: a start of `run_recipe.py`, with its overrides
    program_container.py   the run of a container that a followed program makes
    recipe_process.py      the container that Megatron Bridge itself makes, in another process

A precision that `convert` reads or writes:

    importer.py            `SYSTEM`, and the precision of a name, a mapping, a run or a program
    exporter.py            `export`: a recipe as `mixed_precision`
    program_precisions.py  the precisions that the functions of a program state
    stated_precision.py    the `mixed_precision` of one container, as far as it is known

The evaluation of a program by its syntax. The upper files use the lower ones:

    evaluator.py           `Evaluator`: functions, statements, branches and loops
    expressions.py         `ExpressionEvaluator`: names, attributes, calls and conditions
    modelled_calls.py      calls whose result is known without source
    operations.py          operators, builtin functions and methods of plain values
    journal.py             the changes of a branch, which can be undone and joined
    classes.py             fields and methods of classes
    source_library.py      the source of Megatron Bridge, found by import path
    values.py              the values: `Object`, `FieldValue`, `Function`, `Class`, `ImportedName`
    plain_data.py          values as plain data, in the form of a saved run's YAML

No program is imported or run, except by `recipe_process.py`. A value that is known only when the
program runs is *open*: an `Object` without a class, whose `decider` names the source that decides it.
"""

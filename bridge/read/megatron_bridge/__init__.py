"""Megatron Bridge: its run configs, its recipes in Python, its launches and its precisions.

A run that a YAML states
    run.py                `read`: a saved `ConfigContainer`, as what its file says of a run
    start.py              the values that Megatron Bridge sets at the start of a run, as rows

A run that a Python program or a launch states
    recipes.py            `read_program`: a file whose functions make runs
    launch.py             `read_launch`: a start of `run_recipe.py`, with its overrides
    container.py          `reading_of`: the container of a followed program, as what it says of a run
    recipe_process.py     the container that Megatron Bridge itself makes in a process, on request

A precision that `convert` reads or writes
    importer.py           `import_`: a name, a mapping, a run's file or a program, as a recipe
    exporter.py           `export`: a recipe as `mixed_precision`
    precisions.py         `collect_precisions`: the precisions that the functions of a program state
    stated_precision.py   the `mixed_precision` of one container, as far as a program states it

How a program is followed by its syntax, the upper files by means of the lower ones
    evaluator.py          `Evaluator`: functions, statements, branches and loops
    expressions.py        `Expressions`: names, attributes, calls and conditions
    modelled_calls.py     calls that need no source: precisions, models of checkpoints, starts
    operations.py         operators, builtins and methods of plain values
    journal.py            the changes of a branch, which can be taken back and joined
    classes.py            fields and methods of classes
    library.py            the source of Megatron Bridge, looked up by import path
    values.py             the values: `Object`, `FieldValue`, `Function`, `Class`, `ImportedName`
    plain_data.py         values as plain data, as the YAML of a run has them

A program is never imported or run, but for `recipe_process.py`. What only the run knows is an
`Object` without a class, and its `decider` names what decides it.
"""

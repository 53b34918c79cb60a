"""The rulebook: one row per law.

To add a rule
    1. Choose the file of its subject in ``topics/``: ``topics/statements/``, ``topics/precision/``,
       ``topics/model/``, ``topics/training/`` or ``topics/system/``. A new file needs a row in
       `TOPICS` of rulebook.py, without which no run asks its rules.
    2. Add a row to its `RULES`: ``warning(id=..., when=..., message=..., remedies=..., ...)``. The
       kinds of rows stand in ``rule.py``. The id is the next free number.
    3. Write `when`, a function of the context that yields a `Violation` for each fault.
    4. Add a run that breaks the rule and a run that keeps it to the file of the same name in
       ``tests/rules/cases/``, and the finding to ``examples.yaml``.

The parts of a rule
    rule.py               `Rule`, its kinds by severity and by asker, and `RuleFinding`
    violation.py          `Violation`: a place where a run breaks a rule, and words of its message
    rulebook.py           every rule, by topic and by id

What a rule may ask
    context.py            `RuleContext`: the precision, the values of the configs, the target. The
                          rules of `finalize` and of a sync read no more than this
    run_context.py        `RunContext`: a whole run, with sections, shape, layout and program
    owner_values.py       the types of the configs' fields
    sync_row.py           `SyncRow`: a value that a sync writes, with its reason
    module_selection.py   `ModuleSelection`: the modules that each row of `modules` selects
    program.py            `Program`: the program that starts the run
    facts/                facts about a run that rules of several topics read

What rules of several topics share
    inert.py              fields that change nothing in a run
    without_effect.py     violations about such fields
    storing.py            the setting that stores weights in low precision
    variables.py          environment variables that change a precision
    unknown.py            the sentences about values that are assumed or open

`finalize` asks the errors that need the precision alone, a sync the rows with a `sync`, and `check`
all rows.
"""

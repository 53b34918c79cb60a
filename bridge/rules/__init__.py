"""The rulebook: one law, one row.

    Rule           a row: id, title, setting, severity, sync, versions, when, message, remedies,
                   source, evidence, explanation (`rule.py`, which has a kind of row for each
                   severity and asker; the rows stand in `topics/`, a file per subject)
    RuleContext    the facts that every asker knows (`context.py`): the precision and its
                   statements, the values of the configs that it is written into, the plan of the
                   sync, mode and scheme, the target, the environment
    RunContext     the facts that a check alone knows (`run_context.py`): the sections as they were
                   given, shape and layout, the program, the modules of each row
    Violation      a place where a run breaks a row, and the words of its message (`violation.py`)
    RuleFinding    the finding of a violation: the sentence, the value, its source, the remedies

The `when` of a row is a function of the context. It returns whether the run breaks the row, or
yields the places where it does. Its signature names the context that it needs: mypy refuses a row
of `finalize` or of a sync that reads more than they know.

`finalize` asks the errors that need the precision alone, a sync those whose `sync` says so, `check`
asks all of them (`rulebook.py`). `own_run` refuses the fields that scripts/train.py does not
honour.

    owner_values.py     the types of the fields      sync_row.py    a value that a sync writes
    inert.py            fields without effect        storing.py     the setting that stores weights
    module_selection.py the modules that rows take   variables.py   variables of the environment
    own_run_fields.py   the fields that scripts/train.py honours
    without_effect.py   violations about settings that change nothing
    unknown.py          the sentences about values that are assumed or open
    facts/              facts about a run that rules of several topics read
"""

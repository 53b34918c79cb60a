"""The rulebook: one law, one row.

    Rule           a row: id, title, setting, severity, sync, versions, when, message, remedies, source,
                   evidence, explanation (`rule.py`, which has a kind of row for each severity: `error`, `warning`,
                   `info`; the rows stand in `topics/`, a file per subject)
    RuleContext    what a rule may ask (`context.py`): the precision and what is stated in it, the views of the configs
                   it is written into, the plan of the sync, mode and scheme; of a whole run also its shape, its target,
                   its environment
    Violation      what `when` returns, a list of them: where a run breaks the row, and the words of its message
                   (`violation.py`; `all_of` makes a `when` of conditions)
    RuleFinding    what a violation and its row make: the sentence, the value, who set it, the remedies

`finalize` asks the errors that need the precision alone, a sync those whose `sync` says so, `check` asks all of them
(`rulebook.py`); `own_run` refuses what scripts/train.py does not honour. What rules read:

    fields.py      the fields of Megatron's configs, by release    section.py       a section's values in one form
    target.py      the GPUs and their formats                      versions.py      versions, and ranges of them
    inert.py       fields without effect, and why                  shape/           layers, sizes and layout of a model
    selected_modules.py   what a row of `modules` takes
"""

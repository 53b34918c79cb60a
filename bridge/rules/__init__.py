"""The rules by which `finalize`, a sync and a check find the faults of a run, one row per rule.

To add a rule
    1. Choose the file of its subject in ``topics/``: ``topics/statements/``, ``topics/precision/``,
       ``topics/model/``, ``topics/training/`` or ``topics/system/``. A new file needs a row in
       `TOPICS` of rulebook.py. Rules outside of `TOPICS` are not evaluated.
    2. Add a row to its `RULES`: ``warning(id=..., when=..., message=..., remedies=..., ...)``. The
       kinds of rows are in ``rule.py``. The id is the next free number.
    3. Write `when`, a function of the context that yields a `Violation` for each fault.
    4. Add a run that breaks the rule and a run that follows it to the file of the same name in
       ``tests/rules/cases/``, and the finding to ``expected_findings.yaml``.

The parts of a rule
    rule.py               `Rule`, its kinds, `RuleFinding`, and the evaluation of rules
    violation.py          `Violation`: a place where a run breaks a rule, and values for its message
    rulebook.py           every rule, by topic and by id

The facts that a rule reads
    config_facts.py       `ConfigFacts`: the precision, the values of the configs, the target
    context.py            `RuleContext`: these facts, with the path and the source of each setting.
                          The rules of `finalize` and of a sync read no more than this
    run_context.py        `RunContext`: a whole run, with sections, shape, layout and program
    owner_values.py       the types of the configs' fields
    sync_row.py           `SyncRow`: a value that a sync writes, with its reason
    module_selection.py   `ModuleSelection`: the modules that each row of `modules` selects
    program.py            `Program`: the program that starts the run
    facts/                facts about a run that rules of several topics read

Shared by rules of several topics
    inert_fields.py       fields without effect in a run
    inert_field_violation.py  violations about such fields
    storage_violation.py  violations of the setting that stores weights in low precision
    environment_variables.py  environment variables that change a precision
    unknown_settings.py   text about settings whose values are not known

`finalize` evaluates the rules that need only the precision. A sync evaluates the rules with a
`sync`. A check evaluates all rules.
"""

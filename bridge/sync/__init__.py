"""Writing a precision into Megatron's configs.

    routes.py          the table: the owner and the attribute of each field of a precision
    owner.py           a config of Megatron in a role, and its values as a plan reads them
    plan.py            the value of each attribute after the sync, with the reason; pure
    prediction.py      a run as the last sync leaves it; pure
    module_recipe.py   `modules` as Megatron's per-module recipe
    trial.py           a plan on copies of the configs, validated by Megatron
    synchroniser.py    plan, trial, rules, and the writing: all or nothing
    report.py          what a sync did

To route a field of the precision: a row in routes.py, and its note in routes.yaml.
"""

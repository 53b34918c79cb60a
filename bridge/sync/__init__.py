"""Writing a precision into Megatron's configs.

    field_routes.py    the table: the attributes that each field of a precision sets
    owner.py           a config object that a sync writes into, and its values
    sync_plan.py       the value of each attribute after the sync, with the reason; writes nothing
    prediction.py      a run with the values after its last sync; writes nothing
    module_recipe.py   `modules` as Megatron's per-module recipe
    trial.py           a plan applied to copies of the configs, which Megatron validates
    synchroniser.py    plan, trial, rules and writing, all or nothing
    report.py          the result of a sync

To route a field of the precision, add a row to field_routes.py and its note to route_notes.yaml.
"""

"""Compares the precisions of training and of rollout, the engine that generates its samples.

    engine.py          `Rollout`: the precision of an engine
    frameworks.py      reads it from the options of a run of NeMo-RL, verl, slime or miles
    served_rollout.py  reads it from a config.json, or from the flags of vLLM or SGLang
    training_side.py   the precision of training, also of a run that states no sizes
    comparison.py      a row for each kind of module and tensor, with a verdict
    agreement.py       settings with which the two precisions would agree
    table.py           the comparison as a table

Frameworks, their options and the settings that agree are rows of `bridge/read/foreign/tables/rollout.yaml`.
"""

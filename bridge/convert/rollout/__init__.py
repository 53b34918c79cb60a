"""Training against rollout: the precision of a run, and of the engine that generates its samples.

    engine.py        the precision of an engine: `Rollout`
    frameworks.py    the rollout of a run of NeMo-RL, verl, slime or miles, by its options
    serving.py       the rollout by a config.json, or by the flags of vLLM or SGLang
    stand_in.py      the training side, with small models where the run states no sizes
    comparison.py    a row for each kind of module and tensor, with a verdict
    agreement.py     settings that would make either side agree with the other
    table.py         the comparison for people

Frameworks, their options and the settings that agree are rows of `bridge/read/rows/rollout.yaml`.
"""

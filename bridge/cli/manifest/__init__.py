"""`precision-bridge manifest`: a trained model's formats, serving configs and rollout.

command.py      the arguments, and the choice of an answer
export.py       ``--for SYSTEM``: the quantisation config of a serving system
comparison.py   ``--against FILE``: the differences from a quantisation config
rollout.py      ``--rollout``: training compared with the engine that generates its samples
"""

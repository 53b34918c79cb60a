"""`precision-bridge compare`: the losses of a sweep, finished runs, one batch, or a run's twin.

command.py     the arguments, and the choice of a form; Hydra parses a sweep
runs.py        ``--runs``: finished runs of ours, or logs of other trainers
gradients.py   ``--gradients``: the activations and gradients of one batch
twin.py        ``--twin``: the same run in another precision
"""

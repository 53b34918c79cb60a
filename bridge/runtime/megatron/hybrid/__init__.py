"""Hybrid models and kernels of attention variants.

model.py builds a hybrid, and state_space.py is Mamba's scan in torch. For the length of a run,
kernels.py replaces calls of compiled packages that are not installed by torch code.
"""

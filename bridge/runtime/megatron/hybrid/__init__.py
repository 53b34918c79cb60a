"""Hybrid models and kernels of attention variants: `model` builds a hybrid, `state_space` is Mamba's scan in torch.

`kernels` puts torch code where Megatron's layers call a compiled package that is not installed, while a run goes on.
"""

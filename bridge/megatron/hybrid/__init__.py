"""Hybrid models and attention variants: `model` and `variants` build them, `state_space` is Mamba's scan in torch.

`kernels` puts torch code where Megatron's layers import a compiled package that is not installed.
"""

"""Hybrid models: `model` builds them, `state_space` computes their Mamba layers in plain torch.

`kernels` puts those functions where Megatron's layers import a compiled package that is not installed.
"""

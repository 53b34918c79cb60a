"""Attention of Megatron's layers without Transformer Engine.

    causal_attention.py   attention in one operator of torch
    fused_attention.py    `FusedDotProductAttention`: Megatron's core attention over that operator
    latent_attention.py   `LatentAttention`: the whole gradient of the rotary key
    context_parallel.py   the two chunks of a sequence that a context-parallel rank has

Transformer Engine has attention of its own, which none of these files replaces.
"""

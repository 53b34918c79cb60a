"""The model of a run, built from Megatron's classes.

    gpt.py               `GPTConfig`, and `build_gpt`: Megatron's `GPTModel` in its wrappers
    layer_spec.py        the layers of a chunk, by Megatron's spec functions
    initial_weights.py   weights that are the same in every parallel layout

`runtime/megatron/hybrid/` has the layers of Mamba models, and `runtime/megatron/emulation/` has the
layers that emulate FP8 and FP4.
"""

"""Low-precision GEMMs in Megatron's layers without Transformer Engine, on any device.

    emulated_model.py    makes the linear layers of a built model emulated; their precision by phase
    parallel_linear.py   the emulated column- and row-parallel layers, which call
                         `bridge.runtime.numerics`
    layer_numbers.py     the number of a layer in the whole model
    fp8_regions.py       the parts of a model at whose end delayed scales are renewed
    scale_updates.py     the renewal, over the ranks and under activation recomputation
    stored_weight.py     `StoredWeight`: a weight that is kept as codes and scales
    requantisation.py    stored weights made of the optimizer's masters again

`runtime/megatron/model/gpt.py` calls emulated_model.py for each chunk that it builds.
"""

"""A model, from the values of its config: shape, layer kinds, parallel layout and modules.

section.py           the normalised values of a section, and the faults of its values
read_tracking.py     the settings that a computation reads
shape.py             `ModelShape`: sizes, kinds of layers, experts, latent attention, Mamba
shape_reader.py      the shape of a model config, and the faults of its values
  hybrid_pattern.py  the layers in the pattern of a hybrid model
  attention_variants.py  gated delta net, sparse attention, and variants without a plan
  compressed_attention.py  DeepSeek-V4's hybrid attention, and hyper-connections
  list_expression.py lists of numbers that are stated as expressions
modules.py           `Module`: a module of a layer with its sizes
module_paths.py      `ModulePaths`: the names of modules within a chunk
layout.py            `ParallelLayout`: parallel sizes, and the layers of each model chunk

Everything follows from the values of the config. Megatron is not imported.
"""

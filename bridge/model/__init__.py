"""A model, from the values of its config: shape, layer kinds, parallel layout and modules.

section.py           the values of a section in one form, and what is wrong with them
reads.py             the settings that an answer was made from
shape.py             `ModelShape`: sizes, kinds of layers, experts, latent attention, Mamba
  hybrid.py          the layers that the pattern of a hybrid model names
  variants.py        gated delta net and sparse attention, and variants without a plan
  compressed.py      DeepSeek-V4's hybrid attention, and hyper-connections
  list_expression.py lists of numbers that are stated as expressions
modules.py           `Module`: each module of a layer with its sizes and its path
layout.py            `Parallel`: parallel sizes, and the layers of each pipeline stage

All of it follows from the values of the config. Megatron is not imported.
"""

"""Transformer Engine on a CPU: its Python, over torch code in place of its compiled module.

    install.py     the search for Transformer Engine's Python, and its import: stand-in, patches
    patches.py     every callable that is replaced, as rows; patches.yaml has the line that needs it
    extension.py   the module `transformer_engine_torch`, put together from the files below
      enums.py       its enums, as rows
      storage.py     quantizers and quantised tensors <-> `bridge.runtime.numerics`
      gemm.py        single and grouped GEMMs
      norms.py, attention.py, shards.py, multi_tensor.py
                     norms, attention, casts of shards, and the smaller functions

The C++ part is modelled, and does not run. A run shows the behaviour of Megatron's and Transformer
Engine's Python: the formats of each GEMM, and the copy of a tensor that it reads. It does not show
the behaviour or the speed of CUDA kernels and cuBLAS.

Source: Transformer Engine 2.20.2; files and lines are those of this version.
"""

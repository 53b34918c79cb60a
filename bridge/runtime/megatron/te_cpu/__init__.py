"""Transformer Engine on a CPU: its own Python, over torch code in place of its compiled module.

    install.py     Transformer Engine's Python is found; the import: stand-in first, then it, then the patches
    patches.py     every callable that is replaced, as rows; patches.yaml has the line that needs each
    extension.py   the module `transformer_engine_torch`, put together from the files below
      enums.py       its enums, as rows
      storage.py     quantizers and quantised tensors <-> `bridge.runtime.numerics`
      gemm.py        the GEMMs, one by one and grouped
      norms.py, attention.py, shards.py, support.py

The C++ part is modelled, not run. So a run shows what Megatron's and Transformer Engine's Python do: in which formats
each GEMM multiplies, and which copy of a tensor it reads. It shows nothing about CUDA kernels, cuBLAS or speed.

Source: Transformer Engine 2.20.2; files and lines are those of this version.
"""

"""Code that needs torch or Megatron Core, and readers of the files that a run wrote.

    numerics/     quantisers and emulated GEMMs in FP8 and FP4
    audit/        the record of a run, and its comparison with the plan
    pytorch/      a recipe in a plain PyTorch loop, and the record of a live model
    checkpoint/   the files of a checkpoint
    compare/      the comparison of finished runs
    megatron/     a run of Megatron Core

Each room imports only rooms that are named before it, and `megatron/` all of them.
"""

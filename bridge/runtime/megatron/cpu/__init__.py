"""Megatron Core on a machine without CUDA.

    cuda_shim.py        "cuda" is the CPU, for a block of code; cuda_shim.yaml names the code that
                        needs each patch
    wide_gemm.py        BF16 and FP16 matrices multiplied in FP32, on a CPU without such a kernel

On a machine with CUDA neither file changes anything.
"""

"""The record of a live model: its GEMMs, each with its module, whatever library runs them.

    gemm_watch.py       `GemmWatch`: all GEMMs in a block of code, as rows of a record
    te_gemms.py         the GEMMs of Transformer Engine, seen where it calls its extension
    modules.py          names of modules, and the module that is running
    operand_format.py   `OperandFormat`: format, scheme and tile, read from a tensor
    health.py           error and age of the weight of a low-precision GEMM

`runtime/audit/record.py` defines the rows.
"""

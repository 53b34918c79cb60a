"""The owners of a precision, as type checkers see them: the config objects that a sync writes into.

Megatron's own classes have these attributes, and so has any object that stands in for one. A sync
reads and writes further fields of a precision where the object has them.
"""

from typing import Any, Protocol


class ModelOwner(Protocol):
    """A `TransformerConfig`, a subclass of it, or an object with attributes of the same names."""

    bf16: Any
    fp16: Any


class OptimizerOwner(Protocol):
    """An `OptimizerConfig`, or an object with attributes of the same names."""

    bf16: Any
    fp16: Any


class DdpOwner(Protocol):
    """A `DistributedDataParallelConfig`, or an object with attributes of the same names."""

    grad_reduce_in_fp32: Any

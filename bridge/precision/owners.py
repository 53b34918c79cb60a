"""Types of the config objects that a sync writes into, for type checkers.

Megatron's classes have these attributes. Another object with the same attributes can be used too. A
sync also reads and writes the other fields of a precision that the object has.
"""

from typing import Any, Protocol, TypeAlias

ConfigObject: TypeAlias = object
"""A config object in the code of a sync, which treats all of them alike.

The sync reads and writes attributes by the names in its table of routes. The names depend on the
release of Megatron, so no protocol can list them.
"""


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

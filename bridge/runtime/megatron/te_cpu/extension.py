"""The module `transformer_engine_torch`, made of the public functions and the enums of the files in this folder.

A function that is not here is a name that raises when it is called, with its own name in the message, and never when
Transformer Engine imports it or asks for it.
"""

import types
from collections.abc import Callable
from typing import Any, NoReturn

from bridge.errors import BackendUnavailableError
from bridge.runtime.megatron.replacement import always
from bridge.runtime.megatron.te_cpu import attention, gemm, norms, shards, storage, support
from bridge.runtime.megatron.te_cpu.enums import ENUMS

NAME = "transformer_engine_torch"
_CLASSES = ("CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "FP8TensorMeta")
"""Classes that Transformer Engine names in annotations and in `isinstance`."""


def module_of_missing(name: str) -> types.ModuleType:
    """Return a module all of whose names are functions without a CPU version, which raise when they are called."""
    made = types.ModuleType(name)

    def missing(attribute: str) -> Callable[..., NoReturn]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def refuse(*_: Any, **_named: Any) -> NoReturn:
            raise BackendUnavailableError(
                f"precision_backend=te_cpu: {name}.{attribute} of Transformer Engine's extension has no CPU version. "
                "Leave the feature that calls it off, or run this where Transformer Engine works."
            )

        refuse.__name__ = f"{name}.{attribute}"
        return refuse

    made.__dict__["__getattr__"] = missing
    return made


def extension() -> types.ModuleType:
    """Return the stand-in for the compiled module of Transformer Engine."""
    made = module_of_missing(NAME)
    functions = {
        name: function
        for part in (storage, gemm, norms, attention, shards, support)
        for name, function in vars(part).items()
        if isinstance(function, types.FunctionType)
        and function.__module__ == part.__name__
        and name[0] != "_"
    }
    classes = {
        name: type(name, (), {"__doc__": "A class of the extension, without contents."})
        for name in _CLASSES
    }
    answers = {name: always(value)(None) for name, value in support.ANSWERS.items()}
    made.__dict__.update({**ENUMS, **classes, **functions, **answers})
    return made

"""The module `transformer_engine_torch`.

It has the public functions and the enums of the files in this folder. Any other name of it is a
function that raises when it is called, with the name in the message. Transformer Engine may import
such a function, or look for it, without an error.
"""

import types
from collections.abc import Callable
from typing import Any, NoReturn

from bridge.errors import BackendUnavailableError
from bridge.runtime.megatron.patching import replace_by_constant
from bridge.runtime.megatron.te_cpu import attention, gemm, multi_tensor, norms, shards, storage
from bridge.runtime.megatron.te_cpu.enums import ENUMS

EXTENSION_NAME = "transformer_engine_torch"
_EMPTY_CLASSES = ("CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "FP8TensorMeta")
"""Classes that Transformer Engine names in annotations and in `isinstance`."""


def make_refusing_module(name: str) -> types.ModuleType:
    """Return a module in which every name is a function that raises when it is called."""
    module = types.ModuleType(name)

    def missing(attribute: str) -> Callable[..., NoReturn]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def refuse(*_: Any, **_named: Any) -> NoReturn:
            raise BackendUnavailableError(
                f"precision_backend=te_cpu: {name}.{attribute} of Transformer Engine's extension "
                "has no CPU version. "
                "Leave the feature that calls it off, or run this where Transformer Engine works."
            )

        refuse.__name__ = f"{name}.{attribute}"
        return refuse

    module.__dict__["__getattr__"] = missing
    return module


def build_extension() -> types.ModuleType:
    """Return the stand-in for the compiled module of Transformer Engine."""
    module = make_refusing_module(EXTENSION_NAME)
    names = module.__dict__
    names.update(ENUMS)
    for name in _EMPTY_CLASSES:
        names[name] = type(name, (), {"__doc__": "A class of the extension, without contents."})
    for part in (storage, gemm, norms, attention, shards, multi_tensor):
        names.update(_list_public_functions(part))
    for name, value in multi_tensor.CONSTANT_ANSWERS.items():
        names[name] = replace_by_constant(value)(None)
    return module


def _list_public_functions(part: types.ModuleType) -> dict[str, types.FunctionType]:
    """Return the public functions that a module defines, by name."""
    functions = {}
    for name, value in vars(part).items():
        is_function = isinstance(value, types.FunctionType) and value.__module__ == part.__name__
        if is_function and not name.startswith("_"):
            functions[name] = value
    return functions

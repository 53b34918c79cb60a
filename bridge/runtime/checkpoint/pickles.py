"""Functions that read the pickles of a checkpoint without running their code.

A pickle names the classes and functions that make its objects, and reading it calls them.
Megatron's checkpoints have pickles in three places:

- ``common.pt``, the state that all ranks share;
- ``.metadata``, which is small and lists the tensors;
- the objects between the tensors: random states, and the state of Transformer Engine's modules.

The readers of the last two accept any class. `find_pickle_fault` reads all three before Megatron
does. It makes placeholders, which do nothing, for the classes of an allow list, and refuses a
checkpoint that names any other class, whatever its manifest is.
"""

import io
import json
import math
import pickle
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bridge.errors import DamagedCheckpointError

METADATA_FILE = ".metadata"
"""File that lists the tensors and objects, by the name of torch.distributed.checkpoint."""
SHARDED_BACKEND = "torch_dist"
"""Megatron's name of the only format that is read."""
_CHECKPOINT_PACKAGE = "torch.distributed.checkpoint"
LISTING_NAMES: Mapping[str, tuple[str, ...]] = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    f"{_CHECKPOINT_PACKAGE}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_CHECKPOINT_PACKAGE}.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    f"{_CHECKPOINT_PACKAGE}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""Module -> the names that a ``.metadata`` needs.

Source: files that torch 2.11 and 2.13 with megatron-core 0.16.1 and 0.19.2 wrote.
"""
MODULE_STATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "torch": ("Size",),
    "torch._utils": ("_rebuild_tensor_v2",),
    "torch.storage": ("_load_from_bytes",),
    "collections": ("OrderedDict",),
    "transformer_engine.common.recipe": (
        "DelayedScaling",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Format",
        "MMParams",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "QParams",
        "_FormatHelper",
    ),
    "megatron.core.extensions.transformer_engine": ("TEDelayedScaling",),
    "megatron.core.safe_globals": ("safe_load_from_bytes",),  # 0.19 puts it in the place of torch's
}
"""Module -> the names that the state of a Transformer Engine module needs.

The state is a pickle whose bytes are the values of a uint8 tensor.
"""
MODULE_STATE_KEY = "_extra_state"
"""Part of the key of such a state."""
_DTYPE_PATTERN = re.compile(r"(?:bfloat16|float\d+(?:_e\d+m\d+\w*)?|u?int\d+|complex\d+|bool)\Z")
"""Names of torch's dtypes, which every pickle may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of a checkpoint, as its ``.metadata`` lists it."""

    dtype: str
    """Torch's name without ``torch.``."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, of all ranks together."""

    @property
    def elements(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """An object of a checkpoint, and the position of its pickle in a file."""

    key: str
    file: str
    """Name of the file in the checkpoint's folder."""
    offset: int
    """Number of the first byte."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The content of a ``.metadata``."""

    tensors: Mapping[str, Tensor]
    """Key -> tensor."""
    objects: tuple[StoredObject, ...]
    files: frozenset[str]
    """Names of the files of tensors and objects, all in the checkpoint's folder."""


class _PlaceholderType(type):
    """The metaclass of placeholders, which refuses to set an attribute of their classes.

    A pickle can set attributes of any object that it has, and a class is an object.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"writes onto {cls.__name__}")


class _Placeholder(metaclass=_PlaceholderType):
    """Replaces an object of a class that is not imported, with the values that the pickle sets."""

    def __new__(cls, *arguments: object, **_named: object) -> Self:
        placeholder = super().__new__(cls)
        vars(placeholder)["arguments"] = arguments
        return placeholder

    def __init__(self, *arguments: object, **named: object) -> None:
        """Accept any arguments, because the signature of the real class is not known here."""

    def __setstate__(self, state: object) -> None:
        vars(self)["state"] = state
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: object, value: object) -> None:
        """Accept an item of a mapping, and drop it."""


class _PlainBytes(_Placeholder):
    """Replaces ``torch.storage._load_from_bytes``, and checks its argument, a `torch.save` file."""

    def __new__(cls, *arguments: object, **named: object) -> Self:
        for data in arguments:
            if not isinstance(data, bytes):
                raise pickle.UnpicklingError("loads from what is no bytes")
            _require_plain_data(data)
        return super().__new__(cls, *arguments, **named)


class _NotAllowedError(pickle.UnpicklingError):
    """A pickle names a class that is not on the allow list. The text of the error is the name."""


class _AllowListUnpickler(pickle.Unpickler):
    """An unpickler that makes placeholders for the names of an allow list, and refuses all others."""

    def __init__(self, data: bytes, allowed: Mapping[str, tuple[str, ...]]) -> None:
        """Check the memo of a pickle, without reading the objects.

        Args:
            data: The pickle.
            allowed: Module -> names.

        Raises:
            UnpicklingError: An object has a memo number above the size of the pickle. Python makes
                a memo of that length, which can take gigabytes.
        """
        for opcode, argument, _position in pickletools.genops(data):
            if opcode.name.endswith("PUT") and (argument or 0) > len(data):
                raise pickle.UnpicklingError(f"numbers an object {argument}")
        super().__init__(io.BytesIO(data))
        self.allowed = allowed
        self.placeholders: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> type:
        """Return the placeholder of an allowed class. Classes that a pickle names are not imported.

        Raises:
            _NotAllowedError: The class is not allowed.
        """
        is_dtype = module == "torch" and _DTYPE_PATTERN.match(name)
        if not is_dtype and name not in self.allowed.get(module, ()):
            raise _NotAllowedError(f"{module}.{name}")
        base: type[_Placeholder] = _Placeholder
        if name.endswith("load_from_bytes"):
            base = _PlainBytes
        return self.placeholders.setdefault((module, name), _PlaceholderType(name, (base,), {}))


def read_listing(checkpoint: Path) -> Listing:
    """Return the tensors, objects and files that ``.metadata`` lists. Torch is not imported.

    Raises:
        DamagedCheckpointError: The file is missing, damaged, or names other classes.
    """
    path = checkpoint / METADATA_FILE
    reason = f"{METADATA_FILE} is missing"
    try:
        if path.is_file():
            return _parse_listing(_AllowListUnpickler(path.read_bytes(), LISTING_NAMES).load())
    except OSError as error:
        why = error.strerror or "an error"
        reason = f"{METADATA_FILE} cannot be read ({why.lower()})"
    except _NotAllowedError as error:
        reason = _describe_foreign_name(METADATA_FILE, str(error))
    except Exception:  # noqa: BLE001  a damaged pickle raises errors of any class
        reason = f"{METADATA_FILE} is damaged"
    raise DamagedCheckpointError(checkpoint, reason)


def find_pickle_fault(checkpoint: Path) -> str | None:
    """Return a clause about why Megatron must not read the pickles of a checkpoint.

    The result is None if it may read them.
    """
    for path in checkpoint.glob("*"):
        if not (path.is_file() or path.is_dir()):  # a pipe or a device, which could block for ever
            return f"{path.name:.80} is no regular file"
    try:
        backend = json.loads((checkpoint / "metadata.json").read_bytes())["sharded_backend"]
        if backend != SHARDED_BACKEND:
            return f"its format is {backend!r:.40} and not {SHARDED_BACKEND}"
        listing = read_listing(checkpoint)
    except DamagedCheckpointError as error:
        return error.reason
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "metadata.json is damaged"
    return _find_object_fault(checkpoint, listing)


def _find_object_fault(checkpoint: Path, listing: Listing) -> str | None:
    """Return a clause about a missing file, or an object that is damaged or not plain data.

    The result is None without such a fault.
    """
    name = ""  # of the file or the object that is read
    try:
        for path in sorted(checkpoint.glob("*.pt")):
            name = path.name
            _require_plain_data(path.read_bytes())
        for stored in listing.objects:
            name = stored.key
            with (checkpoint / stored.file).open("rb") as stream:
                stream.seek(stored.offset)
                _require_plain_data(
                    stream.read(stored.length), is_module_state=MODULE_STATE_KEY in name
                )
    except _NotAllowedError as error:
        return _describe_foreign_name(name, str(error))
    except Exception:  # noqa: BLE001  a damaged pickle raises errors of any class
        return f"{name} is damaged, or is no plain data"
    for file in sorted(listing.files):
        if not (checkpoint / file).is_file():
            return f"{file:.80} is missing"
    return None


def _describe_foreign_name(pickle_name: str, foreign_name: str) -> str:
    """Return the clause about a pickle that names a class or function that is not allowed."""
    return (
        f"{pickle_name} names {foreign_name:.80}, which no checkpoint needs; nothing of it was run"
    )


def _require_plain_data(data: bytes, *, is_module_state: bool = False) -> None:
    """Refuse a file of `torch.save` that has more than tensors, containers and plain values.

    Args:
        data: The content of the file.
        is_module_state: Whether uint8 tensors are pickles of Transformer Engine, to be checked too.

    Raises:
        Exception: The file is refused or damaged. Torch's reader or the pickle decides the class.
    """
    import torch  # heavy, and only for the objects of a checkpoint that is read

    with torch.serialization.safe_globals(_list_random_state_classes()):
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not is_module_state:
        return
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint8 and leaf.numel():
            _AllowListUnpickler(leaf.numpy().tobytes(), MODULE_STATE_NAMES).load()


def _list_random_state_classes() -> list[Any]:
    """Return the classes and the function of numpy that a saved random state names."""
    import numpy as np

    # The function that numpy's arrays name in a pickle has no public name. numpy 2 moved it from
    # numpy.core to numpy._core, and a checkpoint may name either.
    rebuild: Any = np.arange(0).__reduce__()[0]
    named = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [np.ndarray, np.dtype, type(np.dtype(np.uint32)), *named]


def _parse_listing(metadata: Any) -> Listing:
    """Return the content of an unpickled ``.metadata``, whose objects are placeholders.

    Raises:
        ValueError: A file is not in the checkpoint's folder.
    """
    tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            (shape,) = entry.size.arguments
            dtype = entry.properties.state[0].__name__
            tensors[str(key)] = Tensor(dtype=str(dtype), shape=tuple(map(int, shape)))
    objects: list[StoredObject] = []
    files: set[str] = set()
    for index, info in metadata.storage_data.items():
        file = str(info.relative_path)
        if "/" in file or "\0" in file or file in ("", ".", ".."):
            raise ValueError(file)
        files.add(file)
        if index.fqn not in tensors:  # `fqn` is torch's name of the key
            stored = StoredObject(
                key=str(index.fqn), file=file, offset=int(info.offset), length=int(info.length)
            )
            objects.append(stored)
    return Listing(tensors=tensors, objects=tuple(objects), files=frozenset(files))

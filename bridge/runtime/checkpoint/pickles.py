"""The pickles of a checkpoint, read without running code.

A pickle names the classes and functions that make its objects, and reading it calls them. Megatron's
checkpoints have pickles in three places, and their readers accept any class in two of them:
``.metadata``, which is small and lists the tensors, and the objects between the tensors (random
states, the state of Transformer Engine's modules). `find_pickle_fault` reads both before Megatron does.
It makes stand-ins, which do nothing, for the classes of an allow list, and refuses a checkpoint that
names any other class, whatever its manifest is.
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
SHARDED_BACKEND = "torch_dist"
"""Megatron's name of the format."""
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
"""Module -> the names that a ``.metadata`` needs. Read in torch 2.11 and 2.13,
megatron-core 0.16.1 and 0.19.2.
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
"""Module -> the names that the state of a Transformer Engine module needs, a pickle in a tensor."""
MODULE_STATE_KEY = "_extra_state"
_DTYPE_PATTERN = re.compile(r"(?:bfloat16|float\d+(?:_e\d+m\d+\w*)?|u?int\d+|complex\d+|bool)\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of a checkpoint, as its ``.metadata`` lists it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """An object of a checkpoint and its place in a file."""

    key: str
    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The content of a ``.metadata``."""

    tensors: Mapping[str, Tensor]
    objects: tuple[StoredObject, ...]
    files: frozenset[str]
    """The files of tensors and objects."""


class _PlaceholderType(type):
    """The class of stand-ins; a pickle can set attributes of objects, and not of these classes."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"writes onto {cls.__name__}")


class _Placeholder(metaclass=_PlaceholderType):
    """Stands for an object of a class that is not imported, with what the pickle gives it."""

    def __new__(cls, *arguments: object, **_named: object) -> Self:
        stand_in = super().__new__(cls)
        vars(stand_in)["arguments"] = arguments
        return stand_in

    def __init__(self, *arguments: object, **named: object) -> None:
        """Take anything: the class that this stands for is not known here."""

    def __setstate__(self, state: object) -> None:
        vars(self)["state"] = state
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: object, value: object) -> None:
        """Take the items of a mapping."""


class _PlainBytes(_Placeholder):
    """Stands for ``torch.storage._load_from_bytes``: the bytes are a file of `torch.save`."""

    def __new__(cls, *arguments: object, **named: object) -> Self:
        for data in arguments:
            if not isinstance(data, bytes):
                raise pickle.UnpicklingError("loads from what is no bytes")
            _require_plain_data(data)
        return super().__new__(cls, *arguments, **named)


class _NotAllowedError(pickle.UnpicklingError):
    """A pickle that names what is not on the list; the name is its text."""


class _AllowListUnpickler(pickle.Unpickler):
    """An unpickler that makes stand-ins for what is on a list, and nothing else."""

    def __init__(self, data: bytes, allowed: Mapping[str, tuple[str, ...]]) -> None:
        for code, number, _position in pickletools.genops(data):
            # a memo of that length, for which Python would take gigabytes
            if code.name.endswith("PUT") and (number or 0) > len(data):
                raise pickle.UnpicklingError(f"numbers an object {number}")
        super().__init__(io.BytesIO(data))
        self.allowed = allowed
        self.made: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> type:
        """Return a stand-in for a class that is allowed; no class of a file is imported."""
        is_dtype = module == "torch" and _DTYPE_PATTERN.match(name)
        if not is_dtype and name not in self.allowed.get(module, ()):
            raise _NotAllowedError(f"{module}.{name}")
        base: type[_Placeholder] = _Placeholder
        if name.endswith("load_from_bytes"):
            base = _PlainBytes
        return self.made.setdefault((module, name), _PlaceholderType(name, (base,), {}))


def read_listing(checkpoint: Path) -> Listing:
    """Return the tensors, objects and files that ``.metadata`` lists, without torch or its code.

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
    """Return why the pickles of a checkpoint must not be read, as a clause, or None."""
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
    """Return, as a clause, which object is missing or more than plain data, or None."""
    name = ""
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


def _describe_foreign_name(name: str, what: str) -> str:
    """Return the sentence about a pickle with a name that is not allowed."""
    return f"{name} names {what:.80}, which no checkpoint needs; nothing of it was run"


def _require_plain_data(data: bytes, *, is_module_state: bool = False) -> None:
    """Raise for a file of `torch.save` that is more than tensors, containers and plain values."""
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

    rebuild: Any = np.arange(0).__reduce__()[0]
    named = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [np.ndarray, np.dtype, type(np.dtype(np.uint32)), *named]


def _parse_listing(metadata: Any) -> Listing:
    """Return the content of an unpickled ``.metadata``, whose objects are stand-ins."""
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
        if index.fqn not in tensors:
            stored = StoredObject(
                key=str(index.fqn), file=file, offset=int(info.offset), length=int(info.length)
            )
            objects.append(stored)
    return Listing(tensors=tensors, objects=tuple(objects), files=frozenset(files))

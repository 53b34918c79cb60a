"""`read_file`: a file that describes a run, read by the module of the framework that wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError
from bridge.front.files import megatron_bridge
from bridge.front.files.reading import FileReading
from bridge.front.problems import KEYS, OWNERS, SECTIONS, Origins, Problems
from bridge.precision import strict_yaml

if TYPE_CHECKING:
    from pathlib import Path

MAPPINGS = (*OWNERS, *SECTIONS)


def read_file(path: Path) -> FileReading:
    """Return what a file says of a run; what stands in it decides which framework wrote it.

    Raises:
        RunConfigError: It cannot be read, or describes no run.
    """
    whole = _mapping(path)
    if megatron_bridge.is_of(whole):
        return megatron_bridge.read(whole)
    return FileReading(sections=_own(whole, path.name))


def _mapping(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds."""
    data = strict_yaml.read_bytes(path, error=RunConfigError)
    text = strict_yaml.decoded(data, str(path), error=RunConfigError)
    documents = strict_yaml.load_all(text, str(path), error=RunConfigError)
    if len(documents) > 1:
        raise RunConfigError(f"{path}: must hold one document, got {len(documents)}. Remove the others.")
    whole = documents[0] if documents else None
    if not isinstance(whole, dict):
        rule = "must hold sections such as model and mixed_precision"
        raise RunConfigError(f"{path}: {rule}, got {type(whole).__name__}. Give a file of such sections.")
    return whole


def _own(whole: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the sections of a file of our own; RunConfigError for an unknown one, and for anything to instantiate."""
    problems = Problems(Origins(by_key=dict.fromkeys(map(str, whole), name)))
    problems.refuse_targets(whole)
    for key, value in whole.items():
        if key not in KEYS:
            problems.unknown(str(key), value, "no such section", KEYS)
        elif key in MAPPINGS and not isinstance(value, dict | None):
            problems.add(key, "must be a mapping of fields", value, f"Write {key}.FIELD=VALUE.")
    problems.raise_any()
    return whole

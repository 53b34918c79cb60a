"""A composed config as plain data: references resolved, no unknown section, nothing that would be instantiated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bridge.errors import RunConfigError
from bridge.front.problems import Problems
from bridge.front.sections import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bridge.front.origin import Origins

__all__ = ["plain", "refuse_targets"]


def plain(config: DictConfig | Mapping[str, Any], origins: Origins, *, missing: bool = False) -> dict[str, Any]:
    """Return the config as plain data with its interpolations resolved.

    Args:
        config: The config, without Hydra's own node.
        origins: Who set its keys, for messages.
        missing: Leave missing values (``???``) out instead of refusing them.

    Raises:
        RunConfigError: Missing values, all of them; a reference to nothing; `_target_` anywhere; unknown sections.
    """
    config = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    if not missing:
        _refuse_missing(config, origins)
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        path = error.full_key or "the configuration"
        why = str(error.msg or error).partition("\n")[0].rstrip(".")
        text = f"{path}: cannot be resolved: {why} ({origins.of(path)}). Correct the reference."
        raise RunConfigError(text) from error
    values = {str(key): _without_missing(value) for key, value in resolved.items()}
    problems = Problems(origins)
    refuse_targets(values, "", problems)
    for key, value in values.items():
        if key not in KEYS:
            problems.unknown(key, value, "no such section", KEYS)
    problems.raise_any()
    return values


def refuse_targets(value: Any, path: str, problems: Problems) -> None:
    """Add every `_target_` in plain data to the problems."""
    for where, target in _targets(value, path):
        rule = "configurations are data, and nothing in them is instantiated"
        problems.add(where, rule, target, "Register a recipe with recipes_from, or set the field's value.")


def _refuse_missing(config: DictConfig, origins: Origins) -> None:
    absent = sorted(_missing(OmegaConf.to_container(config, resolve=False), ""))
    if absent:
        needs = "needs a value" if len(absent) == 1 else "need values"
        places = ", ".join(sorted({origins.of(path) for path in absent}))
        remedy = " ".join(f"{path}=VALUE" for path in absent)
        raise RunConfigError(f"{', '.join(absent)}: {needs}, got ??? ({places}). Give {remedy}.")


def _missing(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _missing(inner, f"{path}.{key}" if path else str(key))
    elif value == "???":
        yield path


def _without_missing(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_missing(inner) for key, inner in value.items() if inner != "???"}
    return value


def _targets(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        inner_path = f"{path}.{key}" if path else str(key)
        if key == "_target_":
            yield inner_path, inner
        yield from _targets(inner, inner_path)

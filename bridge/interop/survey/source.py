"""`Source`: one place where a project says its precision, and the order in which such places win."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.interop.contract import ImportReport
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["ORDER", "Source", "leaves_open", "precision", "source_of"]

ORDER: Mapping[str, str] = MappingProxyType(
    {
        "deepspeed": "its engine casts the module; accelerate and transformers refuse arguments that differ",
        "started program": "a value written out in a call reads no flag, file or variable",
        "launch script": "flags go over the files and variables that the same program reads",
        "unnamed deepspeed": "nothing names it here, so that it counts, and then first, where it is given by hand",
        "program": "a value written out in a call goes over files and variables",
        "training file": "the trainer that reads it hands it on as arguments, which go over the environment",
        "accelerate flag": "`accelerate launch` writes it into the environment, over its own file",
        "accelerate file": "`accelerate launch` writes it into the environment, over what is there",
        "script variable": "an export goes over the environment that the script is started in",
        "process": "an exported variable goes over a .env file",
        ".env file": "it only fills what nobody else set",
    }
)
"""Kind of source -> why it stands above the ones below it, the one that wins first."""

OPEN = MappingProxyType(
    {
        "huggingface": "no switch is on: ACCELERATE_MIXED_PRECISION decides, and without it fp32",
        "fsdp": "weights are used in the dtype they have",
    }
)
"""System -> what decides where its configuration states FP32. Source: transformers 5.23.0."""
VARIABLE = "ACCELERATE_MIXED_PRECISION"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source."""

    path: str
    """File, or "environment"."""
    system: str
    """Name of the system it belongs to."""
    kind: str
    """One of `ORDER`, or "per module"."""
    says: str
    """In a few words."""
    precision: str | None
    """What decides agreement: "bf16", "bf16 + fp8 delayed"; None where it does not say what a run trains in."""
    run: str = ""
    semantics: str | None = None
    recipe: str | None = None
    evidence: str = ""
    unmapped: int = 0


def source_of(
    imported: ImportReport, *, path: str, system: str, kind: str, evidence: str, run: str = "", says: str = ""
) -> Source:
    """Return the source that an import makes: without a precision where the system leaves it to somebody else."""
    is_open = leaves_open(imported, system)
    decider = OPEN[system] if imported.mode_is_stated and is_open else f"{imported.decided_by} decides"
    return Source(
        path=path,
        system=system,
        kind=kind,
        says=": ".join(filter(None, (says, decider))) if is_open else says or precision(imported.config),
        precision=None if is_open else precision(imported.config),
        run=run,
        semantics=None if is_open else imported.semantics,
        recipe=None if is_open else imported.recipe,
        evidence=evidence,
        unmapped=len(imported.unmapped),
    )


def leaves_open(imported: ImportReport, system: str) -> bool:
    """Return whether a configuration leaves its precision to whoever stands above or around it."""
    if not imported.mode_is_stated:
        return True
    if imported.config.mode != "fp32" or imported.config.autocast_enabled:
        return False
    if system == "huggingface":
        return not imported.mapped.get(VARIABLE)
    return system == "fsdp"


def precision(config: MixedPrecisionConfig) -> str:
    """Return dtype and scheme, the part of a precision that two sources can disagree about."""
    dtype = str(config.to_dict().get("autocast_dtype") or config.mode) if config.autocast_enabled else config.mode
    if config.fp8:
        return f"{dtype} + fp8 {config.fp8_recipe}"
    return f"{dtype} + {config.fp4_recipe}" if config.fp4 else dtype

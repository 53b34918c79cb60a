"""`Source`: one place where a project states its precision; an environment variable that bears on it is one too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from bridge.errors import BridgeError
from bridge.interop import accelerate
from bridge.interop.conversion import Run
from bridge.interop.table import rows
from bridge.registry.config import MixedPrecisionConfig

ROWS = rows("sources")
ORDER: dict[str, str] = ROWS["order"]
"""Kind of source -> why it stands above the ones below it, the one that wins first."""
VARIABLES = re.compile("|".join(f"(?P<{system}>{pattern})" for system, pattern in ROWS["variables"].items()))
"""Variables that bear on precision, each in the group of the system that reads it."""
MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source."""

    path: str
    """File, or "environment"."""
    system: str
    kind: str
    """One of `ORDER`, or "per module"."""
    says: str = ""
    precision: str | None = None
    """What decides agreement: "bf16", "bf16 + fp8 delayed"; None where it does not say what a run trains in."""
    run: str = ""
    semantics: str | None = None
    recipe: str | None = None
    evidence: str = ""
    unmapped: int = 0

    @classmethod
    def of(cls, run: Run, name: str, kind: str, says: str = "") -> Source:
        """Return the source that a run is: no precision where the system leaves it to another.

        `name` is the file's in the project; `says` are the words of a program that state the precision.
        """
        imported, config = run.imported, run.imported.config
        is_fp32 = config.mode == "fp32" and not config.autocast_enabled and not imported.mapped.get(MIXED_PRECISION)
        decider = ROWS["open"].get(run.system.name) if is_fp32 else None
        if not imported.mode_is_stated:
            decider = f"{imported.decided_by} decides"
        source = cls(
            path=name,
            system=run.system.name,
            kind=kind,
            says=": ".join(filter(None, (says, decider))),
            run=run.source["run"],
            evidence=run.evidence,
            unmapped=len(imported.unmapped),
        )
        if decider is not None:
            return source
        found = precision(config)
        return replace(
            source, says=says or found, precision=found, semantics=imported.semantics, recipe=imported.recipe
        )


def precision(config: MixedPrecisionConfig) -> str:
    """Return dtype and scheme, the part of a precision that two sources can disagree about."""
    dtype = str(config.to_dict().get("autocast_dtype") or config.mode) if config.autocast_enabled else config.mode
    if config.fp8:
        return f"{dtype} + fp8 {config.fp8_recipe}"
    return f"{dtype} + {config.fp4_recipe}" if config.fp4 else dtype


def of_variables(pairs: Iterable[tuple[str, str]], path: str, kind: str) -> list[Source]:
    """Return a source for each variable that bears on precision; one that is set to several values is several."""
    found = []
    known = sorted({(name, value) for name, value in pairs if VARIABLES.fullmatch(name)})
    of_accelerate = {name: value for name, value in known if name.startswith("ACCELERATE_")}
    for name, value in known:
        reader = VARIABLES.fullmatch(name)
        stated = None
        if name == MIXED_PRECISION:
            with suppress(BridgeError):
                stated = precision(accelerate.import_({**of_accelerate, name: value}).config)
        system, says = str(reader and reader.lastgroup), f"{name}={value}"
        found.append(Source(path=path, system=system, kind=kind, says=says, precision=stated, evidence=f"sets {name}"))
    return found

"""`Source`: one place where a project states its precision; an environment variable that bears on it is one too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bridge.errors import BridgeError
from bridge.interop.accelerate import importer as accelerate
from bridge.interop.contract import ImportReport
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

    def stating(self, imported: ImportReport) -> Source:
        """Return the source with the result of an import: no precision where the system leaves it to another."""
        config, unmapped = imported.config, len(imported.unmapped)
        is_fp32 = config.mode == "fp32" and not config.autocast_enabled and not imported.mapped.get(MIXED_PRECISION)
        decider = ROWS["open"].get(self.system) if is_fp32 else None
        if not imported.mode_is_stated:
            decider = f"{imported.decided_by} decides"
        if decider is not None:
            return replace(self, says=f"{self.says}: {decider}" if self.says else decider, unmapped=unmapped)
        found = precision(config)
        stated = replace(self, precision=found, semantics=imported.semantics, recipe=imported.recipe)
        return replace(stated, says=self.says or found, unmapped=unmapped)


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
    for name, value in known:
        reader = VARIABLES.fullmatch(name)
        source = Source(path=path, system=str(reader and reader.lastgroup), kind=kind, says=f"{name}={value}")
        stated = _of_accelerate({**dict(known), name: value}) if name == MIXED_PRECISION else None
        found.append(replace(source, precision=stated, evidence=f"sets {name}"))
    return found


def _of_accelerate(variables: dict[str, str]) -> str | None:
    own = {name: value for name, value in variables.items() if name.startswith("ACCELERATE_")}
    try:
        return precision(accelerate.import_(own).config)
    except BridgeError:
        return None


def first_fault(error: BridgeError, path: str, name: str) -> str:
    """Return the first line of an error without the file in front, whose `name` in the project stands next to it."""
    line = str(error).splitlines()[0].replace(path, name)
    return re.sub(rf"^{re.escape(name)}[:,] ", "", line)

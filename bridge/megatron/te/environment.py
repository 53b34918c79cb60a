"""Environment variables that change a Transformer Engine recipe without the config.

`read_environment` reads them once, `set_lines` describes them for the run report, and `environment_findings` names
those that contradict the config. Nothing here reads the environment by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from bridge.errors import Finding, did_you_mean
from bridge.megatron.te.variables import NVTE_VARIABLES, Variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bridge.megatron.te.recipe import TERecipe

__all__ = ["Environment", "environment_findings", "read_environment", "set_lines"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Variables that were set when the environment was read."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Variables of `NVTE_VARIABLES` that are set, by name."""
    lookalikes: tuple[tuple[str, str], ...] = ()
    """Variables that are not in the table but look like one that is, with that one."""


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Return the `NVTE_VARIABLES` that are set, and variables that look like a misspelt one.

    Args:
        environ: `os.environ`, as it was before `transformer_engine` was imported.
    """
    values = {name: environ[name] for name in NVTE_VARIABLES if name in environ}
    others = sorted(name for name in environ if name.startswith("NVTE_") and name not in NVTE_VARIABLES)
    near = ((name, get_close_matches(name, NVTE_VARIABLES, n=1, cutoff=0.92)) for name in others)
    return Environment(values=values, lookalikes=tuple((name, match[0]) for name, match in near if match))


def set_lines(environment: Environment) -> list[str]:
    """Return one line per variable that is set, for the run report; empty where none is."""
    lines = []
    for name, text in environment.values.items():
        row = NVTE_VARIABLES[name]
        when = "at import" if row.reads == "import" else "at run time"
        effects = {
            True: row.effect,
            False: "no effect, this is what Transformer Engine does anyway",
            None: f"Transformer Engine accepts only {row.accepted}",
        }
        lines.append(f"{name}={text} (read {when}): {effects[row.is_active(text)]}.")
    return lines


def environment_findings(recipe: TERecipe | None, environment: Environment) -> list[Finding]:
    """Return a finding for each variable that changes a recipe, in the order of the table.

    Args:
        recipe: The result of `te_recipe`; None (no low precision) has no findings.
        environment: The result of `read_environment`.

    Returns:
        Errors for values that Transformer Engine refuses or that contradict the config,
        warnings for other changes and for values without effect.
    """
    if recipe is None:
        return []
    found = [
        finding
        for name, text in environment.values.items()
        for finding in _findings_of(NVTE_VARIABLES[name], text, recipe)
    ]
    for name, meant in environment.lookalikes:
        rule, remedy = "Transformer Engine knows no such variable and ignores it", did_you_mean([meant])
        found.append(Finding(path=name, rule=rule, remedy=remedy, value=name, where="environment", severity="warning"))
    return found


def _findings_of(row: Variable, text: str, recipe: TERecipe) -> Iterator[Finding]:
    if not row.concerns(recipe.scheme, attention=bool(recipe.keywords.get("fp8_dpa"))):
        return
    active = row.is_active(text)
    if active is None:
        yield _finding(row, text, f"must be {row.accepted}", "error")
        return
    if row.kind == "flag" and text not in ("0", "1"):
        yield _finding(row, text, "is switched on by 1 alone, everything else is off", "warning")
    if not active or not row.changes_values or text == recipe.name:
        return
    if recipe.scheme in row.refused_by:
        yield _finding(row, text, f"{recipe.name} cannot be made while it is set", "error")
    else:
        severity = "error" if text in row.contradicts else "warning"
        yield _finding(row, text, f"{recipe.name} is not what the config says: it {row.effect}", severity)


def _finding(row: Variable, text: str, rule: str, severity: str) -> Finding:
    before = " before transformer_engine is imported" if row.reads == "import" else ""
    return Finding(
        path=row.name,
        rule=rule,
        remedy=f"Unset it{before}, so that the config alone says what the run is.",
        value=text,
        where="environment",
        severity=severity,
    )

"""Environment variables that change a Transformer Engine recipe without the config, one row each in variables.yaml.

Most of them become defaults of the recipe classes when `transformer_engine` is imported, so Megatron, which passes few
keywords, gets them into its recipes without a message. `read_environment` reads them once, `set_lines` describes them
for the run report, and `environment_findings` names those that contradict the config. Nothing here reads the
environment by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from bridge.errors import Finding, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bridge.megatron.te.recipe import TERecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One row: an environment variable of Transformer Engine."""

    name: str
    effect: str
    """Effect of a value other than the default, as a clause."""
    schemes: tuple[str, ...] = ()
    """Schemes it concerns; empty for every low-precision scheme."""
    reads: str = "import"
    """import: when `transformer_engine` is imported. run: while the run goes on."""
    kind: str = "flag"
    """flag: only the text 1 switches it on. number: an integer, 0 is off. text: a word."""
    default: str | None = "0"
    """A value that means the same as unset; None where there is none."""
    choices: tuple[str, ...] = ()
    """Values that Transformer Engine accepts; empty where it does not check."""
    keyword: str | None = None
    """Keyword of the recipe class whose default it is."""
    contradicts: tuple[str, ...] = ()
    """Values that contradict the config: an error. Any other change is a warning."""
    refused_by: tuple[str, ...] = ()
    """Schemes whose recipe cannot be made while it is set."""
    attention: bool = False
    """Concerns FP8 attention alone, so only recipes with `fp8_dpa`."""
    changes_values: bool = True
    """False: it picks a kernel or permits something; the recipe stays what it was."""

    def parse(self, text: str) -> object:
        """Return a value as Transformer Engine reads it."""
        if self.kind == "flag":
            return text == "1"
        if self.kind == "number":
            return int(text)
        word = text.upper() if self.name.endswith("ERR_MODE") else text
        if self.choices and word not in self.choices:
            raise ValueError
        return word

    def is_active(self, text: str) -> bool | None:
        """Return whether a value does something else than leaving the variable unset; None: it is refused."""
        try:
            parsed = self.parse(text)
        except ValueError:
            return None
        return self.default is None or parsed != self.parse(self.default)

    def concerns(self, scheme: str, *, attention: bool) -> bool:
        """Return whether it can change a run under a scheme, with or without FP8 attention."""
        return (not self.schemes or scheme in self.schemes) and (attention or not self.attention)

    @property
    def accepted(self) -> str:
        """Values that Transformer Engine accepts, in words."""
        if self.kind == "number":
            return "a whole number"
        return f"one of {', '.join(filter(None, self.choices))}" if self.choices else "anything"


def _row(name: str, given: dict[str, Any]) -> Variable:
    """Return a row of variables.yaml; its lists become tuples."""
    keys: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Variable(name=name, **keys)


_FILE = Path(__file__).with_name("variables.yaml")
NVTE_VARIABLES = MappingProxyType(
    {name: _row(name, given) for name, given in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()}
)
"""Variables by name, in the order of the file, which has their sources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Variables that were set when the environment was read."""

    values: Mapping[str, str] = field(default_factory=dict)
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

"""Environment variables that change a Transformer Engine recipe without the config.

Each variable is a row in environment_variables.yaml. When `transformer_engine` is imported, most of
them become defaults of its recipe classes. Megatron passes few keywords to these classes, so the variables
change its recipes without a message. `format_set_variables` describes the variables of a run for
its report. `check_environment` finds the variables that contradict its config. The functions take
the environment as an argument, and do not read it themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

from bridge.errors import Finding, did_you_mean
from bridge.precision.package_yaml import load_package_yaml
from bridge.precision.schemes import find_scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentVariable:
    """An environment variable of Transformer Engine: a row of environment_variables.yaml."""

    name: str
    effect: str
    """A clause with the effect of a value other than the default."""
    schemes: tuple[str, ...] = ()
    """The schemes that the variable changes. Empty: every low-precision scheme."""
    reads: str = "import"
    """When the variable is read. import: when `transformer_engine` is imported. run: during the run."""
    kind: str = "flag"
    """flag: only the text 1 switches it on. number: an integer; 0 is off. text: any other text."""
    default: str | None = "0"
    """The value with the same effect as an unset variable. None: there is no such value."""
    choices: tuple[str, ...] = ()
    """The values that Transformer Engine accepts. Empty: it does not check the value."""
    keyword: str | None = None
    """The keyword of the recipe class whose default the variable sets."""
    contradicts: tuple[str, ...] = ()
    """The values that contradict the config. They are errors, and any other change is a warning."""
    refused_by: tuple[str, ...] = ()
    """The schemes whose recipe cannot be made while the variable is set."""
    attention: bool = False
    """Whether the variable changes only FP8 attention, in recipes with `fp8_dpa`."""
    changes_values: bool = True
    """Whether the variable changes the values of a recipe. False: it only chooses or permits a kernel."""

    def parse(self, text: str) -> object:
        """Return a value as Transformer Engine reads it.

        Raises:
            ValueError: Transformer Engine refuses the value.
        """
        if self.kind == "flag":
            return text == "1"
        if self.kind == "number":
            return int(text)
        word = text
        if self.name.endswith("ERR_MODE"):
            word = text.upper()
        if self.choices and word not in self.choices:
            raise ValueError
        return word

    def is_active(self, text: str) -> bool | None:
        """Return whether a value has another effect than no value, or None if it is refused."""
        try:
            parsed = self.parse(text)
        except ValueError:
            return None
        return self.default is None or parsed != self.parse(self.default)

    @property
    def accepted_values(self) -> str:
        """The values that Transformer Engine accepts, as text."""
        if self.kind == "number":
            return "a whole number"
        if not self.choices:
            return "anything"
        return f"one of {', '.join(filter(None, self.choices))}"


@cache
def load_nvte_variables() -> Mapping[str, EnvironmentVariable]:
    """Return the variables by name, in the order of the file. The file has their sources."""
    rows = load_package_yaml(Path(__file__).with_name("environment_variables.yaml"))
    variables: dict[str, EnvironmentVariable] = {}
    for name, row in rows.items():
        columns: dict[str, Any] = {}
        for key, value in row.items():
            columns[key] = value
            if isinstance(value, list):
                columns[key] = tuple(value)
        variables[name] = EnvironmentVariable(name=name, **columns)
    return variables


def list_set_variables(environ: Mapping[str, str]) -> list[tuple[EnvironmentVariable, str]]:
    """Return the variables that are set, with their values."""
    if not any(name.startswith("NVTE_") for name in environ):
        return []
    return [(row, environ[name]) for name, row in load_nvte_variables().items() if name in environ]


def list_scheme_variables(
    scheme: str | None, environ: Mapping[str, str], *, attention: bool
) -> list[tuple[EnvironmentVariable, str]]:
    """Return the set variables that can change a run under a scheme, with their values.

    Args:
        scheme: The scaling scheme of the run.
        environ: The environment of the run.
        attention: Whether attention runs in FP8.
    """
    rows_and_values = []
    for row, stated_value in list_set_variables(environ):
        is_read = attention or not row.attention
        if is_read and (not row.schemes or scheme in row.schemes):
            rows_and_values.append((row, stated_value))
    return rows_and_values


def collect_recipe_keywords(environ: Mapping[str, str]) -> tuple[tuple[str, object], ...]:
    """Return (keyword, value) pairs of Transformer Engine's recipe classes that variables change.

    A value that Transformer Engine refuses is left out.
    """
    changed: list[tuple[str, object]] = []
    for row, stated_value in list_set_variables(environ):
        if row.keyword and row.is_active(stated_value):
            changed.append((row.keyword, row.parse(stated_value)))
    return tuple(changed)


def format_set_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each variable that is set, for the report of a run."""
    lines = []
    for row, stated_value in list_set_variables(environ):
        when = "at run time"
        if row.reads == "import":
            when = "at import"
        is_active = row.is_active(stated_value)
        if is_active is None:
            effect = f"Transformer Engine accepts only {row.accepted_values}"
        elif is_active:
            effect = row.effect
        else:
            effect = "no effect, this is what Transformer Engine does anyway"
        lines.append(f"{row.name}={stated_value} (read {when}): {effect}.")
    return lines


def check_environment(
    scheme: str | None, environ: Mapping[str, str], *, attention: bool = False
) -> list[Finding]:
    """Return a finding for each variable that changes a recipe, in the order of the table.

    Args:
        scheme: Megatron's name of the scaling scheme. None: no FP8 and FP4, and no findings.
        environ: `os.environ`, as it was before `transformer_engine` was imported.
        attention: Whether attention runs in FP8.

    Returns:
        Errors for values that Transformer Engine refuses or that contradict the config,
        warnings for other changes, for values without effect and for names that are nearly right.
    """
    if scheme is None:
        return []
    findings: list[Finding] = []
    for row, stated_value in list_scheme_variables(scheme, environ, attention=attention):
        findings += _check_variable(row, stated_value, scheme)
    for name in sorted(environ):
        if not name.startswith("NVTE_") or name in load_nvte_variables():
            continue
        near = get_close_matches(name, load_nvte_variables(), n=1, cutoff=0.92)
        if near:
            rule = "Transformer Engine knows no such variable and ignores it"
            remedy = did_you_mean(near)
            findings.append(
                _make_finding(path=name, rule=rule, remedy=remedy, value=name, severity="warning")
            )
    return findings


_make_finding = partial(Finding, where="environment")


def _check_variable(row: EnvironmentVariable, text: str, scheme: str) -> Iterator[Finding]:
    """Yield the findings about the value of a variable under a scheme."""
    scheme_row = find_scheme(scheme)
    recipe: str | None = scheme
    if scheme_row is not None:
        recipe = scheme_row.te_class

    def make_finding(rule: str, severity: str) -> Finding:
        remedy = "Unset it, so that the config alone says what the run is."
        if row.reads == "import":
            remedy = (
                "Unset it before transformer_engine is imported, so that the config alone says "
                "what the run is."
            )
        return _make_finding(path=row.name, rule=rule, remedy=remedy, value=text, severity=severity)

    is_active = row.is_active(text)
    if is_active is None:
        yield make_finding(f"must be {row.accepted_values}", "error")
        return
    if row.kind == "flag" and text not in ("0", "1"):
        yield make_finding("is switched on by 1 alone, everything else is off", "warning")
    if not is_active or not row.changes_values or text == recipe:
        return
    if scheme in row.refused_by:
        yield make_finding(f"{recipe} cannot be made while it is set", "error")
        return
    severity = "warning"
    if text in row.contradicts:
        severity = "error"
    yield make_finding(f"{recipe} is not what the config says: it {row.effect}", severity)

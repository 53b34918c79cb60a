"""`FrameworkTable`: a framework on top of Megatron Core as a table, `tables/NAME.yaml`.

How a file or a launch is recognised stands in `framework_signs.yaml`, with the column `table: NAME`. A table has:

    title        the framework's name in answers
    repository   owner/name on GitHub, with the `commit` and the `date` of the code that the facts were read in
    counted      the files of a clone that `scripts/frameworks.py` asks: `files`, patterns; `having`, that of a line;
                 `programs`, patterns; `calling`, that of a line of a program
    clone        a folder that only a clone of its repository has
    keys         true: its names are keys of a file, not options of a command line
    settings     whose arguments or classes the settings of its files are: Megatron-LM, Megatron Bridge or Megatron Core
    reads        the files of it that are read, a clause
    release      the release of Megatron Core that it installs: `megatron_core`, `because` and `source`
    schemes      values of fp4_recipe that it adds to Megatron Core's, each with the source of the fact
    ranks        arguments whose product is the number of the training processes, each with its default
    places       a block of its files -> the block of ours with the same field names ("policy.megatron_cfg": model)
    fields       a key of its files -> the settings of ours that it becomes
    start        values that it sets at start, in order
    environment  variables that it sets for its training processes where nothing sets them: `value`, `source`, and
                 `below`, the compute capability from which on it does not; with `replaces` whatever else sets them
    variables_in an argument with JSON of variables that it sets for its training processes
    variables    variables that bear on the run and are not read, with the columns of `own`
    checkpoint   `named`, the key with the checkpoint that the model's config is made of, and its `source`
    forwards     a place -> a pattern of the names that reach Megatron; the others of the place are dropped
    own          names of its own, which Megatron does not have
    ignores      `because`, why a name that nobody knows is dropped in silence, with its `source`
    drops        names that its files may state and that its code does not forward

A row of `start` sets the values of `sets`, and of `copies` (setting -> the setting whose value it takes). Columns:

    when         settings that have to be on, `unless` those that have to be off
    where        setting -> values that fit, `where_not` values that do not; "argument.NAME" is a name of its own
    at_least     setting -> the least number that fits
    default      true: it counts only where nothing states the setting
    after        true: it comes after Megatron-LM's own checks of its arguments, not before
    because      the reason, a clause
    source       file and function

A row of `own` has `names` (a pattern of the whole name, with underscores) and `for`, what they are for. Names that bear
on the run have `opens`, the settings that they may change, or `says`, a sentence with {option} and {value}. A name that
changes the layers has `unplans: true`, and one with which nothing of Megatron Core trains `refuses: true`. `in_bf16` is
a pattern of the modules that it takes out of FP8 and FP4; `warns` is what to do where the name is a fault, a clause.
`harmless` are the values that switch it off; `where` is argument -> the values of which it needs another argument to
have one, and `needs` are arguments that have to be on. A row of `drops` has `names` and `where` as one of `own`,
`because`, `source`, and where it is known `mended`, the release or commit that forwards them, `into`, the setting that
they do not reach where it has another name, and `instead`, the key that reaches it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bridge.precision.package_yaml import load_package_yaml
from bridge.preflight.megatron_release import MegatronRelease, assume_newest_release
from bridge.target.versions import parse_version

TABLES_FOLDER = files("bridge.read").joinpath("framework", "tables")
KEY_IS_NOT_READ = "its code does not read the key"
"""Reason of a name that lies in a place and is none of those that reach Megatron."""
COMMIT_DIGITS = 8
"""Digits of a commit that an answer shows."""
OFF_VALUES = (None, False, "", "False", "false", "None", "none", "0")
"""Values with which an own name changes nothing."""


SETTINGS_OWNERS = ("Megatron-LM", "Megatron Bridge", "Megatron Core")
"""Values of the column `settings`."""
REQUIRED_COLUMNS = ("title", "repository", "commit", "date", "settings", "reads")
TABLE_COLUMNS = frozenset(
    [
        "title",
        "repository",
        "commit",
        "date",
        "counted",
        "clone",
        "keys",
        "settings",
        "reads",
        "release",
        "schemes",
        "ranks",
        "places",
        "fields",
        "start",
        "environment",
        "variables_in",
        "variables",
        "own",
        "ignores",
        "drops",
        "checkpoint",
        "forwards",
    ]
)
START_COLUMNS = frozenset(
    [
        "sets",
        "copies",
        "when",
        "unless",
        "where",
        "where_not",
        "at_least",
        "default",
        "after",
        "because",
        "source",
    ]
)
OWN_COLUMNS = frozenset(
    [
        "names",
        "for",
        "opens",
        "says",
        "unplans",
        "in_bf16",
        "warns",
        "refuses",
        "harmless",
        "where",
        "needs",
        "source",
    ]
)
DROPPED_COLUMNS = frozenset(["names", "where", "because", "source", "mended", "into", "instead"])
VARIABLE_COLUMNS = frozenset(["value", "below", "replaces", "source"])


class TableError(ValueError):
    """A table has a column that is not known, or lacks a column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRow:
    """Values that a framework sets at the start of a run."""

    sets: Mapping[str, Any]
    """Setting ("optimizer.use_distributed_optimizer") -> value."""
    copies: Mapping[str, str]
    """Setting -> the setting whose value it takes."""
    when: Sequence[str]
    unless: Sequence[str]
    where: Mapping[str, Sequence[Any]]
    where_not: Mapping[str, Sequence[Any]]
    at_least: Mapping[str, int]
    is_default: bool
    is_after: bool
    because: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkOption:
    """Names of a framework's own, and what they bear on."""

    names: re.Pattern[str]
    purpose: str
    """What they are for, as a noun."""
    opened_settings: Sequence[str]
    """Settings that they may change."""
    sentence: str
    """A sentence about them with {option} and {value}; empty: nothing."""
    has_no_plan: bool
    """They change the layers, so that there is no plan."""
    in_bf16: str
    """Pattern of the modules that they take out of FP8 and FP4; empty: none."""
    warns: str
    """What to do about them, as a clause: they are a finding; empty: they are none."""
    is_refused: bool
    """With them no language model trains on Megatron Core, so that no command reads the run."""
    harmless: Sequence[Any]
    where: Mapping[str, Sequence[Any]]
    needs: Sequence[str]
    """Arguments without which they change nothing."""
    source: str

    def is_on(self, value: object) -> bool:
        """Return whether a value of such a name changes anything."""
        return value not in (*OFF_VALUES, *self.harmless)


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedOption:
    """Names that a framework's files may state and that its code does not forward."""

    names: re.Pattern[str]
    where: Mapping[str, Sequence[Any]]
    because: str
    source: str
    fixed_in: str
    """The release or commit that forwards them; empty: none is known."""
    target_setting: str
    """The setting that they do not reach, where it has not their name; a name in `fields` reaches those there."""
    instead: str
    """The key that reaches the setting; empty: none is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetVariable:
    """A variable that a framework sets for its training processes."""

    value: str
    below: int | None
    """The compute capability (its first number) from which on it does not; None: it always does."""
    replaces: bool
    """Whether it sets the variable whatever else sets it, and not only where nothing does."""
    source: str


@dataclass(frozen=True, kw_only=True)
class FrameworkTable:
    """One framework on top of Megatron Core."""

    name: str
    """Of its table."""
    title: str
    repository: str
    commit: str
    date: str
    counted: Mapping[str, str]
    clone: str
    """A folder that only a clone of its repository has; empty: none is known."""
    keys: bool
    settings: str
    """Whose arguments or classes its settings are: Megatron-LM or Megatron Bridge."""
    reads: str
    release: Mapping[str, str]
    schemes: Mapping[str, str]
    """Scaling scheme that it adds to Megatron Core's -> file and function."""
    ranks: Mapping[str, int]
    places: Mapping[str, str]
    fields: Mapping[str, Sequence[str]]
    start: Sequence[StartRow]
    environment: Mapping[str, SetVariable]
    variables_in: str
    variables: Sequence[FrameworkOption]
    own: Sequence[FrameworkOption]
    ignores: Mapping[str, str]
    dropped_options: Sequence[DroppedOption]
    checkpoint: Mapping[str, str]
    forwarded_names: Mapping[str, re.Pattern[str]]

    @property
    def code(self) -> str:
        """The code that the facts were read in, as a noun."""
        return f"{self.repository} {self.commit[:COMMIT_DIGITS]} of {self.date}"

    @property
    def megatron_release(self) -> MegatronRelease:
        """The release of Megatron Core that the framework installs, or else the newest known one."""
        if not self.release:
            return assume_newest_release()
        return MegatronRelease(
            version=parse_version(self.release["megatron_core"]), reason=self.release["because"]
        )

    @property
    def mode(self) -> str:
        """The mode of a run whose arguments state none; empty: Megatron's own default."""
        for row in self.start:
            for mode in ("bf16", "fp16"):
                if row.sets.get(f"model.{mode}") is True:
                    return mode
        return ""

    def shown(self, name: str) -> str:
        """Return a name as its files have it: a key, or an option with its dashes."""
        return name if self.keys else f"--{name.replace('_', '-')}"

    def find_option(self, name: str) -> FrameworkOption | None:
        """Return the row of a name of its own, with underscores; None for a name that it does not have."""
        for row in self.own:
            if row.names.fullmatch(name):
                return row
        return None

    def get_megatron_settings(self, key: str) -> tuple[str, ...]:
        """Return the settings that a dotted key of its files becomes; none for a key that is not Megatron's."""
        if key in self.fields:
            return tuple(self.fields[key])
        place = self._find_block(key)
        if place:
            return (f"{self.places[place]}.{key.removeprefix(f'{place}.')}",)
        return ()

    def _find_block(self, key: str) -> str:
        """Return the first place that a key lies in; empty for a key that lies in none."""
        for place in self.places:
            if key.startswith(f"{place}."):
                return place
        return ""

    def find_dropped_option(self, key: str) -> DroppedOption | None:
        """Return the row of a key that does not reach its setting of Megatron; None for a key that does."""
        for row in self.dropped_options:
            if row.names.fullmatch(key):
                return row
        place = self._find_block(key)
        pattern = self.forwarded_names.get(place)
        if (
            key in self.fields
            or pattern is None
            or pattern.fullmatch(key.removeprefix(f"{place}."))
        ):
            return None
        return DroppedOption(
            names=pattern,
            where={},
            because=KEY_IS_NOT_READ,
            source=self.forwards_source,
            fixed_in="",
            target_setting="",
            instead="",
        )

    @property
    def forwards_source(self) -> str:
        """File and function that forward the names of the places."""
        return self.checkpoint.get("source", "")


@cache
def load_framework_table(name: str) -> FrameworkTable:
    """Return the table of a framework."""
    file = f"{name}.yaml"
    columns = load_package_yaml(TABLES_FOLDER.joinpath(file))
    _require_table_columns(file, columns)
    return FrameworkTable(
        name=name,
        title=columns["title"],
        repository=columns["repository"],
        commit=columns["commit"],
        date=str(columns["date"]),
        counted=columns.get("counted", {}),
        clone=columns.get("clone", ""),
        keys=columns.get("keys", False),
        settings=columns["settings"],
        reads=columns["reads"],
        release=columns.get("release", {}),
        schemes=columns.get("schemes", {}),
        ranks=columns.get("ranks", {}),
        places=columns.get("places", {}),
        fields={key: _as_tuple(paths) for key, paths in columns.get("fields", {}).items()},
        start=[_parse_start_row(row) for row in columns.get("start", ())],
        environment={
            key: _parse_set_variable(row) for key, row in columns.get("environment", {}).items()
        },
        variables_in=columns.get("variables_in", ""),
        variables=[_parse_option(row) for row in columns.get("variables", ())],
        own=[_parse_option(row) for row in columns.get("own", ())],
        ignores=columns.get("ignores", {}),
        dropped_options=[_parse_dropped_option(row) for row in columns.get("drops", ())],
        checkpoint=columns.get("checkpoint", {}),
        forwarded_names={
            place: re.compile(names, re.VERBOSE)
            for place, names in columns.get("forwards", {}).items()
        },
    )


def _require_table_columns(file: str, columns: Mapping[str, Any]) -> None:
    """Refuse a table whose columns, or those of its rows, are not known or not complete.

    Raises:
        TableError: A column is not known, is missing, or has a wrong value.
    """
    _require_columns(file, columns, REQUIRED_COLUMNS, TABLE_COLUMNS)
    if columns["settings"] not in SETTINGS_OWNERS:
        owners = ", ".join(SETTINGS_OWNERS)
        raise TableError(f"{file}: settings must be one of {owners}, got {columns['settings']!r}.")
    for row in columns.get("start", ()):
        _require_columns(f"{file}: start", row, ("because", "source"), START_COLUMNS)
    for column in ("own", "variables"):
        for row in columns.get(column, ()):
            _require_columns(f"{file}: {column}", row, ("names", "for", "source"), OWN_COLUMNS)
    for row in columns.get("drops", ()):
        _require_columns(f"{file}: drops", row, ("names", "because", "source"), DROPPED_COLUMNS)
    for variable, row in columns.get("environment", {}).items():
        _require_columns(f"{file}: {variable}", row, ("value", "source"), VARIABLE_COLUMNS)


def _require_columns(
    place: str, row: Mapping[str, Any], required: Sequence[str], known: frozenset[str]
) -> None:
    """Refuse a row with a column that is not known, or without a column that it needs.

    Args:
        place: The place of the row in messages: "slime.yaml: own".
        row: The columns of the row.
        required: Columns that the row must have.
        known: Columns that it may have.

    Raises:
        TableError: A column is not known, or is missing.
    """
    for column in row:
        if column not in known:
            raise TableError(f"{place}: no column {column!r}. Columns: {', '.join(sorted(known))}.")
    for column in required:
        if column not in row:
            raise TableError(f"{place}: the column {column!r} is missing.")


def list_table_names() -> list[str]:
    """Return the names of the tables."""
    names = [path.name for path in TABLES_FOLDER.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@cache
def find_table_by_title(title: str) -> FrameworkTable | None:
    """Return the table of a framework by its name in answers; None for a framework without one."""
    for name in list_table_names():
        table = load_framework_table(name)
        if table.title == title:
            return table
    return None


def find_table_by_clone(path: Path) -> FrameworkTable | None:
    """Return the table of the framework in whose clone a file lies; None for a file in none."""
    for folder in path.resolve().parents:
        for name in list_table_names():
            table = load_framework_table(name)
            if table.clone and (folder / table.clone).is_dir():
                return table
    return None


def _parse_start_row(columns: Mapping[str, Any]) -> StartRow:
    return StartRow(
        sets=columns.get("sets", {}),
        copies=columns.get("copies", {}),
        when=_as_tuple(columns.get("when", ())),
        unless=_as_tuple(columns.get("unless", ())),
        where=columns.get("where", {}),
        where_not=columns.get("where_not", {}),
        at_least=columns.get("at_least", {}),
        is_default=columns.get("default", False),
        is_after=columns.get("after", False),
        because=columns["because"],
        source=columns["source"],
    )


def _parse_option(columns: Mapping[str, Any]) -> FrameworkOption:
    return FrameworkOption(
        names=re.compile(columns["names"], re.VERBOSE),
        purpose=columns["for"],
        opened_settings=_as_tuple(columns.get("opens", ())),
        sentence=columns.get("says", ""),
        has_no_plan=columns.get("unplans", False),
        in_bf16=columns.get("in_bf16", ""),
        warns=columns.get("warns", ""),
        is_refused=columns.get("refuses", False),
        harmless=columns.get("harmless", ()),
        where=columns.get("where", {}),
        needs=_as_tuple(columns.get("needs", ())),
        source=columns["source"],
    )


def _parse_dropped_option(columns: Mapping[str, Any]) -> DroppedOption:
    return DroppedOption(
        names=re.compile(columns["names"], re.VERBOSE),
        where=columns.get("where", {}),
        because=columns["because"],
        source=columns["source"],
        fixed_in=columns.get("mended", ""),
        target_setting=columns.get("into", ""),
        instead=columns.get("instead", ""),
    )


def _parse_set_variable(columns: Mapping[str, Any]) -> SetVariable:
    return SetVariable(
        value=str(columns["value"]),
        below=columns.get("below"),
        replaces=columns.get("replaces", False),
        source=columns["source"],
    )


def _as_tuple(value: Any) -> tuple[str, ...]:
    """Return a column with a setting or a list of them as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)

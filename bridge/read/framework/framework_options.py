"""`read_framework_options`: what the names of a framework's own, and names that its code drops, do to a run.

Each is read, or named; where one that is not read would change the plan or the bytes, there is no plan or no verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import Finding, UnreadFileError, bounded
from bridge.read.framework.framework_table import (
    OFF_VALUES,
    DroppedOption,
    FrameworkOption,
    FrameworkTable,
)
from bridge.read.megatron_lm.flags import get_argument_fields
from bridge.read.megatron_lm.unread_options import is_known_option
from bridge.target.fields import parse_integer

GENERATION_PURPOSE = "generation"
"""Purpose of the options of the engine that generates samples."""
ARGUMENT_PREFIX = "argument."
PACKING_OPTIONS = ("use_dynamic_batch_size", "max_tokens_per_gpu")
SAMPLE_LENGTHS = "the lengths of the samples"
SAMPLE_LENGTHS_NOT_STATED = (
    "The files do not state the lengths of the samples: activations are counted for model.seq_length "
    "tokens a sample. Add model.seq_length=VALUE to count another length."
)
NOT_FORWARDED = "{framework} does not forward it: {because} ({source}, {code}){mended}"
NO_SUCH_OPTION = (
    "neither Megatron-LM 0.16 to 0.20 nor {framework} has such an option, and {because} ({source})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkEffects:
    """What the names of a framework's own do to a run."""

    open_points: tuple[str, ...] = ()
    """Sentences about what they leave open."""
    no_plan_reason: str | None = None
    unread_options: tuple[str, ...] = ()
    unread_sources: Mapping[str, str] = field(default_factory=dict)
    """As in `Uncertainty`."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    quant_recipe: Mapping[str, Any] | None = None
    """Megatron's per-module recipe that has the effect of what the framework does to single modules; None: nothing."""
    dropped: tuple[str, ...] = ()
    """Names that Megatron would read and that the framework does not forward."""
    faulty_options: tuple[Finding, ...] = ()
    """As in `FileReading`."""


def read_framework_options(
    table: FrameworkTable, arguments: Mapping[str, Any], variables: Mapping[str, str], path: str
) -> FrameworkEffects:
    """Return what a run's names do that are the framework's own, or that its code drops.

    Args:
        arguments: Name of an argument -> its value, or the value as it is written where only the run decides it.
        variables: The environment variables that the file sets.
        path: Path of the file.

    Raises:
        UnreadFileError: Nothing of Megatron Core trains with one of these names.
    """
    effects = _EffectsBuilder(table, path)
    for option, value, row in _iterate_active_options(table, arguments, variables):
        effects.add_row(option, value, row)
    if table.find_option(PACKING_OPTIONS[0]) is not None and not _is_packed(arguments):
        effects.add_open_lengths()
    dropped: list[str] = []
    for drop, name in _iterate_dropped_options(table, arguments):
        effects.add_dropped(drop, name, arguments[name])
        dropped.append(name)
    for option in _iterate_ignored_options(table, arguments):
        effects.add_ignored(option)
    return FrameworkEffects(
        open_points=tuple(effects.open_points),
        no_plan_reason=effects.unplanned,
        unread_options=tuple(effects.unread_options),
        unread_sources=effects.unread_sources,
        generation=collect_generation_options(table, arguments),
        quant_recipe=_build_quant_recipe(effects.in_bf16),
        dropped=tuple(dropped),
        faulty_options=tuple(effects.findings),
    )


def refuses_arguments(table: FrameworkTable, arguments: Mapping[str, Any]) -> bool:
    """Return whether a framework trains nothing on Megatron Core with these arguments."""
    return any(row.is_refused for _, _, row in _iterate_active_options(table, arguments, {}))


class _EffectsBuilder:
    """The effects of a run's names, while they are collected."""

    def __init__(self, table: FrameworkTable, path: str) -> None:
        self.table = table
        self.path = path
        """The file of the run."""
        self.open_points: list[str] = []
        self.unplanned: str | None = None
        self.unread_options: list[str] = []
        self.unread_sources: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.in_bf16: dict[str, str] = {}
        """Option -> the pattern of the modules that it keeps in BF16."""

    def add_row(self, option: str, value: object, row: FrameworkOption) -> None:
        """Add the effects of a name by its row; UnreadFileError where nothing of Megatron Core trains with it."""
        sentence = row.sentence.format(option=option, value=value)
        if row.warns:
            clause = sentence.removeprefix(f"{option}: ").removeprefix(f"{option} {value}: ")
            self.findings.append(_make_finding(option, value, clause.rstrip("."), row.warns))
        if row.is_refused:
            refusal = f"{self.path}: {bounded(sentence)}"
            raise UnreadFileError(refusal, kind="it trains nothing on Megatron Core")
        if row.in_bf16:
            self.in_bf16[option] = row.in_bf16
        if row.has_no_plan:
            self.unplanned = self.unplanned or bounded(sentence)
        elif sentence:
            self.open_points.append(bounded(sentence))
        if row.opened_settings:
            self.unread_options.append(option)
        for setting in row.opened_settings:
            self.unread_sources.setdefault(setting, option)

    def add_open_lengths(self) -> None:
        """Add that the lengths of the samples are not known."""
        self.open_points.append(SAMPLE_LENGTHS_NOT_STATED)
        self.unread_options.append(SAMPLE_LENGTHS)
        self.unread_sources.setdefault("model.seq_length", SAMPLE_LENGTHS)

    def add_dropped(self, drop: DroppedOption, name: str, value: object) -> None:
        """Add a name that the framework's code does not forward."""
        table = self.table
        mended = ""
        remedy = "Drop it; or change the framework"
        if drop.fixed_in:
            mended = f"; mended in {drop.fixed_in}"
            remedy = f"Use {table.title} from {drop.fixed_in} on"
        rule = NOT_FORWARDED.format(
            framework=table.title,
            because=drop.because,
            source=drop.source,
            code=table.code,
            mended=mended,
        )
        option = table.shown(name)
        self.findings.append(_make_finding(option, value, rule, remedy))
        self.open_points.append(f"{option}: {table.title} does not forward it.")

    def add_ignored(self, option: str) -> None:
        """Add an option that nobody knows, and that the framework's parser drops."""
        rule = NO_SUCH_OPTION.format(framework=self.table.title, **self.table.ignores)
        self.findings.append(_make_finding(option, None, rule, "Correct its name; or drop it"))


def parse_variables_argument(table: FrameworkTable, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that an argument sets for the training processes; none where they cannot be read."""
    text = arguments.get(table.variables_in)
    if not text:
        return {}
    try:
        content = json.loads(str(text))
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    return {str(name): str(value) for name, value in content.items()}


def count_ranks(table: FrameworkTable, arguments: Mapping[str, Any]) -> int | None:
    """Return the number of the training processes; None where the files do not state it."""
    if not table.ranks:
        return None
    ranks = 1
    for name, default in table.ranks.items():
        number = parse_integer(arguments.get(name, default))
        if not number:
            return None
        ranks *= number
    return ranks


def _build_quant_recipe(in_bf16: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the per-module recipe that keeps modules in BF16, by their patterns; None without any."""
    if not in_bf16:
        return None
    kept = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    matchers = {}
    for name, pattern in in_bf16.items():
        matchers[name] = {"config": "bf16", "type": "glob", "pattern": pattern, "enabled": True}
    return {"configs": {"bf16": kept}, "matchers": matchers}


def write_framework_effects(sections: dict[str, dict[str, Any]], own: FrameworkEffects) -> None:
    """Write what a framework does to single modules into the sections, without what it does not forward."""
    if own.quant_recipe is not None:
        sections["model"].setdefault("quant_recipe", own.quant_recipe)
    for name in own.dropped:
        for path in get_argument_fields(name):
            owner_name, _, attribute = path.partition(".")
            sections[owner_name].pop(attribute, None)


def collect_generation_options(
    table: FrameworkTable, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return each option of the engine that generates samples -> its value."""
    options = {}
    for name, value in arguments.items():
        row = table.find_option(name)
        if row is not None and row.purpose == GENERATION_PURPOSE:
            options[table.shown(name)] = value
    return options


def _iterate_active_options(
    table: FrameworkTable, arguments: Mapping[str, Any], variables: Mapping[str, str]
) -> Iterator[tuple[str, Any, FrameworkOption]]:
    """Yield each name that is on, with its value and the row that knows it; options first, then variables."""
    for name, value in arguments.items():
        row = table.find_option(name)
        if row is None or not row.is_on(value):
            continue
        if _matches(row.where, arguments) and _are_on(row.needs, arguments):
            yield table.shown(name), value, row
    for name, text in variables.items():
        for row in table.variables:
            if row.names.fullmatch(name) and row.is_on(text):
                yield name, text, row


def _is_packed(arguments: Mapping[str, Any]) -> bool:
    """Return whether samples are packed up to a number of tokens that is stated."""
    return (
        bool(arguments.get(PACKING_OPTIONS[0]))
        and parse_integer(arguments.get(PACKING_OPTIONS[1])) is not None
    )


def _iterate_dropped_options(
    table: FrameworkTable, arguments: Mapping[str, Any]
) -> Iterator[tuple[DroppedOption, str]]:
    """Yield each name that is stated and not forwarded, with its row."""
    for row in table.dropped_options:
        if not _matches(row.where, arguments):
            continue
        for name, value in arguments.items():
            if row.names.fullmatch(name) and value not in (None, False):
                yield row, name


def _matches(where: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments have the values that a row asks for."""
    for path, values in where.items():
        stated = str(arguments.get(path.removeprefix(ARGUMENT_PREFIX)))
        if stated not in map(str, values):
            return False
    return True


def _are_on(names: Sequence[str], arguments: Mapping[str, Any]) -> bool:
    """Return whether every argument of a row's `needs` is on."""
    return all(arguments.get(name) not in OFF_VALUES for name in names)


def _iterate_ignored_options(table: FrameworkTable, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that nobody knows, where the framework's parser drops such options."""
    if not table.ignores:
        return
    for name in arguments:
        if (
            table.find_option(name) is None
            and not is_known_option(name)
            and not get_argument_fields(name)
        ):
            yield table.shown(name)


def _make_finding(path: str, value: object, rule: str, remedy: str) -> Finding:
    return Finding(path=path, rule=rule, remedy=remedy, value=value, severity="warning")

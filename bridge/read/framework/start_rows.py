"""Values that a framework on top of Megatron Core sets at the start of a run, as rows of its table in this folder.

Its values stand before the checks of the framework below it, whose arguments or classes its settings are; those of the
column `after` stand behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bridge.preflight.file_reading import MICRO_BATCH_REASON, FileReading
from bridge.read.framework.framework_table import FrameworkTable, StartRow, find_table_by_title
from bridge.read.startup_rows import StartupRow, StartupSettings
from bridge.target.fields import parse_integer
from bridge.target.target import Target

VARIABLE_IS_SET = (
    "{framework} sets {name}={value} for its training processes, where nothing sets it ({source})."
)


VARIABLE_IS_REPLACED = (
    "{framework} sets {name}={value} for its training processes, whatever else sets it ({source})."
)


def add_framework_rows(
    title: str, base: Sequence[StartupRow], sections: Mapping[str, Any]
) -> list[StartupRow]:
    """Return the rows of the framework below, with those of the framework of this name around them."""
    table = find_table_by_title(title)
    if table is None:
        return list(base)
    before = [
        row
        for row in build_start_rows(table, is_after=False)
        if row.path.partition(".")[0] in sections
    ]
    after = [
        row
        for row in build_start_rows(table, is_after=True)
        if row.path.partition(".")[0] in sections
    ]
    return [*before, *base, *after]


def add_framework_variables(reading: FileReading, target: Target) -> FileReading:
    """Return the reading with the variables that its framework sets for its training processes."""
    table = find_table_by_title(reading.framework)
    if table is None:
        return reading
    environment = dict(reading.environment)
    sentences: list[str] = []
    for name, row in table.environment.items():
        is_set = row.below is None or target.is_before(row.below)
        if not is_set or (name in environment and not row.replaces):
            continue
        environment[name] = row.value
        facts = {"name": name, "value": row.value, "source": row.source}
        sentence = VARIABLE_IS_SET
        if row.replaces:
            sentence = VARIABLE_IS_REPLACED
        sentences.append(sentence.format(framework=reading.framework, **facts))
    return replace(reading, environment=environment).with_notes(*sentences)


def build_start_rows(table: FrameworkTable, *, is_after: bool) -> Iterator[StartupRow]:
    """Yield what a framework sets, one row for each setting."""
    for row in table.start:
        if row.is_after != is_after:
            continue
        columns: dict[str, Any] = {
            "when": partial(_applies, row),
            "because": row.because,
            "source": f"{row.source} ({table.code})",
            "is_default": row.is_default,
            "set_by": table.title,
        }
        for path, value in row.sets.items():
            yield StartupRow(path=path, value=value, **columns)
        for path, other in row.copies.items():
            yield StartupRow(path=path, value=_make_copy_function(other), **columns)
    if is_after and table.find_option("max_tokens_per_gpu") is not None:
        source = f"slime/utils/dp_schedule.py ({table.code})"
        when = partial(_compute_packed_tokens)
        yield StartupRow(
            path="model.seq_length",
            value=_compute_packed_tokens,
            when=when,
            because=MICRO_BATCH_REASON,
            source=source,
            set_by=table.title,
        )


def _applies(row: StartRow, start: StartupSettings) -> bool:
    """Return whether the settings of a run are those of a row."""
    is_on = all(start.value(path) for path in row.when)
    is_off = not any(start.value(path) for path in row.unless)
    fits = all(_normalise_value(start.value(path)) in values for path, values in row.where.items())
    differs = all(
        _normalise_value(start.value(path)) not in values for path, values in row.where_not.items()
    )
    is_large = all(
        (parse_integer(start.value(path)) or 0) >= least for path, least in row.at_least.items()
    )
    return is_on and is_off and fits and differs and is_large


def _normalise_value(value: Any) -> Any:
    """Return a value as a table writes it: an enum's member by its name."""
    if isinstance(value, bool | int | float | None):
        return value
    return str(value)


def _make_copy_function(other: str) -> Callable[[StartupSettings], Any]:
    """Return a function that returns the value of another setting."""

    def copied(start: StartupSettings) -> Any:
        return start.value(other)

    return copied


def _compute_packed_tokens(start: StartupSettings) -> int | None:
    """Return the tokens of a full micro batch of packed samples; None where samples are not packed."""
    tokens = parse_integer(start.value("argument.max_tokens_per_gpu"))
    if not tokens or not start.value("argument.use_dynamic_batch_size"):
        return None
    return tokens * start.size("context_parallel_size")

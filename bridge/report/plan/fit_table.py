"""The changes with which a run fits into its GPUs, as a table and sentences."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.fit import FitOption, FitReport
from bridge.report.table import Row, format_bytes, make_table


def make_fit_table(report: FitReport, missing: Sequence[str] = ()) -> RenderableType:
    """Return the changes with which a run fits, the cheapest first.

    Args:
        report: The layouts that fit.
        missing: Parts of the run that are not counted.
    """
    notes = _list_notes(report, missing)
    if not report.options:
        return Group(Text("  No layout that was tried fits.", style="red"), *notes)
    rows: list[Row] = []
    for option in report.options:
        rows.append(
            {
                "change": Text(_format_changes(option)),
                "GPUs": str(option.ranks),
                "fullest rank": format_bytes(option.needed_bytes),
                "largest micro-batch": str(option.micro_batch_size),
            }
        )
    numbers = {*rows[0]} - {"change"}
    title = "Fits with, cheapest first"
    table = make_table(rows, title=title, numbers=numbers, wraps=("change",))
    return Group(table, *_list_conditions(report), *notes)


def _list_conditions(report: FitReport) -> list[Text]:
    """Return lines about the conditions of the search: GPUs, memory and micro-batches."""
    lines = []
    if report.declared_ranks is not None:
        declared = f"{report.declared_ranks} GPU"
        if report.declared_ranks > 1:
            declared += "s"
        lines.append(Text(f"  No layout of {declared} that was tried fits.", style="yellow"))
    usable = format_bytes(report.usable_bytes)
    memory = format_bytes(report.memory_bytes)
    lines.append(Text(f"  It may fill {usable} of {memory}; the rest is for what is not counted."))
    sizes = "Micro-batches are tried in powers of two."
    if report.global_batch_size is not None:
        batch = f"the global batch of {report.global_batch_size}"
        sizes = f"A micro-batch divides the samples that a replica has of {batch}."
    lines.append(Text(f"  {sizes}"))
    return lines


def _list_notes(report: FitReport, missing: Sequence[str]) -> list[Text]:
    """Return lines about layouts that were not tried, and parts that were not counted."""
    notes = []
    if report.untried:
        sentence = (
            f"  {report.untried} layouts were not tried: "
            "the search over a model of so many layers ends early."
        )
        notes.append(Text(sentence, style="yellow"))
    if missing:
        sentence = f"  Not counted, so that it may not fit: {', '.join(missing)}."
        notes.append(Text(sentence, style="yellow"))
    return notes


def _format_changes(option: FitOption) -> str:
    """Return the changes as overrides of a command line."""
    if not option.changes:
        return "nothing: it fits as it is"
    overrides = []
    for name, value in option.changes:
        overrides.append(f"{name}={_format_value(value)}")
    return " ".join(overrides)


def _format_value(value: object) -> str:
    """Return a value in the spelling of an override."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)

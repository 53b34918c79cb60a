"""Violations of rows of `modules` and of foreign matchers, by the modules that they select."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bridge.errors import close_matches, listed
from bridge.precision.linear_names import LINEAR_NAMES, selects_linear_layer
from bridge.precision.matchers import HIGH_PRECISION
from bridge.precision.module_row import ModuleRow, find_absent_layers, parse_module_rows
from bridge.precision.statements import is_stated
from bridge.rules.context import RuleContext
from bridge.rules.module_selection import PlacedModule, RowSelection
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.fields import parse_integer
from bridge.target.versions import is_at_least

QUANT_RECIPE_PATH = "model.quant_recipe"
MAX_LISTED = 6
"""The number of names that a message lists."""


def make_module_violation(
    context: RuleContext, value: object, *, severity: str | None = None, **words: Any
) -> Violation:
    """Return a violation of a row of `modules`, or of a matcher of a foreign recipe."""
    if context.precision is not None and is_stated(context.precision, "modules"):
        return Violation("modules", value=value, severity=severity, noun="row", **words)
    return Violation(QUANT_RECIPE_PATH, value=value, severity=severity, noun="matcher", **words)


def _make_row_violation(
    context: RuleContext, row: RowSelection, *, severity: str | None = None, **words: Any
) -> Violation:
    matcher = row.matcher
    return make_module_violation(
        context, matcher.select, severity=severity, name=matcher.name, **words
    )


def get_stated_rows(context: RuleContext) -> tuple[ModuleRow, ...]:
    """Return the rows of the precision's `modules`."""
    return parse_module_rows(context.stated.get("modules"))


def _get_row_selections(context: RunContext) -> Sequence[RowSelection]:
    if context.selection is None:
        return ()
    return context.selection.rows


def find_empty_rows(context: RuleContext) -> Iterator[Violation]:
    """Yield the rows and matchers that select no linear layer.

    PB292 reports rows of layers that the model does not have. A file of matchers may be used for
    several models, so that its matchers get a warning.
    """
    if not isinstance(context, RunContext):
        yield from _find_rows_of_no_model(context)
        return
    for row in _get_row_selections(context):
        if not row.is_empty or (row.absent_layers and not row.unmatched_layers):
            continue
        reason = ""
        if row.unread:
            reason = f": it takes {_format_module_names(row.unread)} alone, which read no per-module recipe"
        severity = None
        if context.selection is not None and context.selection.is_foreign:
            severity = "warning"
        yield _make_row_violation(
            context,
            row,
            severity=severity,
            reason=reason,
            near=_format_near_names(row.similar_names),
        )


def _find_rows_of_no_model(context: RuleContext) -> Iterator[Violation]:
    """Yield the rows that select no linear layer of any Megatron model.

    It is the check of a sync, which has no plan of its model.
    """
    names = dict.fromkeys(name.rpartition(".")[2] for name in LINEAR_NAMES)
    for number, row in enumerate(get_stated_rows(context)):
        if selects_linear_layer(row):
            continue
        last = (row.select or row.module).rpartition(".")[2].strip("*")
        near = _format_near_names(close_matches(last, names))
        yield make_module_violation(context, str(row), name=number, reason="", near=near)


def _format_near_names(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" (did you mean {listed(names)}?)"


def _format_module_names(modules: Iterable[PlacedModule]) -> str:
    """Return the names of modules, the first `MAX_LISTED` of them."""
    names = list(dict.fromkeys(module.module for module in modules))
    listed_names = ", ".join(names[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        listed_names += f" and {len(names) - MAX_LISTED} more"
    return listed_names


def _format_layer_numbers(numbers: Sequence[int]) -> str:
    """Return text with the first `MAX_LISTED` layer numbers."""
    if not numbers:
        return "no layer"
    listed_numbers = ", ".join(str(number) for number in numbers[:MAX_LISTED])
    if len(numbers) == 1:
        return f"layer {listed_numbers}"
    if len(numbers) > MAX_LISTED:
        listed_numbers += ", ..."
    return f"layers {listed_numbers}"


def find_unmatched_layers(context: RuleContext) -> Iterator[Violation]:
    """Yield the rows that name layers in which they select no module."""
    if not isinstance(context, RunContext):
        is_hybrid = (
            context.model.is_hybrid_model
            or context.model.hybrid_override_pattern
            or context.model.hybrid_layer_pattern
        )
        if not is_hybrid:  # a pattern decides the number of layers of a hybrid model
            yield from _find_absent_layers(context, parse_integer(context.model.num_layers) or 0)
        return
    if context.selection is None:
        return
    yield from _find_absent_layers(context, context.selection.num_layers)
    for row in context.selection.rows:
        if row.unmatched_layers and not row.is_empty:
            yield _make_row_violation(
                context,
                row,
                severity="warning",
                remedy="drop these numbers",
                layers=_format_layer_numbers(row.unmatched_layers),
                reason="there is no such module there",
            )


def _find_absent_layers(context: RuleContext, num_layers: int) -> Iterator[Violation]:
    """Yield the rows that name layers which the model does not have, if its layers are known."""
    if num_layers < 1:
        return
    reason = f"the model's layers are 0 to {num_layers - 1}"
    for number, row in enumerate(get_stated_rows(context)):
        absent = find_absent_layers(row.layer_numbers, num_layers)
        if absent:
            yield make_module_violation(
                context,
                str(row),
                name=number,
                layers=_format_layer_numbers(absent),
                reason=reason,
                remedy="correct these numbers",
            )


def find_shadowed_rows(context: RunContext) -> Iterator[Violation]:
    """Yield the rows whose modules are all selected by earlier rows."""
    for row in _get_row_selections(context):
        if row.is_shadowed:
            yield _make_row_violation(context, row, by=" and ".join(row.shadowed_by))


def find_choices_for_unread_modules(context: RunContext) -> Iterator[Violation]:
    """Yield the rows that choose FP8 or FP4 also for modules that read no per-module recipe."""
    for row in _get_row_selections(context):
        precision = row.matcher.precision
        if row.unread and not row.is_empty and precision != HIGH_PRECISION:
            yield _make_row_violation(
                context, row, precision=precision, modules=_format_module_names(row.unread)
            )


def find_stage_dependent_matchers(context: RunContext) -> Iterator[Violation]:
    """Yield the foreign matchers that select other layers under another pipeline size."""
    if context.selection is None:
        return
    for reach in context.selection.other_stages:
        matcher = reach.row.matcher
        yield Violation(
            value=matcher.select,
            name=matcher.name,
            precision=matcher.precision,
            here=_format_layer_numbers(reach.row.numbers),
            there=_format_layer_numbers(reach.numbers),
            stages=reach.stages,
        )


def find_rows_leaving_no_module(context: RunContext) -> Violation | None:
    """Return a violation if the rows of an FP8 or FP4 run leave no linear layer in FP8 or FP4."""
    if context.selection is None or not context.is_low_precision or not context.selection.rows:
        return None
    names = []
    modules = [*context.selection.unselected]
    for row in context.selection.rows:
        names.append(row.matcher.select)
        modules += row.taken
    if all(module.scheme is None for module in modules):
        return make_module_violation(context, names)
    return None


def find_rows_in_another_stored_scheme(context: RunContext) -> Iterator[Violation]:
    """Yield the rows that multiply weights stored in the run's format in another scheme.

    From megatron-core 0.18 on a hybrid model stores each weight according to its payload (PB214).
    """
    stored = []
    if context.is_fp8 and context.gathers_fp8:
        stored.append("fp8_param_gather=False")
    if context.is_fp4 and context.gathers_fp4:
        stored.append("fp4_param_gather=False")
    if not stored:
        return
    if context.shape.is_hybrid and is_at_least(context.target.mcore, "0.18") is not False:
        return
    for row in _get_row_selections(context):
        other = _find_other_scheme(context, row)
        if other is not None and any(module.is_low_precision for module in row.taken):
            yield _make_row_violation(context, row, other=other, unstored=" and ".join(stored))


def _find_other_scheme(context: RunContext, row: RowSelection) -> str | None:
    """Return the scheme of a row in training or evaluation that differs from the run's, or None."""
    for scheme in (row.matcher.precision, row.matcher.evaluation_label):
        if scheme is not None and scheme not in (HIGH_PRECISION, context.scheme):
            return scheme
    return None

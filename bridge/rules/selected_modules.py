"""Predicates about the modules that rows of `modules`, and matchers of a foreign recipe, take."""

from collections.abc import Sequence
from typing import Any

from bridge.errors import close_matches, listed
from bridge.precision.matchers import HIGH
from bridge.precision.modules import LINEAR_NAMES, ModuleRow, layers_beyond, module_rows, takes_a_linear_layer
from bridge.precision.statements import is_stated
from bridge.rules.context import RuleContext
from bridge.rules.violation import Violation
from bridge.target.fields import whole_number
from bridge.target.versions import at_least

PATH = "model.quant_recipe"
MOST = 6
"""Names that a message lists."""


def about(run: RuleContext, value: object, *, severity: str | None = None, **words: Any) -> Violation:
    """Return a violation of a row of `modules`, or of a matcher of a foreign recipe."""
    is_row = run.precision is not None and is_stated(run.precision, "modules")
    path, noun = ("modules", "row") if is_row else (PATH, "matcher")
    return Violation(path, value=value, severity=severity, noun=noun, **words)


def _about(run: RuleContext, row: Any, *, severity: str | None = None, **words: Any) -> Violation:
    return about(run, row.matcher.select, severity=severity, name=row.matcher.name, **words)


def own_rows(run: RuleContext) -> tuple[ModuleRow, ...]:
    """Return the rows of the precision's `modules`."""
    return module_rows(run.stated.get("modules"))


def _rows(run: RuleContext) -> Sequence[Any]:
    return run.selection.rows if run.selection is not None else ()


def empty(run: RuleContext) -> list[Violation]:
    """Return the rows and matchers that take no linear layer; rows of layers beyond the model are PB292's."""
    if not run.is_whole:
        return _misspelt(run)
    found = []
    for row in _rows(run):
        if not row.is_empty or (row.beyond and not row.missed):
            continue
        unread = _listed(row.unread)
        reason = f": it takes {unread} alone, which read no per-module recipe" if unread else ""
        severity = "warning" if run.selection.is_foreign else None  # a file may serve several models
        found.append(_about(run, row, severity=severity, reason=reason, near=_near(row.nearest)))
    return found


def _misspelt(run: RuleContext) -> list[Violation]:
    """Return the rows that take no linear layer of any Megatron model, for a sync, which has no plan."""
    names = dict.fromkeys(name.rpartition(".")[2] for name in LINEAR_NAMES)
    found = []
    for number, row in enumerate(own_rows(run)):
        if not takes_a_linear_layer(row):
            last = (row.select or row.module).rpartition(".")[2].strip("*")
            found.append(about(run, str(row), name=number, reason="", near=_near(close_matches(last, names))))
    return found


def _near(names: Sequence[str]) -> str:
    return f" (did you mean {listed(names)}?)" if names else ""


def _listed(modules: Sequence[Any]) -> str:
    names = list(dict.fromkeys(one.module for one in modules))
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def _numbers(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no layer"
    more = ", ..." if len(numbers) > MOST else ""
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:MOST]))}{more}"


def missed_layers(run: RuleContext) -> list[Violation]:
    """Return the rows that name layers in which they take nothing; a foreign matcher names no layers."""
    if not run.is_whole:
        return _beyond_the_model(run, whole_number(run.model.num_layers) or 0)
    found = _beyond_the_model(run, run.selection.num_layers) if run.selection is not None else []
    for row in _rows(run):
        if row.missed and not row.is_empty:
            words = {"layers": _numbers(row.missed), "reason": "there is no such module there"}
            found.append(_about(run, row, severity="warning", remedy="drop these numbers", **words))
    return found


def _beyond_the_model(run: RuleContext, num_layers: int) -> list[Violation]:
    """Return the rows that name layers which the model does not have; none where its layers are not known."""
    is_hybrid = run.model.is_hybrid_model or run.model.hybrid_override_pattern or run.model.hybrid_layer_pattern
    if num_layers < 1 or (is_hybrid and not run.is_whole):  # a pattern counts a hybrid model's layers
        return []
    words = {"reason": f"the model's layers are 0 to {num_layers - 1}", "remedy": "correct these numbers"}
    rows = [(number, row, layers_beyond(row.layer_numbers, num_layers)) for number, row in enumerate(own_rows(run))]
    return [
        about(run, str(row), name=number, layers=_numbers(beyond), **words) for number, row, beyond in rows if beyond
    ]


def hidden(run: RuleContext) -> list[Violation]:
    """Return the rows behind earlier ones that take all of their modules."""
    return [_about(run, row, by=" and ".join(row.by)) for row in _rows(run) if row.is_hidden]


def unread(run: RuleContext) -> list[Violation]:
    """Return the rows that choose FP8 or FP4 and select modules too that read no such choice, without naming them."""
    rows = [row for row in _rows(run) if row.unread and not row.is_empty and row.matcher.precision != HIGH]
    return [_about(run, row, precision=row.matcher.precision, modules=_listed(row.unread)) for row in rows]


def elsewhere(run: RuleContext) -> list[Violation]:
    """Return the foreign matchers that mean other layers under another pipeline size."""
    found = []
    for one in getattr(run.selection, "elsewhere", ()):
        matcher, here, there = one.row.matcher, _numbers(one.row.numbers), _numbers(one.there)
        words = {"precision": matcher.precision, "here": here, "there": there, "stages": one.stages}
        found.append(Violation(value=matcher.select, name=matcher.name, **words))
    return found


def all_high(run: RuleContext) -> list[Violation]:
    """Return the rows of a run in FP8 or FP4 that together leave no linear layer in it."""
    if run.selection is None or not run.is_low:
        return []
    modules = [*run.selection.left, *(module for row in run.selection.rows for module in row.taken)]
    names = [row.matcher.select for row in run.selection.rows]
    return [about(run, names)] if names and all(module.scheme is None for module in modules) else []


def in_another_scheme(run: RuleContext) -> list[Violation]:
    """Return the rows that multiply weights stored in the run's format in another scheme.

    A hybrid model stores each weight as its payload says, from megatron-core 0.18 on (PB214).
    """
    gathers = {"fp8_param_gather": run.fp8 and run.gathers_fp8, "fp4_param_gather": run.fp4 and run.gathers_fp4}
    stored = [f"{name}=False" for name, is_on in gathers.items() if is_on]
    if not stored or (run.shape.is_hybrid and at_least(run.mcore, "0.18") is not False):
        return []
    found = []
    for row in _rows(run):
        others = [one for one in (row.matcher.precision, row.matcher.outside) if one not in (None, HIGH, run.scheme)]
        if others and any(module.is_low for module in row.taken):
            found.append(_about(run, row, other=others[0], unstored=" and ".join(stored)))
    return found

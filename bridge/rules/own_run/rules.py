"""Refusals of a run of this project, `scripts/train.py`; other trainers run what it refuses."""

from functools import partial

from bridge.rules.context import RuleContext
from bridge.rules.fields import DEFAULTS, FIELDS
from bridge.rules.own_run.fields import BUILT
from bridge.rules.own_run.refusals import NOT_HONOURED, WRONG_LAYOUT, WRONG_VALUE, refusals
from bridge.rules.rule import error
from bridge.rules.violation import Predicate, Violation

_DEFAULTS = {
    role: {name: DEFAULTS[role][name] for name, row in FIELDS[role].items() if row.is_megatron or name in BUILT}
    for role in ("model", "optimizer", "ddp")
}
SOURCE = "bridge/rules/own_run/fields.py: megatron-core 0.16.1, its readers of each field"


def _refused(rule: str) -> Predicate:
    """Return the predicate of one of the ids of `bridge.rules.own_run.refusals`."""

    def predicate(run: RuleContext) -> list[Violation]:
        if not run.is_own:
            return []
        backend = run.backend
        if backend is None and run.target.gpu is not None:
            backend = "te" if run.has_gpu else "emulated"
        sections = {role: vars(run.views[role]) for role in _DEFAULTS}
        return [
            Violation(one.path, value=one.value, clause=one.rule, remedy=one.remedy.removesuffix("."))
            for one in refusals(sections, _DEFAULTS, backend=backend)
            if one.id == rule
        ]

    return predicate


_row = partial(error, setting="model", message="{clause}", remedies=("{remedy}",))
"""A row whose findings have the words of the refusals."""

RULES = (
    _row(
        id=NOT_HONOURED,
        title="field that the run does not honour",
        when=_refused(NOT_HONOURED),
        source=SOURCE,
        explanation="The build of scripts/train.py would leave the field out and train another model. Which fields it "
        "honours depends on the layers: Transformer Engine's, its Python on a CPU, or the emulated ones.",
    ),
    _row(
        id=WRONG_VALUE,
        title="value that the run cannot have",
        when=_refused(WRONG_VALUE),
        source=SOURCE,
        explanation="The build of scripts/train.py has no such value, or Megatron would end in a traceback for it.",
    ),
    _row(
        id=WRONG_LAYOUT,
        title="layout that trains another model",
        when=_refused(WRONG_LAYOUT),
        source="Runs of megatron-core 0.16.1 over gloo, compared with one process",
    ),
)

"""Refusals of a run of this project, `scripts/train.py`; other trainers run what it refuses."""

from collections.abc import Callable
from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.fields import DEFAULTS, FIELDS
from bridge.rules.own_run.refusals import NOT_HONOURED, WRONG_LAYOUT, WRONG_VALUE, refusals
from bridge.rules.rule import Rule, target_rule

BUILT = ("vocab_size", "seq_length", "make_vocab_size_divisible_by", "position_embedding_type")
"""Fields of the model that the build reads and no class of Megatron Core has."""
_DEFAULTS = {
    role: {name: DEFAULTS[role][name] for name, row in FIELDS[role].items() if row.is_megatron or name in BUILT}
    for role in ("model", "optimizer", "ddp")
}
SOURCE = "bridge/rules/own_run/fields.py: megatron-core 0.16.1, its readers of each field"


def _refused(rule: str) -> Callable[[RuleContext], list[dict[str, Any]]]:
    """Return the predicate of one of the ids of `bridge.rules.own_run.refusals`."""

    def predicate(s: RuleContext) -> list[dict[str, Any]]:
        backend = s.backend
        if backend is None and s.target.gpu is not None:
            backend = "te" if s.has_gpu else "emulated"
        sections = {role: vars(s.views[role]) for role in _DEFAULTS}
        return [
            {"path": one.path, "value": one.value, "clause": one.rule, "remedy": one.remedy.removesuffix(".")}
            for one in refusals(sections, _DEFAULTS, backend=backend)
            if one.id == rule
        ]

    return predicate


RULES = (
    target_rule(
        heading=f"{NOT_HONOURED}: field that the run does not honour",
        predicate=_refused(NOT_HONOURED),
        error="model: {clause}",
        remedies=("{remedy}",),
        verified=SOURCE,
        gate="is_own",
        explanation="The build of scripts/train.py would leave the field out and train another model. Which fields it "
        "honours depends on the layers: Transformer Engine's, its Python on a CPU, or the emulated ones.",
    ),
    target_rule(
        heading=f"{WRONG_VALUE}: value that the run cannot have",
        predicate=_refused(WRONG_VALUE),
        error="model: {clause}",
        remedies=("{remedy}",),
        verified=SOURCE,
        gate="is_own",
        explanation="The build of scripts/train.py has no such value, or Megatron would end in a traceback for it.",
    ),
    Rule(
        heading=f"{WRONG_LAYOUT}: layout that trains another model",
        predicate=_refused(WRONG_LAYOUT),
        error="model: {clause}",
        remedies=("{remedy}",),
        verified="Runs of megatron-core 0.16.1 over gloo, compared with one process",
        gate="is_own",
    ),
)

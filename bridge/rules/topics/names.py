"""Types, misspelt keys, replaced values, and names that promise another scheme."""

import functools
from functools import partial
from typing import Any

from bridge.errors import close_matches, did_you_mean
from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.fields import LAYER_COUNTS
from bridge.rules.context import RuleContext
from bridge.rules.fields import NAMES, PAIRS
from bridge.rules.rule import Rule, each, owners_rule, precision_rule, sync_rule

NAME_TOKENS = {
    "current_scaling": "tensorwise",
    "delayed_scaling": "delayed",
    "mxfp8": "mxfp8",
    "subchannel": "blockwise",
    "blockwise": "blockwise",
    "nvfp4": "nvfp4",
}
"""Part of a recipe's name -> the scheme that it promises."""


DROPOUTS = ("hidden_dropout", "attention_dropout")


def _default_dropouts(s: RuleContext) -> list[dict[str, str]]:
    given = s.sections["model"].stated
    return each(*((f"model.{name}", s.model.num_layers > 0 and name not in given) for name in DROPOUTS))


def _disagreeing(s: RuleContext) -> list[dict[str, Any]]:
    found = []
    for pair in PAIRS:
        (one, mine), (two, theirs) = pair.one, pair.two
        if one == two or not {one, two} <= s.given or (s.is_whole and not pair.is_checked):
            continue
        if mine == "fp8_recipe" and not s.fp8:  # the optimizer's is None then, and the model's is Megatron's default
            continue
        first, second = getattr(s.views[one], mine), getattr(s.views[two], theirs)
        if first != second and (s.is_whole or None not in (first, second)):
            found.append({"path": f"{one}.{mine}", "value": first, "other": f"{two}.{theirs}", "theirs": second})
    return found


def _without_home(s: RuleContext) -> list[dict[str, Any]]:
    return [
        {"path": row.field, "home": f"{row.owner}.{row.attribute}", "since": row.since}
        for row in s.rows
        if row.since is not None and row.owner in s.given and s.stands_out(row.field or "")
    ]


def _unrouted(s: RuleContext) -> list[dict[str, Any]]:
    known = {*FIELD_DEFAULTS, *(row.field for row in s.rows)}
    return [{"path": f"mixed_precision.{name}"} for name in s.stated if name not in known]


def _below_least(s: RuleContext) -> list[dict[str, Any]]:
    return [
        {"path": name, "value": s.stated.get(name, getattr(owner, name)), "least": least}
        for owner, name, least in (
            (s.model, "fp8_margin", 0),
            (s.model, "fp8_amax_history_len", 1),
            (s.model, LAYER_COUNTS[0], 0),
            (s.model, LAYER_COUNTS[1], 0),
            (s.optimizer, "hysteresis", 1),
        )
        if s.stated.get(name, getattr(owner, name)) < least
    ]


def _misspelt(s: RuleContext) -> list[dict[str, Any]]:
    found = []
    for name, value in s.unknown.items():  # every field of the precision is known
        hint = did_you_mean(close_matches(name, FIELD_DEFAULTS)) or "drop it"
        found.append({"path": f"mixed_precision.{name}", "value": value, "hint": hint})
    for role in NAMES:
        for name, value in s.sections[role].unknown.items():
            nearest = nearest_fields(role, name)
            if nearest:
                found.append({"path": f"{role}.{name}", "value": value, "hint": did_you_mean(nearest)})
    return found


@functools.lru_cache(maxsize=1024)
def nearest_fields(role: str, name: str) -> tuple[str, ...]:
    """Return the fields that `name` may be a misspelling of: a provider's own field looks like none of them."""
    letters = set(name)  # which one edit changes by two at most; without this, a file of 20,000 fields takes 9 s
    near = [known for known in NAMES[role] if abs(len(known) - len(name)) <= 2 and len(letters ^ set(known)) <= 4]
    return tuple(known for known in close_matches(name, near) if _distance(known, name) <= 2)


def _distance(one: str, two: str) -> int:
    """Return how many letters have to be inserted, deleted, replaced or swapped to turn `one` into `two`."""
    rows = [list(range(len(two) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, other in enumerate(two, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == two[j - 2] and one[i - 2] == other:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def _misnamed(s: RuleContext) -> Any:
    name = (s.precision.recipe or "") if s.precision is not None else ""
    promised = next((scheme for token, scheme in NAME_TOKENS.items() if token in name), None)
    if promised is None or promised == s.scheme:
        return None
    return {"promised": promised, "actual": s.scheme or "no scheme", "name": name, "value": s.scheme}


_recipe = partial(precision_rule, gate="precision")

RULES = (
    Rule(
        heading="PB121: value of a wrong type",
        predicate=lambda s: [{"path": one.path, "value": one.value, "why": one.why} for one in s.malformed],
        error="model: {why}",
        remedies=("write a value of that type; YAML reads no, off and 1e-5 otherwise than they look",),
        reported="huggingface/accelerate issue 1386, 2023-05-04; AMD-AGI/Primus issue 886, 2026-07-20",
        gate="malformed",
        explanation="A YAML 1.1 parser reads an unquoted `no` or `off` as False and `1e-5` as a string; a quoted "
        '"false" is a non-empty, hence true, string. A value that can only mean one thing is taken; the rest is named.',
    ),
    Rule(
        heading="PB122: misspelt field",
        predicate=_misspelt,
        error="model: there is no such field: an unknown key is dropped, or lands where nothing reads it",
        remedies=("{hint}",),
        reported="pytorch/torchtitan issues 1059 (2025-04-05) and 1644 (2025-08-27); NVIDIA-NeMo/Megatron-Bridge issue "
        "2957, 2026-03-23",
    ),
    owners_rule(
        heading="PB123: recipe replaces an owner's value",
        predicate=lambda s: [
            {
                "path": f"{row.owner}.{row.attribute}",
                "value": row.old,
                "new": row.new,
                "stated": "drop mixed_precision.modules to keep it"
                if row.field == "modules"
                else f"state mixed_precision.{row.field}={row.old} to keep it",
                "keep": "call synchronize(on_conflict='keep')" if row.can_be_kept else "",
            }
            for row in s.rows
            if row.verdict == "override" and row.replaces_own
        ],
        warning="model: the recipe states {new!r} and wins over the owner's own value",
        remedies=("{stated}", "drop it to go with the recipe", "{keep}"),
        verified="NVIDIA-NeMo/Megatron-Bridge issues 2763 (2026-03-11) and 2844 (2026-03-17): the peer does it "
        "silently",
        gate="precision",
    ),
    owners_rule(
        heading="PB124: two owners disagree",
        sync="refused",
        predicate=_disagreeing,
        error="model.bf16: must equal {other}, which is {theirs!r}: it is one setting in two places",
        remedies=("give both the same value", "let a recipe state it, which writes both"),
        verified="megatron-core 0.16.1 to 0.19.2: model, optimizer and DDP each read their own copy; NVIDIA-NeMo/RL "
        "issue 3281, 2026-07-18",
    ),
    _recipe(
        heading="PB125: recipe's name says something else",
        predicate=_misnamed,
        warning="fp8_recipe: the recipe is called {name}, which promises {promised}, and its values are {actual}",
        remedies=("choose the recipe whose name says it", "give the changed recipe a name of its own"),
        verified="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py, 2026-08-22 "
        "(nanov2_bf16_with_fp8_current_scaling_mixed is blockwise)",
    ),
    owners_rule(
        heading="PB126: off written as something else than None",
        predicate=lambda s: [
            {"path": f"model.{name}", "value": getattr(s.model, name)}
            for name in ("fp8", "fp4")
            if getattr(s.model, name) is not None and not getattr(s.model, name)
        ],
        warning="model.fp8: must be None where it is off: CUDA graphs and inference ask whether it is None",
        remedies=("use None",),
        verified="megatron-core 0.19.2 transformer/cuda_graphs.py, transformer/module.py: `config.fp8 is not None`",
    ),
    owners_rule(
        heading="PB127: size below one",
        predicate=lambda s: [
            {"path": f"model.{name}", "value": getattr(s.model, name)}
            for name in (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                "expert_model_parallel_size",
            )
            if (getattr(s.model, name) or 0) < 1
        ],
        error="model.tensor_model_parallel_size: must be at least 1",
        remedies=("use 1 for no parallelism of that kind",),
        verified="megatron-core 0.16.1 parallel_state.py",
    ),
    precision_rule(
        heading="PB128: count below its least value",
        predicate=_below_least,
        error="fp8_margin: must be at least {least}",
        remedies=("use {least} or more",),
        verified="megatron-core 0.16.1 optimizer/grad_scaler.py, fp8_utils.py",
    ),
    sync_rule(
        heading="PB129: no home in this Megatron",
        predicate=_without_home,
        warning="fp4_param_gather: {home} does not exist before megatron-core {since}, so it is not set there",
        remedies=("use megatron-core {since}", "drop it"),
        verified="megatron-core 0.16.1 and 0.17.1 distributed_data_parallel_config.py",
    ),
    _recipe(
        heading="PB130: switch off with the one it needs",
        sync="reported",
        predicate=lambda s: [{"path": name, "by": by} for name, by in s.put_aside.items()],
        info="reuse_grad_buf_for_mxfp8_param_ag: is off, because a later statement turned off what it needs; {by} had "
        "turned it on",
        remedies=("state False, which says the same", "leave it"),
        verified="this project: bridge.precision.statements",
    ),
    sync_rule(
        heading="PB131: field that no config has",
        predicate=_unrouted,
        warning="mixed_precision: no config that the recipe is written into has a field of this name, so it changes "
        "nothing",
        remedies=("add the field to the config that reads it", "drop it"),
        verified="this project: bridge.sync.plan",
        gate="precision",
    ),
    Rule(
        heading="PB132: dropout that only a default decides",
        predicate=_default_dropouts,
        info="model.hidden_dropout: nothing states it, so that Megatron's default drops a tenth of the values; large "
        "models are trained without dropout",
        remedies=("state 0, or the value that is meant",),
        verified="megatron-core 0.16.1 and 0.19.2 transformer_config.py",
        gate="has_model",
    ),
)

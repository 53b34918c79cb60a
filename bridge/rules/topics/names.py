"""Types, misspelt keys, replaced values, and names that promise another scheme."""

import functools
from collections.abc import Iterable
from itertools import chain
from typing import Any

from bridge.errors import close_matches, did_you_mean
from bridge.model.shape import PARALLEL_SIZES
from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.fields import COMMAND_LINE, LAYER_COUNTS
from bridge.precision.grouping import grouped
from bridge.precision.statements import recipe_name, untold_fields
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.rule import contradiction, error, info, no_effect, warning
from bridge.rules.topics.mode import MODES
from bridge.rules.violation import Violation, violations
from bridge.target.fields import DEFAULTS, NAMES, PAIRS

NAME_TOKENS = {
    "current_scaling": "tensorwise",
    "delayed_scaling": "delayed",
    "mxfp8": "mxfp8",
    "subchannel": "blockwise",
    "blockwise": "blockwise",
    "nvfp4": "nvfp4",
}
"""Part of a recipe's name -> the scheme that it promises."""
LEAST = {"fp8_margin": 0, "fp8_amax_history_len": 1, **dict.fromkeys(LAYER_COUNTS, 0), "hysteresis": 1}
"""Count -> its least value."""


def _default_dropouts(run: RuleContext) -> list[Violation]:
    if not (run.has_model and run.model.num_layers > 0):
        return []
    found = []
    for name in ("hidden_dropout", "attention_dropout"):
        if name not in run.sections["model"].stated:
            found.append(Violation(f"model.{name}", rests_on=(f"model.{name}",)))
    return found


def _disagreeing(run: RuleContext) -> list[Violation]:
    found = []
    for pair in PAIRS:
        (one, mine), (two, theirs) = pair.one, pair.two
        if one == two or not {one, two} <= run.given or (run.is_whole and not pair.is_checked):
            continue
        if mine == "fp8_recipe" and not run.fp8:  # the optimizer's is None then, and the model's is Megatron's default
            continue
        if theirs == "fp8_recipe" and run.optimizer.fp8_recipe is None and not run.gathers_fp8:
            continue  # the distributed optimizer asks for it where weights are stored in FP8
        first, second = getattr(run.views[one], mine), getattr(run.views[two], theirs)
        if first != second and (run.is_whole or None not in (first, second)):
            found.append(Violation(f"{one}.{mine}", value=first, other=f"{two}.{theirs}", theirs=second))
    return found


def _replaced(run: RuleContext) -> list[Violation]:
    """Return the values of owners that the recipe's win over, and every other one that somebody wrote down."""
    found = []
    for row in run.rows:
        if not (row.changes and _is_written(run, row)) and (row.verdict != "override" or not row.replaces_own):
            continue
        if not run.is_own_known(row.path):
            continue
        recipe = f"the recipe states {row.new!r}"
        if row.verdict not in ("override", "set"):
            recipe = f"the recipe makes it {row.new!r} ({row.why})"
        stated = f"state mixed_precision.{row.field}={row.old} to keep it"
        if row.field == "modules":
            stated = "drop mixed_precision.modules to keep it"
        elif row.field in MODES:
            stated = f"choose a recipe whose mode is {row.field}" if row.old else "choose a recipe of another mode"
        elif row.field in ("fp8", "fp4") and row.old is None:
            stated = f"choose a recipe without {row.field.upper()}"
        keep = "call synchronize(on_conflict='keep')" if row.can_be_kept else ""
        found.append(Violation(row.path, value=row.old, recipe=recipe, stated=stated, keep=keep))
    return found


def _is_written(run: RuleContext, row: Any) -> bool:
    """Return whether the command line states the value of a row, or a file that does not simply list every field."""
    where = run.where(row.path) or ""
    if where == COMMAND_LINE or row.verdict != "set" or not where.endswith((".yaml", ".yml")):
        return where == COMMAND_LINE
    section = run.sections[row.owner]
    return not section.is_mapping or 2 * len(section.stated) < len(NAMES[row.owner])


def _left_open(run: RuleContext) -> list[Violation]:
    """Return the values that owners keep, where the precision is an object that holds its class's default there."""
    left_open = untold_fields(run.precision) if run.precision is not None else ()
    kept = [row for row in run.rows if row.verdict == "keep" and row.field in left_open and run.is_own_known(row.path)]
    changed = [row for row in kept if row.new != DEFAULTS[row.owner][row.attribute]]
    return [Violation(row.path, value=row.new, field=row.field) for row in changed]


def _without_home(run: RuleContext) -> list[Violation]:
    rows = [row for row in run.rows if row.since is not None and row.owner in run.given]
    return [Violation(row.field, home=row.path, since=row.since) for row in rows if run.stands_out(row.field or "")]


def _unrouted(run: RuleContext) -> list[Violation]:
    known = {*FIELD_DEFAULTS, *(row.field for row in run.rows)}
    return [Violation(f"mixed_precision.{name}") for name in run.stated if name not in known]


def _misspelt(run: RuleContext) -> list[Violation]:
    found = []
    for name, value in run.unknown.items():  # every field of the precision is known
        hint = did_you_mean(close_matches(name, FIELD_DEFAULTS)) or "drop it"
        found.append(Violation(f"mixed_precision.{name}", value=value, hint=hint))
    for role in NAMES:
        stated = run.sections[role].stated
        for name, value in run.sections[role].unknown.items():
            nearest = nearest_fields(role, name)
            if nearest and nearest[0] not in stated:  # otherwise a provider's own field, of the same family
                path = f"{role}.{name}"
                found.append(Violation(path, value=value, hint=did_you_mean(nearest), rests_on=[path]))
    return found


@functools.lru_cache(maxsize=1024)
def nearest_fields(role: str, name: str) -> tuple[str, ...]:
    """Return the fields of Megatron's that `name` may be a misspelling of: a provider's own looks like none."""
    return near_names(name, NAMES[role])


def near_names(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that one or two edits turn `name` into, nearest first."""
    by_length = _by_length(frozenset(names))
    letters = set(name)  # which one edit changes by two at most; without this, a file of 20,000 fields takes 9 s
    of_near_length = (by_length.get(length, ()) for length in range(len(name) - 2, len(name) + 3))
    near = [known for known, own in chain.from_iterable(of_near_length) if len(letters ^ own) <= 4]
    return tuple(known for known in close_matches(name, near) if _distance(known, name) <= 2)


@functools.lru_cache(maxsize=16)
def _by_length(names: frozenset[str]) -> dict[int, list[tuple[str, frozenset[str]]]]:
    """Return length -> the names of that length, each with its letters."""
    return grouped((len(name), (name, frozenset(name))) for name in sorted(names))


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


def _malformed(run: RuleContext) -> list[Violation]:
    return [Violation(one.path, value=one.value, why=one.rule, rests_on=[one.path]) for one in run.malformed]


def _refused(run: RuleContext) -> list[Violation]:
    return [
        Violation(one.path, value=one.value, why=one.rule, remedy=one.remedy, severity=one.severity, rests_on=())
        for one in run.refused
    ]


def _misnamed(run: RuleContext) -> list[Violation]:
    name = (recipe_name(run.precision) or "") if run.precision is not None else ""
    promised = [scheme for token, scheme in NAME_TOKENS.items() if token in name]
    if not promised or promised[0] == run.scheme:
        return []
    return [Violation(value=run.scheme, promised=promised[0], actual=run.scheme or "no scheme", name=name)]


RULES = (
    error(
        id="PB121",
        title="value of a wrong type",
        setting="model",
        when=_malformed,
        message="{why}",
        remedies=("write a value of that type; YAML reads no, off and 1e-5 otherwise than they look",),
        source="huggingface/accelerate issue 1386, 2023-05-04; AMD-AGI/Primus issue 886, 2026-07-20",
        evidence="reported",
        explanation="A YAML 1.1 parser reads an unquoted `no` or `off` as False and `1e-5` as a string; a quoted "
        '"false" is a non-empty, hence true, string. A value that can only mean one thing is taken; the rest is named.',
    ),
    error(
        id="PB122",
        title="misspelt field",
        setting="model",
        when=_misspelt,
        message="there is no such field: an unknown key is dropped, or lands where nothing reads it",
        remedies=("{hint}",),
        source="pytorch/torchtitan issues 1059 (2025-04-05) and 1644 (2025-08-27); NVIDIA-NeMo/Megatron-Bridge issue "
        "2957, 2026-03-23",
        evidence="reported",
    ),
    warning(
        id="PB123",
        title="recipe replaces an owner's value",
        setting="model",
        when=_replaced,
        message="{recipe} and wins over the owner's own value",
        remedies=("{stated}", "drop it to go with the recipe", "{keep}"),
        source="NVIDIA-NeMo/Megatron-Bridge issues 2763 (2026-03-11) and 2844 (2026-03-17): the peer does it silently",
    ),
    error(
        id="PB124",
        title="two owners disagree",
        setting="model.bf16",
        sync="refused",
        when=_disagreeing,
        message="must equal {other}, which is {theirs!r}: it is one setting in two places",
        remedies=("give both the same value", "let a recipe state it, which writes both"),
        source="megatron-core 0.16.1 to 0.19.2: model, optimizer and DDP each read their own copy; NVIDIA-NeMo/RL "
        "issue 3281, 2026-07-18",
    ),
    warning(
        id="PB125",
        title="recipe's name says something else",
        setting="fp8_recipe",
        when=_misnamed,
        message="the recipe is called {name}, which promises {promised}, and its values are {actual}",
        remedies=("choose the recipe whose name says it", "give the changed recipe a name of its own"),
        source="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py, 2026-08-22 "
        "(nanov2_bf16_with_fp8_current_scaling_mixed is blockwise)",
    ),
    warning(
        id="PB126",
        title="off written as something else than None",
        setting="model.fp8",
        when=lambda run: violations({f"model.{name}": getattr(run.model, name) in ("", False) for name in FAMILIES}),
        message="must be None where it is off: CUDA graphs and inference ask whether it is None",
        remedies=("use None",),
        source="megatron-core 0.19.2 transformer/cuda_graphs.py, transformer/module.py: `config.fp8 is not None`",
    ),
    error(
        id="PB127",
        title="size below one",
        setting="model.tensor_model_parallel_size",
        when=lambda run: violations({f"model.{name}": (getattr(run.model, name) or 0) < 1 for name in PARALLEL_SIZES}),
        message="must be at least 1",
        remedies=("use 1 for no parallelism of that kind",),
        source="megatron-core 0.16.1 parallel_state.py",
    ),
    contradiction(
        id="PB128",
        title="count below its least value",
        setting="fp8_margin",
        when=lambda run: [Violation(name, least=least) for name, least in LEAST.items() if run.held(name) < least],
        message="must be at least {least}",
        remedies=("use {least} or more",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py, fp8_utils.py",
    ),
    no_effect(
        id="PB129",
        title="no home in this Megatron",
        setting="fp4_param_gather",
        when=_without_home,
        message="{home} does not exist before megatron-core {since}, so it is not set there",
        remedies=("use megatron-core {since}", "drop it"),
        source="megatron-core 0.16.1 and 0.17.1 distributed_data_parallel_config.py",
    ),
    info(
        id="PB130",
        title="switch off with the one it needs",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        sync="reported",
        when=lambda run: [Violation(name, by=by) for name, by in run.put_aside.items()],
        message="is off, because a later statement turned off what it needs; {by} had turned it on",
        remedies=("state False, which says the same", "leave it"),
        source="this project: bridge.precision.fields",
    ),
    no_effect(
        id="PB131",
        title="field that no config has",
        setting="mixed_precision",
        when=_unrouted,
        message="no config that the recipe is written into has a field of this name, so it changes nothing",
        remedies=("add the field to the config that reads it", "drop it"),
        source="this project: bridge.sync.prediction",
    ),
    info(
        id="PB132",
        title="dropout that only a default decides",
        setting="model.hidden_dropout",
        when=_default_dropouts,
        message="nothing states it, so that Megatron's default drops a tenth of the values; large models are trained "
        "without dropout",
        remedies=("state 0, or the value that is meant",),
        source="megatron-core 0.16.1 and 0.19.2 transformer_config.py",
    ),
    warning(
        id="PB133",
        title="value that may have been stated",
        setting="model.first_last_layers_bf16",
        sync="reported",
        when=_left_open,
        message="stays: Megatron Bridge's object holds the default of its class in {field}, which may have been stated",
        remedies=(
            "state {field} in a MixedPrecisionConfig of this package",
            "leave it, where the owner's value is meant",
        ),
        source="this project: bridge.registry.config.from_peer",
    ),
    error(
        id="PB134",
        title="word that the parser refuses",
        setting="arguments",
        when=_refused,
        message="{why}",
        remedies=("{remedy}",),
        source="Megatron-LM 0.16 to 2026-08-22 training/arguments.py parse_args, training/argument_utils.py",
    ),
)

"""Types, misspelt keys, replaced values, and names that promise another scheme."""

from collections.abc import Iterator

from bridge.errors import close_matches, did_you_mean
from bridge.model.shape import PARALLEL_SIZES
from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.fields import COMMAND_LINE, LAYER_COUNTS
from bridge.precision.statements import recipe_name, untold_fields
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.facts.near_names import nearest_fields
from bridge.rules.rule import (
    contradiction,
    error,
    info,
    no_effect,
    sync_error,
    sync_info,
    sync_warning,
    warning,
)
from bridge.rules.run_context import RunContext
from bridge.rules.sync_row import SyncRow
from bridge.rules.topics.mode import MODES
from bridge.rules.violation import Violation
from bridge.target.fields import DEFAULTS, NAMES, PAIRS, Pair

NAME_TOKENS = {
    "current_scaling": "tensorwise",
    "delayed_scaling": "delayed",
    "mxfp8": "mxfp8",
    "subchannel": "blockwise",
    "blockwise": "blockwise",
    "nvfp4": "nvfp4",
}
"""Part of a recipe's name -> the scheme that it promises."""
LEAST = {
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    **dict.fromkeys(LAYER_COUNTS, 0),
    "hysteresis": 1,
}
"""Count -> its least value."""


def wrong_types(run: RunContext) -> Iterator[Violation]:
    """Yield the values that are not of their field's type."""
    for fault in run.malformed:
        yield Violation(fault.path, value=fault.value, why=fault.rule, rests_on=[fault.path])


def misspelt_fields(run: RunContext) -> Iterator[Violation]:
    """Yield the keys that are no field: all of the precision, of a config those near to a field.

    A key that is near to a field stated together with it is a model provider's own.
    """
    for name, value in run.unknown.items():
        hint = did_you_mean(close_matches(name, FIELD_DEFAULTS)) or "drop it"
        yield Violation(f"mixed_precision.{name}", value=value, hint=hint)
    for role in NAMES:
        section = run.sections[role]
        for name, value in section.unknown.items():
            nearest = nearest_fields(role, name)
            if nearest and nearest[0] not in section.stated:
                path = f"{role}.{name}"
                yield Violation(path, value=value, hint=did_you_mean(nearest), rests_on=[path])


def replaced_values(run: RunContext) -> Iterator[Violation]:
    """Yield the values of owners that the recipe replaces and that somebody set or wrote down."""
    for row in run.rows:
        is_overridden = row.verdict == "override" and row.replaces_own
        is_replaced = is_overridden or (row.changes and _is_written(run, row))
        if not is_replaced or not run.is_own_known(row.path):
            continue
        recipe = f"the recipe states {row.new!r}"
        if row.verdict not in ("override", "set"):
            recipe = f"the recipe makes it {row.new!r} ({row.why})"
        keep = ""
        if row.can_be_kept:
            keep = "call synchronize(on_conflict='keep')"
        yield Violation(row.path, value=row.old, recipe=recipe, stated=_kept_by(row), keep=keep)


def _kept_by(row: SyncRow) -> str:
    """Return the remedy that keeps the old value of a row."""
    if row.field == "modules":
        return "drop mixed_precision.modules to keep it"
    if row.field in MODES:
        if row.old:
            return f"choose a recipe whose mode is {row.field}"
        return "choose a recipe of another mode"
    if row.field in FAMILIES and row.old is None:
        return f"choose a recipe without {row.field.upper()}"
    return f"state mixed_precision.{row.field}={row.old} to keep it"


def _is_written(run: RunContext, row: SyncRow) -> bool:
    """Return whether the command line states the value of a row, or a file that is written by hand.

    A file that lists most fields was saved by a program.
    """
    where = run.where(row.path) or ""
    if where == COMMAND_LINE:
        return True
    if row.verdict != "set" or not where.endswith((".yaml", ".yml")):
        return False
    section = run.sections[row.owner]
    return not section.is_mapping or 2 * len(section.stated) < len(NAMES[row.owner])


def disagreeing_owners(run: RuleContext) -> Iterator[Violation]:
    """Yield the settings that two configs hold with two values.

    The optimizer's fp8_recipe is None in a run without FP8, and the model's is Megatron's default.
    It may be None too where weights are stored in BF16: the distributed optimizer asks for it of
    FP8 weights alone.
    """
    is_whole = isinstance(run, RunContext)
    for pair in PAIRS:
        if not _is_compared(run, pair, is_whole=is_whole):
            continue
        role, name = pair.one
        other_role, other_name = pair.two
        first = getattr(run.views[role], name)
        second = getattr(run.views[other_role], other_name)
        is_known = is_whole or (first is not None and second is not None)
        if first != second and is_known:
            other = f"{other_role}.{other_name}"
            yield Violation(f"{role}.{name}", value=first, other=other, theirs=second)


def _is_compared(run: RuleContext, pair: Pair, *, is_whole: bool) -> bool:
    """Return whether both configs of a pair are there, and this asker compares them."""
    role, name = pair.one
    other_role, _ = pair.two
    if role == other_role or role not in run.given or other_role not in run.given:
        return False
    if is_whole and not pair.is_checked:
        return False
    if name != "fp8_recipe":
        return True
    is_asked = run.optimizer.fp8_recipe is not None or run.gathers_fp8
    return run.is_fp8 and is_asked


def misnamed_recipe(run: RuleContext) -> Iterator[Violation]:
    """Yield the scheme of a recipe whose name promises another."""
    if run.precision is None:
        return
    name = recipe_name(run.precision) or ""
    for token, promised in NAME_TOKENS.items():
        if token in name:
            if promised != run.scheme:
                actual = run.scheme or "no scheme"
                yield Violation(value=run.scheme, promised=promised, actual=actual, name=name)
            return


def off_that_is_not_none(run: RuleContext) -> Iterator[Violation]:
    """Yield the families that are switched off by another value than None."""
    for name in FAMILIES:
        if getattr(run.model, name) in ("", False):
            yield Violation(f"model.{name}")


def sizes_below_one(run: RuleContext) -> Iterator[Violation]:
    """Yield the parallel sizes below one."""
    for name in PARALLEL_SIZES:
        if (getattr(run.model, name) or 0) < 1:
            yield Violation(f"model.{name}")


def counts_below_their_least(run: RuleContext) -> Iterator[Violation]:
    """Yield the counts of a precision that are below their least value."""
    for name, least in LEAST.items():
        if run.held(name) < least:
            yield Violation(name, least=least)


def fields_without_home(run: RuleContext) -> Iterator[Violation]:
    """Yield the stated fields whose home this Megatron Core does not have."""
    for row in run.rows:
        if row.since is None or row.owner not in run.given:
            continue
        if run.stands_out(row.field or ""):
            yield Violation(row.field, home=row.path, since=row.since)


def switches_put_aside(run: RuleContext) -> Iterator[Violation]:
    """Yield the switches that a later statement turned off, together with the switch they need."""
    for name, by in run.put_aside.items():
        yield Violation(name, by=by)


def fields_of_no_config(run: RuleContext) -> Iterator[Violation]:
    """Yield the stated fields, of a recipe's own class, that no config has."""
    known = {*FIELD_DEFAULTS}
    for row in run.rows:
        if row.field is not None:
            known.add(row.field)
    for name in run.stated:
        if name not in known:
            yield Violation(f"mixed_precision.{name}")


def default_dropouts(run: RunContext) -> Iterator[Violation]:
    """Yield the dropouts of a model with layers that nothing states."""
    if not run.has_model or run.model.num_layers <= 0:
        return
    for name in ("hidden_dropout", "attention_dropout"):
        if name not in run.sections["model"].stated:
            yield Violation(f"model.{name}", rests_on=(f"model.{name}",))


def left_open_values(run: RuleContext) -> Iterator[Violation]:
    """Yield the values that owners keep where a foreign precision holds a class default."""
    if run.precision is None:
        return
    left_open = untold_fields(run.precision)
    for row in run.rows:
        if row.verdict != "keep" or row.field not in left_open:
            continue
        is_changed = row.new != DEFAULTS[row.owner][row.attribute]
        if is_changed and run.is_own_known(row.path):
            yield Violation(row.path, value=row.new, field=row.field)


def refused_words(run: RunContext) -> Iterator[Violation]:
    """Yield the words of the command line that the program's parser refuses."""
    for fault in run.program.refused:
        yield Violation(
            fault.path,
            value=fault.value,
            why=fault.rule,
            remedy=fault.remedy,
            severity=fault.severity,
            rests_on=(),
        )


RULES = (
    error(
        id="PB121",
        title="value of a wrong type",
        setting="model",
        when=wrong_types,
        message="{why}",
        remedies=(
            "write a value of that type; YAML reads no, off and 1e-5 otherwise than they look",
        ),
        source="huggingface/accelerate issue 1386, 2023-05-04; "
        "AMD-AGI/Primus issue 886, 2026-07-20",
        evidence="reported",
        explanation="A YAML 1.1 parser reads an unquoted `no` or `off` as False and `1e-5` as a "
        "string; a quoted "
        '"false" is a non-empty, hence true, string. A value that can only mean one thing is '
        "taken; the rest is named.",
    ),
    error(
        id="PB122",
        title="misspelt field",
        setting="model",
        when=misspelt_fields,
        message="there is no such field: an unknown key is dropped, or "
        "lands where nothing reads it",
        remedies=("{hint}",),
        source="pytorch/torchtitan issues 1059 (2025-04-05) and 1644 (2025-08-27); "
        "NVIDIA-NeMo/Megatron-Bridge issue 2957, 2026-03-23",
        evidence="reported",
    ),
    warning(
        id="PB123",
        title="recipe replaces an owner's value",
        setting="model",
        when=replaced_values,
        message="{recipe} and wins over the owner's own value",
        remedies=("{stated}", "drop it to go with the recipe", "{keep}"),
        source="NVIDIA-NeMo/Megatron-Bridge issues 2763 (2026-03-11) and 2844 (2026-03-17): the "
        "peer does it silently",
    ),
    sync_error(
        id="PB124",
        title="two owners disagree",
        setting="model.bf16",
        sync="refused",
        when=disagreeing_owners,
        message="must equal {other}, which is {theirs!r}: it is one setting in two places",
        remedies=("give both the same value", "let a recipe state it, which writes both"),
        source="megatron-core 0.16.1 to 0.19.2: model, optimizer and DDP each read their own "
        "copy; NVIDIA-NeMo/RL issue 3281, 2026-07-18",
    ),
    warning(
        id="PB125",
        title="recipe's name says something else",
        setting="fp8_recipe",
        when=misnamed_recipe,
        message="the recipe is called {name}, which promises {promised}, "
        "and its values are {actual}",
        remedies=(
            "choose the recipe whose name says it",
            "give the changed recipe a name of its own",
        ),
        source="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py, 2026-08-22 "
        "(nanov2_bf16_with_fp8_current_scaling_mixed is blockwise)",
    ),
    warning(
        id="PB126",
        title="off written as something else than None",
        setting="model.fp8",
        when=off_that_is_not_none,
        message="must be None where it is off: CUDA graphs and inference ask whether it is None",
        remedies=("use None",),
        source="megatron-core 0.19.2 transformer/cuda_graphs.py, transformer/module.py: "
        "`config.fp8 is not None`",
    ),
    error(
        id="PB127",
        title="size below one",
        setting="model.tensor_model_parallel_size",
        when=sizes_below_one,
        message="must be at least 1",
        remedies=("use 1 for no parallelism of that kind",),
        source="megatron-core 0.16.1 parallel_state.py",
    ),
    contradiction(
        id="PB128",
        title="count below its least value",
        setting="fp8_margin",
        when=counts_below_their_least,
        message="must be at least {least}",
        remedies=("use {least} or more",),
        source="megatron-core 0.16.1 optimizer/grad_scaler.py, fp8_utils.py",
    ),
    no_effect(
        id="PB129",
        title="no home in this Megatron",
        setting="fp4_param_gather",
        when=fields_without_home,
        message="{home} does not exist before megatron-core {since}, so it is not set there",
        remedies=("use megatron-core {since}", "drop it"),
        source="megatron-core 0.16.1 and 0.17.1 distributed_data_parallel_config.py",
    ),
    sync_info(
        id="PB130",
        title="switch off with the one it needs",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        sync="reported",
        when=switches_put_aside,
        message="is off, because a later statement turned off what it needs; {by} had turned it on",
        remedies=("state False, which says the same", "leave it"),
        source="this project: bridge.precision.fields",
    ),
    no_effect(
        id="PB131",
        title="field that no config has",
        setting="mixed_precision",
        when=fields_of_no_config,
        message="no config that the recipe is written into has a field of this "
        "name, so it changes nothing",
        remedies=("add the field to the config that reads it", "drop it"),
        source="this project: bridge.sync.plan",
    ),
    info(
        id="PB132",
        title="dropout that only a default decides",
        setting="model.hidden_dropout",
        when=default_dropouts,
        message="nothing states it, so that Megatron's default drops a tenth of the values; large "
        "models are trained without dropout",
        remedies=("state 0, or the value that is meant",),
        source="megatron-core 0.16.1 and 0.19.2 transformer_config.py",
    ),
    sync_warning(
        id="PB133",
        title="value that may have been stated",
        setting="model.first_last_layers_bf16",
        sync="reported",
        when=left_open_values,
        message="stays: Megatron Bridge's object holds the default of its class in {field}, which "
        "may have been stated",
        remedies=(
            "state {field} in a MixedPrecisionConfig of this package",
            "leave it, where the owner's value is meant",
        ),
        source="this project: bridge.registry.peer.from_peer",
    ),
    error(
        id="PB134",
        title="word that the parser refuses",
        setting="arguments",
        when=refused_words,
        message="{why}",
        remedies=("{remedy}",),
        source="Megatron-LM 0.16 to 2026-08-22 training/arguments.py parse_args, "
        "training/argument_utils.py",
    ),
)

"""Rules about a recipe and its configs: replaced and different values, and the recipe's name."""

from collections.abc import Iterator

from bridge.precision.precision_config import FIELD_DEFAULTS
from bridge.precision.stated_field import COMMAND_LINE
from bridge.precision.statements import get_ambiguous_fields, get_recipe_name
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.rule import no_effect, sync_error, sync_info, sync_warning, warning
from bridge.rules.run_context import RunContext
from bridge.rules.sync_row import MODE, SyncRow
from bridge.rules.topics.precision.mode import MODE_NAMES
from bridge.rules.violation import Violation
from bridge.target.fields import OWNER_DEFAULTS, OWNER_FIELD_NAMES, SHARED_SETTINGS, SharedSetting

NAME_TOKENS = {
    "current_scaling": "tensorwise",
    "delayed_scaling": "delayed",
    "mxfp8": "mxfp8",
    "subchannel": "blockwise",
    "blockwise": "blockwise",
    "nvfp4": "nvfp4",
}
"""Part of a recipe's name -> the scheme that the name means."""


def find_replaced_values(context: RunContext) -> Iterator[Violation]:
    """Yield the values of owners that the recipe replaces and that somebody set or stated."""
    for row in context.rows:
        is_overridden = row.verdict == "override" and row.replaces_set_value
        is_replaced = is_overridden or (row.changes and _is_stated_by_hand(context, row))
        if not is_replaced or not context.is_value_before_sync_known(row.path):
            continue
        if row.by == MODE and not context.is_mode_known:
            continue
        rule = f"the recipe states {row.new!r} and wins over the owner's own value"
        if row.verdict not in ("override", "set"):
            rule = (
                f"the recipe makes it {row.new!r} ({row.why}) and wins over the owner's own value"
            )
        keeping_call = ""
        if row.can_be_kept:
            keeping_call = "call synchronize(on_conflict='keep')"
        yield Violation(
            row.path,
            value=row.old,
            rule=rule,
            statement=_format_keeping_remedy(row),
            keeping_call=keeping_call,
        )


def _format_keeping_remedy(row: SyncRow) -> str:
    """Return a statement that keeps the old value of a row, as a remedy."""
    if row.field == "modules":
        return "drop mixed_precision.modules to keep it"
    if row.field in MODE_NAMES:
        if row.old:
            return f"choose a recipe whose mode is {row.field}"
        return "choose a recipe of another mode"
    if row.field in FAMILIES and row.old is None:
        return f"choose a recipe without {row.field.upper()}"
    return f"state mixed_precision.{row.field}={row.old} to keep it"


def _is_stated_by_hand(context: RunContext, row: SyncRow) -> bool:
    """Return whether the command line or a hand-written file states the value of a row.

    A file that lists at least half of the fields counts as saved by a program.
    """
    where = context.get_source(row.path) or ""
    if where == COMMAND_LINE:
        return True
    if row.verdict != "set" or not where.endswith((".yaml", ".yml")):
        return False
    section = context.sections[row.owner]
    return not section.is_mapping or 2 * len(section.stated) < len(OWNER_FIELD_NAMES[row.owner])


def find_disagreeing_owners(context: RuleContext) -> Iterator[Violation]:
    """Yield the settings that have different values in two configs.

    `fp8_recipe` is compared only if it matters. Without FP8 the optimizer's value is None, and the
    model's is Megatron's default. With weights in BF16 the optimizer's value may be None, because
    the distributed optimizer reads it only for FP8 weights.
    """
    is_check = isinstance(context, RunContext)
    for pair in SHARED_SETTINGS:
        if not _is_compared(context, pair, is_check=is_check):
            continue
        owner_name, name = pair.first
        other_owner, other_name = pair.second
        first = getattr(context.views[owner_name], name)
        second = getattr(context.views[other_owner], other_name)
        is_known = is_check or (first is not None and second is not None)
        if first != second and is_known:
            other_path = f"{other_owner}.{other_name}"
            yield Violation(f"{owner_name}.{name}", value=first, other=other_path, theirs=second)


def _is_compared(context: RuleContext, pair: SharedSetting, *, is_check: bool) -> bool:
    """Return whether the run has both configs of a pair, and their values have to agree."""
    owner_name, name = pair.first
    other_owner, _ = pair.second
    if owner_name == other_owner or not context.present.issuperset((owner_name, other_owner)):
        return False
    if is_check and not pair.is_checked:
        return False
    if name != "fp8_recipe":
        return True
    is_read = context.optimizer.fp8_recipe is not None or context.gathers_fp8
    return context.is_fp8 and is_read


def find_misnamed_recipe(context: RuleContext) -> Iterator[Violation]:
    """Yield the scheme of a recipe whose name means another scheme."""
    if context.precision is None:
        return
    name = get_recipe_name(context.precision) or ""
    for token, promised in NAME_TOKENS.items():
        if token in name:
            if promised != context.scheme:
                actual = context.scheme or "no scheme"
                yield Violation(value=context.scheme, promised=promised, actual=actual, name=name)
            return


def find_fields_absent_in_megatron(context: RuleContext) -> Iterator[Violation]:
    """Yield the stated fields whose attribute this Megatron Core does not have."""
    for row in context.rows:
        if row.since is None or row.owner not in context.present:
            continue
        if context.differs_from_default(row.field or ""):
            yield Violation(row.field, home=row.path, since=row.since)


def find_switches_put_aside(context: RuleContext) -> Iterator[Violation]:
    """Yield the switches that are off because a later statement turned off what they need."""
    for name, by in context.put_aside.items():
        yield Violation(name, by=by)


def find_fields_of_no_config(context: RuleContext) -> Iterator[Violation]:
    """Yield stated fields, of a subclass of the precision config, that no owner has."""
    known = {*FIELD_DEFAULTS}
    for row in context.rows:
        if row.field is not None:
            known.add(row.field)
    for name in context.stated:
        if name not in known:
            yield Violation(f"mixed_precision.{name}")


def find_ambiguous_values(context: RuleContext) -> Iterator[Violation]:
    """Yield the values that owners keep although Megatron Bridge's object may state a default."""
    if context.precision is None:
        return
    ambiguous = get_ambiguous_fields(context.precision)
    for row in context.rows:
        if row.verdict != "keep" or row.field not in ambiguous:
            continue
        is_changed = row.new != OWNER_DEFAULTS[row.owner][row.attribute]
        if is_changed and context.is_value_before_sync_known(row.path):
            yield Violation(row.path, value=row.new, field=row.field)


RULES = (
    warning(
        id="PB123",
        title="recipe replaces an owner's value",
        setting="model",
        when=find_replaced_values,
        message="{rule}",
        remedies=("{statement}", "drop it to go with the recipe", "{keeping_call}"),
        source="NVIDIA-NeMo/Megatron-Bridge issues 2763 (2026-03-11) and 2844 (2026-03-17): the "
        "peer does it silently",
    ),
    sync_error(
        id="PB124",
        title="two owners disagree",
        setting="model.bf16",
        sync="refused",
        when=find_disagreeing_owners,
        message="must equal {other}, which is {theirs!r}: it is one setting in two places",
        remedies=("give both the same value", "let a recipe state it, which writes both"),
        source="megatron-core 0.16.1 to 0.19.2: model, optimizer and DDP each read their own "
        "copy; NVIDIA-NeMo/RL issue 3281, 2026-07-18",
    ),
    warning(
        id="PB125",
        title="recipe's name says something else",
        setting="fp8_recipe",
        when=find_misnamed_recipe,
        message="the recipe is called {name}, which promises {promised}, "
        "and its values are {actual}",
        remedies=(
            "choose the recipe whose name says it",
            "give the changed recipe a name of its own",
        ),
        source="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py, 2026-08-22 "
        "(nanov2_bf16_with_fp8_current_scaling_mixed is blockwise)",
    ),
    no_effect(
        id="PB129",
        title="no home in this Megatron",
        setting="fp4_param_gather",
        when=find_fields_absent_in_megatron,
        message="{home} does not exist before megatron-core {since}, so it is not set there",
        remedies=("use megatron-core {since}", "drop it"),
        source="megatron-core 0.16.1 and 0.17.1 distributed_data_parallel_config.py",
    ),
    sync_info(
        id="PB130",
        title="switch off with the one it needs",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        sync="reported",
        when=find_switches_put_aside,
        message="is off, because a later statement turned off what it needs; {by} had turned it on",
        remedies=("state False, which says the same", "leave it"),
        source="this project: bridge.precision.stated_field",
    ),
    no_effect(
        id="PB131",
        title="field that no config has",
        setting="mixed_precision",
        when=find_fields_of_no_config,
        message="no config that the recipe is written into has a field of this "
        "name, so it changes nothing",
        remedies=("add the field to the config that reads it", "drop it"),
        source="this project: bridge.sync.sync_plan",
    ),
    sync_warning(
        id="PB133",
        title="value that may have been stated",
        setting="model.first_last_layers_bf16",
        sync="reported",
        when=find_ambiguous_values,
        message="stays: Megatron Bridge's object holds the default of its class in {field}, which "
        "may have been stated",
        remedies=(
            "state {field} in a MixedPrecisionConfig of this package",
            "leave it, where the owner's value is meant",
        ),
        source="this project: bridge.registry.peer.from_peer",
    ),
)

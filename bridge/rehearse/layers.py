"""The layers that a rehearsal keeps: the first and last layers, and one of each kind between them.

`select_kept_layers` chooses the layers, and `shrink_layers` writes them into the small run: their
number, their kinds, the per-module rows that name them, and the split over two pipeline stages.
"""

import re
from collections.abc import Sequence
from typing import Any

from bridge.model.hybrid_pattern import format_pattern
from bridge.model.shape import is_moe_kind
from bridge.rehearse.layout import SPLIT_FIELDS, LayerSplit
from bridge.rehearse.small_run import SmallRun
from bridge.target.fields import parse_integer, read_field

PREDICTION_FIELDS = ("mtp_num_layers", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer")
"""Fields of the model about multi-token prediction."""


def shrink_layers(small_run: SmallRun, limit: int) -> dict[str, Any]:
    """Keep few layers in the small run.

    Args:
        small_run: The small run. Its settings about layers are changed.
        limit: The most layers, as for `select_kept_layers`.

    Returns:
        The model fields that split the kept layers over two pipeline stages.
    """
    settings, shape = small_run.plan.settings, small_run.shape
    split = LayerSplit(
        parallel=small_run.parallel, num_layers=shape.num_layers, virtual=small_run.layout.virtual
    )
    kept = select_kept_layers(
        shape.kinds,
        split,
        start=settings.start,
        end=settings.end,
        limit=limit,
        wanted=_select_named_layers(small_run),
        needs_last=shape.has_mtp,
    )
    small_run.set(
        "model.num_layers", len(kept), "keeps both ends, each kind of layer, and whole stages"
    )
    _write_bf16_layer_counts(small_run, kept)
    _write_layer_kinds(small_run, kept)
    _renumber_rows(small_run, kept)
    _note_quant_recipe_layers(small_run)
    if shape.mtp_num_layers > 2 and "mtp_num_layers" in small_run.model:
        small_run.set("model.mtp_num_layers", 2, "prediction layers are alike")
    split_fields = split.fields(len(kept))
    _remove_split_fields(small_run, split_fields)
    _shrink_recomputed_layers(small_run, len(kept))
    small_run.layers = tuple(str(layer + 1) for layer in kept)
    return split_fields


def _remove_split_fields(small_run: SmallRun, split_fields: dict[str, Any]) -> None:
    """Remove the split of the full run, and record the split that each launch has instead.

    Each launch adds the fields of its split, since a launch without pipeline parallelism must not
    have such fields.
    """
    for name in SPLIT_FIELDS:
        before, after = small_run.model.pop(name, None), split_fields.get(name)
        if before not in (None, False, after):
            small_run.record_change(
                f"model.{name}", before, after, "the split of the run at two stages"
            )


def _shrink_recomputed_layers(small_run: SmallRun, num_layers: int) -> None:
    """Limit the recomputed layers to the layers of a model chunk."""
    recomputed = parse_integer(read_field(small_run.model, "recompute_num_layers"))
    if recomputed:
        chunks = small_run.layout.size("pipeline") * small_run.layout.virtual
        most = max(1, num_layers // chunks)
        reason = "the layers of a stage are fewer"
        small_run.set("model.recompute_num_layers", min(recomputed, most), reason)


def _write_bf16_layer_counts(small_run: SmallRun, kept: tuple[int, ...]) -> None:
    """Write how many of the kept layers are first or last layers that stay in BF16."""
    settings, num_layers = small_run.plan.settings, small_run.shape.num_layers
    end = min(settings.end, max(0, num_layers - settings.start))
    at_start = sum(layer < settings.start for layer in kept)
    at_end = sum(layer >= num_layers - end for layer in kept)
    for name, before, count in (
        ("num_layers_at_start_in_bf16", settings.start, at_start),
        ("num_layers_at_end_in_bf16", settings.end, at_end),
    ):
        if before == count:
            continue
        section = "model"
        if small_run.precision is not None and name in small_run.precision:
            section = "mixed_precision"
        small_run.set(f"{section}.{name}", count, "fewer layers are kept in all")


def _write_layer_kinds(small_run: SmallRun, kept: tuple[int, ...]) -> None:
    """Write the kinds of the kept layers into the small run, in the fields that state kinds."""
    shape, model = small_run.shape, small_run.model
    reason = "the kinds of the kept layers"
    kinds = [shape.kinds[layer] for layer in kept]
    if shape.is_hybrid:
        name = "hybrid_override_pattern"
        if "hybrid_layer_pattern" in model:
            name = "hybrid_layer_pattern"
        small_run.set(f"model.{name}", format_pattern(kinds), reason)
        _leave_out_prediction(small_run, "a run builds no prediction layers of a hybrid")
        return
    if shape.indexer is not None:
        _leave_out_prediction(
            small_run, "this Megatron Core keeps no indexers' losses of prediction layers"
        )
    if shape.delta_net is not None:
        frequency = [int("delta_net" in kind) for kind in kinds]
        small_run.set("model.linear_attention_freq", frequency, reason)
    if shape.is_moe:
        frequency = [int(is_moe_kind(kind)) for kind in kinds]
        if not all(frequency) or read_field(model, "moe_layer_freq", 1) != 1:
            small_run.set("model.moe_layer_freq", frequency, reason)


def _leave_out_prediction(small_run: SmallRun, reason: str) -> None:
    """Remove the prediction layers, and record them as left out if the run has any."""
    if small_run.shape.mtp_num_layers:
        small_run.record_left_out("model.mtp_num_layers", small_run.shape.mtp_num_layers, reason)
    for field in PREDICTION_FIELDS:
        small_run.model.pop(field, None)


def _select_named_layers(small_run: SmallRun) -> list[int]:
    """Return the first layer of each combination that the rows of `modules` make.

    A combination is the kind of a layer, whether the layer has a low-precision GEMM, and the rows
    that name the layer.
    """
    num_layers = small_run.shape.num_layers
    layers_by_row: list[set[int]] = []
    named: set[int] = set()
    for row in small_run.plan.module_rows:
        # A negative number counts from the last layer.
        layers = {number % num_layers for number in row.layer_numbers}
        layers_by_row.append(layers)
        named |= layers
    low_layers = set()
    for planned in small_run.plan.layers:
        if planned.low and planned.number is not None:
            low_layers.add(planned.number - 1)
    firsts: dict[tuple[str, bool, tuple[bool, ...]], int] = {}
    for layer in sorted(named):
        rows_with_layer = tuple(layer in layers for layers in layers_by_row)
        combination = (small_run.shape.kinds[layer], layer in low_layers, rows_with_layer)
        firsts.setdefault(combination, layer)
    return list(firsts.values())


def _renumber_rows(small_run: SmallRun, kept: tuple[int, ...]) -> None:
    """Write the new numbers of the kept layers into the rows of `modules`.

    A row that names no kept layer is removed, and recorded as a choice that is not shown.
    """
    rows = []
    stated_rows = (small_run.precision or {}).get("modules") or ()
    for stated, row in zip(stated_rows, small_run.plan.module_rows, strict=True):
        select = row.renumber_select(kept, small_run.shape.num_layers)
        if select is not None:
            rows.append({**stated, "select": select})
        else:
            small_run.unshown_choices.append(
                f"The row {row} of modules: none of its layers is among the kept ones."
            )
    if rows or small_run.unshown_choices:
        small_run.set("mixed_precision.modules", rows or None, "numbers of the kept layers")


def _note_quant_recipe_layers(small_run: SmallRun) -> None:
    """Record the matchers of a quantisation recipe that name layers by number.

    Megatron counts these numbers within a pipeline stage, so they cannot be renumbered for the kept
    layers. Rows of `modules` can be, and may replace the quantisation recipe.
    """
    if small_run.plan.module_rows:
        return
    selects = []
    for recipe in small_run.plan.settings.recipes[:1]:
        for matcher in recipe.matchers:
            if re.search(r"layers\.\W*\d", matcher.select):
                selects.append(matcher.select)
    if selects:
        names = ", ".join(selects)
        small_run.unshown_choices.append(
            f"The layers of {names} in model.quant_recipe: their numbers count within a stage."
        )


def select_kept_layers(
    kinds: Sequence[str],
    split: LayerSplit,
    *,
    start: int,
    end: int,
    limit: int,
    wanted: Sequence[int] = (),
    needs_last: bool = False,
) -> tuple[int, ...]:
    """Return the layers to keep, by their numbers from 0 on, in order.

    They are the first and last layers that stay in BF16, one layer of each kind between them, the
    wanted layers, and further layers until the pipeline stages can share them.

    Args:
        kinds: The kind of each layer of the full run.
        split: The split over the pipeline stages.
        start: Number of first layers that stay in BF16. Fewer are kept if `limit` needs it, but at
            least one.
        end: Number of last layers that stay in BF16, as for `start`.
        limit: The most layers. There are more if the kinds or the split need more.
        wanted: Further layers. They are kept as far as `limit` allows.
        needs_last: Whether the last layer is kept as the layer of its kind. Prediction layers have
            the kind of the last layer.
    """
    count = len(kinds)
    start, end = min(start, count), min(end, max(0, count - start))
    middle = range(start, count - end)
    # The reversed order makes the first layer of each kind overwrite the others.
    first_of_kind = {kinds[layer]: layer for layer in reversed(middle)}
    if needs_last and not end:
        first_of_kind[kinds[-1]] = count - 1
    # The two ends share the rest of the limit. Each end keeps at least one layer.
    most_ends = max(2, limit - len(first_of_kind))
    kept_start = min(start, max(int(start > 0), most_ends - min(end, most_ends // 2)))
    kept_end = min(end, most_ends - kept_start)
    kept = {*range(kept_start), *range(count - kept_end, count), *first_of_kind.values()}
    for layer in wanted:
        if len(kept) < limit:
            kept.add(layer)
    size = max(split.least, len(kept))
    while size < count and not split.can_share(size):
        size += 1
    return _fill_up_layers(kept, middle, min(size, count))


def _fill_up_layers(kept: set[int], middle: range, size: int) -> tuple[int, ...]:
    """Return `size` layers: the kept layers, and others of the middle.

    The other layers are spread evenly over the layers of the middle that are not kept yet.
    """
    few = min(size, len(middle))
    spread = [middle[index * len(middle) // few] for index in range(few)]
    for layer in (*spread, *middle):
        if len(kept) >= size:
            break
        kept.add(layer)
    return tuple(sorted(kept))

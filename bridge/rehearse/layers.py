"""The layers that a rehearsal keeps: the first and the last, and one of each kind between them."""

import re
from collections.abc import Sequence
from typing import Any

from bridge.model.hybrid_pattern import format_pattern
from bridge.model.shape import is_moe_kind
from bridge.rehearse.layout import SPLIT_FIELDS, LayerSplit
from bridge.rehearse.small_run import SmallRun
from bridge.target.fields import parse_integer, read_field

PREDICTION_FIELDS = ("mtp_num_layers", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer")
"""Fields of prediction layers."""


def shrink_layers(run: SmallRun, limit: int) -> dict[str, Any]:
    """Make the layers few; return the model fields that split them over two pipeline stages."""
    settings, shape = run.plan.settings, run.shape
    stages = run.layout.size("pipeline")
    split = LayerSplit(
        parallel=run.parallel, num_layers=shape.num_layers, virtual=run.layout.virtual
    )
    kept = select_kept_layers(
        shape.kinds,
        split,
        start=settings.start,
        end=settings.end,
        limit=limit,
        wanted=_collect_named_layers(run),
        needs_last=shape.has_mtp,
    )
    run.set("model.num_layers", len(kept), "keeps both ends, each kind of layer, and whole stages")
    _write_bf16_layer_counts(run, kept)
    _write_layer_kinds(run, kept)
    _renumber_rows(run, kept)
    if shape.mtp_num_layers > 2 and "mtp_num_layers" in run.model:
        run.set("model.mtp_num_layers", 2, "prediction layers are alike")
    fields = split.fields(len(kept))
    for name in SPLIT_FIELDS:
        before = run.model.pop(name, None)
        if before not in (None, False, fields.get(name)):
            run.note(
                f"model.{name}", before, fields.get(name), "the split of the run at two stages"
            )
    recomputed = parse_integer(read_field(run.model, "recompute_num_layers"))
    if recomputed:
        most = max(1, len(kept) // (stages * run.layout.virtual))
        why = "the layers of a stage are fewer"
        run.set("model.recompute_num_layers", min(recomputed, most), why)
    run.layers = tuple(str(layer + 1) for layer in kept)
    return fields


def _write_bf16_layer_counts(run: SmallRun, kept: tuple[int, ...]) -> None:
    """Count the kept layers among those of both ends that stay in BF16."""
    settings, layers = run.plan.settings, run.shape.num_layers
    end = min(settings.end, max(0, layers - settings.start))
    at_start = sum(layer < settings.start for layer in kept)
    at_end = sum(layer >= layers - end for layer in kept)
    for name, before, count in (
        ("num_layers_at_start_in_bf16", settings.start, at_start),
        ("num_layers_at_end_in_bf16", settings.end, at_end),
    ):
        if before == count:
            continue
        owner = "model"
        if run.precision is not None and name in run.precision:
            owner = "mixed_precision"
        run.set(f"{owner}.{name}", count, "fewer layers are kept in all")


def _write_layer_kinds(run: SmallRun, layers: tuple[int, ...]) -> None:
    """Write the kinds of the kept layers into the small run."""
    shape, model = run.shape, run.model
    why = "the kinds of the kept layers"
    kinds = [shape.kinds[layer] for layer in layers]
    if shape.is_hybrid:
        name = "hybrid_override_pattern"
        if "hybrid_layer_pattern" in model:
            name = "hybrid_layer_pattern"
        run.set(f"model.{name}", format_pattern(kinds), why)
        _leave_out_prediction(run, "a run builds no prediction layers of a hybrid")
        return
    if shape.indexer is not None:
        _leave_out_prediction(
            run, "this Megatron Core keeps no indexers' losses of prediction layers"
        )
    if shape.delta_net is not None:
        frequency = [int("delta_net" in kind) for kind in kinds]
        run.set("model.linear_attention_freq", frequency, why)
    if shape.is_moe:
        frequency = [int(is_moe_kind(kind)) for kind in kinds]
        if not all(frequency) or read_field(model, "moe_layer_freq", 1) != 1:
            run.set("model.moe_layer_freq", frequency, why)


def _leave_out_prediction(run: SmallRun, why: str) -> None:
    """Leave out the prediction layers of a run that has some."""
    if run.shape.mtp_num_layers:
        run.note_left_out("model.mtp_num_layers", run.shape.mtp_num_layers, why)
    for field in PREDICTION_FIELDS:
        run.model.pop(field, None)


def _collect_named_layers(run: SmallRun) -> list[int]:
    """Return the layers that rows of `modules` name.

    Of the layers of one kind that the same rows name, it is the first.
    """
    count = run.shape.num_layers
    rows: list[set[int]] = []
    named: set[int] = set()
    for row in run.plan.module_rows:
        layers = {number % count for number in row.layer_numbers}
        rows.append(layers)
        named |= layers
    low = {layer.number - 1 for layer in run.plan.layers if layer.low and layer.number is not None}
    firsts: dict[tuple[str, bool, tuple[bool, ...]], int] = {}
    for layer in sorted(named):
        by_rows = tuple(layer in row for row in rows)
        firsts.setdefault((run.shape.kinds[layer], layer in low, by_rows), layer)
    return list(firsts.values())


def _renumber_rows(run: SmallRun, layers: tuple[int, ...]) -> None:
    """Number the layers of the rows of `modules` again, and drop the rows without a kept layer."""
    rows = []
    stated = (run.precision or {}).get("modules") or ()
    for plain, row in zip(stated, run.plan.module_rows, strict=True):
        select = row.renumber_select(layers, run.shape.num_layers)
        if select is not None:
            rows.append({**plain, "select": select})
        else:
            run.dropped.append(
                f"The row {row} of modules: none of its layers is among the kept ones."
            )
    if rows or run.dropped:
        run.set("mixed_precision.modules", rows or None, "numbers of the kept layers")
    if run.plan.module_rows:
        return
    local = []
    for recipe in run.plan.settings.recipes[:1]:
        for matcher in recipe.matchers:
            if re.search(r"layers\.\W*\d", matcher.select):
                local.append(matcher.select)
    if local:
        names = ", ".join(local)
        run.dropped.append(
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
    """Return the layers of these kinds to keep, by their numbers from 0 on.

    There are as many as the split can share. They are the `start` and `end` layers that stay in
    BF16, fewer where the limit asks for it, one of each kind between them, and the wanted ones as
    far as the limit goes. `needs_last`: prediction layers are built as the last one is.
    """
    count = len(kinds)
    start, end = min(start, count), min(end, max(0, count - start))
    middle = range(start, count - end)
    firsts = {kinds[layer]: layer for layer in reversed(middle)}
    if needs_last and not end:
        firsts[kinds[-1]] = count - 1
    most = max(2, limit - len(firsts))  # of both ends together, at least one of each
    few_start = min(start, max(int(start > 0), most - min(end, most // 2)))
    few_end = min(end, most - few_start)
    chosen = {*range(few_start), *range(count - few_end, count), *firsts.values()}
    for layer in wanted:
        if len(chosen) < limit:
            chosen.add(layer)
    size = max(split.least, len(chosen))
    while size < count and not split.can_share(size):
        size += 1
    return _fill_up_layers(chosen, middle, min(size, count))


def _fill_up_layers(chosen: set[int], middle: range, size: int) -> tuple[int, ...]:
    """Return the chosen layers with others of the middle, so that there are `size`, in order.

    The others are spread over the middle first.
    """
    few = min(size, len(middle))
    spread = [middle[place * len(middle) // few] for place in range(few)]
    for layer in (*spread, *middle):
        if len(chosen) >= size:
            break
        chosen.add(layer)
    return tuple(sorted(chosen))

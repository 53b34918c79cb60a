"""The layers of a run that a rehearsal keeps: the first and the last, and one of each kind between them."""

import re
from collections.abc import Sequence
from typing import Any

from bridge.model.hybrid import letters_of
from bridge.model.shape import has_experts
from bridge.rehearse.layout import SPLIT, Split
from bridge.rehearse.sections import SmallRun
from bridge.target.fields import read_field, whole_number

PREDICTION = ("mtp_num_layers", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer")
"""Fields of prediction layers."""


def shrink_layers(run: SmallRun, limit: int) -> dict[str, Any]:
    """Make the layers few; return the model fields that split them over two pipeline stages."""
    settings, shape, stages = run.plan.settings, run.shape, run.layout.size("pipeline")
    split = Split(parallel=run.parallel, num_layers=shape.num_layers, virtual=run.layout.virtual)
    kept = kept_layers(
        shape.kinds,
        split,
        start=settings.start,
        end=settings.end,
        limit=limit,
        wanted=_named_layers(run),
        needs_last=shape.has_mtp,
    )
    run.set("model.num_layers", len(kept), "keeps both ends, each kind of layer, and whole stages")
    end = min(settings.end, max(0, shape.num_layers - settings.start))
    counts = {
        "num_layers_at_start_in_bf16": (
            settings.start,
            sum(layer < settings.start for layer in kept),
        ),
        "num_layers_at_end_in_bf16": (
            settings.end,
            sum(layer >= shape.num_layers - end for layer in kept),
        ),
    }
    for name, (now, count) in counts.items():
        if now != count:
            owner = (
                "model" if run.precision is None or name not in run.precision else "mixed_precision"
            )
            run.set(f"{owner}.{name}", count, "fewer layers are kept in all")
    _state_kinds(run, kept)
    _renumber_rows(run, kept)
    if shape.mtp_num_layers > 2 and "mtp_num_layers" in run.model:
        run.set("model.mtp_num_layers", 2, "prediction layers are alike")
    fields = split.fields(len(kept))
    for name in SPLIT:
        before = run.model.pop(name, None)
        if before not in (None, False, fields.get(name)):
            run.note(
                f"model.{name}", before, fields.get(name), "the split of the run at two stages"
            )
    recomputed = whole_number(read_field(run.model, "recompute_num_layers"))
    if recomputed:
        most = len(kept) // (stages * run.layout.virtual)
        run.set(
            "model.recompute_num_layers",
            min(recomputed, max(1, most)),
            "the layers of a stage are fewer",
        )
    run.layers = tuple(str(layer + 1) for layer in kept)
    return fields


def _state_kinds(run: SmallRun, layers: tuple[int, ...]) -> None:
    shape, model = run.shape, run.model
    why = "the kinds of the kept layers"
    if shape.is_hybrid:
        name = (
            "hybrid_layer_pattern" if "hybrid_layer_pattern" in model else "hybrid_override_pattern"
        )
        run.set(f"model.{name}", letters_of([shape.kinds[layer] for layer in layers]), why)
        _leave_out_prediction(run, "a run builds no prediction layers of a hybrid")
        return
    if shape.indexer is not None:
        _leave_out_prediction(
            run, "this Megatron Core keeps no indexers' losses of prediction layers"
        )
    if shape.delta_net is not None:
        run.set(
            "model.linear_attention_freq",
            [int("delta_net" in shape.kinds[layer]) for layer in layers],
            why,
        )
    if shape.is_moe:
        frequency = [int(has_experts(shape.kinds[layer])) for layer in layers]
        if not all(frequency) or read_field(model, "moe_layer_freq", 1) != 1:
            run.set("model.moe_layer_freq", frequency, why)


def _leave_out_prediction(run: SmallRun, why: str) -> None:
    if run.shape.mtp_num_layers:
        run.note_left_out("model.mtp_num_layers", run.shape.mtp_num_layers, why)
    for field in PREDICTION:
        run.model.pop(field, None)


def _named_layers(run: SmallRun) -> list[int]:
    """Return the layers that rows of `modules` name: the first that is of its kind and named by the same rows."""
    count = run.shape.num_layers
    rows = [{number % count for number in row.layer_numbers} for row in run.plan.module_rows]
    low = {layer.number - 1 for layer in run.plan.layers if layer.low and layer.number is not None}
    firsts: dict[tuple[str, bool, tuple[bool, ...]], int] = {}
    for layer in sorted(set[int]().union(*rows)):
        firsts.setdefault(
            (run.shape.kinds[layer], layer in low, tuple(layer in row for row in rows)), layer
        )
    return list(firsts.values())


def _renumber_rows(run: SmallRun, layers: tuple[int, ...]) -> None:
    """Number the layers of the rows of `modules` again, and drop the rows of which no layer is kept."""
    rows = []
    for plain, row in zip(
        (run.precision or {}).get("modules") or (), run.plan.module_rows, strict=True
    ):
        select = row.renumbered(layers, run.shape.num_layers)
        if select is not None:
            rows.append({**plain, "select": select})
        else:
            run.dropped.append(
                f"The row {row} of modules: none of its layers is among the kept ones."
            )
    if rows or run.dropped:
        run.set("mixed_precision.modules", rows or None, "numbers of the kept layers")
    counted = [
        matcher.select for recipe in run.plan.settings.recipes[:1] for matcher in recipe.matchers
    ]
    local = [pattern for pattern in counted if re.search(r"layers\.\W*\d", pattern)]
    if local and not run.plan.module_rows:
        names = ", ".join(local)
        run.dropped.append(
            f"The layers of {names} in model.quant_recipe: their numbers count within a stage."
        )


def kept_layers(
    kinds: Sequence[str],
    split: Split,
    *,
    start: int,
    end: int,
    limit: int,
    wanted: Sequence[int] = (),
    needs_last: bool = False,
) -> tuple[int, ...]:
    """Return the layers of these kinds to keep, by their numbers from 0 on: as many as the split can share.

    They are the `start` and `end` layers that stay in BF16, fewer where the limit asks for it, one of each kind between
    them, and the wanted ones as far as the limit goes. `needs_last`: prediction layers are built as the last one is.
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
    chosen |= set([layer for layer in wanted if layer not in chosen][: max(0, limit - len(chosen))])
    sizes = [size for size in range(max(split.least, len(chosen)), count + 1) if split.shares(size)]
    size = sizes[0] if sizes else count
    few = min(size, len(middle))
    spread = [middle[place * len(middle) // few] for place in range(few)]
    spare = [layer for layer in spread if layer not in chosen]
    spare += [layer for layer in middle if layer not in chosen and layer not in spare]
    chosen |= set(spare[: size - len(chosen)])
    return tuple(sorted(chosen))

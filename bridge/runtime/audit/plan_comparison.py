"""The audit: the rows of a plan compared with those of a record, and two records compared."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.plan.plan_settings import PlanSettings
from bridge.plan.precision_plan import PlanLayer, PlanModule, PrecisionPlan, format_ranges
from bridge.precision.coercion import DTYPE_SPELLINGS
from bridge.precision.schemes import GEMMS
from bridge.runtime.audit.record import GemmRow, Record

GEMM_MODULE_KINDS = frozenset({"linear", "head", "router", "gate"})
"""Kinds of modules whose GEMMs are recorded; attention cores, convolutions and norms are not."""
HIGH_PRECISION_FORMATS = frozenset({"bf16", "fp16", "fp32", "fp64"})
"""Formats of layers in high precision."""
MISMATCH_TEXTS = {
    "formats": "planned {planned}, ran {ran}",
    "tile": "planned a scale for each {planned}, ran with one for each {ran}",
    "output": "planned a {planned} result, got {ran}",
    "accumulate": "planned an {planned} accumulator, ran with {ran}",
    "storage": "planned {planned} as the stored format of the weight, got {ran}",
    "absent": "planned {planned}, recorded no such GEMM",
    "unplanned": "ran {ran}, which is not in the plan",
    "error": "planned a relative error of at most {planned}, got {ran}",
    "stale": "planned the quantisation of the current weight, multiplied an older one",
    "gathered": "planned the masters of the optimizer on every data-parallel rank, "
    "gathered other weights",
    "census": "planned {planned}, got {ran}",
    "differs": "{planned} in the first, {ran} in the second",
}
"""Column -> sentence of a mismatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A row of the plan and of the record that differ.

    It has all layers, modules and GEMMs that differ alike.
    """

    column: str
    """A key of `TEXT`."""
    planned: str
    ran: str
    layers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    gemms: tuple[str, ...] = ()
    tensors: str = ""
    """Kind of tensor, for a row of the census."""
    cause: str = ""
    """One sentence, where the cause is known."""

    def __str__(self) -> str:
        text = MISMATCH_TEXTS[self.column].format(planned=self.planned, ran=self.ran)
        label = ", ".join(self.layers)
        if _count_layer_numbers(self.layers):
            label = f"{_format_layer_noun(len(self.layers))} {format_ranges(self.layers)}"
        parts = [self.tensors, label, *self.modules]
        if len(self.gemms) != len(GEMMS):
            parts += self.gemms
        where = ", ".join(filter(None, parts))
        if self.cause:
            return f"{text}: {where}; {self.cause}."
        return f"{text}: {where}."


def _count_layer_numbers(labels: Iterable[str]) -> int:
    """Return how many labels are numbers of layers."""
    return sum(map(str.isdecimal, labels))


def _format_layer_noun(count: int) -> str:
    """Return the noun for a number of layers."""
    if count > 1:
        return "layers"
    return "layer"


def make_location(layer: str, module: str, gemm: str) -> dict[str, Any]:
    """Return the place of a GEMM as fields of a `Mismatch`."""
    return {"layers": (layer,), "modules": (module,), "gemms": (gemm,)}


def compare_with_plan(plan: PrecisionPlan, record: Record) -> tuple[Mismatch, ...]:
    """Return every row in which a record differs from the plan, equal mismatches folded.

    The record has the GEMMs of one step of all pipeline stages, and the tensors of one rank.
    Without a census no tensors are compared. The result is empty where plan = record.
    """
    gemms = fold_mismatches(_compare_gemms(plan, record.gemms))
    health = fold_mismatches(_check_health(record))
    return (*gemms, *health, *_compare_census(plan.settings, record))


def lacks_low_precision(plan: PrecisionPlan, record: Record) -> bool:
    """Return whether FP8 or FP4 is asked for, and neither is planned for a layer nor ran in one.

    Plan and record are equal then, and the run is still not what its precision says.
    """
    is_asked = plan.settings.family is not None and plan.settings.reaches_layers
    if not is_asked or plan.linears()[0]:
        return False
    return all(row.scheme == "none" for row in record.gemms)


def _compare_gemms(plan: PrecisionPlan, recorded: Sequence[GemmRow]) -> Iterator[Mismatch]:
    """Yield the differences between the GEMMs of a plan and those that ran."""
    ran: dict[tuple[str, str, str], list[GemmRow]] = {}
    for row in recorded:
        ran.setdefault((row.layer, row.module, row.gemm), []).append(row)
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind not in GEMM_MODULE_KINDS:
                continue
            for gemm in GEMMS:
                rows = ran.pop((layer.label, module.name, gemm), [])
                if not rows and module.module.is_absorbed and plan.settings.absorbs:
                    # The attention multiplies with its weight, and its products have no rows.
                    continue
                # Megatron's own layers multiply a dgrad that nothing takes, too.
                if module.row(gemm) is not None:
                    yield from _compare_gemm(layer, module, gemm, rows)
    for place, extra in ran.items():
        for row in extra:
            yield Mismatch(column="unplanned", planned="", ran=row.formats, **make_location(*place))


def _compare_gemm(
    layer: PlanLayer, module: PlanModule, gemm: str, rows: list[GemmRow]
) -> Iterator[Mismatch]:
    """Yield the differences between a planned GEMM of a module and the rows that ran for it."""
    expected, place = (
        _get_expected_columns(module, gemm),
        make_location(layer.label, module.name, gemm),
    )
    if not rows:
        yield Mismatch(column="absent", planned=expected["formats"], ran="", **place)
    for row in rows:
        if _get_planned_scheme(module, gemm) == "custom" and row.scheme != "none":
            continue  # the factory decides the formats
        if module.scheme == "custom" and row.scheme == "custom":
            continue  # quantizers written in Python, whose formats the record does not see
        planned = expected["formats"]
        is_exact = module.kind == "router" and _is_exact_product(row, planned)
        if row.formats != planned and not is_exact:
            cause = _find_cause(layer, module, row)
            yield Mismatch(column="formats", planned=planned, ran=row.formats, cause=cause, **place)
            continue  # every other column follows
        recorded = {
            "tile": _format_recorded_tiles(row),
            "output": row.output,
            "accumulate": row.accumulate,
            "storage": row.storage,
        }
        for column, value in recorded.items():
            planned = expected[column]
            if value and planned and value != planned:
                yield Mismatch(column=column, planned=planned, ran=value, **place)


def _is_exact_product(row: GemmRow, planned: str) -> bool:
    """Return whether a GEMM has the result that it has with FP32 copies of its operands.

    A product of two BF16 or two FP16 values is exact in FP32. Megatron Core gives Transformer
    Engine the tensors of a router with `moe_router_dtype=fp32` as they are, and asks for an FP32
    result (megatron-core 0.19.2 transformer/moe/moe_utils.py:1327). Without Transformer Engine it
    copies them.
    """
    if row.scheme != "none" or row.left not in ("bf16", "fp16"):
        return False
    has_equal_operands = row.left == row.right == row.storage
    return has_equal_operands and planned == row.output == "fp32"


def _get_planned_scheme(module: PlanModule, gemm: str) -> str | None:
    """Return the scaling scheme in which a GEMM is planned, None for high precision."""
    if module.copies is not None:
        return module.copies.get_gemm_scheme(gemm)
    return module.scheme


def _get_expected_columns(module: PlanModule, gemm: str) -> dict[str, str]:
    """Return the columns of the record that the plan expects; empty where the plan says nothing."""
    rows = {}
    for row_of_plan in module.rows:
        rows[row_of_plan.item] = row_of_plan
    planned = rows[gemm]
    formats, tiles, output, accumulate = planned.format, "", "", ""
    scheme = _get_planned_scheme(module, gemm)
    if scheme is not None:
        if " x " not in formats:
            formats = f"{formats} x {formats}"
        formats = f"{formats} ({scheme})"
        row = GEMMS[gemm]
        left = _parse_planned_tile(rows[row.left].scale, columnwise=row.left_columnwise)
        right = _parse_planned_tile(rows[row.right].scale, columnwise=row.right_columnwise)
        tiles = f"{left} and {right}"
        accumulate = planned.accumulate
    if "output" in rows and gemm == "fprop":
        output = rows["output"].format
    return {
        "formats": formats,
        "tile": tiles,
        "output": output,
        "accumulate": accumulate,
        "storage": rows["weight"].storage,
    }


def _parse_planned_tile(scale: str, *, columnwise: bool) -> str:
    """Return the tile of one copy from the plan's text.

    The row-wise copy of "1x16 / 16x1, hadamard, stochastic" has "1x16, stochastic".
    """
    tiles, *details = scale.split(", ")
    rowwise_tile, _, columnwise_tile = tiles.partition(" / ")
    parts, recorded = [rowwise_tile], ["stochastic"]
    if columnwise:
        parts, recorded = [columnwise_tile or rowwise_tile], ["hadamard", "stochastic"]
    for detail in details:
        if detail in recorded:
            parts.append(detail)
    return ", ".join(parts)


def _format_recorded_tiles(row: GemmRow) -> str:
    """Return the tiles of a GEMM's operands, empty for operands without tiles."""
    if not (row.left_tile and row.right_tile):
        return ""
    return f"{row.left_tile} and {row.right_tile}"


def _find_cause(layer: PlanLayer, module: PlanModule, row: GemmRow) -> str:
    """Return why a GEMM ran in other formats than planned, where it can be known."""
    if row.scheme == "none":
        return _find_high_precision_cause(module, row)
    if module.scheme is None:
        if not row.context or row.context == "off":
            return ""
        kept = ""
        if layer.number is not None:
            kept = " that the plan keeps in high precision"
        return f"the layer{kept} ran inside an autocast ({row.context})"
    if row.scheme == module.scheme or not row.context:
        return ""
    if row.context == module.scheme:
        autocast = f"the autocast ({row.context}) was on"
        return f"{autocast} and the module took quantizers of another scheme"
    return f"an autocast of another recipe ({row.context}) was on"


def _find_high_precision_cause(module: PlanModule, row: GemmRow) -> str:
    """Return why a GEMM ran in a high precision that is not the planned format."""
    if module.scheme is not None:
        if row.context == "off":
            return "the autocast was not entered"
        if row.context:
            autocast = f"the autocast ({row.context}) was on"
            return f"{autocast} and the module multiplied unquantised operands"
    if not row.by:
        return ""
    if module.scheme is not None:
        return f"the module is a {row.by}, which multiplies in high precision"
    return f"the module is a {row.by}"


def fold_mismatches(unfolded: Iterable[Mismatch]) -> tuple[Mismatch, ...]:
    """Return mismatches that differ in one place alone as one.

    They are folded in the layer, then in the GEMM, then in the module.
    """
    for name in ("layers", "gemms", "modules"):
        without: dict[str, Any] = {name: ()}
        places_of: dict[Mismatch, dict[str, None]] = {}
        for mismatch in unfolded:
            places = places_of.setdefault(replace(mismatch, **without), {})
            places.update(dict.fromkeys(getattr(mismatch, name)))
        mismatches = []
        for mismatch, places in places_of.items():
            within: dict[str, Any] = {name: tuple(places)}
            mismatches.append(replace(mismatch, **within))
        unfolded = mismatches
    return tuple(unfolded)


def _check_health(record: Record) -> Iterator[Mismatch]:
    """Yield the modules whose error is above its limit, or whose weight is an older one."""
    for row in record.health:
        place = make_location(row.layer, row.module, "fprop")
        if not row.error <= row.limit:  # NaN is not either
            limit, error = f"{row.limit:g}", f"{row.error:.2g}"
            yield Mismatch(column="error", planned=limit, ran=error, **place)
        if not row.is_fresh:
            cause = "set_is_first_microbatch() was not called after the optimizer's step"
            yield Mismatch(column="stale", planned="", ran="", cause=cause, **place)


def _compare_census(settings: PlanSettings, record: Record) -> Iterator[Mismatch]:
    """Yield the kinds of tensors that have another dtype than planned."""
    expected = _get_expected_census(settings)
    dtypes_of: dict[str, list[str]] = {}
    for row in record.census:
        dtypes_of.setdefault(row.kind, []).append(DTYPE_SPELLINGS.get(row.dtype, row.dtype))
    for kind, dtypes in dtypes_of.items():
        planned = expected.get(kind)
        if planned and not planned.issuperset(dtypes):
            names = " or ".join(sorted(planned))
            ran = " and ".join(dict.fromkeys(dtypes))
            yield Mismatch(column="census", planned=names, ran=ran, tensors=kind)


def _get_expected_census(settings: PlanSettings) -> Mapping[str, frozenset[str]]:
    """Return the dtypes that each kind of tensor may have.

    Kinds that the plan does not know are left out.
    """
    reduced = frozenset({settings.grad_reduce})
    expected = {"gradients": reduced, "gradient reduction": reduced}
    if None not in settings.sent:
        expected["sent between stages"] = frozenset(map(str, settings.sent))
    if not settings.remainders:
        expected["master weights"] = frozenset({settings.master or settings.mode})
    moments = frozenset({settings.exp_avg, settings.exp_avg_sq})
    if "fp8" not in moments:
        expected["optimizer state"] = moments
    return expected


def compare_records(before: Record, after: Record) -> tuple[Mismatch, ...]:
    """Return every GEMM and kind of tensor in which two records differ.

    `planned` of a mismatch is the text of the first record.
    """
    first, second = _collect_format_texts(before), _collect_format_texts(after)
    mismatches = []
    for place in {**first, **second}:
        planned, ran = first.get(place, "nothing"), second.get(place, "nothing")
        if planned != ran:
            mismatches.append(replace(place, planned=planned, ran=ran))
    return fold_mismatches(mismatches)


def _collect_format_texts(record: Record) -> dict[Mismatch, str]:
    """Return texts of the formats of each GEMM, and of the dtypes of each kind of tensor."""
    differs = Mismatch(column="differs", planned="", ran="")
    texts_of: dict[Mismatch, dict[str, None]] = {}
    for row in record.gemms:
        parts = [row.formats, _format_recorded_tiles(row)]
        if row.output:
            parts.append(f"to {row.output}")
        if row.storage:
            parts.append(f"stored {row.storage}")
        place = replace(differs, **make_location(row.layer, row.module, row.gemm))
        texts_of.setdefault(place, {})[", ".join(filter(None, parts))] = None
    for tensors in record.census:
        place = replace(differs, tensors=tensors.kind)
        texts_of.setdefault(place, {})[tensors.dtype] = None
    joined = {}
    for place, texts in texts_of.items():
        joined[place] = " and ".join(texts)
    return joined


def format_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of each layer's GEMMs.

    For example ``layers 2-5: ...; layers 1, 6, output: bf16``.
    """
    rows_of: dict[str, list[GemmRow]] = {}
    for row in rows:
        rows_of.setdefault(row.layer, []).append(row)
    layers_of: dict[str, list[str]] = {}
    for layer, of_layer in rows_of.items():
        layers_of.setdefault(_format_layer_gemms(of_layer), []).append(layer)
    parts = []
    for kind, layers in layers_of.items():
        where = format_ranges(layers, limit=len(layers))
        count = _count_layer_numbers(layers)
        if count:
            where = f"{_format_layer_noun(count)} {where}"
        if where:
            parts.append(f"{where}: {kind}")
        else:
            parts.append(kind)
    return "; ".join(parts)


def _format_layer_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of one layer, and the modules that have them where they differ."""
    rows_of: dict[str, list[GemmRow]] = {}
    for row in rows:
        rows_of.setdefault(row.module, []).append(row)
    modules_of: dict[str, list[str]] = {}
    for module, of_module in rows_of.items():
        modules_of.setdefault(_format_module_gemms(of_module), []).append(module)
    if len(modules_of) == 1 and set(modules_of) <= HIGH_PRECISION_FORMATS:
        return "".join(modules_of)
    parts = []
    for formats, modules in modules_of.items():
        parts.append(f"{formats} ({', '.join(sorted(modules))})")
    return " and ".join(parts)


def _format_module_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of one module, by GEMM where it is in low precision."""
    schemes: dict[str, None] = {}
    formats: dict[str, None] = {}
    operands_of: dict[str, list[str]] = {}
    for row in rows:
        schemes[row.scheme] = None
        formats[row.formats] = None
        operands_of.setdefault(row.gemm, []).append(f"{row.left} x {row.right}")
    schemes.pop("none", None)
    if not schemes:
        return " and ".join(formats)
    parts = [" and ".join(schemes)]
    for gemm in GEMMS:
        if gemm in operands_of:
            parts.append(f"{gemm} {' and '.join(operands_of[gemm])}")
    return ", ".join(parts)

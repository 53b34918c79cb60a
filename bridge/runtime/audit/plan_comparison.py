"""`compare_with_plan`: the audit, which compares the rows of a plan with the rows of a record."""

from collections.abc import Iterator, Mapping, Sequence

from bridge.plan.plan_layers import PlanLayer, PlanModule
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.precision_plan import PrecisionPlan
from bridge.precision.coercion import DTYPE_SPELLINGS
from bridge.precision.schemes import GEMMS
from bridge.runtime.audit.gemm_formats import format_recorded_tiles
from bridge.runtime.audit.mismatch import Mismatch, fold_mismatches, make_location
from bridge.runtime.audit.record import GemmRow, Record

GEMM_MODULE_KINDS = frozenset({"linear", "head", "router", "gate"})
"""Kinds of modules whose GEMMs are recorded. Attention cores, convolutions and norms are not."""


def compare_with_plan(plan: PrecisionPlan, record: Record) -> tuple[Mismatch, ...]:
    """Return every row in which a record differs from the plan, with equal mismatches folded.

    Args:
        plan: The plan of the step, with the layers of all pipeline stages.
        record: The GEMMs of one step of all pipeline stages, and the tensors of one rank. Without
            a census no tensors are compared.

    Returns:
        No mismatch if the step ran as planned.
    """
    gemms = fold_mismatches(_compare_gemms(plan, record.gemms))
    health = fold_mismatches(_check_health(record))
    return (*gemms, *health, *_compare_census(plan.settings, record))


def lacks_low_precision(plan: PrecisionPlan, record: Record) -> bool:
    """Return whether the precision has FP8 or FP4, and no layer is planned in it or ran in it.

    Plan and record agree in this case, and the run is still not in the precision of its recipe.
    """
    has_low_precision = plan.settings.family is not None and plan.settings.reaches_layers
    if not has_low_precision or plan.linears()[0]:
        return False
    return all(row.scheme == "none" for row in record.gemms)


def _compare_gemms(plan: PrecisionPlan, recorded: Sequence[GemmRow]) -> Iterator[Mismatch]:
    """Yield the differences between the GEMMs of a plan and the GEMMs that ran."""
    unmatched: dict[tuple[str, str, str], list[GemmRow]] = {}
    for row in recorded:
        unmatched.setdefault((row.layer, row.module, row.gemm), []).append(row)
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind not in GEMM_MODULE_KINDS:
                continue
            for gemm in GEMMS:
                rows = unmatched.pop((layer.label, module.name, gemm), [])
                if not rows and module.module.is_absorbed and plan.settings.absorbs:
                    # The attention multiplies with this module's weight, outside of its GEMMs.
                    continue
                # A GEMM without a row in the plan may run. Megatron's local layers also compute the
                # dgrad of a layer whose input needs no gradient.
                if module.row(gemm) is not None:
                    yield from _compare_gemm(layer, module, gemm, rows)
    for location, rows in unmatched.items():
        for row in rows:
            yield Mismatch(
                column="unplanned", planned="", ran=row.formats, **make_location(*location)
            )


def _compare_gemm(
    layer: PlanLayer, module: PlanModule, gemm: str, rows: list[GemmRow]
) -> Iterator[Mismatch]:
    """Yield the differences between a planned GEMM of a module and the rows that ran for it."""
    expected = _get_expected_columns(module, gemm)
    location = make_location(layer.label, module.name, gemm)
    if not rows:
        yield Mismatch(column="absent", planned=expected["formats"], ran="", **location)
    for row in rows:
        if _get_planned_scheme(module, gemm) == "custom" and row.scheme != "none":
            continue  # the factory decides the formats
        if module.scheme == "custom" and row.scheme == "custom":
            continue  # the record does not see the formats of quantizers written in Python
        planned = expected["formats"]
        is_exact = module.kind == "router" and _is_exact_product(row, planned)
        if row.formats != planned and not is_exact:
            cause = _find_cause(layer, module, row)
            yield Mismatch(
                column="formats", planned=planned, ran=row.formats, cause=cause, **location
            )
            continue  # the other columns differ for the same cause
        recorded = {
            "tile": format_recorded_tiles(row),
            "output": row.output,
            "accumulate": row.accumulate,
            "storage": row.storage,
        }
        for column, value in recorded.items():
            planned = expected[column]
            if value and planned and value != planned:
                yield Mismatch(column=column, planned=planned, ran=value, **location)


def _is_exact_product(row: GemmRow, planned: str) -> bool:
    """Return whether a GEMM has the same result as with FP32 copies of its operands.

    A product of two BF16 or two FP16 values is exact in FP32. Megatron Core gives Transformer
    Engine the tensors of a router with `moe_router_dtype=fp32` as they are, and requests an FP32
    result (megatron-core 0.19.2 transformer/moe/moe_utils.py:1327). Without Transformer Engine it
    copies them.
    """
    if row.scheme != "none" or row.left not in ("bf16", "fp16"):
        return False
    has_equal_operands = row.left == row.right == row.storage
    return has_equal_operands and planned == row.output == "fp32"


def _get_planned_scheme(module: PlanModule, gemm: str) -> str | None:
    """Return the scaling scheme in which a GEMM is planned, or None for high precision."""
    if module.copies is not None:
        return module.copies.get_gemm_scheme(gemm)
    return module.scheme


def _get_expected_columns(module: PlanModule, gemm: str) -> dict[str, str]:
    """Return the columns that the plan expects of a recorded GEMM.

    A column is empty if the plan does not decide it.
    """
    plan_rows = {}
    for plan_row in module.rows:
        plan_rows[plan_row.item] = plan_row
    planned = plan_rows[gemm]
    formats, tiles, output, accumulate = planned.format, "", "", ""
    scheme = _get_planned_scheme(module, gemm)
    if scheme is not None:
        if " x " not in formats:
            formats = f"{formats} x {formats}"
        formats = f"{formats} ({scheme})"
        sides = GEMMS[gemm]
        left = _parse_planned_tile(plan_rows[sides.left].scale, columnwise=sides.left_columnwise)
        right = _parse_planned_tile(plan_rows[sides.right].scale, columnwise=sides.right_columnwise)
        tiles = f"{left} and {right}"
        accumulate = planned.accumulate
    if "output" in plan_rows and gemm == "fprop":
        output = plan_rows["output"].format
    return {
        "formats": formats,
        "tile": tiles,
        "output": output,
        "accumulate": accumulate,
        "storage": plan_rows["weight"].storage,
    }


def _parse_planned_tile(scale: str, *, columnwise: bool) -> str:
    """Return the tile of one copy from the plan's text.

    From "1x16 / 16x1, hadamard, stochastic" the row-wise copy gets "1x16, stochastic": only the
    column-wise copy is transformed.
    """
    tiles, *details = scale.split(", ")
    rowwise_tile, _, columnwise_tile = tiles.partition(" / ")
    parts = [rowwise_tile]
    details_of_copy = ["stochastic"]
    if columnwise:
        parts = [columnwise_tile or rowwise_tile]
        details_of_copy = ["hadamard", "stochastic"]
    for detail in details:
        if detail in details_of_copy:
            parts.append(detail)
    return ", ".join(parts)


def _find_cause(layer: PlanLayer, module: PlanModule, row: GemmRow) -> str:
    """Return why a GEMM ran in other formats than planned, as a clause; empty if unknown."""
    if row.scheme == "none":
        return _find_high_precision_cause(module, row)
    if module.scheme is None:
        if not row.context or row.context == "off":
            return ""
        if layer.number is None:
            return f"the layer ran inside an autocast ({row.context})"
        return (
            "the layer that the plan keeps in high precision ran inside an autocast "
            f"({row.context})"
        )
    if row.scheme == module.scheme or not row.context:
        return ""
    if row.context == module.scheme:
        return (
            f"the autocast ({row.context}) was on and the module took quantizers of another scheme"
        )
    return f"an autocast of another recipe ({row.context}) was on"


def _find_high_precision_cause(module: PlanModule, row: GemmRow) -> str:
    """Return why a GEMM ran in another high precision than planned; empty if unknown."""
    if module.scheme is not None:
        if row.context == "off":
            return "the autocast was not entered"
        if row.context:
            return (
                f"the autocast ({row.context}) was on and the module multiplied unquantised "
                "operands"
            )
    if not row.by:
        return ""
    if module.scheme is not None:
        return f"the module is a {row.by}, which multiplies in high precision"
    return f"the module is a {row.by}"


def _check_health(record: Record) -> Iterator[Mismatch]:
    """Yield the modules whose error is above its limit, or that multiplied an older weight."""
    for row in record.health:
        location = make_location(row.layer, row.module, "fprop")
        if not row.error <= row.limit:  # also true for NaN
            limit, error = f"{row.limit:g}", f"{row.error:.2g}"
            yield Mismatch(column="error", planned=limit, ran=error, **location)
        if not row.is_fresh:
            cause = "set_is_first_microbatch() was not called after the optimizer's step"
            yield Mismatch(column="stale", planned="", ran="", cause=cause, **location)


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
    """Return kind of tensor -> dtypes that it may have.

    The mapping lacks a kind whose dtype the plan does not decide.
    """
    reduction = frozenset({settings.grad_reduce})
    expected = {"gradients": reduction, "gradient reduction": reduction}
    if None not in settings.sent:
        expected["sent between stages"] = frozenset(map(str, settings.sent))
    if not settings.remainders:
        expected["master weights"] = frozenset({settings.master or settings.mode})
    moments = frozenset({settings.exp_avg, settings.exp_avg_sq})
    if "fp8" not in moments:
        expected["optimizer state"] = moments
    return expected

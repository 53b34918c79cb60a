"""The audit: the rows of a plan compared with the rows of a record, and two records with each other."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from bridge.plan.precision_plan import PlanLayer, PlanModule, PrecisionPlan, compact
from bridge.plan.settings import Settings
from bridge.precision.grouping import grouped
from bridge.precision.schemes import GEMMS
from bridge.precision.values import SPELLINGS
from bridge.runtime.audit.record import GemmRow, Record

MULTIPLIES = frozenset({"linear", "head", "router", "gate"})
"""Kinds of modules whose GEMMs are recorded; attention cores, convolutions and norms are not."""
HIGH = frozenset({"bf16", "fp16", "fp32", "fp64"})
"""Formats of layers in high precision."""
TEXT = {
    "formats": "planned {planned}, ran {ran}",
    "tile": "planned a scale for each {planned}, ran with one for each {ran}",
    "output": "planned a {planned} result, got {ran}",
    "accumulate": "planned an {planned} accumulator, ran with {ran}",
    "storage": "planned {planned} as the stored format of the weight, got {ran}",
    "absent": "planned {planned}, recorded no such GEMM",
    "unplanned": "ran {ran}, which is not in the plan",
    "error": "planned a relative error of at most {planned}, got {ran}",
    "stale": "planned the quantisation of the current weight, multiplied an older one",
    "gathered": "planned the masters of the optimizer on every data-parallel rank, gathered other weights",
    "census": "planned {planned}, got {ran}",
    "differs": "{planned} in the first, {ran} in the second",
}
"""Column -> sentence of a mismatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A row of the plan and of the record that differ, with all layers, modules and GEMMs that differ alike."""

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
        text = TEXT[self.column].format(planned=self.planned, ran=self.ran)
        label = ", ".join(self.layers)
        if any(one.isdecimal() for one in self.layers):
            label = f"layer{'s' * (len(self.layers) > 1)} {compact(self.layers)}"
        gemms = () if len(self.gemms) == len(GEMMS) else self.gemms
        where = [part for part in (self.tensors, label, *self.modules, *gemms) if part]
        cause = f"; {self.cause}" if self.cause else ""
        return f"{text}: {', '.join(where)}{cause}."


def place_of(layer: str, module: str, gemm: str) -> dict[str, Any]:
    """Return the place of a GEMM as fields of a `Mismatch`."""
    return {"layers": (layer,), "modules": (module,), "gemms": (gemm,)}


def compare(plan: PrecisionPlan, record: Record) -> tuple[Mismatch, ...]:
    """Return every row in which a record is not what the plan says, equal mismatches folded; empty where plan = record.

    The record has the GEMMs of one step of all pipeline stages, and the tensors of one rank; without a census no
    tensors are compared.
    """
    gemms = folded(_compare_gemms(plan, record.gemms))
    return (*gemms, *folded(_unhealthy(record)), *_compare_census(plan.settings, record))


def _compare_gemms(plan: PrecisionPlan, recorded: Sequence[GemmRow]) -> Iterator[Mismatch]:
    ran = grouped(((row.layer, row.module, row.gemm), row) for row in recorded)
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind in MULTIPLIES:
                planned = {row.item for row in module.rows}
                for gemm in GEMMS:
                    rows = ran.pop((layer.label, module.name, gemm), [])
                    if not rows and module.module.is_absorbed and plan.settings.absorbs:
                        continue  # the attention multiplies with its weight, and products of attention have no rows
                    if (
                        gemm in planned
                    ):  # Megatron's own layers multiply a dgrad that nothing takes, too
                        yield from _compare(layer, module, gemm, rows)
    for place, extra in ran.items():
        for formats in dict.fromkeys(row.formats for row in extra):
            yield Mismatch(column="unplanned", planned="", ran=formats, **place_of(*place))


def _compare(
    layer: PlanLayer, module: PlanModule, gemm: str, rows: list[GemmRow]
) -> Iterator[Mismatch]:
    expected, at = _expected(module, gemm), place_of(layer.label, module.name, gemm)
    if not rows:
        yield Mismatch(column="absent", planned=expected["formats"], ran="", **at)
    for row in rows:
        if _scheme_of(module, gemm) == "custom" and row.scheme != "none":
            continue  # the factory decides the formats
        if module.scheme == "custom" and row.scheme == "custom":
            continue  # quantizers written in Python, whose formats the record does not see
        is_exact = module.kind == "router" and _is_exact_product(row, expected["formats"])
        if row.formats != expected["formats"] and not is_exact:
            cause = _cause(layer, module, row)
            yield Mismatch(
                column="formats", planned=expected["formats"], ran=row.formats, cause=cause, **at
            )
            continue  # every other column follows
        seen = {
            "tile": _tiles(row),
            "output": row.output,
            "accumulate": row.accumulate,
            "storage": row.storage,
        }
        for column, value in seen.items():
            if value and expected.get(column) and value != expected[column]:
                yield Mismatch(column=column, planned=expected[column], ran=value, **at)


def _is_exact_product(row: GemmRow, planned: str) -> bool:
    """Return whether a GEMM has the result that it has with FP32 copies of its operands.

    A product of two BF16 or two FP16 values is exact in FP32. Megatron Core gives Transformer Engine the tensors of a
    router with `moe_router_dtype=fp32` as they are, and asks for an FP32 result (megatron-core 0.19.2
    transformer/moe/moe_utils.py:1327). Without Transformer Engine it copies them.
    """
    has_half_operands = row.left == row.right and row.left in ("bf16", "fp16")
    return (
        row.scheme == "none"
        and has_half_operands
        and row.storage == row.right
        and planned == row.output == "fp32"
    )


def _scheme_of(module: PlanModule, gemm: str) -> str | None:
    """Return the scaling scheme in which a GEMM is planned; None: high precision."""
    return module.copies.scheme_of(gemm) if module.copies is not None else module.scheme


def _expected(module: PlanModule, gemm: str) -> dict[str, str]:
    """Return the columns that a record of a planned GEMM has to have; empty where the plan says nothing."""
    rows = {row.item: row for row in module.rows}
    own, kind = rows[gemm], GEMMS[gemm]
    formats = own.format
    tiles = ""
    scheme = _scheme_of(module, gemm)
    if scheme is not None:
        formats = f"{formats if ' x ' in formats else f'{formats} x {formats}'} ({scheme})"
        sides = ((kind.left, kind.left_columnwise), (kind.right, kind.right_columnwise))
        tiles = " and ".join(
            _tile(rows[name].scale, columnwise=columnwise) for name, columnwise in sides
        )
    output = rows["output"].format if "output" in rows and gemm == "fprop" else ""
    accumulate = own.accumulate if scheme is not None else ""
    storage = rows["weight"].storage
    return {
        "formats": formats,
        "tile": tiles,
        "output": output,
        "accumulate": accumulate,
        "storage": storage,
    }


def _tile(scale: str, *, columnwise: bool) -> str:
    """Return the tile of one copy from the plan's text, "1x16, stochastic" of "1x16 / 16x1, hadamard, stochastic"."""
    tiles, *details = scale.split(", ")
    tile = tiles.split(" / ")[-1 if columnwise else 0]
    recorded = ("hadamard", "stochastic") if columnwise else ("stochastic",)
    return ", ".join([tile, *(detail for detail in details if detail in recorded)])


def _tiles(row: GemmRow) -> str:
    return f"{row.left_tile} and {row.right_tile}" if row.left_tile and row.right_tile else ""


def _cause(layer: PlanLayer, module: PlanModule, row: GemmRow) -> str:
    """Return why a GEMM ran in other formats than planned, where it can be known."""
    if module.scheme is not None and row.scheme == "none":
        if row.context == "off":
            return "the autocast was not entered"
        if row.context:
            return f"the autocast ({row.context}) was on and the module multiplied unquantised operands"
        return f"the module is a {row.by}, which multiplies in high precision" if row.by else ""
    if row.scheme == "none":
        return f"the module is a {row.by}" if row.by else ""
    if module.scheme is None:
        inside = (
            f" inside an autocast ({row.context})" if row.context and row.context != "off" else ""
        )
        kept = " that the plan keeps in high precision" if layer.number is not None else ""
        return f"the layer{kept} ran{inside}" if inside else ""
    if row.scheme == module.scheme or not row.context:
        return ""
    if row.context == module.scheme:
        return (
            f"the autocast ({row.context}) was on and the module took quantizers of another scheme"
        )
    return f"an autocast of another recipe ({row.context}) was on"


def folded(found: Iterable[Mismatch]) -> tuple[Mismatch, ...]:
    """Return mismatches that differ in one place alone as one: in the layer, then in the GEMM, then in the module."""
    for name in ("layers", "gemms", "modules"):
        none: dict[str, Any] = {name: ()}
        groups = grouped((replace(one, **none), getattr(one, name)) for one in found)
        found = [
            replace(one, **none | {name: tuple(dict.fromkeys(chain(*values)))})
            for one, values in groups.items()
        ]
    return tuple(found)


def _unhealthy(record: Record) -> Iterator[Mismatch]:
    for row in record.health:
        at = place_of(row.layer, row.module, "fprop")
        if not row.error <= row.limit:  # NaN is not either
            yield Mismatch(column="error", planned=f"{row.limit:g}", ran=f"{row.error:.2g}", **at)
        if not row.is_fresh:
            cause = "set_is_first_microbatch() was not called after the optimizer's step"
            yield Mismatch(column="stale", planned="", ran="", cause=cause, **at)


def _compare_census(settings: Settings, record: Record) -> Iterator[Mismatch]:
    wanted = _expected_census(settings)
    for kind, dtypes in grouped(
        (row.kind, SPELLINGS.get(row.dtype, row.dtype)) for row in record.census
    ).items():
        planned = wanted.get(kind, frozenset())
        if planned and not planned.issuperset(dtypes):
            ran = " and ".join(dict.fromkeys(dtypes))
            yield Mismatch(
                column="census", planned=" or ".join(sorted(planned)), ran=ran, tensors=kind
            )


def _expected_census(settings: Settings) -> Mapping[str, frozenset[str]]:
    """Return the dtypes that each kind of tensor may have; kinds that the plan does not know are left out."""
    moments = (settings.exp_avg, settings.exp_avg_sq)
    return {
        "gradients": frozenset({settings.grad_reduce}),
        "gradient reduction": frozenset({settings.grad_reduce}),
        **(
            {}
            if None in settings.sent
            else {"sent between stages": frozenset(map(str, settings.sent))}
        ),
        **(
            {}
            if settings.remainders
            else {"master weights": frozenset({settings.master or settings.mode})}
        ),
        **({} if "fp8" in moments else {"optimizer state": frozenset(moments)}),
    }


def differences(before: Record, after: Record) -> tuple[Mismatch, ...]:
    """Return every GEMM and kind of tensor in which two records differ; `planned` of a mismatch is the first one's."""
    first, second = _texts(before), _texts(after)
    return folded(
        replace(place, planned=first.get(place, "nothing"), ran=second.get(place, "nothing"))
        for place in {**first, **second}
        if first.get(place) != second.get(place)
    )


def _texts(record: Record) -> dict[Mismatch, str]:
    """Return the formats, tiles and stored format of each GEMM, and the dtypes of each kind of tensor, as texts."""
    differs = Mismatch(column="differs", planned="", ran="")
    pairs = []
    for row in record.gemms:
        parts = [
            row.formats,
            _tiles(row),
            row.output and f"to {row.output}",
            row.storage and f"stored {row.storage}",
        ]
        place = replace(differs, **place_of(row.layer, row.module, row.gemm))
        pairs.append((place, ", ".join(filter(None, parts))))
    pairs += [(replace(differs, tensors=one.kind), one.dtype) for one in record.census]
    return {place: " and ".join(dict.fromkeys(texts)) for place, texts in grouped(pairs).items()}


def format_gemms(rows: Sequence[GemmRow]) -> str:
    """Return the formats of each layer's GEMMs, ``layers 2-5: ...; layers 1, 6, output: bf16`` say."""
    parts = []
    by_layer = grouped((row.layer, row) for row in rows)
    for kind, layers in grouped((_kind(own), layer) for layer, own in by_layer.items()).items():
        count = sum(layer.isdecimal() for layer in layers)
        word = f"layer{'s' * (count > 1)} " if count else ""
        where = word + compact(layers, limit=len(layers))
        parts.append(f"{where}: {kind}" if where else kind)
    return "; ".join(parts)


def _kind(rows: Sequence[GemmRow]) -> str:
    by_module = grouped((row.module, row) for row in rows)
    modules = grouped((_formats(own), module) for module, own in by_module.items())
    if set(modules) <= HIGH and len(modules) == 1:
        return next(iter(modules))
    return " and ".join(
        f"{formats} ({', '.join(sorted(names))})" for formats, names in modules.items()
    )


def _formats(rows: Sequence[GemmRow]) -> str:
    if {row.scheme for row in rows} == {"none"}:
        return " and ".join(dict.fromkeys(row.formats for row in rows))
    gemms = grouped((row.gemm, f"{row.left} x {row.right}") for row in rows)
    schemes = " and ".join(dict.fromkeys(row.scheme for row in rows if row.scheme != "none"))
    return f"{schemes}, " + ", ".join(
        f"{gemm} {' and '.join(gemms[gemm])}" for gemm in GEMMS if gemm in gemms
    )

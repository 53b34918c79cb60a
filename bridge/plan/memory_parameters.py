"""Every parameter that one rank holds, with its size there and how it is stored, in the order of Megatron's modules.

Shapes of scales are those that Transformer Engine allocates (2.20 pytorch/csrc/quantizer.cpp, common/recipe): row-wise
and column-wise MXFP8 and NVFP4 scales are padded to multiples of 128 and 4, block scales to multiples of 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bridge.model.layout import Place
from bridge.plan.precision_plan import LOW, PlanModule, PrecisionPlan
from bridge.precision.copies import Copies
from bridge.precision.formats import FORMATS
from bridge.precision.schemes import WHOLE, Scheme, scheme_row

FP32_BYTES = 4


def element_bytes(dtype: str) -> float:
    """Return the bytes of one element of a format; a factory's own format counts as one byte."""
    if dtype == "fp64":
        return 8
    return FORMATS[dtype].bits / 8 if dtype in FORMATS else 1


def has_column_copy(scheme: Scheme | None, capability: tuple[int, int] | None) -> bool:
    """Return whether a second copy is kept for the GEMMs that read the tensor along its other axis.

    Per-tensor scaling needs a transpose on Ada and Hopper, whose FP8 GEMMs read one layout only; Blackwell reads both
    (compute capability 10 or 11, and 13 on; Transformer Engine 2.20 pytorch/utils.py). An unknown GPU counts as Hopper.
    """
    if not is_per_tensor(scheme) or capability is None:
        return True
    return not ((10, 0) <= capability < (12, 0) or capability >= (13, 0))


def scale_bytes(scheme: Scheme | None, rows: int, columns: int) -> int:
    """Return the bytes of the scales of a weight's row-wise copy; the column-wise copy has the transposed shape."""
    if scheme is None or is_per_tensor(scheme):
        return FP32_BYTES
    tile = scheme.operand("weight").row
    if scheme.name == "blockwise":
        return -(-rows // tile[0]) * padded(-(-columns // tile[1]), 4) * FP32_BYTES
    size = element_bytes(scheme.scale_format or "fp32")
    per_tensor = FP32_BYTES if scheme.tensor_scale_format else 0
    return round(padded(rows, 128) * padded(-(-columns // max(tile)), 4) * size) + per_tensor


def bytes_of_two_formats(copies: Copies, rows: int, columns: int, high: float) -> int:
    """Return the bytes of the copies of a weight of two formats; `high` are the bytes of an element of the weight.

    A copy in high precision is the weight itself, or a tensor of its own where a quantizer makes it from the other one.
    """
    row, column = copies.weight.row, copies.weight.column
    total = 0.0
    if row.scheme is not None:
        total += rows * columns * element_bytes(row.format) + scale_bytes(
            scheme_row(row.scheme), rows, columns
        )
    if column.scheme is not None:
        total += rows * columns * element_bytes(column.format) + scale_bytes(
            scheme_row(column.scheme), columns, rows
        )
    elif column.is_of_row and not copies.keeps_row:
        total += rows * columns * high
    return round(total)


def operand_bytes(dtype: str, scheme: Scheme | None) -> float:
    """Return the bytes per element of a linear's quantised input, the scales of its column-wise copy included."""
    if scheme is None or is_per_tensor(scheme):
        return element_bytes(dtype)
    return element_bytes(dtype) + element_bytes(scheme.scale_format or "fp32") / max(
        scheme.operand("input").column
    )


def is_per_tensor(scheme: Scheme | None) -> bool:
    """Return whether one scale serves a whole tensor; a transpose shares the scale of its original then."""
    return scheme is None or all(operand.row == WHOLE for operand in scheme.operands)


def padded(count: int, multiple: int) -> int:
    """Return the next multiple of a number from a count on."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parameter:
    """One parameter on one rank, or the same one of each of several equal layers."""

    layer: str
    """Label of its layer, or of the first of the equal ones."""
    module: str
    name: str
    """weight, bias or Megatron's name of another one."""
    rows: int
    """Outputs on this rank; 1 for a vector."""
    columns: int
    storage: str
    computes: str
    """Format in which its GEMMs take it; its storage where they take it as it is."""
    scheme: Scheme | None = None
    """Scaling scheme in which its GEMMs take it, or else in which it is stored; None: neither."""
    copies: Copies | None = None
    """The copies of its layer's operands, where the copies of the weight have two formats."""
    is_expert: bool = False
    is_frozen: bool = False
    """It is not trained, and lies in none of Megatron's buffers."""
    shares_embedding: bool = False
    """A copy of the embedding that several stages hold; it has a bucket of its own."""

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.rows * self.columns

    @property
    def is_fp32(self) -> bool:
        """Whether it is kept in FP32: its gradient is, and it needs no master."""
        return self.storage == "fp32"

    @property
    def is_stored_low(self) -> bool:
        """Whether it is kept in FP8 or FP4."""
        return self.storage in LOW


def chunk_parameters(plan: PrecisionPlan, place: Place) -> list[Parameter]:
    """Return the parameters of a model chunk on one rank of its stage; all ranks of a stage hold as many."""
    return list(_Chunk(plan, place).parameters())


class _Chunk:
    """Walks one model chunk as Megatron builds it."""

    def __init__(self, plan: PrecisionPlan, place: Place) -> None:
        self.plan, self.place, self.parallel = plan, place, plan.parallel
        self.layers = plan.by_label
        self.made: dict[int | str, list[Parameter]] = {}

    def parameters(self) -> Iterator[Parameter]:
        shape, place = self.plan.shape, self.place
        tied = shape.share_embeddings_and_output_weights
        mtp = place.mtp and shape.mtp_num_layers > 0
        over_stages = self.parallel.pipeline > 1 and (tied or shape.mtp_num_layers > 0)
        if place.embedding or mtp:
            shared = over_stages and not (place.embedding and place.output)
            yield from self._modules(
                "embedding", self.layers["embedding"].modules, shares_embedding=shared
            )
        for index in place.layers:
            yield from self._shared(str(index + 1))
        *norms, head = self.layers["output"].modules
        if place.output:
            yield from self._modules("output", norms)
        for label in (f"mtp {number}" for number in range(1, shape.mtp_layers + 1 if mtp else 1)):
            *first, last = self.layers[label].modules
            yield from self._modules(label, first)
            for inner in (f"{label}.{position + 1}" for position in range(len(shape.mtp_kinds))):
                yield from self._modules(inner, self.layers[inner].modules)
            yield from self._modules(label, (last,))
        if place.output and not (tied and (place.embedding or mtp)):
            yield from self._modules("output", (head,), shares_embedding=tied and over_stages)

    def _shared(self, label: str) -> list[Parameter]:
        """Return the parameters of a layer: those of an equal one, except under Megatron-FSDP, where each is a unit."""
        layer = self.layers[label]
        key = label if self.plan.settings.fsdp else layer.alike
        if key not in self.made:
            self.made[key] = list(self._modules(label, layer.modules))
        return self.made[key]

    def _modules(
        self, label: str, modules: Sequence[PlanModule], *, shares_embedding: bool = False
    ) -> Iterator[Parameter]:
        ordered = sorted(modules, key=lambda planned: planned.module.registered)
        experts = [planned for planned in ordered if planned.module.is_expert]
        for planned in ordered:
            if experts and planned is experts[0]:
                yield from self._experts(label, experts)
            elif not planned.module.is_expert:
                yield from self._module(label, planned, shares_embedding=shares_embedding)

    def _experts(self, label: str, experts: list[PlanModule]) -> Iterator[Parameter]:
        shared = [
            planned
            for planned in experts
            if planned.kind == "adapter" and planned.module.count == 1
        ]
        one = [
            parameter
            for planned in experts
            if planned not in shared
            for parameter in self._module(label, planned)
        ]
        for _ in range(experts[0].module.count // self.parallel.expert):
            yield from one
        for planned in shared:
            yield from self._module(label, planned)

    def _module(
        self, label: str, planned: PlanModule, *, shares_embedding: bool = False
    ) -> Iterator[Parameter]:
        module, mode = planned.module, self.plan.settings.mode
        weight = planned.row("weight")
        storage = weight.storage if weight is not None else mode
        computes = weight.format if weight is not None and weight.format in LOW else storage
        scheme = self.plan.settings.row if storage in LOW else None
        if planned.scheme is not None:
            scheme = self.plan.settings.row_of(planned.scheme)
        ranks = self.parallel.expert_tensor if module.is_expert else self.parallel.tensor
        outputs, inputs = module.on_rank(self.plan.shape, ranks)
        is_expert = module.is_expert and self.parallel.expert > 1
        made = partial(
            Parameter,
            layer=label,
            module=module.name,
            is_expert=is_expert,
            is_frozen=module.is_frozen,
        )
        kept = "fp32" if module.is_fp32 else mode
        vector = partial(made, rows=1, storage=kept, computes=kept)
        for name, length in module.vectors:
            yield vector(name=name, columns=length // ranks if module.split == "column" else length)
        if outputs and module.kind == "norm":
            yield vector(name="weight", columns=outputs)
        elif outputs and module.kind != "attention":
            shares = shares_embedding and module.name != "position_embeddings"
            matrix = partial(
                made, name="weight", rows=outputs, columns=inputs, shares_embedding=shares
            )
            yield matrix(
                storage=storage, computes=computes, scheme=scheme, copies=_of_two_formats(planned)
            )
        if module.bias:
            yield vector(name="bias", columns=outputs)


def _of_two_formats(planned: PlanModule) -> Copies | None:
    """Return the copies of a module's operands where those of its weight have two formats."""
    copies = planned.copies
    if copies is None or copies.weight.row.format == copies.weight.column.format:
        return None
    return copies

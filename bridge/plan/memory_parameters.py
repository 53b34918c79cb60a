"""Every parameter on a rank, with its size and storage there, in the order of Megatron's modules.

Scales have the shapes that Transformer Engine allocates: row-wise and column-wise MXFP8 and NVFP4
scales are padded to multiples of 128 and 4, and block scales to multiples of 4.

Source: Transformer Engine 2.20 pytorch/csrc/quantizer.cpp, common/recipe.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bridge.model.layout import ModelChunk
from bridge.plan.plan_layers import LOW_FORMATS, PlanModule
from bridge.plan.precision_plan import PrecisionPlan
from bridge.precision.formats import FORMATS
from bridge.precision.operand_copies import LayerCopies
from bridge.precision.schemes import WHOLE_TENSOR, Scheme, find_scheme

FP32_BYTES = 4


def get_element_bytes(dtype: str) -> float:
    """Return the bytes of an element of a format. The unknown format of a factory counts as 1."""
    if dtype == "fp64":
        return 8
    if dtype not in FORMATS:
        return 1
    return FORMATS[dtype].bits / 8


def has_column_copy(scheme: Scheme | None, capability: tuple[int, int] | None) -> bool:
    """Return whether a second copy is kept for the GEMMs that read the tensor along its other axis.

    Per-tensor scaling needs a transpose on Ada and Hopper, whose FP8 GEMMs read one layout only.
    Blackwell reads both (compute capability 10 or 11, and 13 on; Transformer Engine 2.20
    pytorch/utils.py). An unknown GPU counts as Hopper.
    """
    if not is_per_tensor(scheme) or capability is None:
        return True
    reads_both_layouts = (10, 0) <= capability < (12, 0) or capability >= (13, 0)
    return not reads_both_layouts


def count_scale_bytes(scheme: Scheme | None, rows: int, columns: int) -> int:
    """Return the bytes of the scales of a weight's row-wise copy.

    The column-wise copy has the transposed shape.
    """
    if scheme is None or is_per_tensor(scheme):
        return FP32_BYTES
    tile = scheme.operand("weight").rowwise_tile
    if scheme.name == "blockwise":
        tiles_down = -(-rows // tile[0])
        tiles_across = -(-columns // tile[1])
        return tiles_down * pad_to_multiple(tiles_across, 4) * FP32_BYTES
    blocks = -(-columns // max(tile))
    scale = get_element_bytes(scheme.scale_format or "fp32")
    size = round(pad_to_multiple(rows, 128) * pad_to_multiple(blocks, 4) * scale)
    if scheme.tensor_scale_format:
        size += FP32_BYTES
    return size


def count_two_format_bytes(copies: LayerCopies, rows: int, columns: int, high: float) -> int:
    """Return the bytes of the copies of a weight, if its two copies have different formats.

    A copy in high precision is the weight itself, or a separate tensor if a quantizer makes it from
    the other copy.

    Args:
        copies: The copies of the layer's operands.
        rows: The rows of the weight.
        columns: The columns of the weight.
        high: The bytes of an element of the weight.
    """
    row, column = copies.weight.row, copies.weight.column
    elements = rows * columns
    total = 0.0
    if row.scheme is not None:
        total += elements * get_element_bytes(row.format)
        total += count_scale_bytes(find_scheme(row.scheme), rows, columns)
    if column.scheme is not None:
        total += elements * get_element_bytes(column.format)
        total += count_scale_bytes(find_scheme(column.scheme), columns, rows)
    elif column.is_from_rowwise and not copies.saves_rowwise_input:
        total += elements * high
    return round(total)


def count_operand_bytes(dtype: str, scheme: Scheme | None) -> float:
    """Return the bytes per element of a linear's quantised input.

    The scales of its column-wise copy are included.
    """
    if scheme is None or is_per_tensor(scheme):
        return get_element_bytes(dtype)
    scale = get_element_bytes(scheme.scale_format or "fp32")
    elements_per_scale = max(scheme.operand("input").columnwise_tile)
    return get_element_bytes(dtype) + scale / elements_per_scale


def is_per_tensor(scheme: Scheme | None) -> bool:
    """Return whether the whole tensor has one scale, which its transpose then shares."""
    return scheme is None or all(
        operand.rowwise_tile == WHOLE_TENSOR for operand in scheme.operands
    )


def pad_to_multiple(count: int, multiple: int) -> int:
    """Return the smallest multiple of a number that is not less than a count."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parameter:
    """A parameter on a rank. Several equal layers share the same `Parameter`."""

    layer: str
    """Label of its layer, or of the first of several equal layers."""
    module: str
    name: str
    """weight, bias, or Megatron's name of another parameter."""
    rows: int
    """The number of outputs on this rank. 1 for a vector."""
    columns: int
    storage: str
    computes: str
    """The format in which its GEMMs read it. It is the storage format if they read it unchanged."""
    scheme: Scheme | None = None
    """The scaling scheme in which its GEMMs read it, or else in which it is stored, or None."""
    copies: LayerCopies | None = None
    """The copies of its layer's operands, if the copies of the weight have two formats."""
    is_expert: bool = False
    is_grouped: bool = False
    """Whether its layer is a `GroupedLinear` of Transformer Engine: all experts of a rank."""
    is_frozen: bool = False
    """Whether it is not trained. Then it is in none of Megatron's buffers."""
    shares_embedding: bool = False
    """Whether it is a copy of the embedding that several stages have. It has a separate bucket."""

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.rows * self.columns

    @property
    def is_fp32(self) -> bool:
        """Whether it is kept in FP32. Then its gradient is in FP32, and it needs no master."""
        return self.storage == "fp32"

    @property
    def is_stored_low(self) -> bool:
        """Whether it is kept in FP8 or FP4."""
        return self.storage in LOW_FORMATS


def list_chunk_parameters(plan: PrecisionPlan, place: ModelChunk) -> list[Parameter]:
    """Return the parameters of a model chunk on one rank of its stage.

    All ranks of a stage have the same number.
    """
    return list(_Chunk(plan, place).parameters())


class _Chunk:
    """Lists the parameters of a model chunk, in the order in which Megatron builds them."""

    def __init__(self, plan: PrecisionPlan, place: ModelChunk) -> None:
        self.plan, self.place, self.parallel = plan, place, plan.parallel
        self.layers = plan.by_label
        self.made: dict[int | str, list[Parameter]] = {}

    def parameters(self) -> Iterator[Parameter]:
        shape, place = self.plan.shape, self.place
        is_tied = shape.share_embeddings_and_output_weights
        predicts = place.mtp and shape.mtp_num_layers > 0
        needs_embedding = place.embedding or predicts
        over_stages = self.parallel.pipeline > 1 and (is_tied or shape.mtp_num_layers > 0)
        if needs_embedding:
            is_shared = over_stages and not (place.embedding and place.output)
            yield from self._modules(
                "embedding", self.layers["embedding"].modules, shares_embedding=is_shared
            )
        for index in place.layers:
            yield from self._layer(str(index + 1))
        *norms, head = self.layers["output"].modules
        if place.output:
            yield from self._modules("output", norms)
        if predicts:
            yield from self._prediction()
        if place.output and not (is_tied and needs_embedding):
            yield from self._modules("output", (head,), shares_embedding=is_tied and over_stages)

    def _prediction(self) -> Iterator[Parameter]:
        """Yield the parameters of the multi-token-prediction layers."""
        shape = self.plan.shape
        for number in range(1, shape.mtp_layers + 1):
            label = f"mtp {number}"
            *first, last = self.layers[label].modules
            yield from self._modules(label, first)
            for position in range(len(shape.mtp_kinds)):
                inner = f"{label}.{position + 1}"
                yield from self._modules(inner, self.layers[inner].modules)
            yield from self._modules(label, (last,))

    def _layer(self, label: str) -> list[Parameter]:
        """Return the parameters of a layer. Equal layers share them.

        Under Megatron-FSDP each layer is a unit, so its parameters are not shared.
        """
        layer = self.layers[label]
        key: int | str = layer.alike
        if self.plan.settings.fsdp:
            key = label
        if key not in self.made:
            self.made[key] = list(self._modules(label, layer.modules))
        return self.made[key]

    def _modules(
        self, label: str, modules: Sequence[PlanModule], *, shares_embedding: bool = False
    ) -> Iterator[Parameter]:
        ordered = sorted(modules, key=lambda planned: planned.module.registration_index)
        experts = [planned for planned in ordered if planned.module.is_expert]
        for planned in ordered:
            if experts and planned is experts[0]:
                yield from self._experts(label, experts)
            elif not planned.module.is_expert:
                yield from self._module(label, planned, shares_embedding=shares_embedding)

    def _experts(self, label: str, experts: list[PlanModule]) -> Iterator[Parameter]:
        """Yield the parameters of a rank's experts, then the parameters of a shared adapter."""
        of_one_expert: list[Parameter] = []
        shared: list[Parameter] = []
        for planned in experts:
            is_shared = planned.kind == "adapter" and planned.module.count == 1
            if is_shared:
                shared += self._module(label, planned)
            else:
                of_one_expert += self._module(label, planned)
        for _ in range(experts[0].module.count // self.parallel.expert):
            yield from of_one_expert
        yield from shared

    def _module(
        self, label: str, planned: PlanModule, *, shares_embedding: bool = False
    ) -> Iterator[Parameter]:
        """Yield the parameters of a module: its vectors, its weight and its bias."""
        module = planned.module
        ranks = self.parallel.get_tensor_ranks(is_expert=module.is_expert)
        outputs, inputs = module.get_rank_shape(self.plan.shape, ranks)
        parameter = partial(
            Parameter,
            layer=label,
            module=module.name,
            is_expert=module.is_expert and self.parallel.expert > 1,
            is_grouped=module.is_expert and self.plan.settings.are_experts_grouped,
            is_frozen=module.is_frozen,
        )
        dtype = "fp32" if module.is_fp32 else self.plan.settings.mode
        vector = partial(parameter, rows=1, storage=dtype, computes=dtype)
        for name, length in module.vectors:
            parts = 1
            if module.split == "column":
                parts = ranks
            yield vector(name=name, columns=length // parts)
        if outputs and module.kind == "norm":
            yield vector(name="weight", columns=outputs)
        elif outputs and module.kind != "attention":
            storage, computes = self._formats(planned)
            yield parameter(
                name="weight",
                rows=outputs,
                columns=inputs,
                storage=storage,
                computes=computes,
                scheme=self._scheme(planned, storage),
                copies=_find_two_format_copies(planned),
                shares_embedding=shares_embedding and module.name != "position_embeddings",
            )
        if module.bias:
            yield vector(name="bias", columns=outputs)

    def _formats(self, planned: PlanModule) -> tuple[str, str]:
        """Return the format in which a weight is stored, and the format in which GEMMs read it."""
        weight = planned.row("weight")
        if weight is None:
            return self.plan.settings.mode, self.plan.settings.mode
        if weight.format in LOW_FORMATS:
            return weight.storage, weight.format
        return weight.storage, weight.storage

    def _scheme(self, planned: PlanModule, storage: str) -> Scheme | None:
        """Return the scheme in which GEMMs read a weight, or else in which it is stored."""
        if planned.scheme is not None:
            return self.plan.settings.find_scheme_row(planned.scheme)
        if storage in LOW_FORMATS:
            return self.plan.settings.scheme_row
        return None


def _find_two_format_copies(planned: PlanModule) -> LayerCopies | None:
    """Return the copies of a module's operands, if the copies of its weight have two formats."""
    copies = planned.copies
    if copies is None or copies.weight.row.format == copies.weight.column.format:
        return None
    return copies

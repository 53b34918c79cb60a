"""`report_gemms`: reports GEMMs of Transformer Engine where its Python calls the extension.

The same code serves a GPU and the stand-in on a CPU: both are the module
`transformer_engine_torch`. The extension is not imported here. A process that has not loaded it
runs none of its GEMMs.

Operands are named as in cuBLAS, whose matrices are column-major: `A` is the right operand of the
product in row-major order, and `B` the left operand.

Source: Transformer Engine 2.20.2 pytorch/cpp_extensions/gemm.py:273-290 (`generic_gemm`), :504-522
(`te_general_grouped_gemm`) and pytorch/custom_recipes/gemm.py:34-48 (`custom_gemm`). The positions
are the same in 2.9.0 and 2.14.0. Megatron Core 0.16.1 tensor_parallel/layers.py:569-576 (Apex).
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

logger = logging.getLogger(__name__)

TE_EXTENSION_MODULE = "transformer_engine_torch"
CUSTOM_GEMM_MODULE = "transformer_engine.pytorch.cpp_extensions.gemm"
"""Module that calls the Python GEMM of a user's quantizer."""
APEX_EXTENSION_MODULE = "fused_weight_gradient_mlp_cuda"
"""Apex's extension.

With it Megatron adds weight gradients to their buffer outside of Transformer Engine.
"""
TRANSFORMER_ENGINE = "Transformer Engine"
TE_RELEASES = "Transformer Engine 2.9 to 2.20"
MEGATRON_RELEASE = "the calls of Megatron Core 0.16"
GEMM_OF_LAYOUT = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
"""(transa, transb) -> the GEMM of a linear layer."""


class GenericGemmArguments(NamedTuple):
    """Positional arguments of `generic_gemm`: a product of two matrices."""

    A: Any
    transa: bool
    B: Any
    transb: bool
    out: Any
    """Tensor to write to. None: a new tensor."""
    quantization_params: Any
    """Quantizer of the result."""
    out_dtype: Any
    bias: torch.Tensor | None
    """Added to the result; with `grad` a buffer for the gradient of the bias."""
    bias_dtype: Any
    gelu: bool
    """Whether the result goes through a GELU before it is returned."""
    gelu_in: torch.Tensor | None
    grad: bool
    workspace: torch.Tensor | None
    workspace_size: int
    accumulate: bool
    """Whether the product is added to `out`."""
    use_split_accumulator: bool


class GroupedGemmArguments(NamedTuple):
    """Positional arguments of `te_general_grouped_gemm`: a product per expert.

    A further argument, the number of multiprocessors, is not recorded.
    """

    A: Sequence[Any]
    transa: bool
    B: Sequence[Any]
    transb: bool
    out: Any
    """A tensor per product, or with `single_output` a tensor for all products."""
    out_dtype: Any
    m_splits: Sequence[int] | None
    """Rows of each product."""
    bias: Sequence[torch.Tensor] | None
    bias_dtype: Any
    single_output: bool
    gelu_in: Any
    grad: bool
    workspaces: Any
    workspace_size: int
    accumulate: bool
    use_split_accumulator: bool

    @classmethod
    def from_args(cls, args: Sequence[Any]) -> "GroupedGemmArguments":
        """Return the named arguments, without those that follow them."""
        return cls(*args[: len(cls._fields)])

    def outputs(self) -> Sequence[torch.Tensor]:
        """Return a tensor per product."""
        if not self.single_output or not self.m_splits:
            return list(self.out)
        joined = self.out
        if isinstance(joined, (list, tuple)):
            joined = joined[0]
        return torch.split(joined, list(self.m_splits))


CUSTOM_GEMM_PARAMETERS = (
    "A",
    "B",
    "workspace",
    "out_dtype",
    "quantization_params",
    "gelu",
    "gelu_in",
    "accumulate",
    "layout",
)
"""The first parameters of `custom_gemm`, up to the last that is read here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeGemm:
    """A GEMM that ran, single or in a group."""

    gemm: str
    """fprop, dgrad or wgrad."""
    left: Any
    """Operand with the result's first axis: a tensor, or a storage of Transformer Engine."""
    right: Any
    """Operand with the result's last axis."""
    out: Any
    """The result of the product. None: only the result after a GELU is known."""
    bias: Any = None
    """Added to the product before it was rounded."""
    part: int | None = None
    """Number of the GEMM in its group. None: a single GEMM."""
    splits: Sequence[int] = ()
    """Rows of each GEMM of the group."""
    split_accumulator: bool = True


def _read_generic_gemm(args: Sequence[Any], _kwargs: Any, result: Any) -> Iterator[TeGemm]:
    """Yield the GEMM of a call of `generic_gemm`."""
    call = GenericGemmArguments(*args[: len(GenericGemmArguments._fields)])
    out = None
    if not call.gelu:
        out = result[0]
    bias = call.bias
    if bias is not None and (call.grad or not bias.numel()):
        bias = None
    yield TeGemm(
        gemm=GEMM_OF_LAYOUT[call.transa, call.transb],
        left=call.B,
        right=call.A,
        out=out,
        bias=bias,
        split_accumulator=bool(call.use_split_accumulator),
    )


def _read_grouped_gemms(args: Sequence[Any], _kwargs: Any, _result: Any) -> Iterator[TeGemm]:
    """Yield each GEMM of a call of `te_general_grouped_gemm`."""
    call = GroupedGemmArguments.from_args(args)
    outs = call.outputs()
    for part, (left, right) in enumerate(zip(call.B, call.A, strict=True)):
        yield TeGemm(
            gemm=GEMM_OF_LAYOUT[call.transa, call.transb],
            left=left,
            right=right,
            out=outs[part],
            part=part,
            splits=list(call.m_splits or ()),
            split_accumulator=bool(call.use_split_accumulator),
        )


def _read_custom_gemm(args: Sequence[Any], kwargs: Any, result: Any) -> Iterator[TeGemm]:
    """Yield the GEMM of a call of `custom_gemm`."""
    arguments = dict(zip(CUSTOM_GEMM_PARAMETERS, args, strict=False))
    arguments.update(kwargs)
    transa, transb = arguments.get("layout", "TN")
    gemm = GEMM_OF_LAYOUT[transa == "T", transb == "T"]
    yield TeGemm(gemm=gemm, left=arguments["B"], right=arguments["A"], out=result[0])


def _read_apex_wgrad(args: Sequence[Any], _kwargs: Any, _result: Any) -> Iterator[TeGemm]:
    """Yield the wgrad GEMM that Apex adds to a buffer."""
    total_input, grad_output, main_grad = args
    yield TeGemm(gemm="wgrad", left=grad_output, right=total_input, out=main_grad)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmFunction:
    """A function that multiplies matrices, and the reader of the GEMMs of its calls."""

    package: str
    """Transformer Engine or Apex."""
    module: str
    name: str
    verified_releases: str
    """The releases whose calls were read to write `gemms`, for a message."""
    min_arguments: int
    """Positional arguments that `gemms` reads."""
    gemms: Callable[[Sequence[Any], Any, Any], Iterator[TeGemm]]
    """Positional arguments, keyword arguments, result -> the GEMMs of the call."""


GEMM_FUNCTIONS = (
    GemmFunction(
        package=TRANSFORMER_ENGINE,
        module=TE_EXTENSION_MODULE,
        name="generic_gemm",
        verified_releases=TE_RELEASES,
        min_arguments=len(GenericGemmArguments._fields),
        gemms=_read_generic_gemm,
    ),
    GemmFunction(
        package=TRANSFORMER_ENGINE,
        module=TE_EXTENSION_MODULE,
        name="te_general_grouped_gemm",
        verified_releases=TE_RELEASES,
        min_arguments=len(GroupedGemmArguments._fields),
        gemms=_read_grouped_gemms,
    ),
    GemmFunction(
        package=TRANSFORMER_ENGINE,
        module=CUSTOM_GEMM_MODULE,
        name="custom_gemm",
        verified_releases=TE_RELEASES,
        min_arguments=2,
        gemms=_read_custom_gemm,
    ),
    GemmFunction(
        package="Apex",
        module=APEX_EXTENSION_MODULE,
        name="wgrad_gemm_accum_fp32",
        verified_releases=MEGATRON_RELEASE,
        min_arguments=3,
        gemms=_read_apex_wgrad,
    ),
    GemmFunction(
        package="Apex",
        module=APEX_EXTENSION_MODULE,
        name="wgrad_gemm_accum_fp16",
        verified_releases=MEGATRON_RELEASE,
        min_arguments=3,
        gemms=_read_apex_wgrad,
    ),
)
"""Functions that are watched. Megatron Core calls the functions of Apex."""


@contextmanager
def report_gemms(
    report: Callable[[TeGemm], None], around_call: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Report every GEMM of the extensions after it has run, inside a ``with`` block.

    Args:
        report: Called with each GEMM.
        around_call: Makes the context in which the extension is called. Operators of torch inside
            it are part of the GEMM.
    """
    with ExitStack() as stack:
        for function in GEMM_FUNCTIONS:
            module = sys.modules.get(function.module)
            original = getattr(module, "__dict__", {}).get(function.name)
            if original is not None:
                reporting = _wrap_with_report(original, function, report, around_call)
                stack.enter_context(patch.object(module, function.name, reporting))
        yield


def _wrap_with_report(
    original: Callable[..., Any],
    function: GemmFunction,
    report: Callable[[TeGemm], None],
    around_call: Callable[[], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """Return a function that calls the original, and then reports its GEMMs."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with around_call():
            result = original(*args, **kwargs)
        if len(args) < function.min_arguments:
            _log_unrecorded(function, len(args))
            return result
        for gemm in function.gemms(args, kwargs, result):
            report(gemm)
        return result

    return call


@functools.cache
def _log_unrecorded(function: GemmFunction, count: int) -> None:
    """Log once that calls of a function with fewer arguments are not recorded."""
    logger.warning(
        "%s of %s is called with %d arguments, not %d: its GEMMs are not recorded. "
        "The record was written for %s.",
        function.name,
        function.package,
        count,
        function.min_arguments,
        function.verified_releases,
    )

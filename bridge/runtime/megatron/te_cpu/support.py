"""Smaller functions of the extension: delayed updates, scales, the optimizer, MoE padding, properties.

Source: pytorch/csrc/extensions/ (recipe.cpp, multi_tensor/, padding.cpp, transpose.cpp).
"""

from collections.abc import Iterator
from typing import Any

import torch

from bridge.precision.formats import FORMATS
from bridge.runtime.megatron.te_cpu.storage import FORMAT_NAMES
from bridge.runtime.numerics.delayed import update_together
from bridge.runtime.numerics.scaling import divide, e8m0_from_amax, scale_from_amax

Tensors = list[list[torch.Tensor]]
_ELEMENTS = 1 << 16
"""Elements that an optimizer works on at a time."""


def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor,
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    algo: str,
    fp8: Any,
    margin: float,
) -> None:
    """Roll the histories of delayed scaling and renew its scales, from amaxes reduced over the ranks."""
    maximum = FORMATS[FORMAT_NAMES[int(fp8)]].max * 2.0**-margin
    update_together(histories, scales, maximum, algo=algo, reduced_amax=reduced)


def compute_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of a tensor."""
    found = x.detach().abs().amax() if x.numel() else torch.zeros(())
    amax.copy_(found.reshape(amax.shape))


def multi_tensor_compute_scale_inv_e8m0(_chunk: int, _noop: Any, tensors: Tensors) -> None:
    """Write the exponents of MXFP8's scales from amaxes."""
    for amax, scale_inv in zip(*tensors, strict=True):
        scale_inv.copy_(
            e8m0_from_amax(amax.float(), FORMATS["e4m3"].max)
            .to(torch.uint8)
            .reshape(scale_inv.shape)
        )


def multi_tensor_compute_scale_and_scale_inv(
    _chunk: int,
    _noop: Any,
    tensors: Tensors,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Write factors and their reciprocals from amaxes."""
    for amax, scale, scale_inv in zip(*tensors, strict=True):
        factor = scale_from_amax(amax, max_fp8, power_of_two=force_pow_2_scales, eps=epsilon)
        scale.copy_(factor)
        scale_inv.copy_(divide(1.0, factor).reshape(scale_inv.shape))


def multi_tensor_scale(
    _chunk: int, _noop: Any, tensors: Tensors, scale: float | torch.Tensor
) -> None:
    """Write tensors times a factor."""
    for source, out in zip(*tensors, strict=True):
        out.copy_(source * scale)


def multi_tensor_l2norm(
    _chunk: int, _noop: Any, tensors: Tensors, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all tensors, and that of each."""
    norms = torch.stack([tensor.float().norm() for tensor in tensors[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


def _in_parts(tensors: Tensors) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield as many elements of each list's tensors as a processor's cache holds, all tensors one after the other."""
    for together in zip(*tensors, strict=True):
        yield from zip(
            *(tensor.detach().view(-1).split(_ELEMENTS) for tensor in together), strict=True
        )


def multi_tensor_adam(_chunk: int, _noop: Any, tensors: Tensors, *settings: Any) -> None:
    """Take a step of Adam (mode 0: decay in the gradient; mode 1: AdamW), in place.

    The tensors are gradients, parameters, first and second moments; a fifth list has masters, stepped instead: FP32
    weights, or the low halves (int16) of those whose high halves are the parameters, in BF16.

    Source: common/multi_tensor/adam.cu.
    """
    lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay = settings
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for given, parameter, mean, variance, *masters in _in_parts(tensors):
        master: Any = masters[0] if masters else None
        has_halves = master is not None and master.dtype == torch.int16
        stepped = parameter.detach() if master is None else master
        weight, gradient = (
            _joined(parameter, master) if has_halves else stepped.float(),
            given.float(),
        )
        if mode == 0:
            gradient = gradient + weight_decay * weight
        mean.copy_(mean.float().mul_(beta1).add_((1 - beta1) * gradient))
        variance.copy_(variance.float().mul_(beta2).add_(((1 - beta2) * gradient).mul_(gradient)))
        update = (mean.float() / first).div_((variance.float() / second).sqrt_().add_(epsilon))
        if mode == 1:
            update.add_(weight_decay * weight)
        weight = weight - update.mul_(lr)
        if has_halves:
            _split(weight, parameter, master)
            continue
        stepped.copy_(weight)
        if master is not None:
            parameter.detach().copy_(weight)


def _joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the FP32 weight of a BF16 parameter, rounded half up in magnitude, and its low 16 bits."""
    high = parameter.detach().view(torch.int16).int() - (remainder < 0).int()
    return ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def _split(weight: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    bits = weight.view(torch.int32)
    remainder.copy_(bits.to(torch.int16))
    parameter.detach().view(torch.int16).copy_((bits >> 16) + (remainder < 0).int())


def fused_multi_row_padding(
    source: torch.Tensor, out: torch.Tensor, rows: list[int], padded_rows: list[int]
) -> None:
    """Copy each expert's rows to the start of its padded part, and zeros into the rest."""
    out.zero_()
    for part, place in zip(torch.split(source, rows), torch.split(out, padded_rows), strict=True):
        place[: len(part)].copy_(part)


def fused_multi_row_unpadding(
    source: torch.Tensor, out: torch.Tensor, padded_rows: list[int], rows: list[int]
) -> None:
    """Copy each expert's rows back from the start of its padded part."""
    for part, place in zip(torch.split(source, padded_rows), torch.split(out, rows), strict=True):
        place.copy_(part[: len(place)])


def swap_first_dims(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor with its first two axes exchanged."""
    swapped = x.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


multi_tensor_scale_tensor = multi_tensor_scale
multi_tensor_adam_param_remainder = multi_tensor_adam

ANSWERS: dict[str, Any] = {
    "get_cublasLt_version": 130000,  # a version that has every feature that Transformer Engine asks for
    "get_cudnn_version": 91200,  # likewise
    "get_num_cublas_streams": 1,
    "get_stream_priority_range": (0, -1),
    "device_supports_multicast": False,
    "ubuf_built_with_mpi": False,
    "nvte_built_with_cublasmp": False,
}
"""Function that is asked about the machine -> the one value that it returns."""

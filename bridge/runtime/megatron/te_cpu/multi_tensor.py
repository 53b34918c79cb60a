"""Smaller functions of the extension: updates, scales, optimizer, MoE padding, properties.

Source: pytorch/csrc/extensions/ (recipe.cpp, multi_tensor/, padding.cpp, transpose.cpp).
"""

from collections.abc import Iterator
from typing import Any

import torch

from bridge.precision.formats import FORMATS
from bridge.runtime.megatron.te_cpu.storage import FORMAT_NAMES
from bridge.runtime.numerics.delayed import update_layers_together
from bridge.runtime.numerics.scaling import compute_e8m0_exponent, compute_scale, divide

Tensors = list[list[torch.Tensor]]
_PART_ELEMENTS = 1 << 16
"""Elements that an optimizer works on at a time."""


def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor,
    histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    algo: str,
    fp8: Any,
    margin: float,
) -> None:
    """Roll the histories of delayed scaling and renew its scales, from reduced amaxes."""
    maximum = FORMATS[FORMAT_NAMES[int(fp8)]].max * 2.0**-margin
    update_layers_together(histories, scales, maximum, algo=algo, reduced_amax=reduced)


def compute_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of a tensor."""
    largest = torch.zeros(())
    if x.numel():
        largest = x.detach().abs().amax()
    amax.copy_(largest.reshape(amax.shape))


def multi_tensor_compute_scale_inv_e8m0(_chunk: int, _noop: Any, tensors: Tensors) -> None:
    """Write the exponents of MXFP8's scales from amaxes."""
    for amax, scale_inv in zip(*tensors, strict=True):
        exponents = compute_e8m0_exponent(amax.float(), FORMATS["e4m3"].max)
        scale_inv.copy_(exponents.to(torch.uint8).reshape(scale_inv.shape))


def multi_tensor_compute_scale_and_scale_inv(
    _chunk: int,
    _noop: Any,
    tensors: Tensors,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Write scales and their reciprocals from amaxes."""
    amaxes, scales, scale_invs = tensors
    if not amaxes:
        return
    # One computation for all tensors: a dozen operators on each single number would be slow.
    joined = torch.cat([amax.reshape(-1) for amax in amaxes])
    factors = compute_scale(joined, max_fp8, power_of_two=force_pow_2_scales, eps=epsilon)
    sizes = [amax.numel() for amax in amaxes]
    for targets, values in ((scales, factors), (scale_invs, divide(1.0, factors))):
        for target, value in zip(targets, torch.split(values, sizes), strict=True):
            target.copy_(value.reshape(target.shape))


def multi_tensor_scale(
    _chunk: int, _noop: Any, tensors: Tensors, scale: float | torch.Tensor
) -> None:
    """Write tensors times a factor."""
    for source, out in zip(*tensors, strict=True):
        out.copy_(source * scale)


def multi_tensor_l2norm(
    _chunk: int, _noop: Any, tensors: Tensors, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors together, and with `per_tensor` the norm of each."""
    norms = torch.stack([tensor.float().norm() for tensor in tensors[0]])
    total_norm = norms.norm().reshape(1)
    if not per_tensor:
        return total_norm, torch.empty(0)
    return total_norm, norms


def _split_into_parts(tensors: Tensors) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield parts of tensors that fit into a processor's cache.

    The lists have tensors of equal sizes; an item has the same elements of a tensor of each list.
    """
    for same_size in zip(*tensors, strict=True):
        flat = [tensor.detach().view(-1) for tensor in same_size]
        if flat[0].numel() <= _PART_ELEMENTS:
            yield tuple(flat)
            continue
        yield from zip(*[tensor.split(_PART_ELEMENTS) for tensor in flat], strict=True)


def multi_tensor_adam(_chunk: int, _noop: Any, tensors: Tensors, *settings: Any) -> None:
    """Compute a step of Adam (mode 0: decay in the gradient; mode 1: AdamW), in place.

    The lists of `tensors` are gradients, parameters, first moments, second moments and, optionally,
    masters. With masters the step updates these and writes the parameters from them. Masters are
    FP32 weights, or int16 low halves of FP32 weights whose high halves are the BF16 parameters.

    Source: common/multi_tensor/adam.cu.
    """
    lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay = settings
    mean_correction, variance_correction = 1.0, 1.0
    if bias_correction:
        mean_correction = 1 - beta1**step
        variance_correction = 1 - beta2**step
    for stored_gradient, parameter, mean, variance, *masters in _split_into_parts(tensors):
        master: torch.Tensor | None = None
        stepped = parameter.detach()
        if masters:
            master = masters[0]
            stepped = master
        has_halves = stepped.dtype == torch.int16
        if has_halves:
            weight = _join_master(parameter, stepped)
        else:
            weight = stepped.float()
        gradient = stored_gradient.float()
        if mode == 0:
            gradient = gradient + weight_decay * weight
        mean.copy_(mean.float().mul_(beta1).add_((1 - beta1) * gradient))
        variance.copy_(variance.float().mul_(beta2).add_(((1 - beta2) * gradient).mul_(gradient)))
        deviation = (variance.float() / variance_correction).sqrt_().add_(epsilon)
        update = (mean.float() / mean_correction).div_(deviation)
        if mode == 1:
            update.add_(weight_decay * weight)
        weight = weight - update.mul_(lr)
        if has_halves:
            _split_master(weight, parameter, stepped)
            continue
        stepped.copy_(weight)
        if master is not None:
            parameter.detach().copy_(weight)


def _join_master(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the FP32 weight of a BF16 parameter and the low 16 bits of the weight.

    The parameter is the weight rounded to nearest, ties away from zero.
    """
    high = parameter.detach().view(torch.int16).int() - (remainder < 0).int()
    return ((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def _split_master(weight: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write an FP32 weight into a BF16 parameter and its low 16 bits."""
    bits = weight.view(torch.int32)
    remainder.copy_(bits.to(torch.int16))
    parameter.detach().view(torch.int16).copy_((bits >> 16) + (remainder < 0).int())


def fused_multi_row_padding(
    source: torch.Tensor, out: torch.Tensor, rows: list[int], padded_rows: list[int]
) -> None:
    """Copy each expert's rows to the start of its padded part, and zeros into the rest."""
    out.zero_()
    targets = torch.split(out, padded_rows)
    for part, target in zip(torch.split(source, rows), targets, strict=True):
        target[: len(part)].copy_(part)


def fused_multi_row_unpadding(
    source: torch.Tensor, out: torch.Tensor, padded_rows: list[int], rows: list[int]
) -> None:
    """Copy each expert's rows back from the start of its padded part."""
    padded_parts = torch.split(source, padded_rows)
    for padded_part, target in zip(padded_parts, torch.split(out, rows), strict=True):
        target.copy_(padded_part[: len(target)])


def swap_first_dims(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor with its first two axes exchanged."""
    swapped = x.transpose(0, 1).contiguous()
    if out is None:
        return swapped
    return out.copy_(swapped)


multi_tensor_scale_tensor = multi_tensor_scale
multi_tensor_adam_param_remainder = multi_tensor_adam

CONSTANT_ANSWERS: dict[str, Any] = {
    # versions that have every feature that Transformer Engine asks for
    "get_cublasLt_version": 130000,
    "get_cudnn_version": 91200,
    "get_num_cublas_streams": 1,
    "get_stream_priority_range": (0, -1),
    "device_supports_multicast": False,
    "ubuf_built_with_mpi": False,
    "nvte_built_with_cublasmp": False,
}
"""Function about the machine or the build -> the value that it returns."""

"""LayerNorm and RMSNorm, computed in FP32; the result is rounded once, or quantised.

Under delayed scaling the kernel quantises the FP32 result (`FUSED_QUANTIZERS`). Every other scheme rounds it
to the layer's dtype first, as a norm with a separate quantisation does.

The arithmetic is that of torch's norms, operator by operator, so that Megatron's torch norms give the
same bits. The backward pass of the extension gets the reciprocal deviation of the forward pass and
not its eps, so that the gradient of RMSNorm is written out:

    n = x r      y = n g
    dn = dy g    dx = dn r - n r^2 mean(dn x)    dg = sum over rows of dy n

Source: pytorch/csrc/extensions/normalization.cpp; torch 2.13 native/layer_norm.cpp.
"""

from typing import Any

import torch
from torch import Tensor

from bridge.runtime.megatron.te_cpu.storage import (
    create_empty_quantized_tensor,
    get_quantizer_name,
    get_torch_dtype,
    quantize,
)

FUSED_QUANTIZERS = {"Float8Quantizer"}
"""Quantizers whose kernel takes the norm's result before it is rounded."""

_layer_norm = torch.ops.aten.native_layer_norm
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward


def _get_gain(weight: Tensor, zero_centered: bool) -> Tensor:
    """Return the gain of a norm, whose weight is the gain minus 1 if it is zero-centred."""
    gamma = weight.detach()
    if zero_centered:
        gamma = gamma + 1
    return gamma


def _write_output(y: Tensor, out: Any, quantizer: Any, stated: Any) -> Any:
    """Return the result of a norm in a dtype or, with a quantizer, quantised.

    Args:
        y: The normalised tensor.
        out: Tensor or storage to write to, or None.
        quantizer: Quantizer of the result, or None.
        stated: Dtype of the result, in the extension's enum.
    """
    dtype = get_torch_dtype(stated)
    if quantizer is None:
        if out is None:
            return y.to(dtype)
        return out.copy_(y)
    if get_quantizer_name(quantizer) not in FUSED_QUANTIZERS:
        return quantize(y.to(dtype), quantizer, out)
    if out is None:  # its nominal dtype is the layer's, not that of the FP32 result
        out = create_empty_quantized_tensor(quantizer, y.shape, dtype)
    return quantize(y, quantizer, out)


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    _margin: int,
    zero: bool,
) -> list[Any]:
    """Return the normalised tensor, None, and the reciprocal root of each row's mean square."""
    wide = x.detach().float()
    deviation = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = wide * deviation * _get_gain(weight, zero)
    return [_write_output(y, out, quantizer, dtype), None, deviation.reshape(-1)]


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, deviation: Tensor, weight: Tensor, _margin: int, zero_centered: bool
) -> list[Tensor]:
    """Return the gradients of input and weight."""
    width = x.shape[-1]
    dy = dy.reshape(-1, width).float()
    wide = x.detach().reshape(-1, width).float()
    r = deviation.reshape(-1, 1)
    dn = dy * _get_gain(weight, zero_centered)
    dr = (dn * wide).sum(-1, keepdim=True)
    dsquare = (-0.5 * dr * r.pow(3)) / width
    dx = dn * r + dsquare * (2.0 * wide)
    return [dx.reshape(x.shape).to(x.dtype), (dy * (wide * r)).sum(0).to(weight.dtype)]


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    _margin: int,
    zero: bool,
) -> list[Any]:
    """Return the normalised tensor, the mean and the reciprocal deviation of each row."""
    x, gamma, bias = x.detach(), _get_gain(weight, zero), bias.detach()
    if quantizer is not None and get_quantizer_name(quantizer) in FUSED_QUANTIZERS:
        x, gamma, bias = x.float(), gamma.float(), bias.float()
    y, mean, deviation = _layer_norm(x, [x.shape[-1]], gamma, bias, eps)
    return [_write_output(y, out, quantizer, dtype), mean.reshape(-1), deviation.reshape(-1)]


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    _margin: int,
    zero_centered: bool,
) -> list[Tensor]:
    """Return the gradients of input, weight and bias."""
    gamma = _get_gain(weight, zero_centered)
    rows = (*x.shape[:-1], 1)
    wide = mean.dtype  # of the forward pass: FP32 where that was fused with the quantisation
    gradients = _layer_norm_backward(
        dy.reshape(x.shape).to(wide),
        x.detach().to(wide),
        [x.shape[-1]],
        mean.reshape(rows),
        deviation.reshape(rows),
        gamma.to(wide),
        torch.zeros_like(gamma, dtype=wide),
        [True, True, True],
    )
    return [gradient.to(x.dtype) for gradient in gradients]

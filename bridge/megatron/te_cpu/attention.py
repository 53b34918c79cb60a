# ruff: noqa: N803  (shape suffixes are capitals)
"""Fused attention of the extension as torch's `scaled_dot_product_attention`, in BF16, FP16 or FP32.

It takes causal attention and attention without a mask; everything else goes to Transformer Engine's unfused attention.
FP8 attention is not modelled.

Shapes: S sequence, B batch, N heads, G key/value heads, D width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation

from bridge.megatron import wide_gemm
from bridge.megatron.te_cpu.enums import ENUMS

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKENDS: Any = ENUMS["NVTE_Fused_Attn_Backend"]
_MASKS = ("NVTE_NO_MASK", "NVTE_CAUSAL_MASK")
_LAYOUTS = ("NVTE_SBHD_SBHD_SBHD", "NVTE_BSHD_BSHD_BSHD")


def get_fused_attn_backend(params: Any) -> tuple[Any, str]:
    """Return the fused back end for Transformer Engine's `FusedAttentionParams`, or none with the reason."""
    reasons = [
        reason
        for reason, applies in (
            ("mask", params.attn_mask_type.name not in _MASKS),
            ("bias", params.bias_type.name != "NVTE_NO_BIAS"),
            ("softmax", params.softmax_type.name != "NVTE_VANILLA_SOFTMAX"),
            ("window", params.window_size_left != -1),
            ("dropout", params.dropout != 0.0),
            ("layout", params.qkv_layout.name not in _LAYOUTS),
            ("dtype", torch.uint8 in (params.qkv_dtype, params.o_dtype) or int(params.qkv_dtype) >= 7),
        )
        if applies
    ]
    if reasons:
        return _BACKENDS.NVTE_No_Backend, f"the CPU version has no such {', '.join(reasons)}"
    return _BACKENDS.NVTE_F16_arbitrary_seqlen, ""


_AXES = {"SBHD": (1, 2, 0, 3), "BSHD": (0, 2, 1, 3)}
"""Format -> the permutation to (B, N, S, D)."""
_BACK = {"SBHD": (2, 0, 1, 3), "BSHD": (0, 2, 1, 3)}


def _format(name: str) -> str:
    """Return SBHD or BSHD of the name of a format or of a layout."""
    return name.removeprefix("NVTE_").split("_")[0]


def _attended(
    q_BNSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, scale: float, mask: Any
) -> torch.Tensor:
    """Return the attended values, in the dtype of the operands."""
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BGSD,
        v_BGSD,
        is_causal=mask.name == "NVTE_CAUSAL_MASK",
        scale=scale,
        enable_gqa=q_BNSD.shape[1] != k_BGSD.shape[1],
    )


def _inside(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor as (B, N, S, D), in the dtype that this CPU multiplies."""
    slow = wide_gemm.is_installed() and tensor.dtype in wide_gemm.slow_dtypes()
    return tensor.detach().permute(_AXES[layout]).to(torch.float32 if slow else tensor.dtype)


def fused_attn_fwd(*arguments: Any) -> list[Any]:
    """Return the attended values, an empty softmax statistic and an empty random state.

    Source: the order of the arguments is that of pytorch/cpp_extensions/fused_attn.py:367-400.
    """
    scale, layout, out_format, mask = arguments[3], arguments[6], arguments[7], arguments[10]
    q, k, v = (_inside(tensor, _format(layout.name)) for tensor in arguments[16:19])
    out = _attended(q, k, v, scale, mask).permute(_BACK[_format(out_format.name)]).contiguous()
    return [out.to(arguments[19]), torch.empty(0), torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*arguments: Any) -> list[Any]:
    """Return the gradients of query, key and value, and two Nones; the forward pass is computed again.

    Source: the order of the arguments is that of pytorch/cpp_extensions/fused_attn.py:618-651.
    """
    scale, layout, gradient_format, mask = arguments[2], arguments[5], arguments[7], arguments[12]
    gradients_layout = arguments[8]
    with torch.enable_grad():
        inputs = [_inside(tensor, _format(layout.name)).requires_grad_() for tensor in arguments[19:22]]
        out = _attended(inputs[0], inputs[1], inputs[2], scale, mask)
        found = torch.autograd.grad(out, inputs, _inside(arguments[23], _format(gradient_format.name)).to(out.dtype))
    back = _BACK[_format(gradients_layout.name)]
    return [*(gradient.permute(back).contiguous().to(arguments[24]) for gradient in found), None, None]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (get_fused_attn_backend, fused_attn_fwd, fused_attn_bwd)
}
"""Functions of the extension by name."""

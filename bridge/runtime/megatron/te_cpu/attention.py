"""Fused attention of the extension as torch's `scaled_dot_product_attention`, in BF16, FP16 or FP32.

It takes causal attention and attention without a mask; everything else goes to Transformer Engine's unfused attention,
which has no context parallelism. FP8 attention is not modelled.

Shapes: S sequence, B batch, N heads, G key/value heads, D width of a head.
"""

from typing import Any

import torch

from bridge.runtime.megatron.causal_attention import attended, multiplied_dtype
from bridge.runtime.megatron.te_cpu.enums import ENUMS

_BACKENDS: Any = ENUMS["NVTE_Fused_Attn_Backend"]
_MASKS = ("NVTE_NO_MASK", "NVTE_CAUSAL_MASK", "NVTE_CAUSAL_BOTTOM_RIGHT_MASK")
_LAYOUTS = ("NVTE_SBHD_SBHD_SBHD", "NVTE_BSHD_BSHD_BSHD")


def get_fused_attn_backend(params: Any) -> tuple[Any, str]:
    """Return the fused back end for Transformer Engine's `FusedAttentionParams`, or none with the reason."""
    mask = params.attn_mask_type.name
    differs = {
        "mask": mask not in _MASKS,
        "lengths": mask == "NVTE_CAUSAL_MASK" and params.max_seqlen_q != params.max_seqlen_kv,
        "bias": params.bias_type.name != "NVTE_NO_BIAS",
        "softmax": params.softmax_type.name != "NVTE_VANILLA_SOFTMAX",
        "window": params.window_size_left != -1,
        "dropout": params.dropout != 0.0,
        "layout": params.qkv_layout.name not in _LAYOUTS,
        "dtype": torch.uint8 in (params.qkv_dtype, params.o_dtype) or int(params.qkv_dtype) >= 7,
    }
    reasons = [name for name, is_so in differs.items() if is_so]
    if reasons:
        return _BACKENDS.NVTE_No_Backend, f"the CPU version has no such {', '.join(reasons)}"
    return _BACKENDS.NVTE_F16_arbitrary_seqlen, ""


_AXES = {"SBHD": (1, 2, 0, 3), "BSHD": (0, 2, 1, 3)}
"""Format -> the permutation to (B, N, S, D)."""
_BACK = {"SBHD": (2, 0, 1, 3), "BSHD": (0, 2, 1, 3)}


def _format(name: str) -> str:
    """Return SBHD or BSHD of the name of a format or of a layout."""
    return name.removeprefix("NVTE_").split("_")[0]


def _inside(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor as (B, N, S, D), in the dtype that this CPU multiplies."""
    return tensor.detach().permute(_AXES[layout]).to(multiplied_dtype(tensor.dtype))


def _attended(
    given: list[torch.Tensor], layout: str, **how: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return query, key and value as leaves of a graph, and the attended values at its end.

    What the graph keeps stands for the kernel's own statistics, and is hidden from whoever counts saved tensors.
    """
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept),
    ):
        inputs = [_inside(tensor, layout).requires_grad_() for tensor in given[:3]]
        return inputs, attended(*inputs, **how)


def _given(arguments: tuple[Any, ...], name: str) -> list[Any]:
    """Return the arguments of one of the extension's enums."""
    return [argument for argument in arguments if type(argument).__name__ == name]


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return query, key and value, and in the backward pass the output and its gradient, with their four axes."""
    return [
        argument
        for argument in arguments
        if isinstance(argument, torch.Tensor) and argument.dim() == 4
    ]


def fused_attn_fwd(*arguments: Any) -> list[Any]:
    """Return the attended values, an empty softmax statistic, which has the graph with it, and an empty random state.

    Source: pytorch/cpp_extensions/fused_attn.py:367-400.
    """
    (layout,), (mask,) = _given(arguments, "NVTE_QKV_Layout"), _given(arguments, "NVTE_Mask_Type")
    out_format = _given(arguments, "NVTE_QKV_Format")[0]
    given = _tensors(arguments)
    how = {"scale": arguments[3], "is_causal": mask.name != "NVTE_NO_MASK"}
    statistic = torch.empty(0)
    _, out = statistic.graph = _attended(given, _format(layout.name), **how)  # type: ignore[attr-defined]
    out = out.detach().permute(_BACK[_format(out_format.name)]).contiguous()
    return [out.to(given[0].dtype), statistic, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*arguments: Any) -> list[Any]:
    """Return the gradients of query, key and value, and two Nones; without the graph the forward pass runs again.

    Source: pytorch/cpp_extensions/fused_attn.py:618-651.
    """
    layouts, (mask,) = _given(arguments, "NVTE_QKV_Layout"), _given(arguments, "NVTE_Mask_Type")
    formats = _given(arguments, "NVTE_QKV_Format")
    given = _tensors(arguments)
    kept = (
        one.__dict__.pop("graph", None)
        for argument in arguments
        if isinstance(argument, list)
        for one in argument
    )
    how = {"scale": arguments[2], "is_causal": mask.name != "NVTE_NO_MASK"}
    inputs, out = next(filter(None, kept), None) or _attended(
        given, _format(layouts[0].name), **how
    )
    found = torch.autograd.grad(
        out, inputs, _inside(given[4], _format(formats[1].name)).to(out.dtype)
    )
    back = _BACK[_format(layouts[-1].name)]
    return [
        *(gradient.permute(back).contiguous().to(given[0].dtype) for gradient in found),
        None,
        None,
    ]

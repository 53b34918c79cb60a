"""Fused attention of the extension as torch's `scaled_dot_product_attention`.

It computes causal attention and attention without a mask, in BF16, FP16 or FP32. All other attention
goes to Transformer Engine's unfused attention, which has no context parallelism. FP8 attention is
not modelled.

Shapes: S sequence, B batch, N heads, G key/value heads, D width of a head.
"""

from typing import Any

import torch

from bridge.runtime.megatron.causal_attention import compute_attention, get_gemm_dtype
from bridge.runtime.megatron.te_cpu.enums import ENUMS

_FUSED_BACKENDS: Any = ENUMS["NVTE_Fused_Attn_Backend"]
_SUPPORTED_MASKS = ("NVTE_NO_MASK", "NVTE_CAUSAL_MASK", "NVTE_CAUSAL_BOTTOM_RIGHT_MASK")
_SUPPORTED_LAYOUTS = ("NVTE_SBHD_SBHD_SBHD", "NVTE_BSHD_BSHD_BSHD")


def get_fused_attn_backend(params: Any) -> tuple[Any, str]:
    """Return the fused back end for TE's `FusedAttentionParams`, or none with the reason."""
    mask = params.attn_mask_type.name
    differs = {
        "mask": mask not in _SUPPORTED_MASKS,
        "lengths": mask == "NVTE_CAUSAL_MASK" and params.max_seqlen_q != params.max_seqlen_kv,
        "bias": params.bias_type.name != "NVTE_NO_BIAS",
        "softmax": params.softmax_type.name != "NVTE_VANILLA_SOFTMAX",
        "window": params.window_size_left != -1,
        "dropout": params.dropout != 0.0,
        "layout": params.qkv_layout.name not in _SUPPORTED_LAYOUTS,
        "dtype": torch.uint8 in (params.qkv_dtype, params.o_dtype) or int(params.qkv_dtype) >= 7,
    }
    reasons = [feature for feature, is_asked_for in differs.items() if is_asked_for]
    if reasons:
        return _FUSED_BACKENDS.NVTE_No_Backend, f"the CPU version has no such {', '.join(reasons)}"
    return _FUSED_BACKENDS.NVTE_F16_arbitrary_seqlen, ""


_TO_BNSD = {"SBHD": (1, 2, 0, 3), "BSHD": (0, 2, 1, 3)}
"""Format -> the permutation to (B, N, S, D)."""
_FROM_BNSD = {"SBHD": (2, 0, 1, 3), "BSHD": (0, 2, 1, 3)}
"""Format -> the permutation from (B, N, S, D)."""
_FWD_SCALE_INDEX = 3
"""Position of the softmax scale among the arguments of `fused_attn_fwd`."""
_BWD_SCALE_INDEX = 2
"""Position of the softmax scale among the arguments of `fused_attn_bwd`."""
_BWD_GRADIENT_INDEX = 4
"""Number of the output's gradient among the tensors of `fused_attn_bwd` with four axes."""


def _parse_format(name: str) -> str:
    """Return SBHD or BSHD of the name of a format or of a layout."""
    return name.removeprefix("NVTE_").split("_")[0]


def _convert_to_bnsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor as (B, N, S, D), in the dtype that this CPU multiplies."""
    return tensor.detach().permute(_TO_BNSD[layout]).to(get_gemm_dtype(tensor.dtype))


def _attend_with_graph(
    tensors: list[torch.Tensor], layout: str, **how: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return query, key and value as leaves of a graph, and the attended values at its end.

    The tensors that the graph saves take the place of the kernel's statistics. Hooks hide them from
    code that counts saved tensors.
    """
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept),
    ):
        inputs = [_convert_to_bnsd(tensor, layout).requires_grad_() for tensor in tensors[:3]]
        return inputs, compute_attention(*inputs, **how)


def _select_enum_members(arguments: tuple[Any, ...], name: str) -> list[Any]:
    """Return the arguments that are members of an enum of the extension."""
    return [argument for argument in arguments if type(argument).__name__ == name]


def _select_4d_tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return query, key and value, with their four axes.

    In the backward pass the output and its gradient follow.
    """
    tensors = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.dim() == 4:
            tensors.append(argument)
    return tensors


def _pop_graph(arguments: tuple[Any, ...]) -> Any:
    """Remove the graph of the forward pass from the softmax statistic, and return it or None."""
    graph = None
    for argument in arguments:
        if isinstance(argument, list):
            for tensor in argument:
                if graph is None:
                    graph = tensor.__dict__.pop("graph", None)
    return graph


def fused_attn_fwd(*arguments: Any) -> list[Any]:
    """Return the attended values, an empty softmax statistic, and an empty random state.

    The statistic has the graph of the backward pass as an attribute.

    Source: pytorch/cpp_extensions/fused_attn.py:367-400.
    """
    (layout,) = _select_enum_members(arguments, "NVTE_QKV_Layout")
    (mask,) = _select_enum_members(arguments, "NVTE_Mask_Type")
    out_format = _select_enum_members(arguments, "NVTE_QKV_Format")[0]
    tensors = _select_4d_tensors(arguments)
    how = {"scale": arguments[_FWD_SCALE_INDEX], "is_causal": mask.name != "NVTE_NO_MASK"}
    statistic = torch.empty(0)
    inputs, out = _attend_with_graph(tensors, _parse_format(layout.name), **how)
    statistic.graph = inputs, out  # type: ignore[attr-defined]
    out = out.detach().permute(_FROM_BNSD[_parse_format(out_format.name)]).contiguous()
    return [out.to(tensors[0].dtype), statistic, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*arguments: Any) -> list[Any]:
    """Return the gradients of query, key and value, and two Nones.

    Without a graph the forward pass is computed once more.

    Source: pytorch/cpp_extensions/fused_attn.py:618-651.
    """
    layouts = _select_enum_members(arguments, "NVTE_QKV_Layout")
    (mask,) = _select_enum_members(arguments, "NVTE_Mask_Type")
    formats = _select_enum_members(arguments, "NVTE_QKV_Format")
    tensors = _select_4d_tensors(arguments)
    graph = _pop_graph(arguments)
    if graph is None:
        is_causal = mask.name != "NVTE_NO_MASK"
        layout = _parse_format(layouts[0].name)
        graph = _attend_with_graph(
            tensors, layout, scale=arguments[_BWD_SCALE_INDEX], is_causal=is_causal
        )
    inputs, out = graph
    grad_output = _convert_to_bnsd(tensors[_BWD_GRADIENT_INDEX], _parse_format(formats[1].name)).to(
        out.dtype
    )
    back = _FROM_BNSD[_parse_format(layouts[-1].name)]
    results: list[Any] = []
    for gradient in torch.autograd.grad(out, inputs, grad_output):
        results.append(gradient.permute(back).contiguous().to(tensors[0].dtype))
    return [*results, None, None]

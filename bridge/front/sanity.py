"""Numbers that no model can be built with, refused before Megatron Core meets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.plan.shape import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.front.problems import Problems

__all__ = ["require_sane_model"]

AT_LEAST_ONE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""Model fields that count something; a model of Mamba layers alone has no attention heads."""


def require_sane_model(model: Mapping[str, Any], problems: Problems) -> None:
    """Add every number of the model section that no model can be built with.

    Values that are no whole numbers are left to the reader of types, and fields that are absent to Megatron's defaults.
    """
    numbers = {name: whole_number(model.get(name)) for name in AT_LEAST_ONE}
    is_hybrid = any(model.get(name) for name in ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"))
    wrong = {name for name, value in numbers.items() if value is not None and value < 1}
    if is_hybrid:
        wrong -= {"num_attention_heads", "num_query_groups", "ffn_hidden_size"}
    for name in AT_LEAST_ONE:
        if name in wrong:
            problems.add(f"model.{name}", "must be at least 1", numbers[name], "Use 1 or more.")
    heads, groups, hidden = (numbers[name] for name in ("num_attention_heads", "num_query_groups", "hidden_size"))
    if wrong or is_hybrid or not heads:
        return
    if groups and heads % groups:
        problems.add("model.num_query_groups", f"must divide the {heads} attention heads", groups, "Use a divisor.")
    is_latent = bool(model.get("multi_latent_attention"))
    if hidden and hidden % heads and model.get("kv_channels") is None and not is_latent:
        near = min(range(1, hidden + 1), key=lambda count: (hidden % count != 0, abs(count - heads)))
        rule = f"must be a multiple of the {heads} attention heads while model.kv_channels is not set"
        problems.add("model.hidden_size", rule, hidden, f"Use {near} heads, or state model.kv_channels.")

"""Names of the plan's modules as Megatron Core has them within one model chunk, which per-module recipes match.

    ModulePaths.of(model).path("5", 0, "linear_fc2")     # "decoder.layers.0.mlp.linear_fc2"

Source: `named_modules()` of GPTModel and MambaModel, megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.precision.module_names import OF_A_LAYER
from bridge.rules.fields import read_field
from bridge.rules.versions import at_least, installed

OTHER_PARTS = {
    "self_attention": ("core_attention", "q_layernorm", "k_layernorm", "kv_layernorm", "delta_rule", "out_norm"),
    "mlp": ("router",),
    "mixer": ("conv1d", "ssm", "gated_norm"),
}
"""Module of a layer -> its own modules next to the linear layers."""
_PARENT_OF = {name: f"{parent}." for parent, names in OTHER_PARTS.items() for name in (*OF_A_LAYER[parent], *names)}
OF_MTP = ("enorm", "hnorm", "eh_proj", "final_layernorm")
"""Modules of a multi-token-prediction layer around its transformer layer."""
RENAMED = {"gated_norm": "norm"}
"""Name in the plan -> name in Megatron, where a layer has two modules of the same name."""


@dataclass(frozen=True, kw_only=True)
class ModulePaths:
    """How a model names its modules."""

    are_experts_grouped: bool = False
    """The experts of a layer are one module (`moe_grouped_gemm`)."""
    inside_mtp: str = "mtp_model_layer"
    """Name of the transformer layer inside a multi-token-prediction layer."""
    mixer: str = "mixer"
    """Name of the module that mixes tokens without a softmax: that of a Mamba layer, or of a gated delta net."""

    @classmethod
    def of(cls, model: Any) -> ModulePaths:
        """Return the names of a model's config values, in the installed megatron-core or else the newest."""
        version = installed("mcore")
        is_old = version is not None and not at_least(version, "0.17")
        return cls(
            are_experts_grouped=bool(read_field(model, "moe_grouped_gemm", default=False)),
            inside_mtp="transformer_layer" if is_old else "mtp_model_layer",
            mixer="mixer" if read_field(model, "experimental_attention_variant") is None else "self_attention",
        )

    def path(self, label: str, index: int, module: str) -> str:
        """Return the name of a module by the label of its row in the plan and its layer's number within the chunk."""
        if label == "embedding":
            return f"embedding.{module}"
        if label == "output":
            return module if module == "output_layer" else f"decoder.{module}"
        if label.startswith("mtp"):
            depth, _, inner = label.partition(" ")[2].partition(".")
            outer = f"mtp.layers.{int(depth) - 1}"
            if inner:
                return f"{outer}.{self.inside_mtp}.layers.{int(inner) - 1}.{self._inner(module)}"
            return f"{outer}.{module}" if module in OF_MTP else f"{outer}.{self.inside_mtp}.{self._inner(module)}"
        return f"decoder.layers.{index}.{self._inner(module)}"

    def _inner(self, module: str) -> str:
        """Return a module's name within its layer; the first expert stands for all of them."""
        expert = module.removeprefix("experts.")
        if expert != module:
            return f"mlp.experts.{expert}" if self.are_experts_grouped else f"mlp.experts.local_experts.0.{expert}"
        if module.startswith("shared_experts."):
            return f"mlp.{module}"
        if module.startswith("indexer."):
            return f"self_attention.core_attention.{module}"
        parent = _PARENT_OF.get(module, "")
        return f"{f'{self.mixer}.' if parent == 'mixer.' else parent}{RENAMED.get(module, module)}"

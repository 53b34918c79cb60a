"""`ModulePaths`: the names of a model's modules within a chunk, as Megatron has them.

ModulePaths.from_model(model).path("3", 2, "linear_qkv")
# "decoder.layers.2.self_attention.linear_qkv"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from bridge.precision.linear_names import LINEAR_LAYERS
from bridge.target.fields import read_field
from bridge.target.versions import get_installed_version, is_at_least

FURTHER_MODULES = {
    "self_attention": (
        "core_attention",
        "q_layernorm",
        "k_layernorm",
        "kv_layernorm",
        "delta_rule",
        "out_norm",
        "linear_kv_proj",
        "linear_o_group_proj",
    ),
    "mlp": ("router",),
    "mixer": ("conv1d", "ssm", "gated_norm"),
}
"""Module of a layer -> the modules inside it, without the linear layers of `LINEAR_LAYERS`."""


def _build_parent_table() -> dict[str, str]:
    """Return module -> the module of a layer that contains it."""
    parents: dict[str, str] = {}
    for parent, names in FURTHER_MODULES.items():
        for name in (*LINEAR_LAYERS[parent], *names):
            parents[name] = parent
    return parents


_PARENT_OF = _build_parent_table()
"""Module -> the module of a layer that contains it."""
MTP_MODULES = ("enorm", "hnorm", "eh_proj", "e_proj", "h_proj", "hc_head", "final_layernorm")
"""Modules of a multi-token-prediction layer outside of its transformer layer."""
MEGATRON_NAMES = {"gated_norm": "norm"}
"""Name in the plan -> name in Megatron, if they differ.

A Mamba layer has two modules with the name `norm`. In the plan, one of them has another name.
"""


class MtpNumbers(NamedTuple):
    """The numbers in the label of a multi-token-prediction layer: "mtp 1", "mtp 1.2"."""

    depth: int
    """The number of the prediction layer, from 1."""
    inner: int | None = None
    """The number of a layer inside the prediction layer of a hybrid model, from 1.

    None: the label is of the prediction layer itself.
    """

    @property
    def label(self) -> str:
        """The label of the layer in the plan."""
        if self.inner is None:
            return f"mtp {self.depth}"
        return f"mtp {self.depth}.{self.inner}"

    @classmethod
    def from_label(cls, label: str) -> Self:
        """Return the numbers in the label of a prediction layer (`is_mtp_label`)."""
        depth, _, inner = label.partition(" ")[2].partition(".")
        if not inner:
            return cls(int(depth))
        return cls(int(depth), int(inner))


def is_mtp_label(label: str) -> bool:
    """Return whether the label of a layer is of a prediction layer, or of a layer inside it."""
    return label.startswith("mtp")


@dataclass(frozen=True, kw_only=True)
class ModulePaths:
    """The names of a model's modules within a chunk.

    They equal the names in `named_modules()` of GPTModel and MambaModel in 0.16.1 and 0.19.2.
    """

    are_experts_grouped: bool = False
    """Whether the experts of a layer are one module (`moe_grouped_gemm`)."""
    inside_mtp: str = "mtp_model_layer"
    """The name of the transformer layer inside a multi-token-prediction layer."""
    mixer: str = "mixer"
    """The name of the module of a Mamba layer or of a gated delta net that mixes tokens."""

    @classmethod
    def from_model(cls, model: object) -> ModulePaths:
        """Return the names of the modules of a model config.

        They are the names in the installed megatron-core, or else in the newest version.
        """
        version = get_installed_version("mcore")
        is_old = version is not None and not is_at_least(version, "0.17")
        are_grouped = bool(read_field(model, "moe_grouped_gemm", default=False))
        variant = read_field(model, "experimental_attention_variant")
        inside_mtp = "mtp_model_layer"
        if is_old:
            inside_mtp = "transformer_layer"
        mixer = "self_attention"
        if variant is None:
            mixer = "mixer"
        return cls(are_experts_grouped=are_grouped, inside_mtp=inside_mtp, mixer=mixer)

    def path(self, label: str, index: int, module: str) -> str:
        """Return the name of a module.

        Args:
            label: The label of its layer in the plan.
            index: The number of its layer within the chunk, from 0.
            module: The name of the module in the plan.
        """
        if label == "embedding":
            return f"embedding.{module}"
        if label == "output":
            if module == "output_layer":
                return module
            return f"decoder.{module}"
        if not is_mtp_label(label):
            return f"decoder.layers.{index}.{self._get_inner_name(module)}"
        numbers = MtpNumbers.from_label(label)
        outer = f"mtp.layers.{numbers.depth - 1}"
        if numbers.inner is not None:
            inner_name = self._get_inner_name(module)
            return f"{outer}.{self.inside_mtp}.layers.{numbers.inner - 1}.{inner_name}"
        if module in MTP_MODULES:
            return f"{outer}.{module}"
        return f"{outer}.{self.inside_mtp}.{self._get_inner_name(module)}"

    def get_debug_name(self, label: str, module: str) -> str:
        """Return the name that Transformer Engine's debugger has for a linear layer.

        The name begins with the wrappers of a chunk, which are Megatron's DDP and Float16Module.
        Layers are numbered in the whole model, from 1. Each expert of a grouped layer has a name,
        and this method returns the name of the first expert.

        Source: nvdlfw-inspect 0.2.2 api.py, infer_and_assign_layer_names; Megatron
        Bridge 0.6.2 training/tensor_inspect.py; Transformer Engine 2.20.2
        pytorch/module/grouped_linear.py, _get_debug_quantizers.

        Args:
            label: Label of the layer in the plan.
            module: Name of the linear layer in the plan.
        """
        index = 0
        if label.isdecimal():
            index = int(label)
        name = self.path(label, index, module)
        if module.startswith("experts.") and self.are_experts_grouped:
            name += ".gemm_0"
        if is_mtp_label(label):
            depth = MtpNumbers.from_label(label).depth
            name = name.replace(f"mtp.layers.{depth - 1}.", f"mtp.layers.{depth}.", 1)
        return f"model.module.module.{name}"

    def _get_inner_name(self, module: str) -> str:
        """Return the name of a module within its layer."""
        expert = module.removeprefix("experts.")
        if expert != module:
            if self.are_experts_grouped:
                return f"mlp.experts.{expert}"
            return f"mlp.experts.local_experts.0.{expert}"
        if module.startswith("shared_experts."):
            return f"mlp.{module}"
        if module.startswith(("indexer.", "compressor")):
            return f"self_attention.core_attention.{module}"
        name = MEGATRON_NAMES.get(module, module)
        parent = _PARENT_OF.get(module)
        if parent is None:
            return name
        if parent == "mixer":
            parent = self.mixer
        return f"{parent}.{name}"

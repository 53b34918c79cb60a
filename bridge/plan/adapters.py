"""`Adapter`: the adapter of a fine-tuning run, a bypass of two small layers at each linear layer.

    peft = read_section("peft", {"type": "LoRA", "dim": 16, "target_modules": ["linear_qkv"]})
    adapter = Adapter.from_sections(peft, model)
    adapter.add_to_modules(modules, shape, path)    # and linear_qkv.adapter.linear_in, ...linear_out

The weights of the model are frozen: they have no gradient, no master and no state, and their linear
layers keep no input. In Megatron Bridge, the two layers of an adapter are Megatron's layers, not
Transformer Engine's. So they compute in the mode's dtype under each scheme. In mcore-bridge and
FlagScale, they are Transformer Engine's layers, and every tensor-parallel rank has one of the two
layers as a whole.

Source: NVIDIA-NeMo/Megatron-Bridge of 2026-08-22, src/megatron/bridge/peft; mcore-bridge 1.6.5
tuners/lora.py LoraParallelLinear; FlagScale da4935ec flagscale/train/peft/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bridge.errors import RunConfigError
from bridge.model.modules import Module
from bridge.model.section import Section
from bridge.model.shape import ModelShape
from bridge.target.fields import TE_ADAPTER

LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linear layers that have adapters by default."""
CANONICAL_LORA_TARGETS = (
    *("linear_q", "linear_k", "linear_v", "linear_proj"),
    *("linear_fc1_up", "linear_fc1_gate", "linear_fc2"),
)
"""The default for the kind `canonical`: each part of a fused layer has a separate adapter."""
ADAPTER_KINDS = {
    "LoRA": "lora",
    "VLMLoRA": "lora",
    "CanonicalLoRA": "canonical",
    "DoRA": "dora",
    TE_ADAPTER: "te",
}
"""Class of an adapter -> kind."""
TE_SPLITS = {"column": ("", "column"), "row": ("row", ""), "": ("", "")}
"""Split of a linear layer -> the splits of the two layers of a `TE_ADAPTER`.

A layer with an empty split is whole on each rank.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The adapter of a run, and the linear layers that have it."""

    kind: str = "lora"
    dim: int = 32
    """Width of the bypass."""
    targets: tuple[str, ...] = LORA_TARGETS
    """The linear layers that have the adapter: names, or patterns of paths with ``*``."""
    excluded: tuple[str, ...] = ()
    are_experts_grouped: bool = False
    """Whether the experts of a rank are a single layer of Transformer Engine."""
    shares_experts: bool = True
    """Whether all experts of a rank share a single adapter."""
    expert_dim: int = 32
    has_dropout: bool = False
    is_high_precision: bool = True
    """Whether its layers compute in high precision under each scheme."""

    @classmethod
    def from_sections(cls, peft: Section, model: Section) -> Adapter | None:
        """Return the adapter of a run, or None if all weights are trained.

        Raises:
            RunConfigError: The plan does not know the adapter's class.
        """
        if not peft.is_given:
            return None
        name = peft.get_stated("type", "LoRA")
        if name not in ADAPTER_KINDS:
            rule = f"cannot plan: the plan knows the adapters {', '.join(ADAPTER_KINDS)}"
            remedy = "Remove the section `peft` for a plan of full training."
            raise RunConfigError.of("peft.type", rule, name, remedy)
        kind = ADAPTER_KINDS[name]
        dim = peft.get_stated("rank") or peft.get_stated("dim") or 32
        topk = 1
        if peft.values["normalize_moe_lora"]:
            topk = model.values["moe_router_topk"]
        default_targets = CANONICAL_LORA_TARGETS if kind == "canonical" else LORA_TARGETS
        return cls(
            kind=kind,
            dim=dim,
            targets=_parse_names(peft.get_stated("target_modules", default_targets)),
            excluded=_parse_names(peft.get_stated("exclude_modules", ())),
            are_experts_grouped=bool(model.values["moe_grouped_gemm"]),
            shares_experts=peft.values["share_expert_adapters"],
            expert_dim=max(1, dim // topk),
            has_dropout=peft.values["dropout"] > 0,
            # mcore-bridge leaves FP8 for its adapters if the weights are stored in FP8.
            is_high_precision=kind != "te" or bool(model.values["fp8_param"]),
        )

    def add_to_modules(
        self, modules: tuple[Module, ...], shape: ModelShape, path: Callable[[str], str]
    ) -> tuple[Module, ...]:
        """Return the frozen modules of a layer, each followed by its adapter."""
        with_adapters: list[Module] = []
        for base in modules:
            with_adapters.append(replace(base, is_frozen=True))
            if self._may_have_adapter(base):
                with_adapters += self._modules(base, path(base.name), shape)
        return tuple(with_adapters)

    def _may_have_adapter(self, base: Module) -> bool:
        """Return whether a module is of a class that may have an adapter.

        Without names of targets, Megatron Bridge takes the linear layers that are split over the
        tensor-parallel ranks, the output layer among them. Grouped experts have another class.

        Source: NVIDIA-NeMo/Megatron-Bridge of 2026-08-22, peft/module_matcher.py match.
        """
        if self.targets or self.kind == "te":
            return base.kind in ("linear", "router")
        is_grouped = base.is_expert and self.are_experts_grouped
        return base.kind in ("linear", "head") and base.split != "" and not is_grouped

    def _modules(self, base: Module, path: str, shape: ModelShape) -> Iterator[Module]:
        """Yield the adapter's layers for a linear layer. A layer without an adapter has none."""
        dim = self.dim
        count = 1
        if base.is_expert:
            dim = self.expert_dim
            if not self.shares_experts:
                count = base.count
        split_in, split_out = base.split or "column", "column"
        if self.kind == "te":
            split_in, split_out = TE_SPLITS[base.split]
        adapter = replace(
            base,
            kind="adapter",
            is_high_precision=self.is_high_precision,
            bias=False,
            vectors=(),
            count=count,
        )
        for part, outputs in self._parts(base, path, shape).items():
            name = f"{base.name}.adapter{part}"
            vectors_in: tuple[tuple[str, int], ...] = ()
            vectors_out: tuple[tuple[str, int], ...] = ()
            if self.kind == "dora":
                # The magnitude belongs to the module that is split like the layer's outputs.
                magnitude = (("weight_magnitude", outputs),)
                if base.split == "row":
                    vectors_in = magnitude
                else:
                    vectors_out = magnitude
            yield replace(
                adapter,
                name=f"{name}.linear_in",
                outputs=dim,
                split=split_in,
                vectors=vectors_in,
            )
            yield replace(
                adapter,
                name=f"{name}.linear_out",
                inputs=dim,
                outputs=outputs,
                split=split_out,
                vectors=vectors_out,
            )

    def _parts(self, base: Module, path: str, shape: ModelShape) -> dict[str, int]:
        """Return part of a linear layer with a separate adapter -> its number of outputs."""
        name = base.name.rpartition(".")[2]
        parts = {name: base.outputs}
        if self.kind == "canonical" and name == "linear_qkv":
            key = shape.num_query_groups * shape.kv_channels
            parts = {
                "linear_q": shape.num_attention_heads * shape.kv_channels,
                "linear_k": key,
                "linear_v": key,
            }
        elif self.kind == "canonical" and name == "linear_fc1":
            parts = dict.fromkeys(("linear_fc1_up", "linear_fc1_gate"), base.outputs // 2)
        targets = [part for part in parts if self._is_target(part, path.replace(name, part))]
        if not targets:
            return {}
        if name in parts or base.is_expert:  # the adapter of an expert layer covers the whole layer
            return {"": base.outputs}
        outputs = {}
        for part in targets:
            suffix = part.replace("linear_", ".adapter_").replace("fc1_", "")
            outputs[suffix] = parts[part]
        return outputs

    def _is_target(self, name: str, path: str) -> bool:
        if self.targets:
            return any(_matches(pattern, name, path) for pattern in self.targets)
        return not any(_matches(pattern, name, path) for pattern in self.excluded)


def _matches(pattern: str, name: str, path: str) -> bool:
    return name == pattern or re.fullmatch(pattern.replace("*", ".*"), path) is not None


def _parse_names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple | set):
        return tuple(map(str, value))
    return ()

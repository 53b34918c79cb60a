"""The adapter of a fine-tuning run: a low-rank bypass of two linear layers beside each linear layer that it takes.

    adapter = Adapter.of(read_section("peft", {"type": "LoRA", "dim": 16, "target_modules": ["linear_qkv"]}))
    adapter.added_to(modules, shape, path)      # the modules, and linear_qkv.adapter.linear_in, ...linear_out

The model's own weights are frozen: they have no gradient, no master and no state, and their linear layers keep no
input. The adapter's two layers are Megatron's own, not Transformer Engine's, so that they compute in the mode's dtype
under each scheme. Source: NVIDIA-NeMo/Megatron-Bridge of 2026-08-22, src/megatron/bridge/peft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bridge.errors import RunConfigError
from bridge.model.modules import Module
from bridge.model.section import Section
from bridge.model.shape import ModelShape

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
CANONICAL = (
    *("linear_q", "linear_k", "linear_v", "linear_proj"),
    *("linear_fc1_up", "linear_fc1_gate", "linear_fc2"),
)
"""The default of adapters that take each part of a fused layer by itself."""
CLASSES = {"LoRA": "lora", "VLMLoRA": "lora", "CanonicalLoRA": "canonical", "DoRA": "dora"}
"""Class of Megatron Bridge -> kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter and the linear layers that it takes."""

    kind: str = "lora"
    dim: int = 32
    """Width of the bypass."""
    targets: tuple[str, ...] = ALL
    """Names, or patterns of paths with ``*``."""
    excluded: tuple[str, ...] = ()
    shares_experts: bool = True
    """The experts of a rank have one adapter together."""
    expert_dim: int = 32
    has_dropout: bool = False

    @classmethod
    def of(cls, peft: Section, model: Section) -> Adapter | None:
        """Return the adapter of a run, None where all weights are trained; RunConfigError for an unknown class."""
        if not peft.is_given:
            return None
        name = peft.given("type", "LoRA")
        if name not in CLASSES:
            rule = f"cannot plan: the plan knows the adapters {', '.join(CLASSES)}"
            raise RunConfigError.of(
                "peft.type", rule, name, "Remove the section `peft` for a plan of full training."
            )
        kind, dim = CLASSES[name], peft.given("rank") or peft.given("dim") or 32
        topk = model.values["moe_router_topk"] if peft.values["normalize_moe_lora"] else 1
        return cls(
            kind=kind,
            dim=dim,
            targets=_names(peft.given("target_modules", CANONICAL if kind == "canonical" else ALL)),
            excluded=_names(peft.given("exclude_modules", ())),
            shares_experts=peft.values["share_expert_adapters"],
            expert_dim=max(1, dim // topk),
            has_dropout=peft.values["dropout"] > 0,
        )

    def added_to(
        self, modules: tuple[Module, ...], shape: ModelShape, path: Callable[[str], str]
    ) -> tuple[Module, ...]:
        """Return the modules of a layer, frozen, each with the adapter that it gets behind it."""
        found: list[Module] = []
        for base in modules:
            found.append(replace(base, is_frozen=True))
            if base.kind in ("linear", "router"):
                found += self._modules(base, path(base.name), shape)
        return tuple(found)

    def _modules(self, base: Module, path: str, shape: ModelShape) -> Iterator[Module]:
        """Yield the layers of the adapter of a linear layer of the model, none where it takes none."""
        dim, count = (self.expert_dim, base.count) if base.is_expert else (self.dim, 1)
        if self.shares_experts:
            count = 1
        made = replace(base, kind="adapter", is_high=True, bias=False, vectors=(), count=count)
        for part, outputs in self._parts(base, path, shape).items():
            name = f"{base.name}.adapter{part}"
            magnitude = (("weight_magnitude", outputs),) if self.kind == "dora" else ()
            first, last = (
                (magnitude, ()) if base.split == "row" else ((), magnitude)
            )  # split like the layer's outputs
            yield replace(
                made,
                name=f"{name}.linear_in",
                outputs=dim,
                split=base.split or "column",
                vectors=first,
            )
            yield replace(
                made,
                name=f"{name}.linear_out",
                inputs=dim,
                outputs=outputs,
                split="column",
                vectors=last,
            )

    def _parts(self, base: Module, path: str, shape: ModelShape) -> dict[str, int]:
        """Return the outputs of each part of a linear layer that has a bypass of its own, by its name."""
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
        taken = {
            part: size
            for part, size in parts.items()
            if self._takes(part, path.replace(name, part))
        }
        if name in parts or base.is_expert:  # experts are taken as a whole
            return {"": base.outputs} if taken else {}
        return {
            part.replace("linear_", ".adapter_").replace("fc1_", ""): size
            for part, size in taken.items()
        }

    def _takes(self, name: str, path: str) -> bool:
        if self.targets:
            return any(_matches(pattern, name, path) for pattern in self.targets)
        return not any(_matches(pattern, name, path) for pattern in self.excluded)


def _matches(pattern: str, name: str, path: str) -> bool:
    return name == pattern or re.fullmatch(pattern.replace("*", ".*"), path) is not None


def _names(given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    return tuple(map(str, given)) if isinstance(given, list | tuple | set) else ()

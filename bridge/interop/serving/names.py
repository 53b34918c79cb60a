"""Names of a trained model's linear layers in its Hugging Face checkpoint, by family of models.

    family_of(shape, "qwen3_moe").served("decoder.layers.3.mlp.router", 48)     # ("model.layers.3.mlp.gate",)

Each of the many experts of a layer is written ``experts.*``. A module without a row has no name: none is guessed.

Source: the mappings of Megatron Bridge of 2026-08-22 (models/llama/llama_bridge.py, models/qwen/qwen3_moe_bridge.py,
models/deepseek/common.py, models/nemotron/nemotron_bridge.py); transformers 5.23.0 modeling_qwen2_moe.py, and
conversion_mapping.py for the names in a checkpoint of Mixtral.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bridge.errors import RunConfigError, close_matches
from bridge.precision.foreign_names import DEEPSEEK, FC1, FC2, LLAMA, PROJ, Q_PROJ, QKV, SHARED_FC1, SHARED_FC2
from bridge.rules.shape.model import ModelShape

ROUTER = "mlp.router"
SHARED_GATE = "mlp.shared_experts.gate"
EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
HEAD = "lm_head"
EH_PROJ = "eh_proj"
_ATTENTION = {name: LLAMA[name] for name in (QKV, PROJ)}
_PLACE = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.|transformer_layer\.)?(.+)")
_ONE_EXPERT = re.compile(r"\blocal_experts\.\d+\.")


class ModulePlace(NamedTuple):
    """A module's place in Megatron's model."""

    block: str
    """decoder or mtp; empty for a module in no layer."""
    layer: int
    name: str
    """The name within the layer; the whole name of a module in no layer."""


def place_of(path: str) -> ModulePlace:
    """Return the place that Megatron's name states; the experts of a layer share one, as one module does."""
    found = _PLACE.fullmatch(path)
    if found is None:
        return ModulePlace("", 0, path)
    return ModulePlace(found[1], int(found[2]), _ONE_EXPERT.sub("", found[3]))


def _experts(parent: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    inside = [f"{parent}.experts.*.{name}" for name in (gate, up, down)]
    return {ROUTER: (f"{parent}.gate",), EXPERTS[0]: (inside[0], inside[1]), EXPERTS[1]: (inside[2],)}


def _shared(name: str) -> dict[str, tuple[str, ...]]:
    gate, up, down = (f"mlp.{name}.{own}_proj" for own in ("gate", "up", "down"))
    return {SHARED_FC1: (gate, up), SHARED_FC2: (down,)}


_SWIGLU = _experts("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models whose checkpoints name their modules alike."""

    model_types: tuple[str, ...]
    """Values of `model_type` in a Hugging Face config.json; the first names the family."""
    names: Mapping[str, tuple[str, ...]]
    """Megatron's name within a layer -> the names there."""
    plain: tuple[str, ...] = ()
    """Megatron's names of modules that the code of the serving systems never quantises, whatever a config says."""

    @property
    def name(self) -> str:
        """The family's name."""
        return self.model_types[0]

    def served(self, path: str, num_layers: int) -> tuple[str, ...]:
        """Return the names of a module, each expert written ``*``; empty where none is known.

        Args:
            path: Megatron's name in the whole model.
            num_layers: Layers of the decoder, which the layers of DeepSeek's multi-token prediction follow.
        """
        block, number, inner = place_of(path)
        if not block:
            return (HEAD,) if inner == "output_layer" else ()
        if block == "mtp" and EH_PROJ not in self.names:
            return ()
        layer = number + num_layers if block == "mtp" else number
        return tuple(f"model.layers.{layer}.{name}" for name in self.names.get(inner, ()))


FAMILIES = (
    Family(model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), names=LLAMA),
    Family(model_types=("nemotron",), names={**_ATTENTION, FC1: ("mlp.up_proj",), FC2: ("mlp.down_proj",)}),
    Family(model_types=("qwen3_moe", "olmoe"), names={**LLAMA, **_SWIGLU}),
    Family(
        model_types=("qwen2_moe",),
        names={**LLAMA, **_SWIGLU, **_shared("shared_expert"), SHARED_GATE: ("mlp.shared_expert_gate",)},
    ),
    Family(
        model_types=("mixtral",),
        names={**_ATTENTION, **_experts("block_sparse_moe", "w1", "w3", "w2")},
        plain=(ROUTER,),
    ),
    Family(
        model_types=("deepseek_v3", "deepseek_v2", "kimi_k2"),
        names={
            **{name: names for name, names in LLAMA.items() if name != QKV},
            **DEEPSEEK,
            Q_PROJ: ("self_attn.q_proj",),
            **_SWIGLU,
            **_shared("shared_experts"),
            EH_PROJ: (EH_PROJ,),
        },
        plain=(ROUTER, EH_PROJ),
    ),
)
"""`plain`: the gate has no quantisation config in vLLM's deepseek_v2.py (002d607) and mixtral.py (005df92), and is no
linear layer in transformers 5.23.0; eh_proj is torch's own linear layer in vLLM's deepseek_mtp.py (03356f8) and in
SGLang's deepseek_nextn.py (0114f9c). Whether the gates of other families are quantised depends on the release."""
BY_TYPE = {name: family for family in FAMILIES for name in family.model_types}


def family_of(shape: ModelShape, model_type: str | None = None) -> Family | None:
    """Return the family of a model; None where its shape fits several or none.

    Args:
        shape: Its dimensions.
        model_type: `model_type` of the Hugging Face config, which decides.

    Raises:
        RunConfigError: No family has this model type.
    """
    if model_type is not None:
        if model_type not in BY_TYPE:
            rule = f"must be one of {', '.join(BY_TYPE)}"
            matches = close_matches(model_type, BY_TYPE)
            raise RunConfigError.of(
                "--model-type", rule, model_type, "The names of its modules are not known.", matches
            )
        return BY_TYPE[model_type]
    if shape.is_hybrid or not shape.gated_linear_unit or shape.attention_output_gate:
        return None
    if shape.latent is not None:
        return BY_TYPE["deepseek_v3"]
    if shape.experts is None:
        return BY_TYPE["llama"]
    return BY_TYPE["qwen2_moe"] if shape.experts.shared_gate else None

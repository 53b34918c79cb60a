"""Names of a trained model's linear layers in its Hugging Face checkpoint, by family of models.

    family_of(shape, "qwen3_moe").served("decoder.layers.3.mlp.router", 48)     # ("model.layers.3.mlp.gate",)

Each of the many experts of a layer is written ``experts.*``. A module without a row has no name: none is guessed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from bridge.convert.serving.formats import ROWS
from bridge.errors import RunConfigError, close_matches
from bridge.model.shape import ModelShape
from bridge.plan.precision_plan import compact
from bridge.precision.foreign_names import DEEPSEEK, LLAMA

HEAD = "lm_head"
_PLACE = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.|transformer_layer\.)?(.+)")
_ONE_EXPERT = re.compile(r"\blocal_experts\.\d+\.")
_PARENT = re.compile(r"model\.layers\.(\d+)\.(?!.*\bexperts\b)(.+)")
"""Layer and parent module; all experts of a layer are one module."""


def place_of(path: str) -> tuple[str, int, str]:
    """Return block, layer and name within it by Megatron's name of a module; no block: it is in no layer."""
    found = _PLACE.fullmatch(path)
    return (
        (found[1], int(found[2]), _ONE_EXPERT.sub("", found[3]))
        if found is not None
        else ("", 0, path)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models whose checkpoints name their modules alike, a row of `rows/serving.yaml`."""

    name: str | None
    names: Mapping[str, tuple[str, ...]]
    """Megatron's name within a layer -> the names there."""
    plain: tuple[str, ...] = ()
    """Megatron's names of modules that the code of the serving systems never quantises, whatever a config says."""

    def served(self, path: str, num_layers: int) -> tuple[str, ...]:
        """Return the names of a module by its name in the whole model, each expert written ``*``; empty: none is known.

        Layers of DeepSeek's multi-token prediction follow the `num_layers` of the decoder.
        """
        block, number, inner = place_of(path)
        if not block:
            return (HEAD,) if self.names and inner == "output_layer" else ()
        if block == "mtp" and "eh_proj" not in self.names:
            return ()
        layer = number + num_layers if block == "mtp" else number
        return tuple(f"model.layers.{layer}.{name}" for name in self.names.get(inner, ()))


def _family(row: Mapping[str, Any]) -> Family:
    known = {**LLAMA, **(DEEPSEEK if row.get("latent") else {}), **row.get("names", {})}
    names = {name: tuple(theirs) for name, theirs in known.items() if theirs is not None}
    return Family(name=row["model_types"][0], names=names, plain=tuple(row.get("plain", ())))


BY_TYPE = {
    name: family
    for row in ROWS["families"]
    for family in (_family(row),)
    for name in row["model_types"]
}
"""Value of `model_type` in a Hugging Face config.json -> family."""
NONE = Family(name=None, names={})
"""The family of a model whose names are not known."""


def family_of(shape: ModelShape, model_type: str | None = None) -> Family:
    """Return the family of a `model_type` of the Hugging Face config, else the only one that fits the shape, or `NONE`.

    RunConfigError where no family has this model type.
    """
    if model_type in BY_TYPE:
        return BY_TYPE[model_type]
    if model_type is not None:
        rule, remedy = (
            f"must be one of {', '.join(BY_TYPE)}",
            "The names of its modules are not known.",
        )
        raise RunConfigError.of(
            "--model-type", rule, model_type, remedy, close_matches(model_type, BY_TYPE)
        )
    if shape.is_hybrid or not shape.gated_linear_unit or shape.attention_output_gate:
        return NONE
    if shape.latent is not None:
        return BY_TYPE["deepseek_v3"]
    if shape.experts is None:
        return BY_TYPE["llama"]
    return BY_TYPE["qwen2_moe"] if shape.experts.shared_gate else NONE


def split(schemes: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a sentence for each group of modules that vLLM loads as one and that gets more than one scheme.

    `schemes`: name of a module in the checkpoint -> its scheme; None: not quantised.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for group, name in product(ROWS["fused"], schemes):
        parent, _, own = name.rpartition(".")
        place = _PARENT.fullmatch(parent) if own == group[0] else None
        given = [schemes[f"{parent}.{each}"] for each in group if f"{parent}.{each}" in schemes]
        if place is not None and len(given) == len(group) and len({*given}) > 1:
            fused = f"{', '.join(group[:-1])} and {group[-1]}"
            found.setdefault((fused, place[2]), []).append(str(int(place[1]) + 1))
    for (fused, inner), layers in found.items():
        yield f"vLLM refuses the config: it fuses {fused}, whose schemes differ in {inner} of layers {compact(layers)}."

"""Names of a trained model's linear layers in its Hugging Face checkpoint, by family of models.

    family = family_of(shape, "qwen3_moe")
    family.served("decoder.layers.3.mlp.router", 48)     # ("model.layers.3.mlp.gate",)

Each of the many experts of a layer is written ``experts.*``. A module without a row has no name:
none is guessed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from bridge.convert.serving.formats import FUSED, ROWS
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
    """Return block, layer and name within it by Megatron's name of a module.

    No block: it is in no layer.
    """
    match = _PLACE.fullmatch(path)
    if match is None:
        return "", 0, path
    return match[1], int(match[2]), _ONE_EXPERT.sub("", match[3])


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models whose checkpoints name their modules alike, a row of `rows/serving.yaml`."""

    name: str | None
    names: Mapping[str, tuple[str, ...]]
    """Megatron's name within a layer -> the names there."""
    plain: tuple[str, ...] = ()
    """Megatron's names of modules that the code of the serving systems never quantises, whatever a
    config says."""

    def served(self, path: str, num_layers: int) -> tuple[str, ...]:
        """Return the names of a module by its name in the whole model, each expert written ``*``.

        Empty: none is known.

        Layers of DeepSeek's multi-token prediction follow the `num_layers` of the decoder.
        """
        block, number, inner = place_of(path)
        if not block:
            if self.names and inner == "output_layer":
                return (HEAD,)
            return ()
        if block == "mtp" and "eh_proj" not in self.names:
            return ()
        layer = number
        if block == "mtp":
            layer += num_layers
        return tuple(f"model.layers.{layer}.{name}" for name in self.names.get(inner, ()))


def _family(row: Mapping[str, Any]) -> Family:
    known = dict(LLAMA)
    if row.get("latent"):
        known |= DEEPSEEK
    known |= row.get("names", {})
    names = {name: tuple(theirs) for name, theirs in known.items() if theirs is not None}
    return Family(name=row["model_types"][0], names=names, plain=tuple(row.get("plain", ())))


def _by_type() -> dict[str, Family]:
    families = {}
    for row in ROWS["families"]:
        families.update(dict.fromkeys(row["model_types"], _family(row)))
    return families


BY_TYPE = _by_type()
"""Value of `model_type` in a Hugging Face config.json -> family."""
NONE = Family(name=None, names={})
"""The family of a model whose names are not known."""


def family_of(shape: ModelShape, model_type: str | None = None) -> Family:
    """Return the family of a `model_type` of the Hugging Face config.

    Without a type it is the only family that fits the shape, or `NONE`. RunConfigError where no
    family has this model type.
    """
    if model_type in BY_TYPE:
        return BY_TYPE[model_type]
    if model_type is not None:
        rule = f"must be one of {', '.join(BY_TYPE)}"
        remedy = "The names of its modules are not known."
        matches = close_matches(model_type, BY_TYPE)
        raise RunConfigError.of("--model-type", rule, model_type, remedy, matches)
    if shape.is_hybrid or not shape.gated_linear_unit or shape.attention_output_gate:
        return NONE
    if shape.latent is not None:
        return BY_TYPE["deepseek_v3"]
    if shape.experts is None:
        return BY_TYPE["llama"]
    if shape.experts.shared_gate:
        return BY_TYPE["qwen2_moe"]
    return NONE


def split(schemes: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a sentence for each group of modules that vLLM loads as one, with several schemes.

    `schemes`: name of a module in the checkpoint -> its scheme; None: not quantised.
    """
    refused: dict[tuple[str, str], list[str]] = {}
    for group, name in product(FUSED.values(), schemes):
        parent, _, last = name.rpartition(".")
        if last != group[0]:
            continue
        place = _PARENT.fullmatch(parent)
        if place is None:
            continue
        siblings = [f"{parent}.{sibling}" for sibling in group]
        if not schemes.keys() >= set(siblings):
            continue
        if len(set(map(schemes.__getitem__, siblings))) > 1:
            fused = f"{', '.join(group[:-1])} and {group[-1]}"
            refused.setdefault((fused, place[2]), []).append(str(int(place[1]) + 1))
    for (fused, inner), layers in refused.items():
        differ = f"whose schemes differ in {inner} of layers {compact(layers)}"
        yield f"vLLM refuses the config: it fuses {fused}, {differ}."

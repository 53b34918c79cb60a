"""The names of a trained model's linear layers in its Hugging Face checkpoint, by family of models.

    family = get_family(shape, "qwen3_moe")
    family.served("decoder.layers.3.mlp.router", 48)     # ("model.layers.3.mlp.gate",)

The experts of a layer are written `experts.*`. A module without a row has no name, since names are
not guessed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridge.convert.serving.formats import FUSED_MODULES, SERVING_ROWS
from bridge.errors import RunConfigError, close_matches
from bridge.model.shape import ModelShape
from bridge.plan.precision_plan import format_ranges
from bridge.precision.foreign_names import DEEPSEEK_NAMES, LLAMA_NAMES

OUTPUT_HEAD = "lm_head"
ROUTER = "mlp.router"
"""Megatron's name of a router within a layer."""
_MODULE_PATTERN = re.compile(
    r"(decoder|mtp)\.layers\.(\d+)\.(?:mtp_model_layer\.|transformer_layer\.)?(.+)"
)
_EXPERT_PATTERN = re.compile(r"\blocal_experts\.\d+\.")
_PARENT_PATTERN = re.compile(r"model\.layers\.(\d+)\.(?!.*\bexperts\b)(.+)")
"""The layer, and the parent module within it. Experts do not match: they are a single module."""


class ModuleLocation(NamedTuple):
    """The location of a module in Megatron's model."""

    block: str
    """decoder or mtp; empty for a module outside the layers."""
    layer: int
    """The number of the layer in its block, from 0."""
    role: str
    """The name within the layer, without the number of an expert."""


def parse_module_path(path: str) -> ModuleLocation:
    """Return the location of a module by Megatron's name in the whole model."""
    match = _MODULE_PATTERN.fullmatch(path)
    if match is None:
        return ModuleLocation("", 0, path)
    return ModuleLocation(match[1], int(match[2]), _EXPERT_PATTERN.sub("", match[3]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """Models whose checkpoints name their modules alike, a row of `foreign/tables/serving.yaml`."""

    name: str | None
    """The name of the family; None for `UNKNOWN_FAMILY`."""
    names: Mapping[str, tuple[str, ...]]
    """Megatron's name within a layer -> the names within a layer of the checkpoint."""
    plain: tuple[str, ...] = ()
    """Megatron's names of modules that serving systems never quantise, with any config."""

    def served(self, path: str, num_layers: int) -> tuple[str, ...]:
        """Return the names of a module in the checkpoint, with `*` for the number of an expert.

        Args:
            path: Megatron's name of the module in the whole model.
            num_layers: Layers of the decoder. In a checkpoint the layers of multi-token prediction
                are numbered after them.

        Returns:
            Empty if no name is known.
        """
        location = parse_module_path(path)
        if not location.block:
            if self.names and location.role == "output_layer":
                return (OUTPUT_HEAD,)
            return ()
        layer = location.layer
        if location.block == "mtp":
            if "eh_proj" not in self.names:
                return ()
            layer += num_layers
        return tuple(f"model.layers.{layer}.{name}" for name in self.names.get(location.role, ()))


def _make_family(row: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a row. Its names replace the names of Llama; null: no such module."""
    served_names = dict(LLAMA_NAMES)
    if row.get("latent"):
        served_names |= DEEPSEEK_NAMES
    served_names |= row.get("names", {})
    names: dict[str, tuple[str, ...]] = {}
    for role, served in served_names.items():
        if served is not None:
            names[role] = tuple(served)
    return ModelFamily(name=row["model_types"][0], names=names, plain=tuple(row.get("plain", ())))


def _collect_families() -> dict[str, ModelFamily]:
    """Return the family of each model type in `foreign/tables/serving.yaml`."""
    families: dict[str, ModelFamily] = {}
    for row in SERVING_ROWS["families"]:
        family = _make_family(row)
        for model_type in row["model_types"]:
            families[model_type] = family
    return families


FAMILY_BY_TYPE = _collect_families()
"""Value of `model_type` in a Hugging Face config.json -> family."""
UNKNOWN_FAMILY = ModelFamily(name=None, names={})
"""The family of a model whose names are not known."""


def get_family(shape: ModelShape, model_type: str | None = None) -> ModelFamily:
    """Return the family of a model.

    Args:
        model_type: The `model_type` of the Hugging Face config. None: the only family that fits the
            shape, or `UNKNOWN_FAMILY`.

    Raises:
        RunConfigError: No family has this model type.
    """
    if model_type in FAMILY_BY_TYPE:
        return FAMILY_BY_TYPE[model_type]
    if model_type is not None:
        rule = f"must be one of {', '.join(FAMILY_BY_TYPE)}"
        remedy = "The names of its modules are not known."
        matches = close_matches(model_type, FAMILY_BY_TYPE)
        raise RunConfigError.of("--model-type", rule, model_type, remedy, matches)
    if shape.is_hybrid or not shape.gated_linear_unit or shape.attention_output_gate:
        return UNKNOWN_FAMILY
    if shape.latent is not None:
        return FAMILY_BY_TYPE["deepseek_v3"]
    if shape.experts is None:
        return FAMILY_BY_TYPE["llama"]
    if shape.experts.shared_gate:
        return FAMILY_BY_TYPE["qwen2_moe"]
    return UNKNOWN_FAMILY


def describe_fused_conflicts(schemes: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a sentence for each group of modules that vLLM loads as one, with several schemes.

    Args:
        schemes: Name of a module in the checkpoint -> its scheme; None: not quantised.
    """
    layers_by_group: dict[tuple[str, str], list[str]] = {}
    for group in FUSED_MODULES.values():
        for name in schemes:
            parent, _, last = name.rpartition(".")
            match = _PARENT_PATTERN.fullmatch(parent)
            if last != group[0] or match is None:
                continue
            layer, inner_parent = match.groups()
            members = [f"{parent}.{member}" for member in group]
            if _has_several_schemes(members, schemes):
                group_names = f"{', '.join(group[:-1])} and {group[-1]}"
                layers = layers_by_group.setdefault((group_names, inner_parent), [])
                layers.append(str(int(layer) + 1))
    for (group_names, inner_parent), layers in layers_by_group.items():
        yield (
            f"vLLM refuses the config: it fuses {group_names}, whose schemes differ in "
            f"{inner_parent} of layers {format_ranges(layers)}."
        )


def _has_several_schemes(members: Sequence[str], schemes: Mapping[str, str | None]) -> bool:
    """Return whether all of several modules are in the model, and their schemes differ."""
    if not schemes.keys() >= set(members):
        return False
    return len({schemes[member] for member in members}) > 1

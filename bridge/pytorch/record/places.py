"""Names of a model's modules as the plan has them: the layer's label and the name in it.

Megatron's layers are recognised by the names of their classes, so that a model of plain torch needs no Megatron. Other
modules have no layer, and their whole path as the name.
"""

import re
from collections.abc import Iterable

import torch

Place = tuple[str, str]
"""Label of the layer, name of the module."""
PREDICTION = "MultiTokenPredictionLayer"
LAYERS = frozenset({"TransformerLayer", "MambaLayer", PREDICTION})
"""Megatron's classes of layers with a `layer_number` in the whole model."""
ATTENTION_CORE = "core_attention"
MIXERS = ("mixer", "self_attention", "indexer")
"""Modules between linear layers: of a Mamba layer, of attention or a gated delta net, and of sparse attention."""
_CONTAINERS = re.compile(
    r"^(mtp_model_layer\.|transformer_layer\.)?(self_attention\.(core_attention\.(?=indexer))?|mlp\.|mixer\.)?(experts\.local_experts\.\d+\.)?"
)


def is_a(module: torch.nn.Module, names: Iterable[str]) -> bool:
    """Return whether a module is of a class of one of these names, or of a class derived from one."""
    wanted = set(names)
    return any(kind.__name__ in wanted for kind in type(module).__mro__)


def places(model: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, Place]:
    """Return the place of every module of a model, or of the chunks of one."""
    found: dict[torch.nn.Module, Place] = {}
    for chunk in model:
        for module in chunk.modules():
            if module in found or not is_a(module, LAYERS):
                continue
            is_mtp = is_a(module, (PREDICTION,))
            label = f"mtp {module.layer_number}" if is_mtp else str(module.layer_number)
            for name, part in module.named_modules():  # a layer inside a prediction layer is part of that one
                found.setdefault(part, (label, _short(name)))
        for path, module in chunk.named_modules():
            is_output = path.rpartition(".")[2] == "output_layer"
            found.setdefault(module, ("output", "output_layer") if is_output and found else ("", path))
    return found


def mixes_tokens(name: str) -> bool:
    """Return whether the matrix products of a module itself mix tokens: none of them is a linear layer's."""
    return name in MIXERS or ATTENTION_CORE in name.split(".")


def _short(name: str) -> str:
    """Return a module's name in its layer as the plan has it; all experts of a layer have one name."""
    match = _CONTAINERS.match(name)
    prefix = match.group() if match is not None else ""
    short = ("experts." if "experts.local_experts." in prefix else "") + name[len(prefix) :]
    return (
        "shared_experts.gate" if short == "shared_experts" else short
    )  # its own product; the others are of its layers

"""The source of a run's layers: Megatron Core, or a module whose layers cannot be planned.

    find_unplanned_layers({"spec": ["my.specs", "layer_spec"]}).sentence
    # "--spec my.specs layer_spec: the layers are built by that module and cannot be planned."

The layers that Megatron Core builds are known. The row `specs` of `foreign/tables/megatron_lm.yaml` has the
names of their specs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MEGATRON_CORE_MODELS = "megatron.core.models."
PLANNED_MODULE_PREFIXES = ("megatron.core.", "megatron.bridge.")
"""Packages whose functions build the layers that a config describes."""
BUILDER_ARGUMENT_PATTERN = re.compile(
    r"\Aspec\Z|(?:^|_)(?:layer_spec|model_provider(?:_path)?|model_builder)\Z"
)
"""Arguments that name the module which builds the model or its layers."""
SPEC_FIELD_PATTERN = re.compile(r"_spec\Z")
"""Fields of a model's class that name the function which builds its layers."""
PLANNED_PROVIDERS = frozenset({"gpt", "mamba", "hybrid"})
"""Values of `--model-provider` for models that are planned here."""
KITCHEN_ARGUMENT_CLAUSE = "Kitchen's layers compute as it says, and cannot be planned"
MODELOPT_CLAUSE = (
    "ModelOpt changes the layers as its configuration says, and they cannot be planned"
)
FOREIGN_BUILDER_CLAUSE = "the layers are built by that module and cannot be planned"
LIBRARY_ARGUMENTS = {
    **dict.fromkeys(("kitchen_config_file", "kitchen_recipe_number"), KITCHEN_ARGUMENT_CLAUSE),
    **dict.fromkeys(("modelopt_enabled", "export_quant_cfg"), MODELOPT_CLAUSE),
}
"""Argument by which another library changes the layers -> why they cannot be planned, as a
clause."""
MODELOPT_FIELD = "model.restore_modelopt_state"
"""Field of a saved config by which ModelOpt changes the layers."""
KITCHEN_FIELDS = ("use_kitchen", "use_kitchen_attention")
"""Fields of a model whose layers are Kitchen's."""
KITCHEN_SENTENCE = (
    "model.{name}: Kitchen computes its layers by a recipe of its own, and they cannot be planned."
)
SPEC_WORD_PATTERN = re.compile(r"[^\s\[\]',\"]+")
"""A word of `--spec`, whose value may be written as a list of Python."""


class UnplannedLayers(NamedTuple):
    """A source of layers that cannot be planned."""

    option: str
    """The option with its value: "--spec my.specs layer_spec"."""
    clause: str
    """Why the layers cannot be planned."""

    @property
    def sentence(self) -> str:
        """Why the run has no plan."""
        return f"{self.option}: {self.clause}."


def find_unplanned_layers(arguments: Mapping[str, Any]) -> UnplannedLayers | None:
    """Return the source of a run's layers if they cannot be planned; None if they can.

    Args:
        arguments: Name of an argument -> its value, or the value as it is written if only the
            run decides it.
    """
    for name, value in arguments.items():
        words = SPEC_WORD_PATTERN.findall(str(value))
        option = f"--{name.replace('_', '-')}"
        if value is not True:
            option = f"{option} {' '.join(words)}"
        if name in LIBRARY_ARGUMENTS and value not in (None, False):
            return UnplannedLayers(option, LIBRARY_ARGUMENTS[name])
        is_builder = BUILDER_ARGUMENT_PATTERN.search(name) is not None
        if is_builder and words and not is_known_spec(words):
            return UnplannedLayers(option, FOREIGN_BUILDER_CLAUSE)
    return None


def find_spec_no_plan_reason(fields: Mapping[str, Any]) -> str | None:
    """Return why the layers of a saved config cannot be planned, as a sentence; None if they can.

    Args:
        fields: Dotted key of a field of the model's own class -> its value; a function is its
            import path.
    """
    for path, value in fields.items():
        is_spec = SPEC_FIELD_PATTERN.search(path) is not None and isinstance(value, str)
        if is_spec and not value.startswith(PLANNED_MODULE_PREFIXES):
            return f"{path}: {value} builds the layers, and they cannot be planned."
        if path == MODELOPT_FIELD and value:
            return f"{path}: {MODELOPT_CLAUSE}."
    return None


def find_kitchen_no_plan_reason(sections: Mapping[str, Any]) -> str | None:
    """Return why a run cannot be planned whose layers are of the library Kitchen, as a sentence.

    It is None for a run without such layers.
    """
    model = sections.get("model")
    if not isinstance(model, Mapping):
        return None
    for name in KITCHEN_FIELDS:
        if model.get(name):
            return KITCHEN_SENTENCE.format(name=name)
    return None


def is_known_spec(words: Sequence[str]) -> bool:
    """Return whether the value of `--spec` or `--model-provider` names layers of Megatron Core.

    Args:
        words: The words of the value: a module and a function, or one word.
    """
    if len(words) == 1 and words[0] in PLANNED_PROVIDERS:
        return True
    is_of_core = words[0].startswith(MEGATRON_CORE_MODELS) or list(words) == ["local"]
    return is_of_core and words[-1].rpartition(".")[2] in _get_spec_implementations()


def find_layer_implementation(arguments: Mapping[str, Any]) -> str | None:
    """Return the value of `transformer_impl` that `--spec` chooses; None without a known spec."""
    words = SPEC_WORD_PATTERN.findall(str(arguments.get("spec") or ""))
    if not words or not is_known_spec(words):
        return None
    return _get_spec_implementations().get(words[-1].rpartition(".")[2])


def get_layer_settings() -> tuple[str, ...]:
    """Return the settings that do not describe the layers if another module builds them."""
    from bridge.read.megatron_lm.flags import TABLE  # most files have no such module

    return tuple(TABLE.data["of the layers"])


def _get_spec_implementations() -> Mapping[str, str]:
    """Return name of a spec of Megatron Core -> the `transformer_impl` of its layers."""
    from bridge.read.megatron_lm.flags import TABLE  # few files have a spec

    specs: Mapping[str, str] = TABLE.data["specs"]
    return specs

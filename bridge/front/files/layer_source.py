"""`unplanned_layers`: options that have another module build the layers of a run, whose plan nobody can know then.

Layers that Megatron Core builds itself are known, and stay planned: `SPECS` has the names of their specs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.front.files.layer_spec import OF_KITCHEN, OF_MODELOPT
from bridge.interop.megatron_lm.flags import TABLE

LAYERS: tuple[str, ...] = tuple(TABLE.data["of the layers"])
"""Settings that say nothing certain where another module builds the layers."""
SPECS: Mapping[str, str] = TABLE.data["specs"]
"""Last word of `--spec`, of Megatron Core's own layers -> the implementation of the layers."""
CORE = "megatron.core.models."
BUILDER = re.compile(r"\Aspec\Z|(?:^|_)(?:layer_spec|model_provider(?:_path)?|model_builder)\Z")
"""Arguments that name what builds the model, or its layers."""
OWN_MODELS = frozenset({"gpt", "mamba", "hybrid"})
"""Values of `--model-provider` for models that are planned here."""
LIBRARIES = {
    **dict.fromkeys(("kitchen_config_file", "kitchen_recipe_number"), OF_KITCHEN),
    **dict.fromkeys(("modelopt_enabled", "export_quant_cfg"), OF_MODELOPT),
}
"""Argument by which another library changes the layers -> why they cannot be planned, as a clause."""
WORD = re.compile(r"[^\s\[\]',\"]+")


def unplanned_layers(arguments: Mapping[str, Any]) -> str | None:
    """Return why the layers of a run cannot be planned, as a sentence; None where they can.

    Args:
        arguments: Name of an argument -> its value, or the value as it is written where only the run decides it.
    """
    for name, value in arguments.items():
        words = WORD.findall(str(value))
        option = f"--{name.replace('_', '-')}"
        if value is not True:
            option = f"{option} {' '.join(words)}"
        if name in LIBRARIES and value not in (None, False):
            return f"{option}: {LIBRARIES[name]}."
        if BUILDER.search(name) and words and not is_known(words):
            return f"{option}: the layers are built by that module and cannot be planned."
    return None


def is_known(words: list[str]) -> bool:
    """Return whether words name layers that Megatron Core builds, or one of its models."""
    if len(words) == 1 and words[0] in OWN_MODELS:
        return True
    is_of_core = words[0].startswith(CORE) or words == ["local"]
    return is_of_core and words[-1].rpartition(".")[2] in SPECS


def implementation(arguments: Mapping[str, Any]) -> str | None:
    """Return the implementation of the layers that `--spec` chooses; None where it is not given."""
    words = WORD.findall(str(arguments.get("spec") or ""))
    if not words or not is_known(words):
        return None
    return SPECS.get(words[-1].rpartition(".")[2])

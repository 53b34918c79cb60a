"""`is_kept`: whether a serving config's list keeps a module in high precision, by each system's rule.

    is_kept(["mlp.gate"], "model.layers.0.mlp.gate_proj", dialect="modelopt", system="vllm")   # True

The same entry means different modules in different systems. A part of a name is enough in some.
vLLM and SGLang compare ModelOpt's entries with names of layers that they load several modules as.
All experts of a layer are one module to the systems: its name ends in ``experts``.

Source: vLLM 4de0dd6 layers/quantization/utils/quant_utils.py (is_layer_skipped) and 00155cd
modelopt.py (is_layer_excluded); SGLang pull request 23467 layers/quantization/utils.py, and
modelopt_quant.py (_get_quant_method, is_layer_excluded); transformers 5.23.0 quantizers/quantizers_utils.py
(should_convert_module) and quantizers/base.py; compressed-tensors 0.20.0 utils/match.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bridge.convert.serving.formats import COMPRESSED_TENSORS, FUSED_MODULES, MODELOPT, SGLANG, VLLM

EXPRESSION_PREFIX = "re:"
"""Beginning of an entry that is a regular expression, in compressed-tensors."""
_EXPERTS = ".experts."
SGLANG_LAYER_NAMES = {"fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa"}
"""vLLM's name of a layer that is loaded as one -> SGLang's, where the two differ."""
LOW_RANK_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Projections of multi-latent attention whose names SGLang looks for within its names of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModule:
    """A module under its name in the checkpoint, and under the name by which a system quantises it."""

    name: str
    layer_name: str
    """The name, or for an expert the name of all experts of its layer."""

    @property
    def is_expert(self) -> bool:
        """Whether the module is one of the experts of a layer."""
        return self.name != self.layer_name


def is_kept(entries: Sequence[str], name: str, *, dialect: str, system: str) -> bool:
    """Return whether a list of modules keeps the module of this name.

    Args:
        entries: The list.
        name: The module's name in the checkpoint.
        dialect: The `quant_method` of the config, `MODELOPT` for every one of ModelOpt's.
        system: The system that reads the config; empty where all systems read the dialect alike.
    """
    module = ServedModule(name=name, layer_name=get_layer_name(name))
    if dialect == MODELOPT and system == VLLM:
        return _is_kept_by_vllm_of_modelopt(entries, module)
    if dialect == MODELOPT:
        return any(_is_kept_by_sglang_of_modelopt(entry, module) for entry in entries)
    keeps = KEEP_RULES[dialect, system]
    return any(keeps(entry, module) for entry in entries)


def is_match(entry: str, name: str) -> bool:
    """Return whether an entry of compressed-tensors names a module: by its whole name, or by an expression."""
    if entry.startswith(EXPRESSION_PREFIX):
        return re.match(entry.removeprefix(EXPRESSION_PREFIX), name) is not None
    return entry == name


def get_layer_name(name: str) -> str:
    """Return the name of a module, or for an expert the name of all experts of its layer."""
    before, _, after = name.partition(_EXPERTS)
    if not after:
        return name
    return f"{before}.experts"


def _is_kept_by_compressed_tensors(entry: str, module: ServedModule) -> bool:
    return is_match(entry, module.name)


def _is_kept_by_vllm(entry: str, module: ServedModule) -> bool:
    if module.is_expert:
        return module.layer_name in entry
    return entry == module.name


def _is_kept_by_sglang(entry: str, module: ServedModule) -> bool:
    return f".{entry}." in f".{module.layer_name}."


def _is_kept_by_transformers(entry: str, module: ServedModule) -> bool:
    if module.layer_name.endswith(entry):
        return True
    return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module.layer_name) is not None


KEEP_RULES: Mapping[tuple[str, str], Callable[[str, ServedModule], bool]] = {
    (COMPRESSED_TENSORS, ""): _is_kept_by_compressed_tensors,
    ("fp8", VLLM): _is_kept_by_vllm,
    ("fp8", SGLANG): _is_kept_by_sglang,
    ("fp8", "hf"): _is_kept_by_transformers,
    ("mxfp8", SGLANG): _is_kept_by_sglang,
    ("mxfp8", "hf"): _is_kept_by_transformers,
}
"""Dialect and system -> whether an entry keeps a module; ModelOpt's lists have functions below."""


def _get_loaded_name(module: ServedModule, name_of: Mapping[str, str]) -> str:
    """Return the name under which a system loads a module: that of the layer which it is a part of.

    Args:
        module: The module.
        name_of: vLLM's name of a layer -> the system's, where the two differ.
    """
    parent, _, last = module.name.rpartition(".")
    for layer, parts in FUSED_MODULES.items():
        if last in parts and not module.is_expert:
            return f"{parent}.{name_of.get(layer, layer)}"
    return module.layer_name


def _is_kept_by_vllm_of_modelopt(entries: Sequence[str], module: ServedModule) -> bool:
    """Return whether vLLM leaves a module out by ModelOpt's list.

    Modules that are loaded as one are left out where the list has the name of each, or an entry
    that is a part of vLLM's name for them.
    """
    loaded = _get_loaded_name(module, {})
    parent, _, layer = loaded.rpartition(".")
    parts = FUSED_MODULES.get(layer, [])
    if parts and all(f"{parent}.{part}" in entries for part in parts):
        return True
    for entry in entries:
        is_an_expert = _EXPERTS in entry and entry.startswith(f"{loaded}.")
        if entry in loaded or fnmatchcase(loaded, entry) or is_an_expert:
            return True
    return False


def _is_kept_by_sglang_of_modelopt(entry: str, module: ServedModule) -> bool:
    """Return whether SGLang leaves a module out by an entry of ModelOpt's list.

    The entry is a part of the module's name between dots, an expression with ``*`` for SGLang's
    name or for a part of it, or it ends in a projection of low rank which SGLang's name contains.
    """
    if _is_kept_by_sglang(entry, module):
        return True
    loaded = _get_loaded_name(module, SGLANG_LAYER_NAMES)
    parts = loaded.split(".")
    if any(fnmatchcase(name, entry) for name in (loaded, *parts)):
        return True
    tail = entry.rpartition(".")[-1]
    return tail in LOW_RANK_PROJECTIONS and tail in parts[-1]

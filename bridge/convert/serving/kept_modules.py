"""`is_kept`: whether the list of a serving config keeps a module in high precision.

    is_kept(["mlp.gate"], "model.layers.0.mlp.gate_proj", dialect="modelopt", system="vllm")   # True

Each system has a different rule. So the same entry can mean different modules in two systems. In
some systems a part of a name is enough. vLLM and SGLang load several modules as a single layer, and
compare ModelOpt's entries with the name of this layer. For all systems, the experts of a layer are
a single module, whose name ends in `experts`.

Source: vLLM 0.33.0 layers/quantization/utils/quant_utils.py (is_layer_skipped), modelopt.py
(is_layer_excluded) and compressed_tensors/utils.py (should_ignore_layer); SGLang 0.5.23
layers/quantization/utils.py (is_layer_skipped), fp8.py (from_config), modelopt_quant.py
(_get_quant_method, is_layer_excluded) and compressed_tensors/utils.py (should_ignore_layer);
transformers 5.23.0 quantizers/quantizers_utils.py (should_convert_module) and quantizers/base.py;
compressed-tensors 0.20.0 utils/match.py. `tests/convert/serving/test_engines.py` asks the engines.
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
"""vLLM's name of a layer that is loaded for several modules -> SGLang's, if the two differ."""
LOW_RANK_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Projections of multi-latent attention. SGLang searches its names of layers for these names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModule:
    """A module by its name in the checkpoint, and by the name that systems quantise it by."""

    name: str
    """The name in the checkpoint."""
    layer_name: str
    """The same name, or for an expert the name of all experts of its layer."""

    @property
    def is_expert(self) -> bool:
        """Whether the module is one of the experts of a layer."""
        return self.name != self.layer_name


def is_kept(entries: Sequence[str], name: str, *, dialect: str, system: str) -> bool:
    """Return whether a list of modules keeps the module of this name.

    Args:
        entries: The list.
        name: The module's name in the checkpoint.
        dialect: The `quant_method` of the config. `MODELOPT` for all methods of ModelOpt.
        system: The system that reads the config. `KEEP_RULES` must have the dialect with it.
    """
    module = ServedModule(name=name, layer_name=get_layer_name(name))
    if dialect == MODELOPT and system == VLLM:
        return _is_kept_by_modelopt_in_vllm(entries, module)
    if dialect == MODELOPT:
        return any(_is_kept_by_modelopt_in_sglang(entry, module) for entry in entries)
    keeps = KEEP_RULES[dialect, system]
    return any(keeps(entry, module) for entry in entries)


def is_match(entry: str, name: str) -> bool:
    """Return whether an entry of compressed-tensors is a module's name, or an expression for it."""
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
    """Return whether the entry is the complete name of the module, or an expression for it."""
    return is_match(entry, module.name)


def _vllm_of_compressed_tensors(entry: str, module: ServedModule) -> bool:
    return is_match(entry, module.name) or is_match(entry, _get_loaded_name(module, {}))


def _sglang_of_compressed_tensors(entry: str, module: ServedModule) -> bool:
    """Return whether an entry keeps a module. The end of the name, after a dot, is enough."""
    if entry == _get_loaded_name(module, SGLANG_LAYER_NAMES):
        return True
    is_end = not entry.startswith(EXPRESSION_PREFIX) and module.name.endswith(f".{entry}")
    return is_end or is_match(entry, module.name)


def _is_kept_by_vllm(entry: str, module: ServedModule) -> bool:
    loaded = _get_loaded_name(module, {})
    if loaded != module.layer_name:
        return entry in {loaded, module.name}
    if _has_experts(loaded):
        return loaded in entry
    return entry == module.name


def _is_kept_by_sglang(entry: str, module: ServedModule) -> bool:
    """Return whether an entry keeps a module. A part of the name, between dots, is enough."""
    if f".{entry}." in f".{module.layer_name}.":
        return True
    is_loaded_alone = _get_loaded_name(module, SGLANG_LAYER_NAMES) == module.layer_name
    return is_loaded_alone and _has_experts(module.layer_name) and module.layer_name in entry


def _sglang_of_fp8(entry: str, module: ServedModule) -> bool:
    """Return whether an entry keeps a module, with or without ``model.`` before the entry."""
    bare = entry.removeprefix("model.")
    return _is_kept_by_sglang(bare, module) or _is_kept_by_sglang(f"model.{bare}", module)


def _has_experts(name: str) -> bool:
    """Return whether the engines treat a layer as a layer of experts, by its name."""
    return "experts" in name


def _is_kept_by_transformers(entry: str, module: ServedModule) -> bool:
    """Return whether the entry is an end of the name, or an expression for its beginning."""
    if module.layer_name.endswith(entry):
        return True
    return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module.layer_name) is not None


KEEP_RULES: Mapping[tuple[str, str], Callable[[str, ServedModule], bool]] = {
    (COMPRESSED_TENSORS, COMPRESSED_TENSORS): _is_kept_by_compressed_tensors,
    (COMPRESSED_TENSORS, "hf"): _is_kept_by_compressed_tensors,
    (COMPRESSED_TENSORS, VLLM): _vllm_of_compressed_tensors,
    (COMPRESSED_TENSORS, SGLANG): _sglang_of_compressed_tensors,
    ("fp8", VLLM): _is_kept_by_vllm,
    ("fp8", SGLANG): _sglang_of_fp8,
    ("fp8", "hf"): _is_kept_by_transformers,
    ("mxfp8", SGLANG): _sglang_of_fp8,
    ("mxfp8", "hf"): _is_kept_by_transformers,
}
"""Dialect and system -> whether an entry keeps a module. ModelOpt's lists have functions below."""


def _get_loaded_name(module: ServedModule, layer_names: Mapping[str, str]) -> str:
    """Return the name of the layer as which a system loads a module.

    Args:
        layer_names: vLLM's name of a layer -> the system's, if the two differ.
    """
    parent, _, last = module.name.rpartition(".")
    for layer, parts in FUSED_MODULES.items():
        if last in parts and not module.is_expert:
            return f"{parent}.{layer_names.get(layer, layer)}"
    return module.layer_name


def _is_kept_by_modelopt_in_vllm(entries: Sequence[str], module: ServedModule) -> bool:
    """Return whether vLLM keeps a module in high precision by ModelOpt's list.

    Modules that are loaded as one layer are kept if the list has the name of each, or an entry that
    is a part of vLLM's name of the layer.
    """
    loaded_name = _get_loaded_name(module, {})
    parent, _, layer = loaded_name.rpartition(".")
    parts = FUSED_MODULES.get(layer, [])
    if parts and all(f"{parent}.{part}" in entries for part in parts):
        return True
    for entry in entries:
        names_an_expert = _EXPERTS in entry and entry.startswith(f"{loaded_name}.")
        if entry in loaded_name or fnmatchcase(loaded_name, entry) or names_an_expert:
            return True
    return False


def _is_kept_by_modelopt_in_sglang(entry: str, module: ServedModule) -> bool:
    """Return whether SGLang keeps a module in high precision by an entry of ModelOpt's list.

    SGLang keeps the module in three cases:

    - The module is not an expert, and the entry is a part of its name between dots.
    - The entry is an expression with ``*`` for SGLang's name, or for a part of it.
    - The entry ends in a projection of `LOW_RANK_PROJECTIONS` that SGLang's name contains.
    """
    if not module.is_expert and _is_kept_by_sglang(entry, module):
        return True
    loaded_name = _get_loaded_name(module, SGLANG_LAYER_NAMES)
    parts = loaded_name.split(".")
    if any(fnmatchcase(name, entry) for name in (loaded_name, *parts)):
        return True
    last_part = entry.rpartition(".")[-1]
    return last_part in LOW_RANK_PROJECTIONS and last_part in parts[-1]

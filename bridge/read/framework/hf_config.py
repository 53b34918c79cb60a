"""`build_bridged_model`: the model's config that a framework's bridge makes of a Hugging Face `config.json`.

    made = model_of({"model_type": "qwen3", "num_hidden_layers": 36, ...}, bridge=MEGATRON_BRIDGE)
    made.fields["num_layers"]    # 36

`foreign/tables/hf_config.yaml` has the keys and the families of models, with their sources. A family
that it lacks has no fields here: whether a bridge makes such a model, and of which layers, is not known then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from bridge.errors import PayloadError
from bridge.model.section import NULLABLE_FIELDS
from bridge.precision import strict_yaml
from bridge.read.foreign.row_files import load_rows
from bridge.read.text.dotted import get_dotted_value
from bridge.target.fields import parse_integer

MEGATRON_BRIDGE, MBRIDGE, MCORE_BRIDGE = "Megatron Bridge", "mbridge", "mcore-bridge"
"""The bridges: those of NeMo-RL and verl, of verl with `vanilla_mbridge`, and of ms-swift."""
MCORE_ADAPTER = "mcore_adapter"
"""The bridge of ROLL. It makes models of further families, whose layers are not known here."""
DTYPE_KEYS = ("torch_dtype", "dtype")
"""Keys with the dtype of the weights: before transformers 4.56, and since."""
DENSE_LAYERS_KEYS = ("first_k_dense_replace", "moe_layer_start_index")
"""Keys with the number of the first layers, which have no experts."""
EXPERT_STEP_KEY = "interleave_moe_layer_step"
"""Key with the step from one layer with experts to the next, of which the last layer of a step has them."""
SHARED_EXPERTS_KEY = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
LINEAR_ATTENTION, SLIDING, DENSE = "linear_attention", "sliding_attention", "dense"
"""Kinds of `layer_types`, and the one of `mlp_layer_types` that has no experts."""
LAYERS = "num_hidden_layers"
TIED, INNER = "tie_word_embeddings", "inner"
PATTERN = "hybrid_override_pattern"
MAX_VOCAB_DIVISOR = 128
"""Source: Megatron Bridge 067f987d models/conversion/model_bridge.py: make_vocab_size_divisible_by."""
MTP_PATTERN_KEY = "mtp_hybrid_override_pattern"
MTP_REPEATED_LAYER_KEY = "mtp_use_repeated_layer"
BLOCKS = {PATTERN: "layers_block_type", MTP_PATTERN_KEY: "mtp_layers_block_type"}
"""A pattern of letters -> the list of kinds of layers that takes its place since transformers 5."""
LETTERS = {
    "mamba": "M",
    LINEAR_ATTENTION: "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
"""Kind of a layer in `BLOCKS` -> its letter."""
RATIOS, RATES = "compress_ratios", "compress_rates"
"""Tokens of a compressed key: those of each layer, and those of each kind of layer."""
UNKNOWN_FAMILY = "its model_type {family} is none whose layers are known here"
UNPLANNED_FAMILY = "a model of its model_type {family} has {parts}, which are not planned"
NO_LAYERS = "it states no {key}"
UNSUPPORTED_BY_BRIDGE = "{bridge} makes no model of its model_type {family}"
OTHER_PARTS_NOT_COUNTED = (
    "{inner}: the other parts of the model, such as a vision tower, are neither planned "
    "nor counted."
)
VOCAB_DIVISOR_FIELD = "make_vocab_size_divisible_by"
FURTHER_PARTS = "model_type {family}: {parts} are neither planned nor counted."


@dataclass(frozen=True, kw_only=True, slots=True)
class BridgedModel:
    """The model that a bridge makes of a `config.json`."""

    fields: Mapping[str, object] = field(default_factory=dict)
    """Field of Megatron's model config -> its value."""
    set_by_bridge: frozenset[str] = frozenset()
    """The fields whose values the bridge sets itself, whatever `config.json` has."""
    dtype: str | None = None
    """The dtype of the checkpoint's weights ("bfloat16"); None where it has no key for it."""
    unread: str | None = None
    """Why the fields are not known, as a clause; None: they are."""
    vocab_divisor: int = 1
    """The divisor to which Megatron Bridge pads a vocabulary that is the tokenizer's, not the checkpoint's."""
    other_parts: str | None = None
    """The parts of the model that are neither planned nor counted, as a sentence; None: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """A row of `families`, with those of the families that it is like."""

    fields: Mapping[str, Sequence[str]]
    without: Sequence[str] = ()
    sets: Mapping[str, object] = field(default_factory=dict)
    absent: Mapping[str, object] = field(default_factory=dict)
    inner: str = ""
    megatron_bridge_fields: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    of_inner: bool = False
    ties: str = ""
    tower: str = ""
    """A sentence about the parts in front of a language model that has no block of its own."""
    further: str = ""
    unplanned: str = ""
    needs: str = ""
    vocab_divisor: int | None = None
    bridges: Sequence[str] = (MEGATRON_BRIDGE, MBRIDGE, MCORE_BRIDGE)


def load_hf_config(path: Path) -> Mapping[str, object]:
    """Return what a `config.json` holds.

    Raises:
        PayloadError: It cannot be read, or holds no mapping.
    """
    text = strict_yaml.decode_text(
        strict_yaml.read_bytes(path, error=PayloadError), str(path), error=PayloadError
    )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{path}: must hold JSON ({error}). Correct it there.") from None
    if not isinstance(content, dict):
        raise PayloadError(f"{path}: must hold a mapping. Give the config.json of a checkpoint.")
    return content


def list_unknown_fields(*, is_read: bool) -> list[str]:
    """Return the fields of a model that its checkpoint decides and that are not known.

    Args:
        is_read: Whether its `config.json` is read.
    """
    table = _load_table()
    names: list[str] = table["unread"].split()
    if not is_read:
        names = [*table["decided"].split(), *names]
    return names


def build_bridged_model(config: Mapping[str, object], bridge: str) -> BridgedModel:
    """Return the model that a bridge makes of the contents of a `config.json`."""
    name = str(config.get("model_type"))
    family = _family_of(config)
    inner = config
    if family is not None:
        family = _drop_absent_block(config, family)
        inner = _with_patterns(_get_block(config, family.inner))
    dtype = _find_dtype(config) or _find_dtype(inner)
    unread = _unread(name, family, inner, bridge)
    if family is None or unread is not None:
        return BridgedModel(dtype=dtype, unread=unread)
    if family.inner and family.ties != INNER:
        inner = {**inner, TIED: config.get(TIED, inner.get(TIED, False))}
    of_all_models: Mapping[str, object] = _load_table()["bridges"][bridge]
    of_config = _build_fields(inner, family)
    of_family = family.megatron_bridge_fields.get(bridge, {})
    fields = {**of_all_models, **of_config, **of_family}
    set_by_bridge = {*of_family, *family.sets, VOCAB_DIVISOR_FIELD}
    set_by_bridge |= {name for name in of_all_models if name not in of_config}
    if bridge in (MCORE_BRIDGE, MCORE_ADAPTER):
        fields.pop("mtp_num_layers", None)
    return BridgedModel(
        fields=fields,
        set_by_bridge=frozenset(set_by_bridge),
        dtype=dtype,
        vocab_divisor=family.vocab_divisor or _compute_vocab_divisor(fields.get("vocab_size")),
        other_parts=_other_parts(name, family),
    )


def _family_of(config: Mapping[str, object]) -> _Family | None:
    """Return the family of a model; with `of_inner`, that of its language model in the place of the whole."""
    outer = _load_families().get(str(config.get("model_type")))
    if outer is None or not outer.of_inner:
        return outer
    language_model = _get_block(config, outer.inner)
    family = _load_families().get(str(language_model.get("model_type")))
    if family is None:
        return None
    return replace(
        family,
        inner=outer.inner,
        ties=outer.ties,
        bridges=outer.bridges,
        megatron_bridge_fields=outer.megatron_bridge_fields,
    )


def _drop_absent_block(config: Mapping[str, object], family: _Family) -> _Family:
    """Return the family with its language model at the top, if that is where `config.json` has it.

    Files of older releases of transformers have it there: the published ones of Qwen2.5-VL.
    """
    if not family.inner or _get_block(config, family.inner) or LAYERS not in config:
        return family
    tower = OTHER_PARTS_NOT_COUNTED.format(inner=f"model_type {config.get('model_type')}")
    return replace(family, inner="", tower=tower)


def _unread(
    name: str, family: _Family | None, config: Mapping[str, object], bridge: str
) -> str | None:
    """Return why the fields of a family's model are not known, as a clause; None: they are."""
    if family is None:
        return UNKNOWN_FAMILY.format(family=name)
    if bridge not in family.bridges and bridge == MCORE_ADAPTER:
        return UNKNOWN_FAMILY.format(family=name)
    if bridge not in family.bridges:
        return UNSUPPORTED_BY_BRIDGE.format(bridge=bridge, family=name)
    if family.unplanned:
        return UNPLANNED_FAMILY.format(family=name, parts=family.unplanned)
    if family.needs and not config.get(family.needs):
        return NO_LAYERS.format(key=family.needs)
    if family.inner and not config:
        return NO_LAYERS.format(key=family.inner)
    return None


def _other_parts(name: str, family: _Family) -> str | None:
    """Return the parts of a family's model that are neither planned nor counted; None: it has none."""
    sentences = []
    if family.inner:
        sentences.append(OTHER_PARTS_NOT_COUNTED.format(inner=family.inner))
    if family.tower:
        sentences.append(family.tower)
    if family.further:
        sentences.append(FURTHER_PARTS.format(family=name, parts=family.further))
    return " ".join(sentences) or None


def _with_patterns(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return a mapping of keys with the patterns and numbers that its lists of layers stand for."""
    found = dict(config)
    for pattern, key in BLOCKS.items():
        blocks = config.get(key)
        if pattern in config or not isinstance(blocks, list):
            continue
        if any(kind not in LETTERS for kind in blocks):
            continue
        found[pattern] = "".join(LETTERS[kind] for kind in blocks)
        if pattern == PATTERN:
            found[LAYERS] = len(blocks)
    kinds, rates = config.get("layer_types"), config.get(RATES)
    if RATIOS not in config and isinstance(kinds, list) and isinstance(rates, Mapping):
        ratios: list[object] = []
        for kind in kinds:
            if kind == SLIDING:
                ratios.append(0)
            else:
                ratios.append(rates.get(kind))
        found[RATIOS] = ratios
    return found


def _compute_vocab_divisor(vocab_size: object) -> int:
    """Return the largest power of two that divides a vocabulary, up to `MAX_VOCAB_DIVISOR`."""
    size = parse_integer(vocab_size)
    divisor = 1
    while size and divisor < MAX_VOCAB_DIVISOR and size % (2 * divisor) == 0:
        divisor *= 2
    return divisor


def _build_fields(config: Mapping[str, object], family: _Family) -> dict[str, object]:
    """Return the fields of the language model that a mapping of keys describes."""
    model_fields: dict[str, object] = {}
    for name, keys in family.fields.items():
        stated = [config[key] for key in keys if config.get(key) is not None]
        if stated:
            model_fields[name] = stated[0]
        elif name in NULLABLE_FIELDS and any(key in config for key in keys):
            model_fields[name] = None
        elif name in family.absent:
            model_fields[name] = family.absent[name]
    model_fields |= family.sets
    for name in family.without:
        model_fields.pop(name, None)
    kinds = config.get("layer_types")
    ratios = model_fields.get("csa_compress_ratios")
    predicted = parse_integer(model_fields.get("mtp_num_layers")) or 0
    if isinstance(ratios, list) and len(ratios) == model_fields.get("num_layers"):
        model_fields["csa_compress_ratios"] = [*ratios, *[0] * predicted]
    if "linear_attention_freq" in model_fields and isinstance(kinds, list):
        model_fields["linear_attention_freq"] = [int(kind == LINEAR_ATTENTION) for kind in kinds]
    _write_expert_fields(model_fields, config)
    if not model_fields.get("mtp_num_layers"):
        model_fields.pop("mtp_num_layers", None)
    elif config.get(MTP_PATTERN_KEY):
        model_fields["mtp_hybrid_override_pattern"] = config[MTP_PATTERN_KEY]
        model_fields["mtp_use_repeated_layer"] = config.get(MTP_REPEATED_LAYER_KEY, True)
    # No bridge pads the vocabulary.
    model_fields[VOCAB_DIVISOR_FIELD] = 1
    return model_fields


def _write_expert_fields(model_fields: dict[str, object], config: Mapping[str, object]) -> None:
    """Write which layers have experts, and the width of those that are shared; without experts, nothing."""
    if model_fields.get("num_moe_experts") is None:
        for name in ("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"):
            model_fields.pop(name, None)
        return
    layers = parse_integer(model_fields.get("num_layers"))
    dense = None
    for key in reversed(DENSE_LAYERS_KEYS):
        if config.get(key) is not None:
            dense = parse_integer(config[key])
    step = parse_integer(config.get(EXPERT_STEP_KEY))
    kinds = config.get("mlp_layer_types")
    if layers is not None and dense is not None:
        model_fields["moe_layer_freq"] = [0] * min(dense, layers) + [1] * (layers - dense)
    elif isinstance(kinds, list):
        model_fields["moe_layer_freq"] = [int(kind != DENSE) for kind in kinds]
    elif layers is not None and step is not None and step > 1:
        model_fields["moe_layer_freq"] = [int(i % step == step - 1) for i in range(layers)]
    width = parse_integer(model_fields.get("moe_ffn_hidden_size"))
    for key in SHARED_EXPERTS_KEY:
        shared = parse_integer(config.get(key))
        if shared and width is not None:
            model_fields.setdefault("moe_shared_expert_intermediate_size", shared * width)


def _find_dtype(config: Mapping[str, object]) -> str | None:
    for key in DTYPE_KEYS:
        if config.get(key) is not None:
            return str(config[key]).removeprefix("torch.")
    return None


def _get_block(config: Mapping[str, object], path: str) -> Mapping[str, object]:
    """Return the mapping at a path with dots; the whole one at an empty path, an empty one where there is none."""
    if not path:
        return config
    block = get_dotted_value(config, path)
    if not isinstance(block, Mapping):
        return {}
    return block


@cache
def _load_table() -> Mapping[str, Any]:
    return load_rows("hf_config")


@cache
def _load_families() -> dict[str, _Family]:
    table = _load_table()
    everywhere = {name: _as_tuple(keys) for name, keys in table["fields"].items()}
    base = _Family(fields=everywhere)
    families: dict[str, _Family] = {}
    for name, columns in table["families"].items():
        below = families.get(columns.get("like", ""), base)
        fields = {key: _as_tuple(keys) for key, keys in columns.get("fields", {}).items()}
        families[name] = _Family(
            fields={**below.fields, **fields},
            without=columns.get("without", ()),
            sets=columns.get("sets", below.sets),
            absent=columns.get("absent", below.absent),
            inner=columns.get("inner", ""),
            megatron_bridge_fields=columns.get("adds", {}),
            of_inner=columns.get("of_inner", False),
            ties=columns.get("ties", ""),
            further=columns.get("further", ""),
            unplanned=columns.get("unplanned", ""),
            needs=columns.get("needs", ""),
            vocab_divisor=columns.get("vocab_divisor"),
            bridges=columns.get("made_by", base.bridges),
        )
    return families


def _as_tuple(keys: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(keys, str):
        return (keys,)
    return tuple(keys)

"""`OWNER_FIELDS`: the fields of Megatron's configs, with kinds, defaults and versions.

``scripts/write_megatron_fields.py`` writes `megatron_fields.json` from the class definitions of the
releases that the file names. A field has the default of the newest release. This module adds three
tables: the settings of a run that no class of Megatron Core has, the pairs of settings of two
configs that must be equal, and the switches of sharding that two configs have.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from bridge.target.versions import Version, VersionRange, is_at_least, parse_version

_MAIN_RELEASE = "0.20"
"""The number of the release that Megatron's main branch becomes."""
FSDP_GRADIENT_DTYPES = "0.19"
"""First megatron-core whose Megatron-FSDP has fields for the dtypes of gradients.

From this release on, Megatron-FSDP does not read grad_reduce_in_fp32.
"""

OwnerFieldKind = Literal["bool", "int", "float", "name", "dtype", "any"]
"""The type of the values of a field. A dtype is kept as a token such as "bf16"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerField:
    """A field of a config of a run."""

    name: str
    kind: OwnerFieldKind
    default: Any = None
    """The value if no config sets the field."""
    is_megatron: bool = True
    """Whether a class of Megatron Core has the field. False for the other settings of a run."""
    has: VersionRange | None = None
    """The versions of megatron-core that have the field. None: all versions."""


ENCODERS = {
    "vision_model": "vision tower",
    "audio_model": "audio encoder",
    "sound_encoder": "sound encoder",
}
"""Encoder in front of the language model of a multimodal model -> its name in messages.

The key is spelled as in the name of the field that freezes the encoder.
"""
_FREEZE_ENCODERS: dict[str, tuple[OwnerFieldKind, Any]] = {
    f"freeze_{part}": ("bool", False) for part in ENCODERS
}
RUN_SETTINGS: dict[str, dict[str, tuple[OwnerFieldKind, Any]]] = {
    "model": {
        "vocab_size": ("int", None),
        "seq_length": ("int", None),
        "make_vocab_size_divisible_by": ("int", 128),
        "max_position_embeddings": ("any", None),
        "position_embedding_type": ("any", None),
        "fp16_lm_cross_entropy": ("bool", False),
        "share_embeddings_and_output_weights": ("bool", False),
        "hybrid_override_pattern": ("any", None),
        "hybrid_layer_pattern": ("any", None),
        "hybrid_attention_ratio": ("float", None),
        "hybrid_mlp_ratio": ("float", None),
        "freeze_language_model": ("bool", False),
        "freeze_moe_router": ("bool", False),
        **_FREEZE_ENCODERS,
        "freeze_vision_projection": ("bool", False),
        "keep_mtp_spec_in_bf16": ("bool", False),
        "keep_fp8_weight_transpose_cache": ("bool", True),
    },
    "optimizer": {},
    "ddp": {"use_torch_fsdp2": ("bool", False)},
    "train": {
        "micro_batch_size": ("int", None),
        "global_batch_size": ("int", None),
        "train_iters": ("int", None),
        "check_for_nan_in_loss": ("bool", True),
    },
    "data": {
        "seq_length": ("int", None),
        "vocab_size": ("int", None),
        "enable_offline_packing": ("bool", False),
        "packed_sequence_specs": ("any", None),
        "dataset_kwargs": ("any", None),
        "enable_in_batch_packing": ("bool", False),
        "defer_in_batch_packing_to_step": ("bool", False),
        "in_batch_packing_pad_to_multiple_of": ("int", 1),
    },
    "peft": {
        "type": ("any", None),
        "rank": ("int", None),
        "dim": ("int", None),
        "target_modules": ("any", None),
        "exclude_modules": ("any", None),
        "dropout": ("float", 0.0),
        "share_expert_adapters": ("bool", True),
        "normalize_moe_lora": ("bool", False),
    },
}
"""Section -> setting of a run that no class of Megatron Core has -> its kind and its default.

A default of None: the value is not known.
"""
TE_ADAPTER = "LoraParallelLinear"
"""Value of `peft.type` for adapters of Transformer Engine's layers: the class of mcore-bridge.
FlagScale's adapters are split in the same way."""
DEVELOPMENT_FIELDS: dict[str, tuple[OwnerFieldKind, Any]] = {
    "csa_compress_ratios": ("any", None),
    "csa_dense_mode": ("bool", False),
    "enable_hyper_connections": ("bool", False),
    "num_residual_streams": ("int", 4),
    "o_groups": ("int", 8),
    "o_lora_rank": ("int", 1024),
}
"""Field that decides the layers of a model in Megatron-LM's development branch -> kind and default.

No release has these fields.

Source: Megatron-LM dev of 2026-08-21 (d48bd6be), transformer/transformer_config.py.
"""
RUN_SETTINGS["model"] |= DEVELOPMENT_FIELDS

_NAMED_DTYPES = ("moe_router_dtype",)
"""Fields that hold the name of a dtype in Megatron Core, and a dtype in Megatron Bridge's files."""

_FIELD_TABLE = json.loads(
    (Path(__file__).parent / "megatron_fields.json").read_text(encoding="utf-8")
)


def _collect_release_numbers() -> dict[str, str]:
    """Return name of a release in the table -> its number."""
    numbers = {}
    for name in _FIELD_TABLE["releases"]:
        numbers[name] = name
        if name.startswith("main"):
            numbers[name] = _MAIN_RELEASE
    return numbers


_RELEASE_NUMBERS = _collect_release_numbers()
"""Release in the table -> its number, oldest first. The last is Megatron's main branch."""


def _make_version_range(releases: list[str]) -> VersionRange:
    """Return the range of versions that have a field.

    Args:
        releases: The releases in the table that have the field, oldest first.
    """
    known = list(_RELEASE_NUMBERS)
    first = known.index(releases[0])
    end = known.index(releases[-1]) + 1
    limits = []
    # A field of the oldest release is taken to be in every older version too.
    if first > 0:
        limits.append(f">={_RELEASE_NUMBERS[releases[0]]}")
    if end < len(known):
        limits.append(f"<{_RELEASE_NUMBERS[known[end]]}")
    return VersionRange(product="mcore", versions=SpecifierSet(",".join(limits)))


def list_known_releases() -> tuple[Version, ...]:
    """Return the releases of Megatron Core in the table of fields, oldest first.

    The last is the release that Megatron's main branch becomes.
    """
    return tuple(map(parse_version, _RELEASE_NUMBERS.values()))


def _make_megatron_field(name: str, row: Mapping[str, Any]) -> OwnerField:
    """Return a field of the table `megatron_fields.json`."""
    kind = row["kind"]
    if name in _NAMED_DTYPES:
        kind = "dtype"
    versions = None
    if "in" in row:
        versions = _make_version_range(row["in"])
    return OwnerField(name=name, kind=kind, default=row["default"], has=versions)


def _build_owner_fields() -> dict[str, dict[str, OwnerField]]:
    """Return section -> name -> field: Megatron's fields, then the other settings of a run."""
    fields: dict[str, dict[str, OwnerField]] = {section: {} for section in RUN_SETTINGS}
    for section, rows in _FIELD_TABLE["fields"].items():
        for name, row in rows.items():
            fields[section][name] = _make_megatron_field(name, row)
    for section, settings in RUN_SETTINGS.items():
        for name, (kind, default) in settings.items():
            fields[section][name] = OwnerField(
                name=name, kind=kind, default=default, is_megatron=False
            )
    return fields


OWNER_FIELDS = _build_owner_fields()
"""Section of a run -> name -> field."""


def _collect_defaults(section: str) -> dict[str, Any]:
    """Return name -> default of the fields of a section."""
    return {name: field.default for name, field in OWNER_FIELDS[section].items()}


OWNER_DEFAULTS = {section: _collect_defaults(section) for section in OWNER_FIELDS}
"""Section of a run -> name -> default."""

_MEGATRON_SECTIONS = ("model", "optimizer", "ddp")
OWNER_FIELD_NAMES = {section: frozenset(OWNER_FIELDS[section]) for section in _MEGATRON_SECTIONS}
"""Section of Megatron's -> the names of its fields in any version, to correct a misspelt name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSetting:
    """A setting that two owners have. A sync makes both values equal."""

    first: tuple[str, str]
    """Owner name and attribute."""
    second: tuple[str, str]
    """Owner name and attribute."""
    is_checked: bool = True
    """Whether the check reports a difference between the two as an error."""


SHARED_SETTINGS = (
    SharedSetting(first=("model", "fp16"), second=("optimizer", "fp16")),
    SharedSetting(first=("model", "bf16"), second=("optimizer", "bf16")),
    SharedSetting(first=("model", "fp8_recipe"), second=("optimizer", "fp8_recipe")),
    SharedSetting(
        first=("optimizer", "reuse_grad_buf_for_mxfp8_param_ag"),
        second=("ddp", "reuse_grad_buf_for_mxfp8_param_ag"),
    ),
    # Not checked: nothing reads params_dtype of the optimizer.
    SharedSetting(
        first=("model", "params_dtype"), second=("optimizer", "params_dtype"), is_checked=False
    ),
    SharedSetting(
        first=("model", "fp8_param"), second=("ddp", "fp8_param_gather"), is_checked=False
    ),  # rule PB303 checks it
    SharedSetting(
        first=("model", "fp4_param"), second=("ddp", "fp4_param_gather"), is_checked=False
    ),  # rule PB303 checks it
    SharedSetting(
        first=("model", "enable_autocast"), second=("model", "autocast_enabled"), is_checked=False
    ),
)

FUSED_ADAM_RECIPES = (None, "delayed")
"""Values of `optimizer.fp8_recipe` with which the fused Adam of the precision-aware optimizer keeps
the master weights.

Source: megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22:
optimizer_config.py __post_init__, use_precision_aware_optimizer_no_fp8_or_ds_fp8.
"""

SHARED_SWITCHES = ("use_distributed_optimizer", "overlap_param_gather")
"""Switches that the optimizer and the DDP config both have. A switch that is on in one config is
turned on in the other config too."""


def get_gradient_dtypes(
    ddp: Mapping[str, Any], mode: str, mcore: Version | None
) -> tuple[str, str]:
    """Return the dtypes that gradients are accumulated in and reduced in.

    Args:
        ddp: Field -> value of the DDP config, with defaults.
        mode: The dtype of the run's mode: fp32, fp16 or bf16.
        mcore: The version of megatron-core. An unknown version counts as the newest.

    Source: megatron-core 0.16.1 distributed_data_parallel.py. Since 0.19 Megatron-FSDP reads
    separate fields (distributed/fsdp/mcore_fsdp_adapter.py).
    """
    is_fsdp = ddp["use_megatron_fsdp"] or ddp["use_custom_fsdp"]
    if is_fsdp and is_at_least(mcore, FSDP_GRADIENT_DTYPES) is not False:
        accumulated: str = ddp["megatron_fsdp_main_grads_dtype"] or mode
        return accumulated, ddp["megatron_fsdp_grad_comm_dtype"] or accumulated
    if ddp["grad_reduce_in_fp32"]:
        return "fp32", "fp32"
    return mode, mode


def read_field(config: object, name: str, default: Any = None) -> Any:
    """Return a value of a mapping or an object, or the default if the value is absent or None."""
    if isinstance(config, Mapping):
        value = config.get(name)
    else:
        value = getattr(config, name, None)
    if value is None:
        return default
    return value


def is_different(value: Any, default: Any) -> bool:
    """Return whether a value differs from a default.

    A tuple and a list with the same items are equal, since JSON and YAML write a tuple as a list.
    """
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) != list(default)
    return bool(value != default)


def parse_integer(value: Any) -> int | None:
    """Return a whole number that may be written as text or as a float, or None for other values."""
    try:
        number = int(value)
        is_whole = number == float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if is_whole and not isinstance(value, bool):
        return number
    return None

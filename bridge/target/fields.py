"""The fields of Megatron's configs as rows: type, class default, and the versions that have them.

`megatron_fields.json` is written by ``scripts/write_megatron_fields.py`` from the class definitions
of the releases that it names; a default is that of the newest release. Settings of a run that no
class of Megatron Core has stand here, and the settings that two configs hold: pairs that must
agree, and switches of sharding that are meant for both.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from bridge.target.versions import Version, VersionRange, is_at_least, parse_version

_MAIN = "0.20"
"""The release that Megatron's main branch becomes."""
FSDP_GRADIENT_DTYPES = "0.19"
"""First megatron-core whose Megatron-FSDP has fields for the dtypes of gradients.

From then on it does not read grad_reduce_in_fp32.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerField:
    """A field of a config of a run."""

    name: str
    kind: str
    """bool, int, float, name, dtype (kept as a token such as "bf16") or any."""
    default: Any = None
    """The value it holds where no config sets it."""
    is_megatron: bool = True
    """Whether a class of Megatron Core has it; False for the other settings of a run."""
    has: VersionRange | None = None
    """The versions of megatron-core that have it; None: all versions."""


ENCODERS = {
    "vision_model": "vision tower",
    "audio_model": "audio encoder",
    "sound_encoder": "sound encoder",
}
"""Part of a multimodal model in front of its language model -> its name.

The part is spelled as in the field that freezes it.
"""
_FREEZE_ENCODERS = {f"freeze_{part}": ("bool", False) for part in ENCODERS}
RUN_SETTINGS: dict[str, dict[str, tuple[str, Any]]] = {
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
        **_FREEZE_ENCODERS,
        "freeze_vision_projection": ("bool", False),
        "keep_mtp_spec_in_bf16": ("bool", False),
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

The default None stands for "not known".
"""
DEVELOPMENT_FIELDS: dict[str, tuple[str, Any]] = {
    "csa_compress_ratios": ("any", None),
    "csa_dense_mode": ("bool", False),
    "enable_hyper_connections": ("bool", False),
    "num_residual_streams": ("int", 4),
    "o_groups": ("int", 8),
    "o_lora_rank": ("int", 1024),
}
"""Field of the model that decides its layers in Megatron-LM's development branch alone.

No release has it.

Source: Megatron-LM dev of 2026-08-21 (d48bd6be), transformer/transformer_config.py.
"""
RUN_SETTINGS["model"] |= DEVELOPMENT_FIELDS


_NAMED_DTYPES = ("moe_router_dtype",)
"""Names of dtypes in Megatron Core, dtypes in the files of Megatron Bridge."""


_FIELD_TABLE = json.loads(
    (Path(__file__).parent / "megatron_fields.json").read_text(encoding="utf-8")
)


def _collect_release_numbers() -> dict[str, str]:
    numbers = {}
    for name in _FIELD_TABLE["releases"]:
        numbers[name] = name
        if name.startswith("main"):
            numbers[name] = _MAIN
    return numbers


_RELEASE_NUMBERS = _collect_release_numbers()
"""Release that the fields were read in, in order -> its number.

The last is Megatron's main branch.
"""


def _make_version_range(releases: list[str]) -> VersionRange:
    """Return the range from the first of `releases` to the first one that lacks the field again."""
    known = list(_RELEASE_NUMBERS)
    first = known.index(releases[0])
    behind = known.index(releases[-1]) + 1
    limits = []
    if first > 0:
        limits.append(f">={_RELEASE_NUMBERS[releases[0]]}")
    if behind < len(known):
        limits.append(f"<{_RELEASE_NUMBERS[known[behind]]}")
    return VersionRange(product="mcore", versions=SpecifierSet(",".join(limits)))


def list_known_releases() -> tuple[Version, ...]:
    """Return the releases of Megatron Core that the fields are of, in order.

    The last is the one of its main branch.
    """
    return tuple(map(parse_version, _RELEASE_NUMBERS.values()))


def _build_owner_fields() -> dict[str, dict[str, OwnerField]]:
    rows: dict[str, dict[str, OwnerField]] = {role: {} for role in RUN_SETTINGS}
    for role, fields in _FIELD_TABLE["fields"].items():
        for name, field in fields.items():
            kind = field["kind"]
            if name in _NAMED_DTYPES:
                kind = "dtype"
            has = None
            if "in" in field:
                has = _make_version_range(field["in"])
            rows[role][name] = OwnerField(name=name, kind=kind, default=field["default"], has=has)
    for role, settings in RUN_SETTINGS.items():
        for name, (kind, default) in settings.items():
            rows[role][name] = OwnerField(name=name, kind=kind, default=default, is_megatron=False)
    return rows


OWNER_FIELDS = _build_owner_fields()


def _collect_defaults(role: str) -> dict[str, Any]:
    return {name: row.default for name, row in OWNER_FIELDS[role].items()}


OWNER_DEFAULTS = {role: _collect_defaults(role) for role in OWNER_FIELDS}

OWNER_FIELD_NAMES = {role: frozenset(OWNER_FIELDS[role]) for role in ("model", "optimizer", "ddp")}
"""Section of Megatron's -> every field name of any version, for the nearest to a misspelt one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSetting:
    """A setting that two configs hold, each by its role and its attribute."""

    first: tuple[str, str]
    second: tuple[str, str]
    is_checked: bool = True
    """Whether the check reports a difference as an error. A sync writes both equal in any case."""


SHARED_SETTINGS = (
    SharedSetting(first=("model", "fp16"), second=("optimizer", "fp16")),
    SharedSetting(first=("model", "bf16"), second=("optimizer", "bf16")),
    SharedSetting(first=("model", "fp8_recipe"), second=("optimizer", "fp8_recipe")),
    SharedSetting(
        first=("optimizer", "reuse_grad_buf_for_mxfp8_param_ag"),
        second=("ddp", "reuse_grad_buf_for_mxfp8_param_ag"),
    ),
    # Nothing reads it in the optimizer.
    SharedSetting(
        first=("model", "params_dtype"), second=("optimizer", "params_dtype"), is_checked=False
    ),
    SharedSetting(
        first=("model", "fp8_param"), second=("ddp", "fp8_param_gather"), is_checked=False
    ),  # PB303
    SharedSetting(
        first=("model", "fp4_param"), second=("ddp", "fp4_param_gather"), is_checked=False
    ),  # PB303
    SharedSetting(
        first=("model", "enable_autocast"), second=("model", "autocast_enabled"), is_checked=False
    ),
)

FUSED_ADAM_RECIPES = (None, "delayed")
"""Values of `optimizer.fp8_recipe` under which a fused Adam holds the masters.

It is the Adam of the precision-aware optimizer.

Source: megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22:
optimizer_config.py __post_init__, use_precision_aware_optimizer_no_fp8_or_ds_fp8.
"""

SHARED_SWITCHES = ("use_distributed_optimizer", "overlap_param_gather")
"""Switches of the optimizer and of DDP: a switch that is on in one config is meant for both."""


def get_gradient_dtypes(
    ddp: Mapping[str, Any], mode: str, mcore: Version | None
) -> tuple[str, str]:
    """Return the dtypes that gradients are accumulated and reduced in.

    An unknown version counts as the newest.

    Source: megatron-core 0.16.1 distributed_data_parallel.py; Megatron-FSDP reads fields of its own
    since 0.19 (distributed/fsdp/mcore_fsdp_adapter.py).
    """
    is_fsdp = ddp["use_megatron_fsdp"] or ddp["use_custom_fsdp"]
    if is_fsdp and is_at_least(mcore, FSDP_GRADIENT_DTYPES) is not False:
        main: str = ddp["megatron_fsdp_main_grads_dtype"] or mode
        return main, ddp["megatron_fsdp_grad_comm_dtype"] or main
    if ddp["grad_reduce_in_fp32"]:
        return "fp32", "fp32"
    return mode, mode


def read_field(model: Any, name: str, default: Any = None) -> Any:
    """Return a value of a mapping or an object, or the default where it is absent or None."""
    if isinstance(model, Mapping):
        value = model.get(name)
    else:
        value = getattr(model, name, None)
    if value is None:
        return default
    return value


def is_different(value: Any, default: Any) -> bool:
    """Return whether a value is another than a default; JSON and YAML write a tuple as a list."""
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) != list(default)
    return bool(value != default)


def parse_integer(value: Any) -> int | None:
    """Return a whole number, also one that is written as text or as a float, or None."""
    try:
        number = int(value)
        is_whole = number == float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if is_whole and not isinstance(value, bool):
        return number
    return None

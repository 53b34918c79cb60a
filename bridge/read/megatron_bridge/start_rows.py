"""`START_ROWS`: the values that Megatron Bridge sets when a run starts.

The rows are applied in the order of its `runtime_config_update`, since a later row may read the value
of an earlier one. A setting that changes no plan, no bytes, no dimension and no finding has no row.

Source: NVIDIA-NeMo/Megatron-Bridge of 2026-08-22, src/megatron/bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bridge.errors import BridgeError
from bridge.precision.precision_config import FIELD_DEFAULTS
from bridge.read.startup_rows import (
    StartupRow,
    StartupSettings,
    is_megatron_fsdp,
    make_startup_rows,
)
from bridge.read.tokenizers import find_vocab_size
from bridge.registry.registry import get_mixed_precision_config
from bridge.target.fields import parse_integer
from bridge.target.versions import parse_version

BUCKET_SIZE = 128 * 2**20
"""Elements of a DDP bucket under `comm_overlap`."""
NULL_END_WITHIN = parse_version("0.18")
"""First release of Megatron Core whose NullTokenizer counts the end of a document in its vocabulary."""
OVERLAP_SOURCE = "training/comm_overlap.py"
CONFIG_SOURCE = "training/config.py"


def _is_overlapped(settings: StartupSettings) -> bool:
    """Return whether the run has a section `comm_overlap`."""
    return bool(settings.sections.get("comm_overlap"))


def _is_interleaved(settings: StartupSettings) -> bool:
    """Return whether a stage has several chunks by the field itself.

    Megatron Bridge reads a layout that implies chunks only after these rows.
    """
    stages = settings.size("pipeline_model_parallel_size")
    return stages > 1 and settings.size("virtual_pipeline_model_parallel_size") > 1


def _is_replicated(settings: StartupSettings) -> bool:
    """Return whether there are several data-parallel ranks.

    If the number of GPUs is not known, the file may state the number of ranks. Otherwise several are
    assumed.
    """
    if settings.gpus is None:
        return (parse_integer(settings.value("comm_overlap.data_parallel_size")) or 2) > 1
    ranks_of_a_replica = (
        settings.size("tensor_model_parallel_size")
        * settings.size("pipeline_model_parallel_size")
        * settings.size("context_parallel_size")
    )
    return settings.gpus // ranks_of_a_replica > 1


def _make_overlap_row(
    path: str, value: object, *, needs_distributed_optimizer: bool = False
) -> StartupRow:
    """Return the row of a field of `comm_overlap`.

    Its value is the one that `comm_overlap` states, or else a derived one.

    Args:
        path: Dotted key of the field that is set.
        value: The derived value, or a function that derives it from the settings.
        needs_distributed_optimizer: Whether the field is set only with the distributed optimizer, as
            those of the data-parallel ranks are.
    """

    def get_value(settings: StartupSettings) -> object:
        """Return the stated value, or else the derived one."""
        stated = settings.value(f"comm_overlap.{path.partition('.')[2]}")
        if stated is not None:
            return stated
        if callable(value):
            return value(settings)
        return value

    def is_set(settings: StartupSettings) -> bool:
        """Return whether Megatron Bridge sets the field."""
        if not _is_overlapped(settings):
            return False
        if not needs_distributed_optimizer:
            return True
        return bool(settings.value("ddp.use_distributed_optimizer"))

    function = "_get_model_comm_overlap_cfgs"
    if needs_distributed_optimizer:
        function = "_get_optimizer_overlap_cfgs"
    return StartupRow(
        path=path,
        when=is_set,
        value=get_value,
        because="comm_overlap",
        source=f"{OVERLAP_SOURCE}: {function}",
    )


def _make_switch_rows(name: str) -> tuple[StartupRow, ...]:
    """Return the rows of a switch that is on for the optimizer and DDP if it is on for one of them."""
    source = f"{CONFIG_SOURCE}: _validate_and_sync_distributed_optimizer_settings"
    ddp = f"ddp.{name}"
    optimizer = f"optimizer.{name}"
    return (
        StartupRow(path=ddp, value=True, when=optimizer, because=optimizer, source=source),
        StartupRow(path=optimizer, value=True, when=ddp, because=ddp, source=source),
    )


def _get_fp8_recipe(settings: StartupSettings) -> object:
    """Return the `fp8_recipe` of the precision.

    `MixedPrecisionConfig.setup` writes it into the optimizer's config in every mode, also without FP8.
    """
    precision: Any = settings.sections.get("mixed_precision")
    if isinstance(precision, Mapping):
        return precision.get("fp8_recipe", FIELD_DEFAULTS["fp8_recipe"])
    try:
        return get_mixed_precision_config(precision).fp8_recipe
    except BridgeError:  # the plan raises it again, with the known names
        return settings.value("optimizer.fp8_recipe")


def _takes_null_vocabulary(settings: StartupSettings) -> bool:
    """Return whether the model has the vocabulary of a NullTokenizer of known size.

    With `use_tokenizer_vocab_size` it overwrites the model's own vocabulary. Without the switch it
    counts for a model that has none, neither stated nor of a checkpoint.
    """
    if settings.value("tokenizer.tokenizer_type") != "NullTokenizer":
        return False
    if parse_integer(settings.value("tokenizer.vocab_size")) is None:
        return False
    if settings.value("tokenizer.use_tokenizer_vocab_size"):
        return True
    has_own = settings.stated("model.vocab_size") is not None
    return not has_own and settings.value("model.hf_model_id") is None


def _get_tokenizer_vocab_size(settings: StartupSettings) -> int | None:
    """Return the vocabulary size of the run's tokenizer by its name; None if the name is not known."""
    return find_vocab_size(settings.value("tokenizer.tokenizer_model"))


def _get_checkpoint_vocab_size(settings: StartupSettings) -> int | None:
    """Return the vocabulary size of the checkpoint that makes the model; None if its name is not known."""
    return find_vocab_size(settings.value("model.hf_model_id"))


def _get_bucket_size(settings: StartupSettings) -> int | None:
    """Return the size of a DDP bucket; None for a single data-parallel rank."""
    if _is_replicated(settings):
        return BUCKET_SIZE
    return None


def _get_null_vocab_size(settings: StartupSettings) -> int:
    """Return the vocabulary size of a NullTokenizer.

    Before Megatron Core 0.18 a NullTokenizer adds a token for the end of a document.

    Source: megatron-core 0.17.1 and 0.18.2 tokenizers/text/libraries/null_tokenizer.py.
    """
    size = parse_integer(settings.value("tokenizer.vocab_size")) or 0
    if settings.core_release is not None and settings.core_release < NULL_END_WITHIN:
        size += 1
    return size


_make_fsdp_rows = partial(
    make_startup_rows,
    because="Megatron-FSDP",
    source=f"{CONFIG_SOURCE}: _validate_and_apply_megatron_fsdp_v1_configs",
)
"""Makes rows of values that Megatron-FSDP decides."""

START_ROWS: tuple[StartupRow, ...] = (
    StartupRow(
        path="model.tp_comm_overlap",
        when=_is_overlapped,
        value=lambda settings: (
            settings.value("comm_overlap.tp_comm_overlap") is True
            and settings.size("tensor_model_parallel_size") > 1
            and bool(settings.value("model.sequence_parallel"))
        ),
        because="comm_overlap",
        source=f"{OVERLAP_SOURCE}: _get_model_comm_overlap_cfgs",
    ),
    _make_overlap_row("model.defer_embedding_wgrad_compute", False),
    _make_overlap_row("model.overlap_p2p_comm", _is_interleaved),
    _make_overlap_row(
        "model.batch_p2p_comm",
        lambda settings: (
            settings.size("pipeline_model_parallel_size") > 1 and not _is_interleaved(settings)
        ),
    ),
    _make_overlap_row("model.overlap_moe_expert_parallel_comm", value=False),
    _make_overlap_row(
        "ddp.bucket_size",
        _get_bucket_size,
        needs_distributed_optimizer=True,
    ),
    _make_overlap_row("ddp.overlap_grad_reduce", _is_replicated, needs_distributed_optimizer=True),
    _make_overlap_row("ddp.overlap_param_gather", _is_replicated, needs_distributed_optimizer=True),
    _make_overlap_row(
        "optimizer.overlap_param_gather", _is_replicated, needs_distributed_optimizer=True
    ),
    _make_overlap_row(
        "optimizer.overlap_param_gather_with_optimizer_step",
        value=False,
        needs_distributed_optimizer=True,
    ),
    _make_overlap_row(
        "ddp.align_param_gather",
        lambda settings: _is_replicated(settings) and _is_interleaved(settings),
        needs_distributed_optimizer=True,
    ),
    *make_startup_rows(
        {"model.expert_tensor_parallel_size": 1},
        lambda settings: settings.size("expert_model_parallel_size") > 1,
        because="experts are parallel",
        source="models/transformer_config.py: _set_moe_expert_tensor_parallel_default",
        is_default=True,
    ),
    *make_startup_rows(
        {"model.vocab_size": _get_null_vocab_size},
        _takes_null_vocabulary,
        because="the vocabulary of NullTokenizer",
        source="training/setup.py: _validate_and_set_vocab_size",
    ),
    *make_startup_rows(
        {"model.vocab_size": _get_tokenizer_vocab_size},
        _get_tokenizer_vocab_size,
        because="the published vocabulary of the tokenizer's name, of which the tokenizer may "
        "lack 0.5 %",
        source="training/setup.py: _validate_and_set_vocab_size; bridge/read/tokenizers.yaml",
        is_default=True,
    ),
    *make_startup_rows(
        {"model.vocab_size": _get_checkpoint_vocab_size},
        _get_checkpoint_vocab_size,
        because="the vocabulary of the checkpoint's name",
        source="models/conversion/auto_bridge.py: to_megatron_provider; bridge/read/tokenizers.yaml",
        is_default=True,
    ),
    *_make_fsdp_rows(
        {
            "ddp.use_megatron_fsdp": True,
            "ddp.use_distributed_optimizer": True,
            "optimizer.use_distributed_optimizer": True,
            "ddp.reuse_grad_buf_for_mxfp8_param_ag": False,
            "optimizer.reuse_grad_buf_for_mxfp8_param_ag": False,
        },
        is_megatron_fsdp,
    ),
    *_make_fsdp_rows(
        {"ddp.megatron_fsdp_use_decoupled_grad": True},
        lambda settings: (
            is_megatron_fsdp(settings) and settings.value("optimizer.use_precision_aware_optimizer")
        ),
    ),
    *_make_fsdp_rows(
        {"mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": False},
        lambda settings: (
            is_megatron_fsdp(settings)
            and settings.value("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag")
        ),
    ),
    *make_startup_rows(
        {"optimizer.fp8_recipe": _get_fp8_recipe},
        lambda settings: (
            settings.value("optimizer.use_precision_aware_optimizer")
            and settings.sections.get("mixed_precision") is not None
        ),
        because="mixed_precision.fp8_recipe, in every mode",
        source="training/mixed_precision.py: update_config_with_precision_overrides",
    ),
    *_make_switch_rows("use_distributed_optimizer"),
    *_make_switch_rows("overlap_param_gather"),
)

"""The values that Megatron Bridge sets at the start of a run, as rows.

They are applied in order, as its `runtime_config_update` works. Settings that change no plan, no
bytes, no dimension and no finding have no row.

Source: NVIDIA-NeMo/Megatron-Bridge of 2026-08-22, src/megatron/bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bridge.errors import BridgeError
from bridge.precision.config import FIELD_DEFAULTS
from bridge.read.startup_rows import (
    StartupRow,
    StartupSettings,
    is_megatron_fsdp,
    make_startup_rows,
)
from bridge.read.tokenizers import find_vocab_size
from bridge.registry.registry import get_mixed_precision_config
from bridge.target.fields import parse_integer

BUCKET_SIZE = 128 * 2**20
"""Elements of a DDP bucket under `comm_overlap`."""
OVERLAP_SOURCE = "training/comm_overlap.py"
CONFIG_SOURCE = "training/config.py"


def _is_overlapped(start: StartupSettings) -> bool:
    return bool(start.sections.get("comm_overlap"))


def _is_interleaved(start: StartupSettings) -> bool:
    """Return whether a stage has several chunks by the field itself.

    A layout that implies them is read later.
    """
    stages = start.size("pipeline_model_parallel_size")
    return stages > 1 and start.size("virtual_pipeline_model_parallel_size") > 1


def _is_replicated(start: StartupSettings) -> bool:
    """Return whether there are several data-parallel ranks.

    Without a number of GPUs the file says so, or there are two, as usual.
    """
    if start.gpus is None:
        return (parse_integer(start.value("comm_overlap.data_parallel_size")) or 2) > 1
    ranks_of_a_replica = (
        start.size("tensor_model_parallel_size")
        * start.size("pipeline_model_parallel_size")
        * start.size("context_parallel_size")
    )
    return start.gpus // ranks_of_a_replica > 1


def _make_overlap_row(path: str, value: Any, *, shared: bool = False) -> StartupRow:
    """Return the row of a field of `comm_overlap`: what is stated there, or else the value that it derives.

    `shared` fields are those of the data-parallel ranks, which need the distributed optimizer.
    """

    def decided(start: StartupSettings) -> Any:
        stated = start.value(f"comm_overlap.{path.partition('.')[2]}")
        if stated is not None:
            return stated
        return value(start) if callable(value) else value

    def is_set(start: StartupSettings) -> Any:
        if not _is_overlapped(start):
            return False
        return not shared or start.value("ddp.use_distributed_optimizer")

    function = "_get_optimizer_overlap_cfgs" if shared else "_get_model_comm_overlap_cfgs"
    return StartupRow(
        path=path,
        when=is_set,
        value=decided,
        because="comm_overlap",
        source=f"{OVERLAP_SOURCE}: {function}",
    )


def _make_switch_rows(name: str) -> tuple[StartupRow, ...]:
    """Return the rows of a switch of the optimizer and of DDP: on in one, it is on in both."""
    source = f"{CONFIG_SOURCE}: _validate_and_sync_distributed_optimizer_settings"
    of_ddp = f"ddp.{name}"
    of_optimizer = f"optimizer.{name}"
    return (
        StartupRow(path=of_ddp, value=True, when=of_optimizer, because=of_optimizer, source=source),
        StartupRow(path=of_optimizer, value=True, when=of_ddp, because=of_ddp, source=source),
    )


def _get_fp8_recipe(start: StartupSettings) -> Any:
    """Return the `fp8_recipe` of the precision, which `MixedPrecisionConfig.setup` writes in every mode."""
    precision: Any = start.sections.get("mixed_precision")
    if isinstance(precision, Mapping):
        return precision.get("fp8_recipe", FIELD_DEFAULTS["fp8_recipe"])
    try:
        return get_mixed_precision_config(precision).fp8_recipe
    except BridgeError:  # which the plan raises again, with the known names
        return start.value("optimizer.fp8_recipe")


def _takes_null_vocabulary(start: StartupSettings) -> bool:
    """Return whether the model has the vocabulary of a NullTokenizer of known size.

    It takes the place of the model's own where the run asks for it. A checkpoint has a vocabulary.
    """
    if start.value("tokenizer.tokenizer_type") != "NullTokenizer":
        return False
    if parse_integer(start.value("tokenizer.vocab_size")) is None:
        return False
    if start.value("tokenizer.use_tokenizer_vocab_size"):
        return True
    has_own = start.stated("model.vocab_size") is not None
    return not has_own and start.value("model.hf_model_id") is None


def _get_tokenizer_vocab_size(start: StartupSettings) -> int | None:
    """Return the vocabulary of the run's tokenizer, where its name is known."""
    return find_vocab_size(start.value("tokenizer.tokenizer_model"))


def _get_checkpoint_vocab_size(start: StartupSettings) -> int | None:
    """Return the vocabulary of the checkpoint that the model is made of, where its name is known."""
    return find_vocab_size(start.value("model.hf_model_id"))


_make_fsdp_rows = partial(
    make_startup_rows,
    because="Megatron-FSDP",
    source=f"{CONFIG_SOURCE}: _validate_and_apply_megatron_fsdp_v1_configs",
)

START_ROWS: tuple[StartupRow, ...] = (
    StartupRow(
        path="model.tp_comm_overlap",
        when=_is_overlapped,
        value=lambda start: (
            start.value("comm_overlap.tp_comm_overlap") is True
            and start.size("tensor_model_parallel_size") > 1
            and bool(start.value("model.sequence_parallel"))
        ),
        because="comm_overlap",
        source=f"{OVERLAP_SOURCE}: _get_model_comm_overlap_cfgs",
    ),
    _make_overlap_row("model.overlap_p2p_comm", _is_interleaved),
    _make_overlap_row(
        "model.batch_p2p_comm",
        lambda start: start.size("pipeline_model_parallel_size") > 1 and not _is_interleaved(start),
    ),
    _make_overlap_row("model.overlap_moe_expert_parallel_comm", value=False),
    _make_overlap_row(
        "ddp.bucket_size", lambda start: BUCKET_SIZE if _is_replicated(start) else None, shared=True
    ),
    _make_overlap_row("ddp.overlap_grad_reduce", _is_replicated, shared=True),
    _make_overlap_row("ddp.overlap_param_gather", _is_replicated, shared=True),
    _make_overlap_row("optimizer.overlap_param_gather", _is_replicated, shared=True),
    _make_overlap_row(
        "optimizer.overlap_param_gather_with_optimizer_step", value=False, shared=True
    ),
    _make_overlap_row(
        "ddp.align_param_gather",
        lambda start: _is_replicated(start) and _is_interleaved(start),
        shared=True,
    ),
    *make_startup_rows(
        {"model.expert_tensor_parallel_size": 1},
        lambda start: start.size("expert_model_parallel_size") > 1,
        because="experts are parallel",
        source="models/transformer_config.py: _set_moe_expert_tensor_parallel_default",
        is_default=True,
    ),
    *make_startup_rows(
        {
            "model.vocab_size": lambda start: (
                (parse_integer(start.value("tokenizer.vocab_size")) or 0) + 1
            )
        },
        _takes_null_vocabulary,
        because="the vocabulary of NullTokenizer and its end of document",
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
        lambda start: (
            is_megatron_fsdp(start) and start.value("optimizer.use_precision_aware_optimizer")
        ),
    ),
    *_make_fsdp_rows(
        {"mixed_precision.reuse_grad_buf_for_mxfp8_param_ag": False},
        lambda start: (
            is_megatron_fsdp(start)
            and start.value("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag")
        ),
    ),
    *make_startup_rows(
        {"optimizer.fp8_recipe": _get_fp8_recipe},
        lambda start: (
            start.value("optimizer.use_precision_aware_optimizer")
            and start.sections.get("mixed_precision") is not None
        ),
        because="mixed_precision.fp8_recipe, in every mode",
        source="training/mixed_precision.py: update_config_with_precision_overrides",
    ),
    *_make_switch_rows("use_distributed_optimizer"),
    *_make_switch_rows("overlap_param_gather"),
)

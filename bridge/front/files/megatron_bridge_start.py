"""The values that Megatron Bridge sets at the start of a run, as rows.

They are applied in order, as its `runtime_config_update` works. Settings that change no plan, no bytes, no dimension
and no finding have no row.

Source: NVIDIA-NeMo/Megatron-Bridge of 2026-08-22, src/megatron/bridge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge.front.files.start import Row, Start
from bridge.rules.fields import whole_number

BUCKET = 128 * 2**20
"""Elements of a DDP bucket under `comm_overlap`."""
OVERLAP = "training/comm_overlap.py"
CONFIG = "training/config.py"


def _overlap(path: str, value: Any, *, shared: bool = False) -> Row:
    """Return the row of a field of `comm_overlap`: what is stated there, or else the value that it derives.

    `shared` fields are those of the data-parallel ranks, which need the distributed optimizer.
    """
    stated = f"comm_overlap.{path.partition('.')[2]}"

    def decided(start: Start) -> Any:
        own = start.value(stated)
        if own is not None:
            return own
        return value(start) if callable(value) else value

    function = "_get_optimizer_overlap_cfgs" if shared else "_get_model_comm_overlap_cfgs"
    return Row(
        path=path,
        when=(lambda start: start.is_overlapped) if shared else (lambda start: start.has("comm_overlap")),
        value=decided,
        because="comm_overlap",
        source=f"{OVERLAP}: {function}",
    )


def _fsdp(path: str, value: Any, *, when: Callable[[Start], Any] | None = None) -> Row:
    return Row(
        path=path,
        when=lambda start: start.is_fsdp and (when is None or bool(when(start))),
        value=value,
        because="Megatron-FSDP",
        source=f"{CONFIG}: _validate_and_apply_megatron_fsdp_v1_configs",
    )


def _both(name: str) -> tuple[Row, Row]:
    """Return the rows of a switch that the optimizer and DDP have: on in one of them, it is on in both."""
    return tuple(  # type: ignore[return-value]
        Row(
            path=f"{role}.{name}",
            when=lambda start, other=other: bool(start.value(f"{other}.{name}")),  # type: ignore[misc]
            value=True,
            because=f"{other}.{name}",
            source=f"{CONFIG}: _validate_and_sync_distributed_optimizer_settings",
        )
        for role, other in (("ddp", "optimizer"), ("optimizer", "ddp"))
    )


ROWS: tuple[Row, ...] = (
    Row(
        path="model.tp_comm_overlap",
        when=lambda start: start.has("comm_overlap"),
        value=lambda start: (
            start.value("comm_overlap.tp_comm_overlap") is True
            and start.tensor > 1
            and bool(start.value("model.sequence_parallel"))
        ),
        because="comm_overlap",
        source=f"{OVERLAP}: _get_model_comm_overlap_cfgs",
    ),
    _overlap("model.overlap_p2p_comm", lambda start: start.is_interleaved),
    _overlap("model.batch_p2p_comm", lambda start: start.pipeline > 1 and not start.is_interleaved),
    _overlap("model.overlap_moe_expert_parallel_comm", value=False),
    _overlap("ddp.bucket_size", lambda start: BUCKET if start.is_replicated else None, shared=True),
    _overlap("ddp.overlap_grad_reduce", lambda start: start.is_replicated, shared=True),
    _overlap("ddp.overlap_param_gather", lambda start: start.is_replicated, shared=True),
    _overlap("optimizer.overlap_param_gather", lambda start: start.is_replicated, shared=True),
    _overlap("optimizer.overlap_param_gather_with_optimizer_step", value=False, shared=True),
    _overlap("ddp.align_param_gather", lambda start: start.is_replicated and start.is_interleaved, shared=True),
    Row(
        path="model.expert_tensor_parallel_size",
        when=lambda start: (
            start.value("model.expert_tensor_parallel_size") is None and start.size("expert_model_parallel_size") > 1
        ),
        value=1,
        because="experts are parallel",
        source="models/transformer_config.py: _set_moe_expert_tensor_parallel_default",
    ),
    Row(
        path="model.vocab_size",
        when=lambda start: (
            start.value("tokenizer.tokenizer_type") == "NullTokenizer"
            and start.value("model.vocab_size") is None
            and whole_number(start.value("tokenizer.vocab_size")) is not None
        ),
        value=lambda start: (whole_number(start.value("tokenizer.vocab_size")) or 0) + 1,
        because="the vocabulary of NullTokenizer and its end of document",
        source="training/setup.py: _validate_and_set_vocab_size",
    ),
    _fsdp("ddp.use_megatron_fsdp", value=True),
    _fsdp("ddp.use_distributed_optimizer", value=True),
    _fsdp("optimizer.use_distributed_optimizer", value=True),
    _fsdp(
        "ddp.megatron_fsdp_use_decoupled_grad",
        value=True,
        when=lambda start: start.value("optimizer.use_precision_aware_optimizer"),
    ),
    _fsdp(
        "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",
        value=False,
        when=lambda start: start.value("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"),
    ),
    _fsdp("ddp.reuse_grad_buf_for_mxfp8_param_ag", value=False),
    _fsdp("optimizer.reuse_grad_buf_for_mxfp8_param_ag", value=False),
    *_both("use_distributed_optimizer"),
    *_both("overlap_param_gather"),
)

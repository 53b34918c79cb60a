"""The values that Megatron Bridge sets at the start of a run, as rows of a table.

    row = ROWS[0]
    row.path, row.because, row.source      # ddp.overlap_grad_reduce, comm_overlap, training/comm_overlap.py: ...

A row applies where its condition holds, and its value takes the place of the one in the file. Rows are applied in
order, as Megatron Bridge's `runtime_config_update` works; a value that is there already is not reported. Settings that
change no plan, no bytes, no dimension and no finding have no row.

Source: NVIDIA-NeMo/Megatron-Bridge of 2026-08-22, src/megatron/bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.front.files.reading import MEGATRON_BRIDGE, Derived
from bridge.rules.fields import DEFAULTS, whole_number
from bridge.rules.shape.hybrid import DEPTH

BUCKET = 128 * 2**20
"""Elements of a DDP bucket under `comm_overlap`."""
OVERLAP = "training/comm_overlap.py"
CONFIG = "training/config.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The settings of a run that the rows ask about."""

    sections: Mapping[str, Any]
    own_fields: Mapping[str, Any]
    gpus: int | None
    """GPUs of the run; None: not known."""

    def value(self, path: str) -> Any:
        """Return a setting's value, Megatron's default where there is none."""
        role, _, name = path.partition(".")
        held = self.sections.get(role)
        given = held.get(name) if isinstance(held, Mapping) else None
        return DEFAULTS.get(role, {}).get(name, self.own_fields.get(path)) if given is None else given

    def has(self, section: str) -> bool:
        """Return whether a section is there and not empty."""
        return bool(self.sections.get(section))

    def size(self, name: str) -> int:
        """Return a size of the model's parallel layout, at least 1."""
        return max(1, whole_number(self.value(f"model.{name}")) or 1)

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return self.size("tensor_model_parallel_size")

    @property
    def pipeline(self) -> int:
        """Pipeline stages."""
        return self.size("pipeline_model_parallel_size")

    @property
    def is_interleaved(self) -> bool:
        """Whether a stage has several chunks by the field itself; a layout that implies them is read later."""
        return self.pipeline > 1 and self.size("virtual_pipeline_model_parallel_size") > 1

    @property
    def is_replicated(self) -> bool:
        """Whether there is more than one data-parallel rank; without a number of GPUs, as the file or as usual."""
        if self.gpus is None:
            return (whole_number(self.value("comm_overlap.data_parallel_size")) or 2) > 1
        return self.gpus // (self.tensor * self.pipeline * self.size("context_parallel_size")) > 1

    @property
    def is_overlapped(self) -> bool:
        """Whether `comm_overlap` decides about the communication of data-parallel ranks."""
        return self.has("comm_overlap") and bool(self.value("ddp.use_distributed_optimizer"))

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP, the established version of it, runs."""
        on = self.value("dist.use_megatron_fsdp") or self.value("ddp.use_megatron_fsdp")
        return bool(on) and (self.value("ddp.megatron_fsdp_version") or 1) == 1

    @property
    def hybrid_pattern(self) -> str:
        """The pattern of a hybrid model with a part for each multi-token-prediction depth."""
        main = str(self.value("model.hybrid_layer_pattern")).split(DEPTH)[0]
        depths = whole_number(self.value("model.mtp_num_layers")) or 0
        if self.value("model.mtp_use_repeated_layer"):
            depths = max(1, depths)
        return main + DEPTH + DEPTH.join([str(self.value("model.mtp_hybrid_override_pattern"))] * depths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One value that Megatron Bridge sets at start."""

    path: str
    when: Callable[[Start], bool]
    """The condition."""
    value: Any
    """The value, or a function of it."""
    because: str
    """The condition in words, as a clause or a setting's name."""
    source: str
    """File and function of Megatron Bridge."""

    def value_at(self, start: Start) -> Any:
        """Return the value that is set."""
        return self.value(start) if callable(self.value) else self.value


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
    """Return the row of a field that Megatron-FSDP decides about."""
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
    _overlap("model.defer_embedding_wgrad_compute", value=False),
    _overlap("model.overlap_moe_expert_parallel_comm", value=False),
    _overlap("model.delay_wgrad_compute", value=False),
    _overlap("ddp.bucket_size", lambda start: BUCKET if start.is_replicated else None, shared=True),
    _overlap("ddp.overlap_grad_reduce", lambda start: start.is_replicated, shared=True),
    _overlap("ddp.overlap_param_gather", lambda start: start.is_replicated, shared=True),
    _overlap("optimizer.overlap_param_gather", lambda start: start.is_replicated, shared=True),
    _overlap("optimizer.overlap_param_gather_with_optimizer_step", value=False, shared=True),
    _overlap("ddp.align_param_gather", lambda start: start.is_replicated and start.is_interleaved, shared=True),
    Row(
        path="model.hybrid_layer_pattern",
        when=lambda start: bool(
            start.value("model.hybrid_layer_pattern") and start.value("model.mtp_hybrid_override_pattern")
        ),
        value=lambda start: start.hybrid_pattern,
        because="model.mtp_hybrid_override_pattern",
        source="models/hybrid/hybrid_provider.py: finalize",
    ),
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
        path="model.use_te_rng_tracker",
        when=lambda start: bool(start.value("rng.te_rng_tracker")),
        value=True,
        because="rng.te_rng_tracker",
        source=f"{CONFIG}: validate",
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
        "ddp.average_in_collective",
        value=False,
        when=lambda start: not start.value("ddp.disable_symmetric_registration"),
    ),
    _fsdp("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag", value=False),
    _fsdp("ddp.reuse_grad_buf_for_mxfp8_param_ag", value=False),
    _fsdp("optimizer.reuse_grad_buf_for_mxfp8_param_ag", value=False),
    *_both("use_distributed_optimizer"),
    *_both("overlap_param_gather"),
)


def derived(
    sections: dict[str, Any], own_fields: Mapping[str, Any], gpus: int | None, rows: Sequence[Row] = ROWS
) -> tuple[Derived, ...]:
    """Write into the sections what Megatron Bridge sets at the start of a run with them, and return it."""
    start = Start(sections=sections, own_fields=own_fields, gpus=gpus)
    found: dict[str, Derived] = {}
    for row in rows:
        before = start.value(row.path)
        if not row.when(start):
            continue
        value = row.value_at(start)
        if value == before:
            continue
        role, _, name = row.path.partition(".")
        stated = found[row.path].stated if row.path in found else before
        sections[role] = {**(sections.get(role) or {}), name: value}
        found[row.path] = Derived(
            path=row.path, value=value, stated=stated, because=row.because, framework=MEGATRON_BRIDGE
        )
    return tuple(one for one in found.values() if one.value != one.stated)

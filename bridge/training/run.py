"""A run that has been built from a synchronised `ConfigContainer`: data, model and optimizer."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bridge.errors import CheckpointError, RunConfigError
from bridge.precision.mode import format_label
from bridge.precision.subjects import IMPOSSIBLE, NEEDS_PERMISSION
from bridge.registry.registry import get_mixed_precision_config
from bridge.registry.schedule import Phase, PrecisionSchedule
from bridge.runtime.audit.record import GemmRow
from bridge.runtime.checkpoint.folder import get_step_folder
from bridge.runtime.checkpoint.precision_change import PrecisionChange, find_precision_changes
from bridge.runtime.megatron.backend import Backend
from bridge.runtime.megatron.checkpoint.loading import (
    find_newest_sound,
    load_checkpoint,
    read_manifest_facts,
    require_no_later_checkpoint,
)
from bridge.runtime.megatron.checkpoint.state import Position
from bridge.runtime.megatron.data.batches import (
    Splits,
    build_splits,
    compute_unigram_entropy,
    iterate_batches,
)
from bridge.runtime.megatron.data.corpus import Corpus, open_corpus
from bridge.runtime.megatron.emulation.emulated_model import switch_precision
from bridge.runtime.megatron.gpt import adapt_config, build_gpt, count_parameters
from bridge.runtime.megatron.optimizer import build_optimizer, build_scheduler
from bridge.runtime.megatron.process import Process
from bridge.runtime.megatron.record.census import Activations
from bridge.runtime.megatron.record.telemetry import Telemetry
from bridge.runtime.megatron.trainer import StepResult, Trainer
from bridge.training.config import ConfigContainer
from bridge.training.fingerprint import compute_fingerprint
from bridge.training.metrics import TrainRecord, ValidationRecord
from bridge.training.supported_fields import require_supported
from bridge.training.value_checks import find_batch_fault


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord:
    """One phase of a precision schedule, as it ran."""

    first: int
    """The first step, from 1 on."""
    last: int
    """The last step that it was to have."""
    precision: str
    gemms: tuple[GemmRow, ...]
    """GEMMs of its first step in this process."""


@dataclass(kw_only=True)
class TrainingRun:
    """A run that has been built, and how far it has come."""

    config: ConfigContainer
    process: Process
    trainer: Trainer
    splits: Splits
    entropy: float
    parameters: int
    notes: list[str]
    start: Position
    backend: str
    telemetry: Telemetry
    activations: Activations = field(default_factory=Activations)
    schedule: PrecisionSchedule | None = None
    gemms: tuple[GemmRow, ...] = ()
    """GEMMs of the first step."""
    phases: list[PhaseRecord] = field(default_factory=list)
    """The phases of a schedule that this process was in, each with the GEMMs of its first step."""
    iteration: int = 0
    skipped_steps: int = 0
    """Skipped steps of the whole run, with those before the checkpoint that it resumed from."""
    stuck_in_a_row: int = 0
    """Number of the last steps that were skipped without a lower loss scale left."""
    stop_signal: int | None = None
    """Number of the signal that ended the run before its last step."""
    recent_losses: deque[float] = field(default_factory=deque)
    validation: ValidationRecord | None = None
    """The last validation of this process."""
    step_seconds: list[float] = field(default_factory=list)
    recorded_steps: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the last step was taken."""
        return self.iteration >= self.config.train.train_iters

    @property
    def is_over(self) -> bool:
        """Whether no further step is taken."""
        return self.is_done or self.stop_signal is not None

    @property
    def steps(self) -> int:
        """Steps of this process."""
        return self.iteration - self.start.iteration

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return int(self.config.train.global_batch_size * self.trainer.config.seq_length)

    @property
    def position(self) -> Position:
        """How far the run has come, for a checkpoint."""
        precision = get_precision_label(self.config)
        if self.schedule is not None:
            precision = format_label(self.schedule.phase_at(max(1, self.iteration)).precision)
        extra = {"precision": precision, "skipped_steps": self.skipped_steps}
        return Position(
            iteration=self.iteration, consumed_samples=self.consumed_samples, extra=extra
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the run for the manifest of a checkpoint, as plain data."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "precision": self.position.extra["precision"],
            "settings": compute_fingerprint(self.config, os.environ, model=self.trainer.config),
        }

    @property
    def consumed_samples(self) -> int:
        """Samples of the run that were trained on, over all ranks."""
        return self.start.consumed_samples + self.steps * self.config.train.global_batch_size

    def enter_phase(self) -> Phase | None:
        """Switch to the precision of the next step.

        Returns:
            The step's phase if it is this process's first step in it, else None.
        """
        if self.schedule is None:
            return None
        phase = self.schedule.apply(self.iteration + 1)
        if phase is not None and self.backend == "emulated":
            switch_precision(self.trainer.model, self.trainer.config)
        if not self.step_seconds:
            return self.schedule.phase_at(self.iteration + 1)
        return phase

    def batches_of(self, dataset: Any, *, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's micro-batches of a split, after the first `start` samples."""
        return iterate_batches(
            dataset,
            micro_batch_size=self.config.train.micro_batch_size,
            data_parallel_rank=self.process.data_parallel_rank,
            data_parallel_size=self.process.data_parallel_size,
            context_parallel_rank=self.process.context_parallel_rank,
            context_parallel_size=self.process.context_parallel_size,
            device=self.process.device,
            num_workers=self.config.data.num_workers,
            start=start,
        )

    def count(self, result: StepResult, seconds: float) -> None:
        """Add a step to the counts."""
        self.iteration += 1
        self.skipped_steps += result.skipped
        if result.is_stuck:
            self.stuck_in_a_row += 1
        else:
            self.stuck_in_a_row = 0
        self.recent_losses.append(result.loss)
        self.step_seconds.append(seconds)

    def record(self, result: StepResult) -> TrainRecord:
        """Return the record of the last step, with the mean loss and speed since the last record."""
        seconds = self.step_seconds[self.recorded_steps :]
        losses = list(self.recent_losses)[-len(seconds) :]
        self.recorded_steps = len(self.step_seconds)
        return TrainRecord(
            step=self.iteration,
            loss=sum(losses) / len(losses),
            skipped=result.skipped,
            skipped_steps=self.skipped_steps,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            learning_rate=result.learning_rate,
            tokens_per_second=self.tokens_per_step * len(seconds) / sum(seconds),
            consumed_samples=self.consumed_samples,
            not_finite=result.not_finite,
        )


def get_skipped_steps(start: Position) -> int:
    """Return the number of skipped steps before the checkpoint that a run begins at."""
    return int(start.extra.get("skipped_steps", 0))


def get_precision_label(config: ConfigContainer) -> str:
    """Return the recipe's name with the fields stated over it, or the dtypes of the configs."""
    precision, schedule = config.mixed_precision, config.precision_schedule
    if isinstance(schedule, PrecisionSchedule):
        return "; then ".join(format_label(phase.precision) for phase in schedule.phases)
    if isinstance(precision, str):
        return precision
    if precision is not None:
        return format_label(get_mixed_precision_config(precision))
    model: Any = config.model
    weights = "fp32"
    if model.bf16:
        weights = "bf16"
    elif model.fp16:
        weights = "fp16"
    if model.enable_autocast:
        autocast = str(model.autocast_dtype).removeprefix("torch.")
        return f"{weights} weights, {autocast} autocast"
    return weights


def list_phase_models(config: ConfigContainer) -> list[Any]:
    """Return the model config of each phase; a run without a schedule has a single phase."""
    schedule = _get_schedule(config)
    if schedule is None:
        return [config.model]
    return schedule.models()


def _get_schedule(config: ConfigContainer) -> PrecisionSchedule | None:
    """Return the precision schedule of a run, None for a run with a single precision."""
    if isinstance(config.precision_schedule, PrecisionSchedule):
        return config.precision_schedule
    return None


def build_run(config: ConfigContainer, process: Process, *, backend: Backend) -> TrainingRun:
    """Build data, model, optimizer and schedule, and resume from `checkpoint.load` if it is set.

    The call is inside of a ``with bridge.runtime.megatron.backend.running(backend)``.

    Raises:
        RunConfigError: The batch sizes do not fit the ranks, or a setting is not honoured.
        DataError: The data cannot be used.
        CheckpointError: There is nothing to resume from, or the folder has later checkpoints.
    """
    fault = find_batch_fault(config.train, ranks=process.data_parallel_size)
    if fault is not None:
        raise RunConfigError(str(fault))
    schedule = _get_schedule(config)
    phases = list_phase_models(config)
    require_supported(config, phases, backend=backend.name)
    corpus = open_corpus(
        config.data.path, vocab_size=config.data.vocab_size, cache_dir=config.data.cache_dir
    )
    splits = _build_splits(config, corpus)
    adapted, notes = adapt_config(config.model, vocab_size=corpus.vocab_size, backend=backend.name)
    if schedule is not None:
        notes.append(f"Precision schedule: {schedule}.")
    trainer = _build_trainer(config, adapted, process, backend, phases)
    if schedule is not None:
        schedule.bind(adapted)
    start, resumed = _resume_from_checkpoint(config, trainer, schedule, backend)
    checkpoint = config.checkpoint
    if checkpoint.save is not None:
        require_no_later_checkpoint(
            Path(checkpoint.save), start, checksum=checkpoint.checksum, trust=checkpoint.trust
        )
    sentences = [*process.notes, *backend.notes, *notes, *resumed]
    sentences.append(f"Data: {corpus.name} ({corpus.prefix}).")
    return TrainingRun(
        config=config,
        process=process,
        trainer=trainer,
        splits=splits,
        entropy=compute_unigram_entropy(splits, corpus.vocab_size),
        parameters=count_parameters(trainer.model),
        notes=sentences,
        start=start,
        backend=backend.name,
        schedule=schedule,
        telemetry=Telemetry(trainer.model),
        iteration=start.iteration,
        skipped_steps=get_skipped_steps(start),
        recent_losses=deque(maxlen=max(1, config.logging.log_interval)),
    )


def _build_splits(config: ConfigContainer, corpus: Corpus) -> Splits:
    """Return the samples of all steps, and of a validation."""
    train = config.train
    model: Any = config.model
    return build_splits(
        corpus,
        seq_length=model.seq_length,
        split=config.data.split,
        seed=config.data.seed,
        train_samples=train.train_iters * train.global_batch_size,
        validation_samples=train.eval_iters * train.global_batch_size,
    )


def _resume_from_checkpoint(
    config: ConfigContainer, trainer: Trainer, schedule: PrecisionSchedule | None, backend: Backend
) -> tuple[Position, list[str]]:
    """Restore the run from the newest sound checkpoint of `checkpoint.load`, if that is set.

    Returns:
        How far the run had come, and sentences for the log.
    """
    if config.checkpoint.load is None:
        return Position(), []
    files, label = config.checkpoint, get_precision_label(config)
    folder = Path(str(files.load))
    saved = find_newest_sound(folder, checksum=files.checksum, trust=files.trust)
    # A checkpoint holds the delayed scales of the phase in which it was written.
    if schedule is not None:
        schedule.apply(max(1, saved))
        label = format_label(schedule.phase_at(max(1, saved)).precision)
        if backend.name == "emulated":
            switch_precision(trainer.model, trainer.config)
    checkpoint = get_step_folder(folder, saved)
    now = compute_fingerprint(config, os.environ, model=trainer.config)
    changes = find_precision_changes(read_manifest_facts(checkpoint).get("settings") or {}, now)
    _require_allowed(changes, checkpoint, is_allowed=config.resume.allow_precision_change)
    start = load_checkpoint(trainer, folder, saved, rounds_masters=bool(changes))
    before = start.extra.get("precision", "an unknown precision")
    other = ""
    if before != label:
        other = f", which was saved in {before} and goes on in {label}"
    notes = [f"Resumed from step {start.iteration} of {folder}{other}."]
    for change in changes:
        notes.append(f"{change}.")
    if start.iteration >= config.train.train_iters:
        notes.append(
            f"There is nothing left to do: train.train_iters is {config.train.train_iters}."
        )
    return start, notes


def _require_allowed(changes: Sequence[PrecisionChange], source: Path, *, is_allowed: bool) -> None:
    """Refuse changes of precision that lose bits, unless `is_allowed`, and impossible changes.

    Raises:
        CheckpointError: A change is refused; its text lists all of them.
    """
    refused_outcomes = [IMPOSSIBLE]
    if not is_allowed:
        refused_outcomes.append(NEEDS_PERMISSION)
    refused = [change for change in changes if change.outcome in refused_outcomes]
    if not refused:
        return
    remedy = "Set resume.allow_precision_change=true, or use the precision that wrote it"
    if refused[0].outcome == IMPOSSIBLE:
        remedy = "Use the precision that wrote it"
    lines = [f"checkpoint.load: {source} was saved in another precision. {remedy}:"]
    for change in refused:
        lines.append(f"  {change}")
    raise CheckpointError("\n".join(lines))


def _build_trainer(
    config: ConfigContainer, model: Any, process: Process, backend: Backend, phases: Sequence[Any]
) -> Trainer:
    """Build model, optimizer and schedule."""
    train = config.train
    chunks = build_gpt(
        model, config.ddp, process.device, seed=train.seed, backend=backend.name, phases=phases
    )
    optimizer = build_optimizer(config.optimizer, chunks)
    scheduler = build_scheduler(
        config.optimizer,
        optimizer,
        warmup_iters=train.lr_warmup_iters,
        decay_iters=train.lr_decay_iters or train.train_iters,
        decay_style=train.lr_decay_style,
        global_batch_size=train.global_batch_size,
    )
    sizes = {
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
    }
    return Trainer(
        config=model,
        model=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        process=process,
        **sizes,
    )

"""`TrainingRun`: the data, model and optimizer that are built from a `ConfigContainer`.

Before the run is built, the precision is written into the container's sections.
"""

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
from bridge.runtime.megatron.model.gpt import adapt_config, build_gpt, count_parameters
from bridge.runtime.megatron.optimizer import build_optimizer, build_scheduler
from bridge.runtime.megatron.process.training_process import Process
from bridge.runtime.megatron.record.census import Activations
from bridge.runtime.megatron.record.telemetry import Telemetry
from bridge.runtime.megatron.trainer import StepResult, Trainer
from bridge.training.config import ConfigContainer
from bridge.training.fingerprint import compute_fingerprint
from bridge.training.metrics import TrainRecord, ValidationRecord
from bridge.training.unsupported_settings import require_supported_settings
from bridge.training.value_checks import find_batch_fault


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord:
    """One phase of a precision schedule, as it ran."""

    first: int
    """The first step, from 1 on."""
    last: int
    """The last step of the schedule in this phase. The run can end before it."""
    precision: str
    """The recipe's name with the fields stated over it."""
    gemms: tuple[GemmRow, ...]
    """GEMMs of the first step that this process took in the phase."""


@dataclass(kw_only=True)
class TrainingRun:
    """A run that has been built, and its progress."""

    config: ConfigContainer
    process: Process
    trainer: Trainer
    splits: Splits
    entropy: float
    """Unigram entropy of the validation tokens, in nats per token."""
    parameters: int
    """Parameters of the whole model, with the padding of the vocabulary."""
    notes: list[str]
    """Sentences about the built run, for the log."""
    start: Position
    """The position at which this process began: of the checkpoint, or of the beginning."""
    backend: str
    """Name of the backend of the low-precision GEMMs."""
    telemetry: Telemetry
    activations: Activations = field(default_factory=Activations)
    schedule: PrecisionSchedule | None = None
    gemms: tuple[GemmRow, ...] = ()
    """GEMMs of the first step."""
    phases: list[PhaseRecord] = field(default_factory=list)
    """The phases of the schedule that this process was in."""
    iteration: int = 0
    """Steps of the whole run, including those before the checkpoint that it resumed from."""
    skipped_steps: int = 0
    """Skipped steps of the whole run, including those before the checkpoint."""
    stuck_in_a_row: int = 0
    """Length of the present series of skipped steps in which the loss scale could not fall."""
    stop_signal: int | None = None
    """Number of the signal that ended the run before its last step. None: no signal did."""
    recent_losses: deque[float] = field(default_factory=deque)
    """Losses of the last `logging.log_interval` steps."""
    validation: ValidationRecord | None = None
    """The last validation of this process."""
    step_seconds: list[float] = field(default_factory=list)
    """Time of each step of this process."""
    recorded_steps: int = 0
    """Steps of this process up to the last `TrainRecord`."""

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
        """Steps that this process has taken."""
        return self.iteration - self.start.iteration

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return int(self.config.train.global_batch_size * self.trainer.config.seq_length)

    @property
    def position(self) -> Position:
        """The position of the run, for a checkpoint."""
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
        """Samples that the whole run has trained on, over all ranks."""
        return self.start.consumed_samples + self.steps * self.config.train.global_batch_size

    def enter_phase(self) -> Phase | None:
        """Switch to the precision of the next step.

        Returns:
            The phase of the step, or None if this process has already taken a step in the phase.
        """
        if self.schedule is None:
            return None
        new_phase = self.schedule.apply(self.iteration + 1)
        if new_phase is not None and self.backend == "emulated":
            switch_precision(self.trainer.model, self.trainer.config)
        is_first_of_process = not self.step_seconds
        if is_first_of_process:
            return self.schedule.phase_at(self.iteration + 1)
        return new_phase

    def batches_of(self, dataset: Any, *, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's micro-batches of a dataset, after the first `start` samples."""
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
        """Add a finished step to the progress of the run.

        Args:
            seconds: The time of the step.
        """
        self.iteration += 1
        self.skipped_steps += result.skipped
        if result.is_stuck:
            self.stuck_in_a_row += 1
        else:
            self.stuck_in_a_row = 0
        self.recent_losses.append(result.loss)
        self.step_seconds.append(seconds)

    def record(self, result: StepResult) -> TrainRecord:
        """Return a record of the last step, with the mean loss and speed since the previous record.

        The next call counts from this record on.
        """
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
    """Return the number of skipped steps up to the position at which a run begins."""
    return int(start.extra.get("skipped_steps", 0))


def get_precision_label(config: ConfigContainer) -> str:
    """Return the recipe's name with the fields stated over it.

    A schedule has the label of each phase. Without a precision the label has the dtypes of the
    configs.
    """
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
    """Return the model config of each phase. A run without a schedule has a single phase."""
    schedule = _get_schedule(config)
    if schedule is None:
        return [config.model]
    return schedule.models()


def _get_schedule(config: ConfigContainer) -> PrecisionSchedule | None:
    """Return the precision schedule of a run, or None for a run with a single precision."""
    if isinstance(config.precision_schedule, PrecisionSchedule):
        return config.precision_schedule
    return None


def build_run(config: ConfigContainer, process: Process, *, backend: Backend) -> TrainingRun:
    """Build data, model, optimizer and schedule, and resume from `checkpoint.load` if it is set.

    It is called in a ``with use_backend(backend)`` block of `bridge.runtime.megatron.backend`.

    Args:
        config: The run. The precision is written into its sections.
        process: The training process.
        backend: The backend of the low-precision GEMMs.

    Raises:
        RunConfigError: The batch sizes do not fit the ranks, or a setting is not supported.
        DataError: The data cannot be used.
        CheckpointError: There is nothing to resume from, or the folder has later checkpoints.
    """
    fault = find_batch_fault(config.train, ranks=process.data_parallel_size)
    if fault is not None:
        raise RunConfigError(str(fault))
    schedule = _get_schedule(config)
    phase_models = list_phase_models(config)
    require_supported_settings(config, phase_models, backend=backend.name)
    corpus = open_corpus(
        config.data.path, vocab_size=config.data.vocab_size, cache_dir=config.data.cache_dir
    )
    splits = _build_splits(config, corpus)
    model, model_notes = adapt_config(
        config.model, vocab_size=corpus.vocab_size, backend=backend.name
    )
    if schedule is not None:
        model_notes.append(f"Precision schedule: {schedule}.")
    trainer = _build_trainer(config, model, process, backend, phase_models)
    if schedule is not None:
        schedule.bind(model)
    start, resume_notes = _find_start(config, trainer, schedule, backend)
    data_note = f"Data: {corpus.name} ({corpus.prefix})."
    return TrainingRun(
        config=config,
        process=process,
        trainer=trainer,
        splits=splits,
        entropy=compute_unigram_entropy(splits, corpus.vocab_size),
        parameters=count_parameters(trainer.model),
        notes=[*process.notes, *backend.notes, *model_notes, *resume_notes, data_note],
        start=start,
        backend=backend.name,
        schedule=schedule,
        telemetry=Telemetry(trainer.model),
        iteration=start.iteration,
        skipped_steps=get_skipped_steps(start),
        recent_losses=deque(maxlen=max(1, config.logging.log_interval)),
    )


def _build_splits(config: ConfigContainer, corpus: Corpus) -> Splits:
    """Return the data splits, with the samples of all training steps and of one validation."""
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


def _find_start(
    config: ConfigContainer, trainer: Trainer, schedule: PrecisionSchedule | None, backend: Backend
) -> tuple[Position, list[str]]:
    """Resume from `checkpoint.load` if it is set, and check the folder of new checkpoints.

    Returns:
        The position at which the run begins, and sentences for the log.

    Raises:
        CheckpointError: There is nothing to resume from, or the folder has later checkpoints.
    """
    checkpoint = config.checkpoint
    start = Position()
    notes: list[str] = []
    if checkpoint.load is not None:
        folder = Path(checkpoint.load)
        start, notes = _resume_from_checkpoint(config, folder, trainer, schedule, backend)
    if checkpoint.save is not None:
        require_no_later_checkpoint(
            Path(checkpoint.save), start, checksum=checkpoint.checksum, trust=checkpoint.trust
        )
    return start, notes


def _resume_from_checkpoint(
    config: ConfigContainer,
    folder: Path,
    trainer: Trainer,
    schedule: PrecisionSchedule | None,
    backend: Backend,
) -> tuple[Position, list[str]]:
    """Restore the run from the newest sound checkpoint of a folder.

    Returns:
        The position of the run at the checkpoint, and sentences for the log.

    Raises:
        CheckpointError: No checkpoint can be loaded, or its precision differs in a way that is not
            allowed.
    """
    label = get_precision_label(config)
    step = find_newest_sound(
        folder, checksum=config.checkpoint.checksum, trust=config.checkpoint.trust
    )
    # A checkpoint has the delayed scales of the phase in which it was written. So the model is
    # switched to that phase before it is loaded.
    if schedule is not None:
        schedule.apply(max(1, step))
        label = format_label(schedule.phase_at(max(1, step)).precision)
        if backend.name == "emulated":
            switch_precision(trainer.model, trainer.config)
    step_folder = get_step_folder(folder, step)
    saved_settings = read_manifest_facts(step_folder).get("settings") or {}
    settings = compute_fingerprint(config, os.environ, model=trainer.config)
    changes = find_precision_changes(saved_settings, settings)
    _require_allowed(changes, step_folder, is_allowed=config.resume.allow_precision_change)
    start = load_checkpoint(trainer, folder, step, rounds_masters=bool(changes))
    resumed = f"Resumed from step {start.iteration} of {folder}"
    saved_label = start.extra.get("precision", "an unknown precision")
    if saved_label != label:
        resumed = f"{resumed}, which was saved in {saved_label} and goes on in {label}"
    notes = [f"{resumed}.", *(f"{change}." for change in changes)]
    if start.iteration >= config.train.train_iters:
        notes.append(
            f"There is nothing left to do: train.train_iters is {config.train.train_iters}."
        )
    return start, notes


def _require_allowed(changes: Sequence[PrecisionChange], source: Path, *, is_allowed: bool) -> None:
    """Refuse impossible changes of precision, and changes that lose bits unless they are allowed.

    Args:
        changes: The changes between the checkpoint and the run.
        source: The folder of the checkpoint, for the message.
        is_allowed: Whether changes may lose bits.

    Raises:
        CheckpointError: A change is refused; its text lists all of them.
    """
    refused_outcomes = [IMPOSSIBLE]
    if not is_allowed:
        refused_outcomes.append(NEEDS_PERMISSION)
    refused = [change for change in changes if change.outcome in refused_outcomes]
    if not refused:
        return
    headline = (
        f"checkpoint.load: {source} was saved in another precision. "
        "Set resume.allow_precision_change=true, or use the precision that wrote it:"
    )
    if refused[0].outcome == IMPOSSIBLE:
        headline = (
            f"checkpoint.load: {source} was saved in another precision. "
            "Use the precision that wrote it:"
        )
    lines = [headline]
    for change in refused:
        lines.append(f"  {change}")
    raise CheckpointError("\n".join(lines))


def _build_trainer(
    config: ConfigContainer,
    model: Any,
    process: Process,
    backend: Backend,
    phase_models: Sequence[Any],
) -> Trainer:
    """Build the model chunks, the optimizer and the learning-rate schedule.

    Args:
        config: The run.
        model: The adapted model config.
        process: The training process.
        backend: The backend of the low-precision GEMMs.
        phase_models: The model config of each phase.
    """
    train = config.train
    chunks = build_gpt(
        model,
        config.ddp,
        process.device,
        seed=train.seed,
        backend=backend,
        phases=phase_models,
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
    return Trainer(
        config=model,
        model=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        process=process,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
    )

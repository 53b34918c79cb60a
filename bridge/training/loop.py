"""The run: builds everything from a synchronised `ConfigContainer`, trains, validates, saves and sums up.

Nothing here decides about precision. What the configs say is what Megatron gets; what the tensors then are is read from
them (`bridge.megatron.census`) and shown beside the result.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bridge.errors import RunConfigError, TrainingError
from bridge.megatron import checkpoint as checkpoints
from bridge.megatron.census import Activations, take_census, watch_activations
from bridge.megatron.corpus import open_corpus
from bridge.megatron.data import Splits, batches, build_splits, unigram_entropy
from bridge.megatron.gpt import build_gpt, parameter_count, run_config
from bridge.megatron.layer_spec import require_gemm_backend
from bridge.megatron.optimizer import build_optimizer, build_scheduler
from bridge.megatron.process import Process, apply_tf32, training_process
from bridge.megatron.step import StepResult, Trainer
from bridge.report.curves import plot_loss
from bridge.training.config import ConfigContainer
from bridge.training.console import Display, Silent, display, show_summary
from bridge.training.metrics import Metrics, NoMetrics, TrainRecord, ValidationRecord, metrics_log
from bridge.training.stop import StopRequest, stop_on_signal
from bridge.training.summary import RunSummary

__all__ = ["pretrain"]


@dataclass(kw_only=True)
class _Run:
    """A run that has been built, and how far it has come."""

    config: ConfigContainer
    process: Process
    trainer: Trainer
    splits: Splits
    entropy: float
    parameters: int
    notes: list[str]
    start: checkpoints.Position
    activations: Activations = field(default_factory=Activations)
    iteration: int = 0
    skipped_steps: int = 0
    stopped_early: bool = False
    recent_losses: deque[float] = field(default_factory=deque)
    validation_loss: float | None = None
    step_seconds: list[float] = field(default_factory=list)

    @property
    def consumed_samples(self) -> int:
        """Samples of the run that were trained on, over all ranks."""
        steps = self.iteration - self.start.iteration
        return self.start.consumed_samples + steps * self.config.train.global_batch_size


def pretrain(config: ConfigContainer, *, run_dir: Path) -> RunSummary:
    """Train as the config says and return what it came to.

    Args:
        config: Everything about the run, with its precision already written into the sections. It is left as it is.
        run_dir: Folder for ``metrics.jsonl``, ``tensorboard/``, ``loss.png`` and ``summary.json``; the first rank
            writes them, also when the run ends early.

    Raises:
        BackendUnavailableError: The recipe's matrix multiplications cannot run here; nothing was built.
        RunConfigError: A section is missing or settings contradict each other.
        DataError: The data cannot be used.
        CheckpointError: The checkpoint cannot be loaded or saved.
        TrainingError: The loss is not finite.
    """
    began = time.perf_counter()
    _require_sections(config)
    require_gemm_backend(config.model)
    tf32 = apply_tf32(getattr(config.mixed_precision, "tf32", None))
    with training_process(config.model, seed=config.train.seed) as process:
        run = _build(config, process)
        run.notes.append(tf32)
        if process.is_first:
            run_dir.mkdir(parents=True, exist_ok=True)
        _train_and_report(run, run_dir)
        summary = _summarise(run, run_dir, time.perf_counter() - began)
        if process.is_first:
            summary.write(run_dir / "summary.json")
            show_summary(summary)
    return summary


def precision_label(config: ConfigContainer) -> str:
    """Return the name of the recipe, or what the configs amount to where there is none."""
    precision = config.mixed_precision
    if isinstance(precision, str):
        return precision
    if precision is not None and precision.recipe:
        return precision.recipe
    model: Any = config.model
    weights = "bf16" if model.bf16 else "fp16" if model.fp16 else "fp32"
    if model.enable_autocast:
        return f"{weights} weights, {str(model.autocast_dtype).removeprefix('torch.')} autocast"
    return weights


def _require_sections(config: ConfigContainer) -> None:
    """Refuse a container without what a run needs."""
    missing = [name for name in ("model", "optimizer", "ddp") if getattr(config, name) is None]
    if missing:
        raise RunConfigError(f"{', '.join(missing)}: a run needs this section, got None. Give Megatron's own config.")
    if not hasattr(config.model, "seq_length"):
        raise RunConfigError(
            f"model: must be a bridge.megatron.gpt.GPTConfig, got {type(config.model).__name__}. A TransformerConfig "
            "alone does not say how long sequences are."
        )


def _require_whole_batches(config: ConfigContainer, process: Process) -> None:
    """Refuse a global batch that is not a whole number of micro-batches on every rank."""
    train = config.train
    samples = train.micro_batch_size * process.data_parallel_size
    if train.global_batch_size < 1 or train.global_batch_size % samples:
        raise RunConfigError(
            f"train.global_batch_size: must be a multiple of micro_batch_size {train.micro_batch_size} x "
            f"{process.data_parallel_size} data-parallel ranks, got {train.global_batch_size}. Use {samples}, say."
        )


def _build(config: ConfigContainer, process: Process) -> _Run:
    """Build data, model, optimizer and schedule, and continue from a checkpoint if one is named."""
    _require_whole_batches(config, process)
    train = config.train
    model: Any = config.model
    corpus = open_corpus(config.data.path, vocab_size=config.data.vocab_size, cache_dir=config.data.cache_dir)
    splits = build_splits(
        corpus,
        seq_length=model.seq_length,
        split=config.data.split,
        seed=config.data.seed,
        train_samples=train.train_iters * train.global_batch_size,
        validation_samples=train.eval_iters * train.global_batch_size,
    )
    settled, notes = run_config(model, vocab_size=corpus.vocab_size)
    chunks = build_gpt(settled, config.ddp, process.device)
    optimizer = build_optimizer(config.optimizer, chunks)
    decay_iters = train.lr_decay_iters or train.train_iters
    scheduler = build_scheduler(
        config.optimizer,
        optimizer,
        warmup_iters=train.lr_warmup_iters,
        decay_iters=decay_iters,
        decay_style=train.lr_decay_style,
        global_batch_size=train.global_batch_size,
    )
    trainer = Trainer(
        config=settled,
        model=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        process=process,
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
    )
    start = checkpoints.Position()
    if config.checkpoint.load is not None:
        start = checkpoints.load_checkpoint(trainer, Path(config.checkpoint.load))
    if config.checkpoint.save is not None:
        checkpoints.require_free(Path(config.checkpoint.save), start)
    return _Run(
        config=config,
        process=process,
        trainer=trainer,
        splits=splits,
        entropy=unigram_entropy(splits, corpus.vocab_size),
        parameters=parameter_count(chunks),
        notes=[*process.notes, *notes, f"Data: {corpus.name} ({corpus.prefix})."],
        start=start,
        iteration=start.iteration,
        recent_losses=deque(maxlen=max(1, config.logging.log_interval)),
    )


def _train_and_report(run: _Run, run_dir: Path) -> None:
    """Train with metrics, display and a stop request around it; draw the curves however it ends."""
    config, first = run.config, run.process.is_first
    with ExitStack() as stack:
        metrics: Metrics = NoMetrics()
        shown: Display = Silent()
        if first:
            log = metrics_log(run_dir, resumed_at=run.start.iteration, tensorboard=config.logging.tensorboard)
            metrics = stack.enter_context(log)
            stack.callback(_draw, run, metrics, run_dir)
            shown = stack.enter_context(
                display(
                    total=config.train.train_iters, start=run.start.iteration, progress=config.logging.progress
                )
            )
        for note in run.notes:
            shown.say(note)
        _train(run, metrics, shown, stack.enter_context(stop_on_signal()))


def _draw(run: _Run, metrics: Metrics, run_dir: Path) -> None:
    plot_loss(
        run_dir / "loss.png",
        title=precision_label(run.config),
        train=metrics.train,
        validation=metrics.validation,
        unigram_entropy=run.entropy,
    )


def _train(run: _Run, metrics: Metrics, shown: Display, request: StopRequest) -> None:
    """Take the remaining steps, with validations and checkpoints at their intervals and at the end."""
    train, saving = run.config.train, run.config.checkpoint
    source = _batches_of(run, run.splits.train, start=run.start.consumed_samples)
    pace = _Pace(run)
    while run.iteration < train.train_iters and not run.stopped_early:
        result = _timed_step(run, source, request)
        shown.stepped(run.iteration)
        _require_finite(run, result, metrics)
        last = run.iteration == train.train_iters
        if result.skipped or last or run.iteration % run.config.logging.log_interval == 0:
            record = pace.record(result)
            metrics.add(record)
            shown.logged(record)
        run.stopped_early = result.stop and not last
        if run.splits.validation is not None and not run.stopped_early:
            if last or (train.eval_interval and run.iteration % train.eval_interval == 0):
                _validate(run, metrics, shown)
        due = saving.save_interval and run.iteration % saving.save_interval == 0
        if saving.save is not None and (due or last or run.stopped_early):
            where = checkpoints.save_checkpoint(run.trainer, Path(saving.save), _position(run))
            shown.say(f"Checkpoint: {where}")
    if run.stopped_early:
        shown.say(f"Stopped on request after step {run.iteration} of {train.train_iters}.")


def _timed_step(run: _Run, source: Iterator[dict[str, torch.Tensor]], request: StopRequest) -> StepResult:
    """Take one step; the first one also records the activations' dtypes."""
    began = time.perf_counter()
    with ExitStack() as stack:
        if not run.activations.layers:
            run.activations = stack.enter_context(watch_activations(run.trainer.model))
        result = run.trainer.step(source, stop=request.asked)
    run.step_seconds.append(time.perf_counter() - began)
    run.iteration += 1
    run.skipped_steps += result.skipped
    run.recent_losses.append(result.loss)
    return result


class _Pace:
    """Makes records of what happened since the last one."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._steps_before = 0

    def record(self, result: StepResult) -> TrainRecord:
        """Return the record of the steps since the last call."""
        run = self._run
        seconds = run.step_seconds[self._steps_before :]
        losses = list(run.recent_losses)[-len(seconds) :]
        self._steps_before = len(run.step_seconds)
        return TrainRecord(
            step=run.iteration,
            loss=sum(losses) / len(losses),
            skipped=result.skipped,
            skipped_steps=run.skipped_steps,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            learning_rate=result.learning_rate,
            tokens_per_second=_tokens_per_step(run) * len(seconds) / sum(seconds),
            consumed_samples=run.consumed_samples,
        )


def _tokens_per_step(run: _Run) -> int:
    return int(run.config.train.global_batch_size * run.trainer.config.seq_length)


def _require_finite(run: _Run, result: StepResult, metrics: Metrics) -> None:
    """End the run at a loss that is not finite, where the config asks for it."""
    if not run.config.train.check_for_nan_in_loss or math.isfinite(result.loss):
        return
    metrics.add(_Pace(run).record(result))
    raise TrainingError(
        f"train.check_for_nan_in_loss: the loss must be finite, got {result.loss} at step {run.iteration} (loss scale "
        f"{result.loss_scale:g}, learning rate {result.learning_rate:.2e}). Lower optimizer.lr, or choose a recipe with "
        "a wider range."
    )


def _validate(run: _Run, metrics: Metrics, shown: Display) -> None:
    """Compute the validation loss, on the same samples every time."""
    source = _batches_of(run, run.splits.validation, start=0)
    run.validation_loss = run.trainer.evaluate(source, run.config.train.eval_iters)
    record = ValidationRecord(step=run.iteration, loss=run.validation_loss)
    metrics.add(record)
    shown.logged(record)


def _batches_of(run: _Run, dataset: Any, *, start: int) -> Iterator[dict[str, torch.Tensor]]:
    return batches(
        dataset,
        micro_batch_size=run.config.train.micro_batch_size,
        data_parallel_rank=run.process.data_parallel_rank,
        data_parallel_size=run.process.data_parallel_size,
        where=run.process.device,
        num_workers=run.config.data.num_workers,
        start=start,
    )


def _position(run: _Run) -> checkpoints.Position:
    return checkpoints.Position(
        iteration=run.iteration,
        consumed_samples=run.consumed_samples,
        extra={"precision": precision_label(run.config)},
    )


def _summarise(run: _Run, run_dir: Path, seconds: float) -> RunSummary:
    """Sum the run up."""
    timed = run.step_seconds[1:]
    return RunSummary(
        run_dir=run_dir,
        precision=precision_label(run.config),
        iteration=run.iteration,
        steps=run.iteration - run.start.iteration,
        skipped_steps=run.skipped_steps,
        stopped_early=run.stopped_early,
        train_loss=sum(run.recent_losses) / len(run.recent_losses) if run.recent_losses else None,
        validation_loss=run.validation_loss,
        unigram_entropy=run.entropy,
        tokens_per_second=_tokens_per_step(run) * len(timed) / sum(timed) if timed else None,
        seconds=seconds,
        parameters=run.parameters,
        census=take_census(run.trainer.model, run.trainer.optimizer, run.activations),
    )

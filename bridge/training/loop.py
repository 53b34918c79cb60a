"""The training loop of a synchronised `ConfigContainer`: steps, validation, checkpoints, summary.

Nothing here decides about precision: Megatron gets the configs as they are. The dtypes of the
tensors are read from the tensors themselves (`bridge.runtime.megatron.record`) and reported
together with the result. Ctrl-C or the scheduler's signal ends a run between two steps.
"""

import logging
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from bridge.errors import TrainingError
from bridge.precision.mode import format_label
from bridge.report.curves import Points, collect_points, plot_loss
from bridge.report.quantisation_picture import plot_quantisation
from bridge.runtime.audit.early_warnings import WarningInputs, find_early_warnings
from bridge.runtime.checkpoint.lock import lock_folder
from bridge.runtime.checkpoint.manifest import compute_manifest_digest
from bridge.runtime.megatron.backend import choose_backend_of_phases, use_backend
from bridge.runtime.megatron.checkpoint.saving import save_checkpoint
from bridge.runtime.megatron.process.agreement import compute_on_first_rank
from bridge.runtime.megatron.process.memory import (
    read_peak_memory,
    reset_peak_memory,
    trim_heap,
)
from bridge.runtime.megatron.process.training_process import apply_tf32, training_process
from bridge.runtime.megatron.record.census import take_census, watch_activations
from bridge.runtime.megatron.trainer import StepResult
from bridge.target.fields import list_known_releases
from bridge.target.versions import Version, get_installed_version
from bridge.training.audit import Audit
from bridge.training.config import ConfigContainer
from bridge.training.console import Display, RunSummary, open_display, print_summary
from bridge.training.fingerprint import compute_fingerprint
from bridge.training.metrics import Metrics, ValidationRecord, open_metrics
from bridge.training.run import (
    PhaseRecord,
    TrainingRun,
    build_run,
    get_precision_label,
    get_skipped_steps,
    list_phase_models,
)
from bridge.training.value_checks import require_sane_values

log = logging.getLogger("bridge.training")

MAX_STUCK_STEPS = 10
"""Steps in a row that may be skipped if no lower loss scale is left; then the run ends."""


def pretrain(config: ConfigContainer, *, run_dir: Path) -> RunSummary:
    """Train, and return the summary of the run.

    Args:
        config: The run, whose precision is written into its sections already.
        run_dir: Folder of the run's files, which the first rank writes even if the run ends early.

    Raises:
        BackendUnavailableError: The recipe's matrix multiplications cannot run here; nothing was
            built.
        RunConfigError: A section is missing or settings contradict each other.
        DataError: The data cannot be used.
        CheckpointError: The checkpoint cannot be loaded, or its folder cannot be written to.
        TrainingError: The loss or a weight is not finite, gradients are not in ten steps in a row,
            or a write failed.
    """
    began = time.perf_counter()
    reset_peak_memory()
    require_sane_values(config)
    backend = choose_backend_of_phases(
        config.precision_backend, list_phase_models(config), os.environ
    )
    warn_about_untested_release(get_installed_version("mcore"))
    tf32 = getattr(config.mixed_precision, "tf32", None)
    applied = []
    if tf32 is not None:
        applied.append(apply_tf32(tf32))
    started = training_process(
        config.model,
        seed=config.train.seed,
        fingerprint=compute_fingerprint(config, os.environ),
        timeout_minutes=config.train.distributed_timeout_minutes,
    )
    with started as process, use_backend(backend), ExitStack() as stack:
        saved = config.checkpoint.save
        notes = [_lock_folder(stack, "checkpoint.save", saved)]
        run = build_run(config, process, backend=backend)
        notes.append(_lock_folder(stack, "logging.run_dir", run_dir, locked=saved))
        run.notes += [*filter(None, notes), *applied]
        return _train_and_report(run, run_dir, began)


def _lock_folder(
    stack: ExitStack, key: str, folder: Path | str | None, *, locked: str | None = None
) -> str | None:
    """Lock a folder that the first rank writes into, until a stack is closed.

    Args:
        stack: Its end releases the lock.
        key: Setting that names the folder.
        folder: None locks nothing.
        locked: A folder that this run has locked before.

    Returns:
        A sentence where the lock of a dead process was replaced, else None.
    """

    def lock() -> str | None:
        if folder is None:
            return None
        if locked is not None and Path(folder).resolve() == Path(locked).resolve():
            return None
        return stack.enter_context(lock_folder(Path(folder), key=key))

    return compute_on_first_rank(lock)


def _train_and_report(run: TrainingRun, run_dir: Path, began: float) -> RunSummary:
    """Train with metrics and a display, and return the summary.

    The curves are drawn even if the run ends with an error.
    """
    config = run.config
    with ExitStack() as stack:
        metrics, screen, start = Metrics(), Display(), run.start.iteration
        if run.process.is_first:
            metrics = stack.enter_context(
                open_metrics(run_dir, resumed_at=start, config=config.logging)
            )
            if config.logging.plots:
                stack.callback(_plot_curves, run, metrics, run_dir)
            shown = open_display(
                total=config.train.train_iters, start=start, progress=config.logging.progress
            )
            screen = stack.enter_context(shown)
        for note in run.notes:
            screen.note(note)
        run.process.stop.is_noted_only = True
        _train(run, Audit(run, run_dir), metrics, screen)
    summary = _summarise(run, run_dir, time.perf_counter() - began)
    if run.process.is_first:
        summary.write(run_dir / "summary.json")
        print_summary(summary, quantisation=metrics.quantisation)
    return summary


def warn_about_untested_release(version: Version | None) -> None:
    """Log a warning for a megatron-core that is older or newer than the releases of the tests."""
    first, *_, last = list_known_releases()
    if version is not None and not first <= version <= last:
        log.warning(
            "megatron-core: the tested releases are %s to %s, got %s. Compare a short run.",
            first,
            last,
            version,
        )


def _plot_curves(run: TrainingRun, metrics: Metrics, run_dir: Path) -> None:
    """Draw the curves of the losses and, in FP8 and FP4, of the quantisation errors."""
    loss_scale: Points = ()
    if getattr(run.config.optimizer, "fp16", False):
        loss_scale = collect_points(metrics.train, "loss_scale")
    plot_loss(
        run_dir / "loss.png",
        title=get_precision_label(run.config),
        train=collect_points(metrics.train, "loss"),
        validation=collect_points(metrics.validation, "loss"),
        loss_scale=loss_scale,
        unigram_entropy=run.entropy,
    )
    if metrics.quantisation:
        plot_quantisation(
            run_dir / "quantisation.png",
            metrics.quantisation,
            title=get_precision_label(run.config),
        )


def _show_warnings(
    run: TrainingRun, audit: Audit, metrics: Metrics, screen: Display, shown: Collection[str]
) -> Collection[str]:
    """Show the early warnings that are not shown yet, and return the names of all that hold now."""
    optimizer = run.config.optimizer
    smallest_scale = None
    if getattr(optimizer, "fp16", False) and getattr(optimizer, "loss_scale", None) is None:
        smallest_scale = getattr(optimizer, "min_loss_scale", None)
    signs = WarningInputs(
        train=metrics.train,
        quantisation=metrics.quantisation,
        health=audit.record.health,
        smallest_scale=smallest_scale,
        silenced=run.config.silence,
    )
    warnings = dict(find_early_warnings(signs))
    for name, sentence in warnings.items():
        if name not in shown:
            screen.note(f"Early warning {name}: {sentence}")
    return warnings


def _train(run: TrainingRun, audit: Audit, metrics: Metrics, screen: Display) -> None:
    """Take the remaining steps, with validations and checkpoints where they are due."""
    source = run.batches_of(run.splits.train, start=run.start.consumed_samples)
    warnings: Collection[str] = ()
    while not run.is_over:
        result = _train_step(run, audit, source)
        is_measured = run.telemetry.step == run.iteration
        if is_measured:
            metrics.add_quantisation(run.telemetry.gather_stages(run.iteration))
        screen.advance_to(run.iteration)
        _require_sound(run, result, metrics)
        if result.stop and not run.is_done:
            run.stop_signal = result.stop
        ends = run.is_over or audit.failure is not None
        is_logged = ends or result.skipped or _is_due(run, run.config.logging.log_interval)
        if is_logged:
            trim_heap()
            record = run.record(result)
            metrics.add(record)
            screen.show_record(record)
        if is_logged or is_measured:
            warnings = _show_warnings(run, audit, metrics, screen, warnings)
        if run.is_done or (_is_due(run, run.config.train.eval_interval) and not run.is_over):
            _validate(run, metrics, screen)
        is_last = ends and (run.config.checkpoint.save_last or not run.is_done)
        if is_last or _is_due(run, run.config.checkpoint.save_interval):
            _save_checkpoint(run, screen)
            if not run.is_over:  # a signal in the save ends the run here, not after the next step
                run.stop_signal = run.trainer.largest(run.process.stop()) or None
        if audit.failure is not None:
            raise audit.failure
    _show_end(run, screen)


def _show_end(run: TrainingRun, screen: Display) -> None:
    """Show why the run is no success, and that it was stopped."""
    failure = _find_failure(run)
    if failure is not None:
        screen.note(failure)
    if run.stop_signal is None:
        return
    sentence = f"Stopped on request after step {run.iteration} of {run.config.train.train_iters}."
    if not run.config.checkpoint.save:
        sentence += " Nothing was saved: checkpoint.save names no folder."
    screen.note(sentence)


def _is_due(run: TrainingRun, interval: int | None) -> bool:
    """Return whether this step ends an interval; None and 0 are no intervals."""
    return bool(interval) and run.iteration % (interval or 1) == 0


def _train_step(
    run: TrainingRun, audit: Audit, source: Iterator[dict[str, torch.Tensor]]
) -> StepResult:
    """Train a step and count it.

    The first step records the dtypes of activations too, and some steps are audited or measured.
    """
    began = time.perf_counter()
    first = not run.step_seconds
    phase = run.enter_phase()
    interval = run.config.logging.quantisation_interval
    coming = run.iteration + 1
    is_measured = interval and (coming % interval == 0 or coming == run.config.train.train_iters)
    with ExitStack() as stack:
        stack.enter_context(audit.record_step(phase))
        if first:
            run.activations = stack.enter_context(watch_activations(run.trainer.model))
        elif phase is None and is_measured:
            stack.enter_context(run.telemetry.measure_step(coming))
        result = run.trainer.step(source, stop=run.process.stop)
    run.count(result, time.perf_counter() - began)
    if run.process.peers is not None:
        run.process.peers.finished(run.iteration)
    gemms = audit.record.gemms
    run.gemms = run.gemms or gemms
    if phase:
        label = format_label(phase.precision)
        record = PhaseRecord(first=phase.first, last=phase.last, precision=label, gemms=gemms)
        run.phases.append(record)
    return result


def _require_sound(run: TrainingRun, result: StepResult, metrics: Metrics) -> None:
    """End a run whose loss or weights are not finite, or whose weights no longer change."""
    is_finite = math.isfinite(result.loss)
    facts = f"loss scale {result.loss_scale:g}, learning rate {result.learning_rate:.2e}"
    lower = "Lower optimizer.lr"
    if getattr(run.config.optimizer, "loss_scale", None):
        lower = "Lower the constant loss scale, or optimizer.lr"
    wider = f"{lower}, or choose a recipe with a wider range."
    if run.config.train.check_for_nan_in_loss and not is_finite:
        rule = f"the loss must be finite, got {result.loss} at step {run.iteration} ({facts})"
        message = f"train.check_for_nan_in_loss: {rule}. {wider}"
    elif not is_finite and not run.trainer.has_finite_state():
        got = f"NaN or Inf at step {run.iteration} (loss {result.loss:g}, {facts})"
        message = f"optimizer: the weights must be finite, got {got}. {wider}"
    elif run.stuck_in_a_row >= MAX_STUCK_STEPS:
        message = (
            f"optimizer: gradients must be finite, got NaN or Inf in {run.stuck_in_a_row} steps "
            f"in a row, the last one step {run.iteration} (loss {result.loss:g}, {facts}). "
            f"These steps changed no weight, and no lower loss scale is left. {lower}, "
            "look at the data of these steps, or choose a recipe with a wider range."
        )
    else:
        return
    metrics.add(run.record(result))
    raise TrainingError(message)


def _find_failure(run: TrainingRun) -> str | None:
    """Return why a run of which more than half the steps were skipped is no success, or None."""
    skipped = run.skipped_steps - get_skipped_steps(run.start)
    if 2 * skipped <= run.steps:
        return None
    headline = "MOST STEPS WERE SKIPPED"
    if skipped == run.steps:
        headline = "NOTHING WAS LEARNED"
    fact = f"{skipped} of {run.steps} steps had NaN or Inf in their gradients and updated nothing"
    scale = run.trainer.loss_scale
    remedy = "Lower optimizer.lr, or look at the data of these steps"
    if run.trainer.loss_scale_may_fall:
        state = f"The loss scale is {scale:g} and still falling"
        remedy = f"{state}: train longer, or lower initial_loss_scale"
    elif getattr(run.config.optimizer, "loss_scale", None):
        remedy = f"The loss scale is constant at {scale:g}: lower it"
    elif scale != 1 or getattr(run.config.optimizer, "fp16", False):
        state = f"The loss scale is at its floor, {scale:g}"
        remedy = f"{state}: lower optimizer.lr, or choose a recipe with a wider range"
    return f"{headline}: {fact}. {remedy}."


def _validate(run: TrainingRun, metrics: Metrics, screen: Display) -> None:
    """Record the validation loss, which is measured on the same samples every time."""
    if run.splits.validation is not None:
        source = run.batches_of(run.splits.validation, start=0)
        loss = run.trainer.evaluate(source, run.config.train.eval_iters)
        run.validation = ValidationRecord(step=run.iteration, loss=loss)
        metrics.add(run.validation)
        screen.show_record(run.validation)


def _save_checkpoint(run: TrainingRun, screen: Display) -> None:
    """Write a checkpoint, if the run has a folder for it."""
    folder = run.config.checkpoint.save
    if folder is not None:
        checksum = run.config.checkpoint.checksum
        where = save_checkpoint(
            run.trainer, Path(folder), run.position, facts=run.facts, checksum=checksum
        )
        proof = compute_on_first_rank(lambda: compute_manifest_digest(where))
        screen.note(f"Checkpoint: {where}, manifest sha256 {proof}")


def _summarise(run: TrainingRun, run_dir: Path, seconds: float) -> RunSummary:
    """Return the summary of a run; its speed is that of all steps but the first."""
    timed = run.step_seconds[1:]
    tokens_per_second = None
    if timed:
        tokens_per_second = run.tokens_per_step * len(timed) / sum(timed)
    train_loss = None
    if run.recent_losses:
        train_loss = sum(run.recent_losses) / len(run.recent_losses)
    validation_loss, validation_step = None, None
    if run.validation is not None:
        validation_loss, validation_step = run.validation.loss, run.validation.step
    return RunSummary(
        run_dir=run_dir,
        precision=get_precision_label(run.config),
        iteration=run.iteration,
        steps=run.steps,
        skipped_steps=run.skipped_steps,
        failure=_find_failure(run),
        stop_signal=run.stop_signal,
        train_loss=train_loss,
        validation_loss=validation_loss,
        validation_step=validation_step,
        unigram_entropy=run.entropy,
        tokens_per_second=tokens_per_second,
        seconds=seconds,
        peak_memory_bytes=read_peak_memory(),
        parameters=run.parameters,
        gemms=run.gemms,
        phases=tuple(run.phases),
        census=take_census(run.trainer.model, run.trainer.optimizer, run.activations),
    )

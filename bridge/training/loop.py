"""`pretrain`: the training loop, with steps, validations, checkpoints and the summary.

Nothing here decides about precision: Megatron gets the configs as they are. The dtypes in the
summary are read from the tensors (`bridge.runtime.megatron.record`). Ctrl-C or a signal of the
scheduler ends a run between two steps.
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
"""A run ends after this number of skipped steps in a row in which the loss scale could not fall."""


def pretrain(
    config: ConfigContainer, *, run_dir: Path, recorded_steps: Collection[int] | None = None
) -> RunSummary:
    """Train, and return the summary of the run.

    Args:
        config: The run. Its precision is already written into its sections.
        run_dir: Folder of the run's files. The first rank writes them even if the run ends early.
        recorded_steps: The steps whose GEMMs are recorded and compared with the plan, from 1 on.
            None chooses them by ``train.audit``. The summary has no GEMMs of a first step that is
            not recorded.

    Raises:
        BackendUnavailableError: The matrix multiplications of the recipe cannot run here. Nothing
            was built.
        RunConfigError: A section is missing or settings contradict each other.
        DataError: The data cannot be used.
        CheckpointError: The checkpoint cannot be loaded, or its folder cannot be written to.
        AuditError: A step differs from the plan, under ``train.audit=error``.
        TrainingError: The loss or a weight is not finite, the gradients of `MAX_STUCK_STEPS` steps
            in a row are not finite, or a write failed.
    """
    began = time.perf_counter()
    reset_peak_memory()
    require_sane_values(config)
    backend = choose_backend_of_phases(
        config.precision_backend, list_phase_models(config), os.environ
    )
    warn_about_untested_release(get_installed_version("mcore"))
    tf32 = getattr(config.mixed_precision, "tf32", None)
    tf32_notes = []
    if tf32 is not None:
        tf32_notes.append(apply_tf32(tf32))
    opened = training_process(
        config.model,
        seed=config.train.seed,
        fingerprint=compute_fingerprint(config, os.environ),
        timeout_minutes=config.train.distributed_timeout_minutes,
    )
    with opened as process, use_backend(backend), ExitStack() as stack:
        save_folder = config.checkpoint.save
        lock_notes = [_lock_folder(stack, "checkpoint.save", save_folder)]
        run = build_run(config, process, backend=backend)
        lock_notes.append(_lock_folder(stack, "logging.run_dir", run_dir, locked=save_folder))
        run.notes += [*filter(None, lock_notes), *tf32_notes]
        audit = Audit(run, run_dir, steps=recorded_steps)
        return _train_and_report(run, audit, run_dir, began)


def _lock_folder(
    stack: ExitStack, key: str, folder: Path | str | None, *, locked: str | None = None
) -> str | None:
    """Lock a folder that the first rank writes into. All ranks call it.

    Args:
        stack: Its end releases the lock.
        key: Setting that names the folder.
        folder: The folder. None: nothing is locked.
        locked: A folder that this run has locked already. It is not locked a second time.

    Returns:
        A sentence if the lock of a dead process was replaced, or None otherwise.
    """

    def lock() -> str | None:
        if folder is None:
            return None
        if locked is not None and Path(folder).resolve() == Path(locked).resolve():
            return None
        return stack.enter_context(lock_folder(Path(folder), key=key))

    return compute_on_first_rank(lock)


def _train_and_report(run: TrainingRun, audit: Audit, run_dir: Path, began: float) -> RunSummary:
    """Train with metrics and a display, and return the summary.

    The curves are drawn even if the run ends with an error.
    """
    config = run.config
    with ExitStack() as stack:
        metrics, display, start = Metrics(), Display(), run.start.iteration
        if run.process.is_first:
            metrics = stack.enter_context(
                open_metrics(run_dir, resumed_at=start, config=config.logging)
            )
            if config.logging.plots:
                stack.callback(_plot_curves, run, metrics, run_dir)
            display = stack.enter_context(
                open_display(
                    total=config.train.train_iters, start=start, progress=config.logging.progress
                )
            )
        for note in run.notes:
            display.note(note)
        # From now on a signal ends the run after the present step, not at once.
        run.process.stop.is_noted_only = True
        _train(run, audit, metrics, display)
    summary = _summarise(run, run_dir, time.perf_counter() - began)
    if run.process.is_first:
        summary.write(run_dir / "summary.json")
        print_summary(summary, quantisation=metrics.quantisation)
    return summary


def warn_about_untested_release(version: Version | None) -> None:
    """Log a warning if megatron-core is older or newer than the tested releases."""
    first, *_, last = list_known_releases()
    if version is not None and not first <= version <= last:
        log.warning(
            "megatron-core: the tested releases are %s to %s, got %s. Compare a short run.",
            first,
            last,
            version,
        )


def _plot_curves(run: TrainingRun, metrics: Metrics, run_dir: Path) -> None:
    """Draw the curves of the losses and, if there are any, of the quantisation errors."""
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
    run: TrainingRun, audit: Audit, metrics: Metrics, display: Display, shown: Collection[str]
) -> Collection[str]:
    """Show the early warnings that were not shown at the previous call.

    Args:
        metrics: Its records.
        shown: The result of the previous call.

    Returns:
        The names of the present warnings.
    """
    optimizer = run.config.optimizer
    smallest_scale = None
    if getattr(optimizer, "fp16", False) and getattr(optimizer, "loss_scale", None) is None:
        smallest_scale = getattr(optimizer, "min_loss_scale", None)
    inputs = WarningInputs(
        train=metrics.train,
        quantisation=metrics.quantisation,
        health=audit.record.health,
        smallest_scale=smallest_scale,
        silenced=run.config.silence,
    )
    warnings = dict(find_early_warnings(inputs))
    for name, sentence in warnings.items():
        if name not in shown:
            display.note(f"Early warning {name}: {sentence}")
    return warnings


def _train(run: TrainingRun, audit: Audit, metrics: Metrics, display: Display) -> None:
    """Take the remaining steps, with the validations and checkpoints that are due."""
    config = run.config
    batches = run.batches_of(run.splits.train, start=run.start.consumed_samples)
    warnings: Collection[str] = ()
    while not run.is_over:
        result = _train_step(run, audit, batches)
        is_measured = run.telemetry.step == run.iteration
        if is_measured:
            metrics.add_quantisation(run.telemetry.gather_stages(run.iteration))
        display.advance_to(run.iteration)
        _require_sound(run, result, metrics)
        if result.stop and not run.is_done:
            run.stop_signal = result.stop
        is_last = run.is_over or audit.failure is not None
        is_logged = is_last or result.skipped or _is_due(run, config.logging.log_interval)
        if is_logged:
            _log_step(run, result, metrics, display)
        if is_logged or is_measured:
            warnings = _show_warnings(run, audit, metrics, display, warnings)
        if run.is_done or (_is_due(run, config.train.eval_interval) and not run.is_over):
            _validate(run, metrics, display)
        # A run that ends early is saved in any case.
        is_saved_last = is_last and (config.checkpoint.save_last or not run.is_done)
        if is_saved_last or _is_due(run, config.checkpoint.save_interval):
            _save_checkpoint(run, display)
            if not run.is_over:
                # A signal during the save ends the run here, not after the next step.
                run.stop_signal = run.trainer.find_largest(run.process.stop()) or None
        if audit.failure is not None:
            raise audit.failure
    _show_end(run, display)


def _log_step(run: TrainingRun, result: StepResult, metrics: Metrics, display: Display) -> None:
    """Write and show the record of the last step."""
    trim_heap()
    record = run.record(result)
    metrics.add(record)
    display.show_record(record)


def _show_end(run: TrainingRun, display: Display) -> None:
    """Show why the run has failed, if it has, and that it was stopped, if it was."""
    failure = _find_failure(run)
    if failure is not None:
        display.note(failure)
    if run.stop_signal is None:
        return
    sentence = f"Stopped on request after step {run.iteration} of {run.config.train.train_iters}."
    if not run.config.checkpoint.save:
        sentence += " Nothing was saved: checkpoint.save names no folder."
    display.note(sentence)


def _is_due(run: TrainingRun, interval: int | None) -> bool:
    """Return whether the last step ends an interval. It never does if the interval is None or 0."""
    return bool(interval) and run.iteration % (interval or 1) == 0


def _train_step(
    run: TrainingRun, audit: Audit, batches: Iterator[dict[str, torch.Tensor]]
) -> StepResult:
    """Train a step and count it.

    The first step also records the dtypes of activations. Some steps are audited or measured. The
    first step of the run or of a phase is not measured.
    """
    began = time.perf_counter()
    is_first = not run.step_seconds
    phase = run.enter_phase()
    interval = run.config.logging.quantisation_interval
    step = run.iteration + 1
    is_measured = interval and (step % interval == 0 or step == run.config.train.train_iters)
    with ExitStack() as stack:
        stack.enter_context(audit.record_step(phase))
        if is_first:
            run.activations = stack.enter_context(watch_activations(run.trainer.model))
        elif phase is None and is_measured:
            stack.enter_context(run.telemetry.measure_step(step))
        result = run.trainer.step(batches, stop=run.process.stop)
    run.count(result, time.perf_counter() - began)
    if run.process.peers is not None:
        run.process.peers.record_step_end(run.iteration)
    gemms = audit.record.gemms
    run.gemms = run.gemms or gemms
    if phase:
        label = format_label(phase.precision)
        record = PhaseRecord(first=phase.first, last=phase.last, precision=label, gemms=gemms)
        run.phases.append(record)
    return result


def _require_sound(run: TrainingRun, result: StepResult, metrics: Metrics) -> None:
    """Require a finite loss, finite weights, and weights that still change.

    Raises:
        TrainingError: A requirement is not met. The record of the step is written before.
    """
    message = _find_unsound_state(run, result)
    if message is not None:
        metrics.add(run.record(result))
        raise TrainingError(message)


def _find_unsound_state(run: TrainingRun, result: StepResult) -> str | None:
    """Return the message about a step after which the run cannot go on, or None."""
    is_finite = math.isfinite(result.loss)
    facts = f"loss scale {result.loss_scale:g}, learning rate {result.learning_rate:.2e}"
    remedy = "Lower optimizer.lr, or choose a recipe with a wider range."
    remedy_of_stuck_run = (
        "Lower optimizer.lr, look at the data of these steps, "
        "or choose a recipe with a wider range."
    )
    if getattr(run.config.optimizer, "loss_scale", None):
        remedy = (
            "Lower the constant loss scale, or optimizer.lr, or choose a recipe with a wider range."
        )
        remedy_of_stuck_run = (
            "Lower the constant loss scale, or optimizer.lr, look at the data of these steps, "
            "or choose a recipe with a wider range."
        )
    if run.config.train.check_for_nan_in_loss and not is_finite:
        return (
            f"train.check_for_nan_in_loss: the loss must be finite, got {result.loss} at step "
            f"{run.iteration} ({facts}). {remedy}"
        )
    if not is_finite and not run.trainer.has_finite_state():
        return (
            f"optimizer: the weights must be finite, got NaN or Inf at step {run.iteration} "
            f"(loss {result.loss:g}, {facts}). {remedy}"
        )
    if run.stuck_in_a_row >= MAX_STUCK_STEPS:
        return (
            f"optimizer: gradients must be finite, got NaN or Inf in {run.stuck_in_a_row} steps "
            f"in a row, the last one step {run.iteration} (loss {result.loss:g}, {facts}). "
            "These steps changed no weight, and no lower loss scale is left. "
            f"{remedy_of_stuck_run}"
        )
    return None


def _find_failure(run: TrainingRun) -> str | None:
    """Return why the run has failed, or None unless more than half of its steps were skipped."""
    skipped = run.skipped_steps - get_skipped_steps(run.start)
    if 2 * skipped <= run.steps:
        return None
    headline = "MOST STEPS WERE SKIPPED"
    if skipped == run.steps:
        headline = "NOTHING WAS LEARNED"
    scale = run.trainer.loss_scale
    remedy = "Lower optimizer.lr, or look at the data of these steps."
    if run.trainer.loss_scale_may_fall:
        remedy = (
            f"The loss scale is {scale:g} and still falling: "
            "train longer, or lower initial_loss_scale."
        )
    elif getattr(run.config.optimizer, "loss_scale", None):
        remedy = f"The loss scale is constant at {scale:g}: lower it."
    elif scale != 1 or getattr(run.config.optimizer, "fp16", False):
        remedy = (
            f"The loss scale is at its floor, {scale:g}: "
            "lower optimizer.lr, or choose a recipe with a wider range."
        )
    return (
        f"{headline}: {skipped} of {run.steps} steps had NaN or Inf in their gradients and updated "
        f"nothing. {remedy}"
    )


def _validate(run: TrainingRun, metrics: Metrics, display: Display) -> None:
    """Measure and record the validation loss, if the run has validation samples.

    All validations of a run measure it on the same samples.
    """
    if run.splits.validation is not None:
        batches = run.batches_of(run.splits.validation, start=0)
        loss = run.trainer.evaluate(batches, run.config.train.eval_iters)
        run.validation = ValidationRecord(step=run.iteration, loss=loss)
        metrics.add(run.validation)
        display.show_record(run.validation)


def _save_checkpoint(run: TrainingRun, display: Display) -> None:
    """Write a checkpoint, if the run has a folder for it."""
    save_folder = run.config.checkpoint.save
    if save_folder is None:
        return
    step_folder = save_checkpoint(
        run.trainer,
        Path(save_folder),
        run.position,
        facts=run.facts,
        checksum=run.config.checkpoint.checksum,
    )
    digest = compute_on_first_rank(lambda: compute_manifest_digest(step_folder))
    display.note(f"Checkpoint: {step_folder}, manifest sha256 {digest}")


def _summarise(run: TrainingRun, run_dir: Path, seconds: float) -> RunSummary:
    """Return the summary of a run.

    Args:
        run: The run, after its last step.
        run_dir: Folder of the run's files.
        seconds: Time from the start of `pretrain`.
    """
    # The first step is slower than the others, so it does not count.
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

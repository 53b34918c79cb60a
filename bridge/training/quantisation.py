"""Quantisation error of a recipe on a model's operands, measured without a training run."""

from contextlib import nullcontext

from bridge.audit.quantisation import QuantisationRow
from bridge.errors import RunConfigError
from bridge.megatron.backend import choose_backend, running
from bridge.megatron.emulation.model import requantise_stored_weights
from bridge.megatron.process import training_process
from bridge.training.config import ConfigContainer, runtime_config_update
from bridge.training.run import Run, build_run, precision_label
from bridge.training.values import require_sane_values

MEASUREMENTS = 8
"""Steps that are measured, at most; the last one is always among them."""
WARM_UP = 2
"""Passes before the measured one where no step is taken: delayed scales begin at 1."""


def measure_quantisation(config: ConfigContainer, *, steps: int) -> list[QuantisationRow]:
    """Build a run, take some steps, and return the quantisation error of its operands.

    Args:
        config: A run as `pretrain` takes it, its recipe not yet written into the sections. `checkpoint.load` says
            which weights to begin with.
        steps: Optimizer steps to take, some of them measured; 0 measures forward and backward passes alone, on the
            weights as they are.

    Raises:
        RunConfigError: The recipe has no low-precision matmuls to be measured.
        BridgeError: As `pretrain`.
    """
    require_sane_values(config)
    if steps < 0:
        raise RunConfigError(f"--steps: must not be negative, got {steps}. Use 0 for the weights as they are.")
    config.train.train_iters = max(config.train.train_iters, steps)
    config.resume.allow_precision_change = True  # the weights of a checkpoint are measured as they are
    runtime_config_update(config)
    backend = choose_backend("emulated", config.model)
    if backend.name != "emulated":
        raise RunConfigError(
            f"mixed_precision: must have FP8 or FP4 matmuls to be measured, got {precision_label(config)!r}. "
            "`precision-bridge recipes` lists those that have."
        )
    with training_process(config.model, seed=config.train.seed) as process, running(backend):
        run = build_run(config, process, backend=backend)
        _measure(run, steps)
        return run.telemetry.of_all_stages()


def _measure(run: Run, steps: int) -> None:
    source = run.batches_of(run.splits.train, start=run.start.consumed_samples)
    every = max(1, steps // MEASUREMENTS)
    for step in range(1, steps + 1):
        measured = (steps - step) % every == 0
        with run.telemetry.measuring(run.start.iteration + step) if measured else nullcontext():
            run.trainer.step(source)
    if not steps:
        for _ in range(WARM_UP):
            run.trainer.forward_backward(source)
            requantise_stored_weights(run.trainer.optimizer)  # as a step would, with the scales renewed
        with run.telemetry.measuring(run.start.iteration):
            run.trainer.forward_backward(source)

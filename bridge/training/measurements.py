"""`measure_quantisation` and `check_gradients`: passes of a built run without a training loop.

`measure_quantisation` measures the errors of the run's quantisers. `check_gradients` compares the
activations and gradients of one batch in two precisions.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from bridge.errors import RunConfigError
from bridge.precision.matchers import list_matchers
from bridge.precision.schemes import OPERAND_FORMATS
from bridge.runtime.audit.quantisation import QuantisationRow
from bridge.runtime.compare.band import Band, compute_band, compute_rounding_error
from bridge.runtime.megatron.backend import Backend, choose_backend, use_backend
from bridge.runtime.megatron.emulation.parallel_linear import get_layer_scheme
from bridge.runtime.megatron.emulation.requantisation import requantise_stored_weights
from bridge.runtime.megatron.one_batch import (
    CapturedResults,
    RouterReplays,
    capture_linear_results,
    compute_relative_error,
    compute_relative_errors,
    sample_tensor,
)
from bridge.runtime.megatron.process.training_process import training_process
from bridge.training.config import ConfigContainer, runtime_config_update
from bridge.training.run import TrainingRun, build_run, get_precision_label
from bridge.training.value_checks import require_sane_values

SHUFFLE_SEED = 1
"""Seed of the order of the tokens in the control pass."""
MAX_WEIGHT_ERROR = 2**-6
"""Largest relative error between the same weights in two dtypes."""
MAX_LOSS_SCALE = 2.0**12
"""Largest initial dynamic loss scale.

A training run can begin with a larger scale, since its first steps overflow until the scale has
fallen.
"""
MAX_MEASUREMENTS = 8
"""The most measured steps. The last step is always measured."""
WARM_UP_PASSES = 2
"""Passes before the measured pass in a run without steps.

Delayed scales begin at 1, and these passes compute them from the tensors.
"""


@contextmanager
def _open_run(config: ConfigContainer, backend: Backend) -> Iterator[TrainingRun]:
    """Build a run, in a training process that ends after the ``with`` block."""
    with training_process(config.model, seed=config.train.seed) as process, use_backend(backend):
        yield build_run(config, process, backend=backend)


def _warm_up(run: TrainingRun, batches: Callable[[], Iterator[dict[str, torch.Tensor]]]) -> None:
    """Run passes until the delayed scales are computed from the tensors. No weight changes."""
    for _ in range(WARM_UP_PASSES):
        run.trainer.forward_backward(batches())
        # Stored FP8 weights get the new scales, as after an optimizer step.
        requantise_stored_weights(run.trainer.optimizer)


def measure_quantisation(config: ConfigContainer, *, steps: int) -> list[QuantisationRow]:
    """Build a run, train some steps, and return the quantisation errors of its operands.

    Args:
        config: The run. Its recipe is not yet written into its sections. `checkpoint.load` names
            the weights to begin with.
        steps: Steps to train, of which some are measured. 0 measures a pass without a step.

    Raises:
        RunConfigError: `steps` is negative, or the recipe has no low-precision matmuls.
    """
    require_sane_values(config)
    if steps < 0:
        raise RunConfigError(
            f"--steps: must not be negative, got {steps}. Use 0 for the weights as they are."
        )
    config.train.train_iters = max(config.train.train_iters, steps)
    # A checkpoint that was saved in another precision can be measured too.
    config.resume.allow_precision_change = True
    runtime_config_update(config)
    backend = choose_backend("emulated", config.model)
    if backend.name != "emulated":
        raise RunConfigError(
            "mixed_precision: must have FP8 or FP4 matmuls to be measured, "
            f"got {get_precision_label(config)!r}. "
            "`precision-bridge recipes` lists those that have."
        )
    with _open_run(config, backend) as run:
        _measure_steps(run, steps)
        return run.telemetry.gather_stages()


def _measure_steps(run: TrainingRun, steps: int) -> None:
    """Measure some of the next steps, or a pass without a step."""
    source = run.batches_of(run.splits.train, start=run.start.consumed_samples)
    interval = max(1, steps // MAX_MEASUREMENTS)
    for step in range(1, steps + 1):
        measuring: AbstractContextManager[object] = nullcontext()
        # Counted from the end, so that the last step is measured.
        if (steps - step) % interval == 0:
            measuring = run.telemetry.measure_step(run.start.iteration + step)
        with measuring:
            run.trainer.step(source)
    if not steps:
        _warm_up(run, lambda: source)
        with run.telemetry.measure_step(run.start.iteration):
            run.trainer.forward_backward(source)


def check_gradients(first: ConfigContainer, second: ConfigContainer) -> Band:
    """Return the errors of the second precision relative to the first, with bounds and a control.

    The control is a pass in the first precision with the tokens in another order. Only the order of
    sums causes its errors.

    Args:
        first: The reference run. Its recipe is not yet written into its sections.
        second: The run to compare, as `first`.

    Raises:
        RunConfigError: The weights of the runs differ, or their routers drop tokens.
    """
    routes = RouterReplays()
    control_config = deepcopy(first)  # the first pass writes the recipe into its sections
    reference = _run_pass(first, routes)
    control = _run_pass(control_config, routes, shuffle=True)
    other = _run_pass(second, routes)
    differs = reference.weights.shape != other.weights.shape
    if differs or compute_relative_error(reference.weights, other.weights) > MAX_WEIGHT_ERROR:
        rule, remedy = "needs the same weights in both runs", "Use one model and one seed."
        raise RunConfigError.of("gradients", rule, "weights that differ", remedy)
    model: Any = first.model
    return compute_band(
        compute_relative_errors(reference.results, other.results),
        compute_relative_errors(reference.results, control.results),
        num_layers=int(model.num_layers),
        forward=compute_rounding_error(reference.formats.forward)
        + compute_rounding_error(other.formats.forward),
        backward=compute_rounding_error(reference.formats.both)
        + compute_rounding_error(other.formats.both),
        rerouted=routes.rerouted_share,
    )


class Formats(NamedTuple):
    """The formats of the operands of a model's matrix multiplications."""

    forward: tuple[str, ...]
    """Formats in the forward pass."""
    both: tuple[str, ...]
    """Formats in the forward and the backward pass."""


class _Pass(NamedTuple):
    """A forward and a backward pass of a run."""

    results: CapturedResults
    weights: torch.Tensor
    """A sample of the weights."""
    formats: Formats


def _require_replayable_routes(model: Any) -> None:
    """Refuse routers that cannot send tokens to the experts of another pass.

    Raises:
        RunConfigError: The router balances by Sinkhorn, or its experts have a capacity.
    """
    cannot_replay = (
        "sinkhorn" in model.moe_router_load_balancing_type
        or model.moe_expert_capacity_factor is not None
    )
    if model.num_moe_experts and cannot_replay:
        rule = (
            "needs routers that send each token to the experts with the highest scores, "
            "and drop none"
        )
        got = f"{model.moe_router_load_balancing_type}, capacity {model.moe_expert_capacity_factor}"
        remedy = (
            "Set model.moe_router_load_balancing_type=aux_loss and "
            "model.moe_expert_capacity_factor=null."
        )
        raise RunConfigError.of("gradients", rule, got, remedy)


def _run_pass(config: ConfigContainer, routes: RouterReplays, *, shuffle: bool = False) -> _Pass:
    """Build a run, and run its first batch forward and backward.

    Args:
        config: The run.
        routes: The experts of each token. The first pass records them, later passes replay them.
        shuffle: Whether the tokens are in another order.
    """
    require_sane_values(config)
    runtime_config_update(config)
    model: Any = config.model
    _require_replayable_routes(model)
    model.hidden_dropout = model.attention_dropout = 0.0
    optimizer: Any = config.optimizer
    if optimizer.fp16 and optimizer.loss_scale is None:
        optimizer.initial_loss_scale = min(optimizer.initial_loss_scale, MAX_LOSS_SCALE)
    with _open_run(config, choose_backend(config.precision_backend, model, os.environ)) as run:
        source = run.batches_of(run.splits.train, start=run.start.consumed_samples)
        batches = [next(source) for _ in range(run.trainer.num_microbatches)]
        if shuffle:
            batches = [_shuffle_tokens(batch) for batch in batches]
        weights = _sample_embeddings(run.trainer.model)
        if get_layer_scheme(model) == "delayed":
            _warm_up(run, lambda: iter(batches))
        chunks = run.trainer.model
        with (
            routes.follow(chunks),
            capture_linear_results(chunks, loss_scale=run.trainer.loss_scale) as results,
        ):
            run.trainer.forward_backward(iter(batches))
        return _Pass(results, weights, get_gemm_formats(model))


def _shuffle_tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a micro-batch with its tokens in another order. Each token keeps its label."""
    tokens = batch["tokens"]
    generator = torch.Generator().manual_seed(SHUFFLE_SEED)
    order = torch.randperm(tokens.numel(), generator=generator).to(tokens.device)
    shuffled = dict(batch)
    for name in ("tokens", "labels"):
        shuffled[name] = batch[name].reshape(-1)[order].view_as(tokens)
    return shuffled


def _sample_embeddings(model: list[torch.nn.Module]) -> torch.Tensor:
    """Return a sample of the embeddings and the output layer.

    Every recipe stores these weights in high precision, so two runs can be compared by them.
    """
    samples = []
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if "embedding" in name or "output_layer" in name:
                samples.append(sample_tensor(parameter))
    return torch.cat(samples or [torch.zeros(1)])


def get_gemm_formats(model: Any) -> Formats:
    """Return the formats of the operands of a model config's matrix multiplications."""
    names = [getattr(model, "fp8", None), getattr(model, "fp4", None)]
    for matcher in list_matchers(getattr(model, "quant_recipe", None)):
        if matcher.training is not None:
            names.append(matcher.training.format)
    high_precision = "fp32"
    if model.fp16:
        high_precision = "fp16"
    elif model.bf16 or model.enable_autocast:
        high_precision = "bf16"
    forward, backward = [high_precision], []
    for name in names:
        if name:
            forward_format, backward_format = OPERAND_FORMATS[name]
            forward.append(forward_format)
            backward.append(backward_format)
    return Formats(tuple(forward), (*forward, *backward))

"""One training step and one validation, through Megatron's schedules."""

# ruff: noqa: N803 tensors carry their shape in capitals

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.pipeline_parallel import get_forward_backward_func

from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.gpt import bucket_groups
from bridge.runtime.megatron.optimizer import inner_optimizers, one_gather, parts
from bridge.runtime.megatron.process import Process
from bridge.runtime.megatron.record.not_finite import are_finite, first_not_finite

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one optimizer step."""

    loss: float
    """Mean over the global batch, in nats per token; the same on every rank."""
    skipped: bool
    """Whether a gradient held NaN or Inf on any rank, so that nothing was updated."""
    not_finite: str | None
    """Where the backward pass first had NaN or Inf, as a clause; None for a step that was not skipped."""
    is_stuck: bool
    """Whether the step was skipped and the loss scale cannot fall: there is none, it is constant or at its floor."""
    grad_norm: float | None
    """Norm of the gradients before clipping; None for a skipped step or where nothing is clipped."""
    loss_scale: float
    learning_rate: float
    stop: int
    """The largest number of the signals that asked any rank to stop; 0 for none."""


def _loss(loss_mask_BS: torch.Tensor, losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over the unmasked tokens, to be differentiated and to be reported.

    Under context parallelism both are this rank's part of it; the mean of the reported ones is the mean. The schedule
    multiplies the other by the number of these ranks and divides it by that of the micro-batches, in place.
    """
    mask = loss_mask_BS.view(-1)
    tokens, group = mask.sum(), parallel_state.get_context_parallel_group()
    if group.size() > 1:
        torch.distributed.all_reduce(tokens, group=group)
    loss = (losses_BS.float().view(-1) * mask).sum() / tokens
    return loss, loss.detach() * group.size()


def _forward(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch forward; the schedule calls the returned loss function on the last stage."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _one_or_all(hooks: list[Any]) -> Any:
    """Return the hooks as Megatron's schedules take them: a list for the chunks of an interleaved pipeline."""
    return hooks if len(hooks) > 1 else hooks[0]


@dataclass(kw_only=True, eq=False)
class Trainer:
    """The model, its optimizer and schedule, and how to advance them by one step."""

    config: Any
    """The model config that the model was built with; it gets the loss scale and the gradient reduction."""
    model: list[Any]
    optimizer: Any
    scheduler: Any
    process: Process
    micro_batch_size: int
    global_batch_size: int

    def __post_init__(self) -> None:
        model, optimizer, config = self.model, self.optimizer, self.config
        self.num_microbatches = self.global_batch_size // (
            self.micro_batch_size * self.process.data_parallel_size
        )
        self._schedule = get_forward_backward_func()
        scalers = [getattr(part, "grad_scaler", None) for part in parts(optimizer)]
        self._scalers = [scaler for scaler in scalers if scaler is not None]
        self._checks_gradients = len(self._scalers) == len(
            scalers
        )  # Megatron looks for NaN and Inf as it unscales
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        ddp = model[0].ddp_config
        if ddp.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
            if ddp.align_param_gather:
                config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
        if ddp.overlap_param_gather and ddp.align_param_gather:
            config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])

    def step(self, batches: Iterator[Batch], *, stop: Callable[[], int] = int) -> StepResult:
        """Train on one global batch; `stop` is asked at its end for the signal that this rank is to stop on, or 0."""
        losses = self.forward_backward(batches)
        groups = self.optimizer.param_groups
        learning_rate = float(
            next((group for group in groups if group.get("default_config", True)), groups[0])["lr"]
        )
        loss_scale, may_fall = self.loss_scale, self.loss_scale_may_fall
        updated, grad_norm = False, None
        if self._checks_gradients or self._everywhere(are_finite(self._gradients())):
            with one_gather(
                [chunk for chunk in self.model if not chunk.ddp_config.overlap_param_gather]
            ):
                updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=self.global_batch_size)
        loss, number = self._mean_over_ranks(losses, stop())
        return StepResult(
            loss=loss,
            skipped=not updated,
            not_finite=None if updated else first_not_finite(self.model),
            is_stuck=not updated and not may_fall,
            grad_norm=float(grad_norm) if updated and grad_norm is not None else None,
            loss_scale=loss_scale,
            learning_rate=learning_rate,
            stop=number,
        )

    def forward_backward(self, batches: Iterator[Batch]) -> list[torch.Tensor]:
        """Compute the gradients of one global batch; the losses come back on the last stage only."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._fill_shared_buffers()
        return self._run(batches, self.num_microbatches, forward_only=False)

    def _fill_shared_buffers(self) -> None:
        """Write the masters into the gradients' buffers, where the next forward pass gathers MXFP8 weights from these.

        Megatron leaves that to the training loop under `overlap_param_gather`, and would gather zeros without it. Where
        the weights were gathered since the last step, nothing would take the masters out of the gradients again, unless
        the schedule gathers them once more (`align_param_gather` of an interleaved pipeline).
        Source: megatron-core 0.16.1 optimizer/optimizer.py, step_with_ready_grads; Megatron-LM training.py, train_step.
        """
        is_gathered = all(group.param_gather_dispatched for group in bucket_groups(self.model))
        if is_gathered and not isinstance(self.config.param_sync_func, list):
            return
        for part in parts(self.optimizer):
            settings = part.config
            if settings.reuse_grad_buf_for_mxfp8_param_ag and settings.overlap_param_gather:
                part._copy_main_params_to_param_buffer()

    def evaluate(self, batches: Iterator[Batch], iterations: int) -> float:
        """Return the mean loss over a number of global batches, in nats per token."""
        for chunk in self.model:
            chunk.eval()
        try:
            with torch.no_grad(), self.parameters_in_place():
                losses = self._run(batches, iterations * self.num_microbatches, forward_only=True)
        finally:
            for chunk in self.model:
                chunk.train()
        return self._mean_over_ranks(losses, stop=0)[0]

    @contextmanager
    def parameters_in_place(self) -> Iterator[None]:
        """Gather parameters now, where they are otherwise gathered during the next forward pass.

        Megatron's own forced gather would leave MXFP8 weights in the buffer, and the weights of the last step in use.
        """
        if not self.model[0].ddp_config.overlap_param_gather:
            yield
            return
        self._fill_shared_buffers()
        for group in bucket_groups(self.model):
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        for chunk in self.model:
            chunk.disable_forward_pre_hook(param_sync=False)
        try:
            yield
        finally:
            for chunk in self.model:
                chunk.enable_forward_pre_hook()

    def _run(
        self, batches: Iterator[Batch], num_microbatches: int, *, forward_only: bool
    ) -> list[torch.Tensor]:
        """Run micro-batches through the pipeline; the losses come back on the last stage only."""
        sources: Any = batches
        if (
            len(self.model) > 1
        ):  # every chunk of an interleaved pipeline goes through the same micro-batches
            own = list(islice(batches, num_microbatches))
            sources = [iter(own) for _ in self.model]
        losses: list[torch.Tensor] = self._schedule(
            forward_step_func=_forward,
            data_iterator=sources,
            model=self.model,
            num_microbatches=num_microbatches,
            seq_length=self.config.seq_length,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )
        return losses

    def has_finite_state(self) -> bool:
        """Return whether weights, master weights and the optimizer's state hold no NaN or Inf on any rank."""
        weights = [parameter for chunk in self.model for parameter in chunk.parameters()]
        held = [
            parameter.dequantize() if isinstance(parameter, StoredWeight) else parameter
            for parameter in weights
        ]
        for inner in inner_optimizers(self.optimizer):
            held += [parameter for group in inner.param_groups for parameter in group["params"]]
            held += [value for state in inner.state.values() for value in state.values()]
        return self._everywhere(
            are_finite(value for value in held if isinstance(value, torch.Tensor))
        )

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradient buffers of this rank, reduced; with sharding, its own part of them and its addends."""
        for chunk in self.model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    @property
    def loss_scale(self) -> float:
        """The scale that the next step's loss is multiplied with; 1 without one."""
        return float(self.optimizer.get_loss_scale())

    @property
    def loss_scale_may_fall(self) -> bool:
        """Return whether a dynamic loss scale is above its floor."""
        dynamic = [scaler for scaler in self._scalers if isinstance(scaler, DynamicGradScaler)]
        return any(bool(scaler.scale > scaler.min_scale) for scaler in dynamic)

    def _everywhere(self, holds: bool) -> bool:
        """Return whether something holds on every rank; a collective call."""
        return not self.largest(int(not holds))

    def _mean_over_ranks(self, losses: list[torch.Tensor], stop: int) -> tuple[float, int]:
        """Return the mean loss of the last stages and the largest number in `stop`, both known on every rank."""
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=self.process.device)
        if self.process.world_size == 1:
            return float(mean), stop
        torch.distributed.all_reduce(mean)
        last_stages = (
            self.process.world_size // parallel_state.get_pipeline_model_parallel_world_size()
        )
        return float(mean) / last_stages, self.largest(stop)

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers; a collective call."""
        if self.process.world_size == 1:
            return number
        largest = torch.tensor(number, device=self.process.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return int(largest)

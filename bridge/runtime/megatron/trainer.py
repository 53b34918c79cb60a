"""`Trainer`: a training step and a validation, through Megatron's schedules."""

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
from bridge.runtime.megatron.model.gpt import list_bucket_groups
from bridge.runtime.megatron.optimizer import (
    gather_params_once,
    list_chained_optimizers,
    list_torch_optimizers,
)
from bridge.runtime.megatron.process.training_process import Process
from bridge.runtime.megatron.record.not_finite import are_finite, find_first_not_finite

Batch = dict[str, torch.Tensor]
"""Tensors of a micro-batch by name, each (samples, sequence)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of an optimizer step."""

    loss: float
    """Mean loss of the global batch, in nats per token; equal on all ranks."""
    skipped: bool
    """Whether a gradient of any rank had NaN or Inf, so that no weight was updated."""
    not_finite: str | None
    """A clause about the first NaN or Inf of the backward pass. None: the step was not skipped."""
    is_stuck: bool
    """Whether the step was skipped and the loss scale cannot be lowered.

    There is no loss scale, or it is constant, or it is at its floor.
    """
    grad_norm: float | None
    """Norm of the gradients before clipping. None: the step was skipped, or nothing is clipped."""
    loss_scale: float
    """Factor of the loss in this step; 1 without a loss scale."""
    learning_rate: float
    stop: int
    """The largest number of a signal that asked a rank to stop; 0 without a signal."""


def _compute_loss(
    loss_mask_BS: torch.Tensor, losses_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to be differentiated and the loss to be reported, both of the unmasked tokens.

    Without context parallelism both are the mean over the tokens. With it, the first is this rank's
    part of the mean. The second is this part times the number of context-parallel ranks, so that
    its mean over these ranks is the mean loss. The schedule multiplies the first by the number of
    these ranks and divides it by the number of micro-batches, in place.

    Args:
        loss_mask_BS: 1 for a token that counts, 0 for any other.
        losses_BS: Loss of each token, in nats.
    """
    group = parallel_state.get_context_parallel_group()
    mask = loss_mask_BS.view(-1)
    tokens = mask.sum()
    if group.size() > 1:
        torch.distributed.all_reduce(tokens, group=group)
    loss = (losses_BS.float().view(-1) * mask).sum() / tokens
    return loss, loss.detach() * group.size()


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Run the next micro-batch forward, and return the output and the loss function.

    On the last pipeline stage the output is the loss of each token, and the schedule calls the loss
    function with it.
    """
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_compute_loss, batch["loss_mask"])


def _unwrap_single(hooks: list[Any]) -> Any:
    """Return a hook per chunk in the form of Megatron's schedules: a list, or the hook of one chunk."""
    if len(hooks) > 1:
        return hooks
    return hooks[0]


@dataclass(kw_only=True, eq=False)
class Trainer:
    """The model, its optimizer and its schedule, which take steps together."""

    config: Any
    """The model config with which the model was built.

    The loss scale and the gradient reduction are set in it.
    """
    model: list[Any]
    optimizer: Any
    scheduler: Any
    process: Process
    micro_batch_size: int
    global_batch_size: int

    def __post_init__(self) -> None:
        samples = self.micro_batch_size * self.process.data_parallel_size
        self.num_microbatches = self.global_batch_size // samples
        self._schedule = get_forward_backward_func()
        optimizers = list_chained_optimizers(self.optimizer)
        scalers = [getattr(part, "grad_scaler", None) for part in optimizers]
        self._scalers = [scaler for scaler in scalers if scaler is not None]
        # An optimizer with a loss scale looks for NaN and Inf itself when it unscales gradients.
        self._checks_gradients = len(self._scalers) == len(optimizers)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self._set_schedule_hooks()

    def _set_schedule_hooks(self) -> None:
        """Give the config the hooks of data parallelism that the schedules call."""
        config = self.config
        ddp = self.model[0].ddp_config
        if ddp.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.model]
            config.no_sync_func = _unwrap_single(no_syncs)
            if ddp.align_param_gather:
                grad_syncs = [chunk.start_grad_sync for chunk in self.model]
                config.grad_sync_func = _unwrap_single(grad_syncs)
        if ddp.overlap_param_gather and ddp.align_param_gather:
            param_syncs = [chunk.start_param_sync for chunk in self.model]
            config.param_sync_func = _unwrap_single(param_syncs)

    def step(self, batches: Iterator[Batch], *, stop: Callable[[], int] = int) -> StepResult:
        """Train on a global batch.

        Args:
            batches: This rank's micro-batches.
            stop: Called at the end of the step. Returns the number of the signal that asked this
                rank to stop, or 0.
        """
        losses = self.forward_backward(batches)
        # The optimizer changes these values, and the result needs the values of this step.
        learning_rate = self._get_learning_rate()
        loss_scale = self.loss_scale
        loss_scale_may_fall = self.loss_scale_may_fall
        updated, grad_norm = self._update_weights()
        loss, stop_signal = self._average_over_ranks(losses, stop())
        not_finite = None
        if not updated:
            grad_norm = None
            not_finite = find_first_not_finite(self.model)
        return StepResult(
            loss=loss,
            skipped=not updated,
            not_finite=not_finite,
            is_stuck=not updated and not loss_scale_may_fall,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            learning_rate=learning_rate,
            stop=stop_signal,
        )

    def _update_weights(self) -> tuple[bool, float | None]:
        """Take a step of optimizer and schedule, unless a gradient of any rank is not finite.

        Returns:
            Whether the weights were updated, and the norm of the gradients before clipping, or
            None if it was not computed.
        """
        if not self._checks_gradients:
            is_finite = are_finite(self._list_gradient_buffers())
            if not self._is_true_on_all_ranks(is_finite):
                return False, None
        gathered_in_step = []
        for chunk in self.model:
            if not chunk.ddp_config.overlap_param_gather:
                gathered_in_step.append(chunk)
        with gather_params_once(gathered_in_step):
            updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=self.global_batch_size)
        if grad_norm is not None:
            grad_norm = float(grad_norm)
        return updated, grad_norm

    def _get_learning_rate(self) -> float:
        """Return the rate of the first parameter group that follows the run's schedule."""
        groups = self.optimizer.param_groups
        for group in groups:
            if group.get("default_config", True):
                return float(group["lr"])
        return float(groups[0]["lr"])

    def forward_backward(self, batches: Iterator[Batch]) -> list[torch.Tensor]:
        """Compute the gradients of a global batch, and return the losses of its micro-batches.

        The list is empty on all stages but the last.
        """
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._fill_shared_buffers()
        return self._run(batches, self.num_microbatches, forward_only=False)

    def _fill_shared_buffers(self) -> None:
        """Write the masters into the gradients' buffers, from which the next forward pass gathers MXFP8.

        Under `overlap_param_gather` Megatron leaves this to the training loop, and would gather
        zeros without it. If the weights were gathered since the last step, nothing would remove the
        masters from the gradients' buffers again, and nothing is written. The exception is a
        schedule that gathers the weights once more (`align_param_gather` of an interleaved
        pipeline).

        Source: megatron-core 0.16.1 optimizer/optimizer.py, step_with_ready_grads; Megatron-LM
            training.py, train_step.
        """
        is_gathered = all(group.param_gather_dispatched for group in list_bucket_groups(self.model))
        if is_gathered and not isinstance(self.config.param_sync_func, list):
            return
        for part in list_chained_optimizers(self.optimizer):
            settings = part.config
            if settings.reuse_grad_buf_for_mxfp8_param_ag and settings.overlap_param_gather:
                part._copy_main_params_to_param_buffer()

    def evaluate(self, batches: Iterator[Batch], iterations: int) -> float:
        """Return the mean loss over a number of global batches, in nats per token."""
        for chunk in self.model:
            chunk.eval()
        try:
            with torch.no_grad(), self.gather_parameters():
                losses = self._run(batches, iterations * self.num_microbatches, forward_only=True)
        finally:
            for chunk in self.model:
                chunk.train()
        return self._average_over_ranks(losses, stop=0)[0]

    @contextmanager
    def gather_parameters(self) -> Iterator[None]:
        """Gather the weights before a ``with`` block, and not during its forward passes.

        Without `overlap_param_gather` they are gathered already. Megatron's forced gather is not
        used. It would leave MXFP8 weights in the buffer, and the weights of the last step in use.
        """
        if not self.model[0].ddp_config.overlap_param_gather:
            yield
            return
        self._fill_shared_buffers()
        for group in list_bucket_groups(self.model):
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
        """Run micro-batches through the pipeline, and return their losses on the last stage."""
        sources: Any = batches
        if len(self.model) > 1:
            # every chunk of an interleaved pipeline goes through the same micro-batches
            micro_batches = list(islice(batches, num_microbatches))
            sources = [iter(micro_batches) for _ in self.model]
        losses: list[torch.Tensor] = self._schedule(
            forward_step_func=_forward_step,
            data_iterator=sources,
            model=self.model,
            num_microbatches=num_microbatches,
            seq_length=self.config.seq_length,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )
        return losses

    def has_finite_state(self) -> bool:
        """Return whether weights, masters and the optimizer's state are finite on every rank."""
        values: list[Any] = []
        for chunk in self.model:
            for parameter in chunk.parameters():
                if isinstance(parameter, StoredWeight):
                    values.append(parameter.dequantize())
                else:
                    values.append(parameter)
        for inner in list_torch_optimizers(self.optimizer):
            for group in inner.param_groups:
                values.extend(group["params"])
            for state in inner.state.values():
                values.extend(state.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        return self._is_true_on_all_ranks(are_finite(tensors))

    def _list_gradient_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the reduced gradient buffers of this rank.

        In a sharded buffer only the part of this rank is reduced.
        """
        for chunk in self.model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    @property
    def loss_scale(self) -> float:
        """Factor of the next step's loss; 1 without a loss scale."""
        return float(self.optimizer.get_loss_scale())

    @property
    def loss_scale_may_fall(self) -> bool:
        """Whether a dynamic loss scale is above its floor."""
        dynamic = [scaler for scaler in self._scalers if isinstance(scaler, DynamicGradScaler)]
        return any(bool(scaler.scale > scaler.min_scale) for scaler in dynamic)

    def _is_true_on_all_ranks(self, holds: bool) -> bool:
        """Return whether a condition is true on every rank in a collective call."""
        return not self.find_largest(int(not holds))

    def _average_over_ranks(self, losses: list[torch.Tensor], stop: int) -> tuple[float, int]:
        """Return the mean loss over all micro-batches and the largest stop signal.

        This is a collective call.

        Args:
            losses: Losses of this rank's micro-batches; empty on all pipeline stages but the last.
            stop: Number of this rank's stop signal, or 0.
        """
        if losses:
            mean = torch.stack(losses).mean()
        else:
            mean = torch.zeros((), device=self.process.device)
        if self.process.world_size == 1:
            return float(mean), stop
        torch.distributed.all_reduce(mean)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        last_stages = self.process.world_size // stages
        return float(mean) / last_stages, self.find_largest(stop)

    def find_largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers in a collective call."""
        if self.process.world_size == 1:
            return number
        largest = torch.tensor(number, device=self.process.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return int(largest)

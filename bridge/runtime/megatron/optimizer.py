"""Megatron's optimizer and schedule, with corrections for exact resuming and for a CPU."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.patching import Patch, apply_patches, keep_compatible


class TorchAdamDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's distributed optimizer over torch's Adam.

    The state of this Adam has a "step" per parameter, and a checkpoint has one step for all
    parameters. Without this class, loading raises a KeyError, because distrib_optimizer.py:938 in
    0.16.1 copies every key of the state from the checkpoint.
    """

    def _set_main_param_and_optimizer_states(
        self, model_param: Any, tensors: dict[str, torch.Tensor], *others: Any, **named: Any
    ) -> None:
        """Set the state of a parameter. Without a step in the checkpoint its step stays."""
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        super()._set_main_param_and_optimizer_states(model_param, tensors, *others, **named)


def build_optimizer(config: Any, model: list[Any]) -> Any:
    """Build Megatron's optimizer for the model chunks of this rank.

    Without Transformer Engine and Apex, Megatron uses torch's AdamW. It is switched to its fused
    kernel. Its state is created now, and not in the first step: FP16 begins with overflows, and a
    run must be able to resume from a checkpoint that was written before the first successful step.

    Args:
        config: Optimizer config.
        model: Chunks of this rank.
    """
    with (
        warnings.catch_warnings()
    ):  # 0.19 imports an experimental model class, which warns of itself
        warnings.filterwarnings("ignore", message="MimoModelConfig is experimental")
        optimizer = get_megatron_optimizer(config, model)
    for part in list_chained_optimizers(optimizer):
        inner = part.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue
        if type(part) is DistributedOptimizer:
            part.__class__ = TorchAdamDistributedOptimizer
            _drop_dequantised_shards(part)
        for group in inner.param_groups:
            group.update(fused=True, foreach=False)
            for parameter in group["params"]:
                if not inner.state[parameter]:  # as torch would create it
                    inner.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
    return optimizer


def _drop_dequantised_shards(part: Any) -> None:
    """Replace the shards of stored weights in a distributed optimizer by None.

    Under delayed scaling Megatron makes shards of the dequantised weight, and uses them as views of
    the weight, which they are not. Under other schemes it has None in their place.
    """
    for shards, weights in zip(part.shard_float16_groups, part.model_float16_groups, strict=True):
        for index, (_, weight) in enumerate(zip(shards, weights, strict=True)):
            if isinstance(weight, StoredWeight):
                shards[index] = None


def list_chained_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of a `ChainedOptimizer`, or a list of any other optimizer."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def list_torch_optimizers(optimizer: Any) -> list[Any]:
    """Return the torch optimizers inside Megatron's, which update the weights."""
    return [
        part.optimizer for part in list_chained_optimizers(optimizer) if part.optimizer is not None
    ]


def unshare_steps(optimizer: Any) -> None:
    """Give every parameter a separate step tensor after a checkpoint was loaded.

    `DistributedOptimizer.load_state_dict` gives all parameters the same tensor, and Adam increments
    it once per parameter. In a run with 53 parameters that resumes at step 5, the step is 217
    instead of 9 after four steps, without an error.
    """
    for inner in list_torch_optimizers(optimizer):
        for state in inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def build_scheduler(
    config: Any,
    optimizer: Any,
    *,
    warmup_iters: int,
    decay_iters: int,
    decay_style: str,
    global_batch_size: int,
) -> Any:
    """Build Megatron's schedule of learning rate and weight decay, which counts samples.

    Args:
        config: Optimizer config.
        optimizer: Megatron's optimizer.
        warmup_iters: Steps of warm-up.
        decay_iters: Steps after which the rate is `min_lr`.
        decay_style: Megatron's name of the schedule.
        global_batch_size: Samples of a step.
    """
    decay_iters = max(decay_iters, warmup_iters + 1)
    wsd_decay_steps, wsd_decay_style = None, None
    if decay_style == "WSD":
        wsd_decay_steps = max(1, decay_iters * global_batch_size // 10)
        wsd_decay_style = "cosine"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr or 0.0,
        lr_warmup_steps=warmup_iters * global_batch_size,
        lr_decay_steps=decay_iters * global_batch_size,
        lr_decay_style=decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_iters * global_batch_size,
        wd_incr_style="constant",
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=wsd_decay_style,
    )


@contextmanager
def gather_params_once(chunks: Sequence[Any]) -> Iterator[None]:
    """Gather the weights once, after the last optimizer of a step, for a ``with`` block.

    With experts there are two optimizers. In megatron-core 0.16.1 each gathers the weights of both
    after its update (optimizer/distrib_optimizer.py:2617-2619). MXFP8 weights go through the
    gradients' buffer: the first gather takes the experts' gradients for weights, and the second
    finds zeros in place of all other weights.
    """
    last_calls: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def postpone(chunk: Any, *args: Any, **named: Any) -> None:
        last_calls[chunk] = (args, named)

    patches = [(chunk, "start_param_sync", partial(postpone, chunk)) for chunk in chunks]
    with apply_patches(keep_compatible(patches)):
        yield
    for chunk, (args, named) in last_calls.items():
        chunk.start_param_sync(*args, **named)


def gather_buckets_separately() -> AbstractContextManager[None]:
    """Gather the buckets of a group one after the other on gloo, in a ``with`` block.

    Megatron gathers them in one coalesced collective, and puts FP8 codes and BF16 parameters
    into one group. Gloo coalesces by copying everything into one tensor of one dtype: the codes
    are converted to numbers of that dtype and back, and come out as other codes, without an
    error. NCCL sends each bucket as it is.

    Source: torch 2.13 ProcessGroupGloo, `allgather_into_tensor_coalesced`; megatron-core 0.16.1
    distributed/param_and_grad_buffer.py:276-300.
    """
    bucket_group_class = param_and_grad_buffer._ParamAndGradBucketGroup
    gather = param_and_grad_buffer.dist_all_gather_func
    original_start = bucket_group_class.start_param_sync
    finished_work = SimpleNamespace(wait=lambda: None)

    def gather_now(*parts: Any, **named: Any) -> Any:
        named.pop("async_op", None)
        return gather(*parts, **named)

    patches_for_gloo: list[Patch] = [
        (
            param_and_grad_buffer,
            "_coalescing_manager",
            lambda *_, **_named: nullcontext(finished_work),
        ),
        (param_and_grad_buffer, "dist_all_gather_func", gather_now),
    ]

    def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.intra_distributed_optimizer_instance_group
        if torch.distributed.get_backend(group) != "gloo":
            return original_start(self, *args, **kwargs)
        with apply_patches(keep_compatible(patches_for_gloo)):
            return original_start(self, *args, **kwargs)

    patch_of_class = (bucket_group_class, "start_param_sync", start_param_sync)
    return apply_patches(keep_compatible([patch_of_class]))

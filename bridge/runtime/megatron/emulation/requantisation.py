"""Functions that make the weights from the optimizer's masters again, as a step does.

A checkpoint has the masters and the dequantised weights, which any precision can read. Quantising
dequantised weights again does not always give the same codes. Quantising the masters does.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bridge.runtime.megatron.emulation.fp8_regions import list_delayed_updates
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight, quantize_shards
from bridge.runtime.megatron.optimizer import list_chained_optimizers


def _copy_masters_and_gather(part: Any) -> None:
    """Let a distributed optimizer write its masters into the weights, and gather the weights."""
    if part.config.reuse_grad_buf_for_mxfp8_param_ag:
        part._copy_main_params_to_param_buffer()
    else:
        part._copy_main_params_to_model_params()
    for chunk in part.model_chunks:
        chunk.start_param_sync(force_sync=True)


@contextmanager
def pause_amax_recording(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Record no amaxes in a ``with`` block that writes to weights."""
    with ExitStack() as stack:
        for updates in list_delayed_updates(model):
            for state in updates.states:
                stack.enter_context(state.use_scales(state.copy_scales()))
        yield


def round_masters_to_weights(optimizer: Any) -> None:
    """Round the optimizer's FP32 masters to the weights, as after a step. A collective call."""
    for part in list_chained_optimizers(optimizer):
        if hasattr(part, "model_chunks"):
            _copy_masters_and_gather(part)
        elif hasattr(part, "fp32_from_float16_groups"):
            part._copy_main_params_to_model_params()


def requantise_stored_weights(optimizer: Any) -> None:
    """Quantise stored weights from the optimizer's masters, as after the last step.

    This is a collective call. Under delayed scaling the weights get the scales of the last step.
    """
    for part in list_chained_optimizers(optimizer):
        if hasattr(part, "_get_fp8_params_and_shard_fp32_from_fp8"):
            _requantise_from_shards(part)
        else:
            _requantise_from_masters(part)


def _requantise_from_shards(part: Any) -> None:
    """Quantise the weights of a distributed optimizer, whose masters are sharded."""
    shards = [part._get_fp8_params_and_shard_fp32_from_fp8()]
    # From megatron-core 0.17.1 on, NVFP4 weights have a separate list.
    if hasattr(part, "_get_nvfp4_params_and_shard_fp32_from_nvfp4"):
        shards.append(part._get_nvfp4_params_and_shard_fp32_from_nvfp4())
    for weights, masters, starts in shards:
        if all(isinstance(weight, StoredWeight) for weight in weights):
            with _use_stored_scales(weights):
                quantize_shards(weights, masters, starts, part.data_parallel_group)
        else:
            _copy_masters_and_gather(part)


def _requantise_from_masters(part: Any) -> None:
    """Quantise the weights of an optimizer that has whole masters."""
    weight_groups = getattr(part, "float16_groups", ())
    master_groups = getattr(part, "fp32_from_float16_groups", ())
    for weights, masters in zip(weight_groups, master_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            if isinstance(weight, StoredWeight):
                with _use_stored_scales([weight]):
                    weight.quantize_(master)


@contextmanager
def _use_stored_scales(weights: Sequence[StoredWeight]) -> Iterator[None]:
    """Quantise weights with the delayed scales of their present codes, in a ``with`` block."""
    with ExitStack() as stack:
        for weight in weights:
            if weight.store.state is not None:
                stack.enter_context(weight.store.state.use_stored_scale())
        yield

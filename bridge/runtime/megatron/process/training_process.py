"""`training_process`: sets up torch.distributed, Megatron's groups, seeds and threads for a run.

A single process needs no launcher. torchrun, or any launcher that sets the same variables, starts
several processes, and each runs the same code. At the end everything is taken down again, also
after an exception, so that one Python process can train several times.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

# torch.distributed re-exports them untyped
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from bridge.errors import BridgeError, RunConfigError, TrainingError
from bridge.runtime.megatron.cpu import cuda_shim, wide_gemm
from bridge.runtime.megatron.hybrid.kernels import use_torch_fallbacks
from bridge.runtime.megatron.patching import apply_patches, keep_compatible
from bridge.runtime.megatron.process.agreement import require_agreement
from bridge.runtime.megatron.process.peers import Peers, run_with_timeout
from bridge.runtime.megatron.process.quiet_loggers import quiet_loggers
from bridge.runtime.megatron.process.stop_request import StopRequest, catch_stop_signals
from bridge.runtime.megatron.without_te import CHANGES_FOR_LAYERS

TIMEOUT_MINUTES = 30.0
"""The default time for which a collective waits for its ranks."""
MAX_THREADS_WITHOUT_GC = 200
"""The number of threads above which the models of a sweep's earlier runs are collected.

A run has about twenty threads.
"""
_run_counter = itertools.count()
"""Numbers the runs of this process."""
_chunks_to_release: list[Any] = []
"""Model chunks of the present run."""
_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """This process among the ranks of the job."""

    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    context_parallel_rank: int
    context_parallel_size: int
    device: torch.device
    notes: tuple[str, ...]
    """Sentences for the log about adaptations to this machine."""
    peers: Peers | None
    """The other ranks. None: the job has one process."""
    stop: StopRequest
    """The signal that asked this process to stop."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and the log."""
        return self.rank == 0


class _LauncherVariables:
    """The launcher's variables, read once from the environment."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        """Number of this process on its machine."""
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        """Number of processes on this machine."""
        self.launched = "RANK" in os.environ and "MASTER_ADDR" in os.environ
        """Whether a launcher started this process."""

    def count_threads(self) -> int:
        """Return OMP_NUM_THREADS, or this rank's share of the CPUs of the machine."""
        stated_threads = os.environ.get("OMP_NUM_THREADS", "")
        stated = 0
        if stated_threads.isdecimal():
            stated = int(stated_threads)
        if stated and not (self.launched and stated == 1):  # torchrun sets 1 by itself
            return stated
        cpus = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cpus = len(os.sched_getaffinity(0))
        return max(1, cpus // self.local_world_size)


@contextmanager
def training_process(
    model: Any,
    *,
    seed: int,
    fingerprint: Mapping[str, str] | None = None,
    timeout_minutes: float = TIMEOUT_MINUTES,
) -> Iterator[Process]:
    """Set this process up for training, and take it down at the end.

    Args:
        model: Model config with the parallel sizes.
        seed: The same on all ranks. Megatron derives a seed per rank from it.
        fingerprint: Settings that must be equal on all ranks.
        timeout_minutes: The time for which a collective waits for its ranks.

    Raises:
        RunConfigError: Ranks have different settings, or their number does not fit the parallel
            sizes.
        TrainingError: Other ranks ended or stalled, so that a collective of this rank failed.
    """
    launch = _LauncherVariables()
    notes: list[str] = []
    with ExitStack() as stack:
        request = stack.enter_context(catch_stop_signals())
        stack.enter_context(quiet_loggers())
        _patch_layers(stack)
        where = _set_up_device(stack, launch, model, notes)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(launch.count_threads())
        timeout = timedelta(minutes=timeout_minutes)
        store = _start_distributed(stack, launch, where, timeout)
        peers = None
        if launch.world_size > 1:
            peers = Peers(store, launch.rank, launch.world_size, timeout)
            stack.enter_context(peers.answer_alarms())
            stack.enter_context(_blame_failed_ranks(peers, request))
        if fingerprint is not None:
            require_agreement(fingerprint)
        _require_whole_replicas(model, launch.world_size)
        _start_model_parallel(stack, model, timeout_minutes, seed)
        yield _make_process(launch, where, notes, peers, request)


def _make_process(
    launch: _LauncherVariables,
    where: torch.device,
    notes: Sequence[str],
    peers: Peers | None,
    request: StopRequest,
) -> Process:
    """Return the `Process`, with its ranks in Megatron's groups."""
    return Process(
        rank=launch.rank,
        world_size=launch.world_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        device=where,
        notes=tuple(notes),
        peers=peers,
        stop=request,
    )


@contextmanager
def _blame_failed_ranks(peers: Peers, request: StopRequest) -> Iterator[None]:
    """Name the ranks that caused an error of this rank in a ``with`` block.

    An error of this rank is reported to the other ranks. An error of a collective that failed
    because of other ranks is replaced by an error that names them.

    Raises:
        TrainingError: Other ranks ended or stalled.
    """
    try:
        yield
    except Exception as error:
        request.is_noted_only = True
        if isinstance(error, BridgeError):
            peers.report_end(f"ended: {error}")
            raise
        fault = peers.diagnose_failure()
        if fault is not None:
            raise fault from error
        peers.report_end(f"ended with {type(error).__name__}. Look at its log.")
        raise
    except BaseException:
        peers.report_end("was stopped.")
        raise


def _patch_layers(stack: ExitStack) -> None:
    """Repair Megatron's layers, and ignore warnings of torch that a user cannot act on."""
    stack.enter_context(apply_patches(keep_compatible(CHANGES_FOR_LAYERS)))
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"(torch\.distributed|megatron)\."
    )
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    # FP32 norms under autocast
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


def _require_whole_replicas(model: Any, world_size: int) -> None:
    """Refuse a number of processes that is not a multiple of the processes of a model replica."""
    dense = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    experts = (
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
    )
    for path, names in (("model", dense), ("model.expert_model_parallel_size", experts)):
        sizes = {name: getattr(model, name) or model.tensor_model_parallel_size for name in names}
        ranks = math.prod(sizes.values())
        if world_size % ranks:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            raise RunConfigError(
                f"{path}: the number of processes must be a multiple of {product} = {ranks}, "
                f"got {world_size} (WORLD_SIZE). "
                f"Start the run with torchrun --nproc-per-node={ranks}, or change the parallel "
                "sizes."
            )


def _set_up_device(
    stack: ExitStack, launch: _LauncherVariables, model: Any, notes: list[str]
) -> torch.device:
    """Return the device of this process.

    Without CUDA the shim is installed, and with it widened GEMMs on a CPU whose 16-bit GEMMs are
    scalar loops.
    """
    if cuda_shim.has_cuda():
        torch.cuda.set_device(launch.local_rank)
        return torch.device("cuda", launch.local_rank)
    stack.enter_context(cuda_shim.cpu_as_cuda())
    # A C++ compiler would take seconds per function, and its sums may differ.
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    is_hybrid = getattr(model, "is_hybrid_model", False)
    if is_hybrid or getattr(model, "experimental_attention_variant", None):
        stack.enter_context(use_torch_fallbacks())
    notes.append("No CUDA device: Megatron Core runs on the CPU with gloo.")
    slow = wide_gemm.find_slow_dtypes()
    is_widened = stack.enter_context(wide_gemm.widen_gemms(slow))
    of_model = _list_gemm_dtypes(model)
    names = [str(dtype).removeprefix("torch.") for dtype in slow if dtype in of_model]
    if is_widened and names:
        notes.append(
            f"This CPU has no {' and '.join(names)} matrix multiplication: operands are widened to "
            "float32, multiplied there, and the result is rounded once to 16 bits "
            "(the same values as 16-bit operands with float32 accumulation)."
        )
    return torch.device("cpu")


def _list_gemm_dtypes(model: Any) -> set[torch.dtype]:
    """Return the 16-bit dtypes in which a model multiplies.

    The emulation of FP8 and FP4 multiplies in BF16.
    """
    dtypes: set[torch.dtype] = set()
    if any(getattr(model, name, None) for name in ("bf16", "fp8", "fp4")):
        dtypes.add(torch.bfloat16)
    if getattr(model, "fp16", False):
        dtypes.add(torch.float16)
    if getattr(model, "enable_autocast", False):
        dtypes.add(model.autocast_dtype)
    return dtypes


def _start_distributed(
    stack: ExitStack, launch: _LauncherVariables, where: torch.device, timeout: timedelta
) -> Store:
    """Join the process group, and return its store.

    A process without a launcher has a store in memory, which needs no port. Each run has separate
    keys in the launcher's store, so that a launch can train several times.
    """
    if psutil.Process().num_threads() > MAX_THREADS_WITHOUT_GC:
        # models, which refer to themselves, hold their process groups, and each group its threads
        gc.collect()
    backend = "gloo"
    if where.type == "cuda":
        backend = "nccl"
    store: Store = HashStore()
    try:
        if launch.launched:
            meeting = rendezvous("env://", timeout=timeout)
            # torch waits for a silent store
            shared, _, _ = run_with_timeout(lambda: next(meeting), timeout.total_seconds() + 5)
            store = PrefixStore(f"precision-bridge-{next(_run_counter)}", shared)
        torch.distributed.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise TrainingError(
            f"ranks: all {launch.world_size} must meet at {place} within "
            f"{timeout.total_seconds():g} s, and did not (train.distributed_timeout_minutes). "
            "One of them stalls, or was refused: look at the log of each."
        ) from error
    stack.callback(torch.distributed.destroy_process_group)
    return PrefixStore("peers", store)


def release_chunk_at_end(chunk: Any) -> None:
    """Release a model chunk at the end of the running `training_process`.

    Megatron's `DistributedDataParallel` wraps the chunk. The wrapper holds the model; experts hold
    tensors of the last step's graph; its C++ nodes hold the gradient hooks, and these hold the
    wrapper. Python does not collect such a cycle: the model, its optimizer and the process groups
    with their threads would outlive the run. So the wrapper is empty after it.
    """
    _chunks_to_release.append(chunk)


def _release_chunks() -> None:
    """Empty the wrappers of all model chunks of this run."""
    while _chunks_to_release:
        chunk = _chunks_to_release.pop()
        chunk.grad_accs.clear()
        del chunk.module


def _start_model_parallel(stack: ExitStack, model: Any, timeout_minutes: float, seed: int) -> None:
    """Create Megatron's process groups and seed everything.

    At the end Megatron forgets the groups, its buffers, losses and states.
    """
    stack.callback(_release_chunks)
    # the keys of the caches hold a process group, with threads
    stack.callback(RotaryEmbedding.forward.cache_clear)
    stack.callback(YarnRotaryEmbedding.forward.cache_clear)
    stack.callback(_get_expert_losses().clear)  # as long as this run's model has layers
    stack.callback(MTPLossLoggingHelper.tracker.clear)
    stack.callback(DSAIndexerLossLoggingHelper.tracker.clear)
    stack.callback(lambda: tensor_parallel.get_cuda_rng_tracker().reset())
    stack.callback(parallel_state.destroy_global_memory_buffer)
    stack.callback(parallel_state.destroy_model_parallel)
    sizes = {name: getattr(model, name) for name in _PARALLEL_SIZES}
    parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=timeout_minutes)
    # Each pipeline stage gets a different seed, as in Megatron-LM.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)  # noqa: NPY002 Megatron's data code may draw from the global state
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def _get_expert_losses() -> dict[str, Any]:
    """Return Megatron's record of the experts' losses, which 0.19 moved into a tracker."""
    losses: dict[str, Any]
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        losses = moe_utils.get_moe_metrics_tracker().metrics
    else:
        losses = moe_utils.get_moe_layer_wise_logging_tracker()
    return losses


def apply_tf32(allow: bool) -> str:
    """Allow or forbid TF32 in FP32 matrix multiplications, and return a sentence for the log."""
    precision, answer = "highest", "forbidden"
    if allow:
        precision, answer = "high", "allowed"
    torch.set_float32_matmul_precision(precision)
    effect = ""
    if not cuda_shim.has_cuda():
        effect = "; without a CUDA device it has no effect"
    return f"TF32 is {answer} (float32 matmul precision {precision!r}){effect}."

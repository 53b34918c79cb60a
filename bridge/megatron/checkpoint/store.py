"""Checkpoints in Megatron's own format: ``dist_checkpointing`` (torch_dist), ``iter_0000100/``, a latest pointer.

Each one ends with a manifest of its files (`bridge.megatron.checkpoint.manifest`), which is verified before anything is
read. A damaged or unfinished checkpoint is named and skipped for the one before.

On the same layout a resumed run continues bit for bit: weights, master weights, Adam's moments and step, loss scale,
learning-rate schedule, random states and the place in the data. On another layout everything but the random states is
resharded.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from bridge.errors import CheckpointError, Finding, TrainingError
from bridge.megatron.agreement import from_first_rank
from bridge.megatron.checkpoint.manifest import contents, damage, folder_of, is_finished, iterations, write_manifest
from bridge.megatron.emulation.model import delayed_updates, requantise_stored_weights, unrecorded
from bridge.megatron.emulation.stored_weight import StoredWeight
from bridge.megatron.gpt import padded_vocab_size, unwrapped
from bridge.megatron.optimizer import inner_optimizers, parts, unshare_steps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bridge.megatron.step import Trainer

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
"""File with the number of the newest complete checkpoint, Megatron's name."""
SHARDING: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the default cannot be loaded, dp_reshardable drops the step
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""How Megatron shards the optimizer's state."""
SPACE_BYTES = 2**20
"""A disk with less free space than this is full."""
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "multi_latent_attention",
    "mtp_num_layers",
)

_SCHEDULE = {
    "max_lr": ("optimizer.lr", False),
    "min_lr": ("optimizer.min_lr", False),
    "lr_warmup_steps": ("train.lr_warmup_iters", True),
    "lr_decay_steps": ("train.lr_decay_iters", True),
    "lr_decay_style": ("train.lr_decay_style", False),
    "end_wd": ("optimizer.weight_decay", False),
}
"""Attribute of Megatron's scheduler -> the run's key, and whether it counts samples, where the key counts steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a run has come."""

    iteration: int = 0
    consumed_samples: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that the caller stored with the checkpoint."""


def latest_iteration(folder: Path) -> int | None:
    """Return the number that the pointer of a folder names; None where there is no pointer, or a torn one."""
    try:
        text = (folder / LATEST).read_text(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and len(text) < 20 else None


def load_fault(folder: Path) -> Finding | None:
    """Return the fault of a folder without a checkpoint, or None."""
    if iterations(folder):
        return None
    remedy = "Give the folder that an earlier run saved to, or leave it at None to start fresh."
    return Finding(path="checkpoint.load", rule="no checkpoint there", value=str(folder), remedy=remedy)


def newest_sound(folder: Path) -> int:
    """Return the number of the newest checkpoint that is whole; a collective call.

    The search begins at the one that the pointer names, or at the newest where there is no pointer. Every checkpoint
    that is passed over is logged with the reason.

    Raises:
        CheckpointError: There is none.
    """
    return from_first_rank(lambda: _newest_sound(folder))


def _newest_sound(folder: Path) -> int:
    fault = load_fault(folder)
    if fault is not None:
        raise CheckpointError(str(fault))
    pointed = latest_iteration(folder)
    numbers = [number for number in iterations(folder) if pointed is None or number <= pointed]
    if pointed is not None and pointed not in numbers:
        logger.warning("checkpoint.load: %s names step %d, whose checkpoint is missing.", folder / LATEST, pointed)
    reasons = []
    for number in numbers:
        wrong = damage(folder_of(folder, number))
        if wrong is None:
            return number
        logger.warning("checkpoint.load: %s is skipped: %s.", folder_of(folder, number), wrong)
        reasons.append(f"step {number}: {wrong}")
    raise CheckpointError(
        f"checkpoint.load: must hold a whole checkpoint, got {str(folder)!r} ({'; '.join(reasons) or 'none'}). Give "
        "another folder, or leave it at None to start fresh."
    )


def require_free(folder: Path, start: Position) -> None:
    """Refuse to write into a folder that holds checkpoints later than where this run begins; a collective call.

    Raises:
        CheckpointError: There are such checkpoints, and they would be mixed with this run's.
    """
    from_first_rank(lambda: _require_free(folder, start))


def _require_free(folder: Path, start: Position) -> None:
    for latest in iterations(folder):
        checkpoint = folder_of(folder, latest)
        if latest <= start.iteration or not is_finished(checkpoint):
            continue
        if start.iteration and damage(checkpoint) is not None:
            _set_aside(checkpoint, "damaged")
            continue
        raise CheckpointError(
            f"checkpoint.save: the folder holds a checkpoint of step {latest}, and this run begins at step "
            f"{start.iteration}, got {str(folder)!r}. Resume with checkpoint.load={folder}, or save elsewhere."
        )


def _set_aside(checkpoint: Path, why: str) -> None:
    """Rename a checkpoint that stands in the place of a coming one; nothing of it is deleted."""
    names = (checkpoint.with_name(f"{checkpoint.name}.{why}{number or ''}") for number in itertools.count())
    other = next(name for name in names if not name.exists())
    checkpoint.rename(other)
    logger.warning("checkpoint.save: %s is %s and is renamed to %s.", checkpoint, why, other.name)


def _layout() -> dict[str, int | None]:
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    interleaved = {} if chunks is None else {"virtual_pipeline_model_parallel_size": chunks}
    return {
        **interleaved,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _identity(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must be equal between a checkpoint and the run that resumes it."""
    config = trainer.config
    return {
        **{f"model.{name}": getattr(config, name) for name in _SHAPE},
        "model.vocab_size, padded": padded_vocab_size(config),
        "model.share_embeddings_and_output_weights": config.share_embeddings_and_output_weights,
        "optimizer.use_distributed_optimizer": any(hasattr(part, "gbuf_ranges") for part in parts(trainer.optimizer)),
        "optimizer.fp16 or bf16": bool(trainer.optimizer.config.fp16 or trainer.optimizer.config.bf16),
    }


def _random_states() -> ShardedObject:
    """Return this rank's random states as an entry of the checkpoint; data-parallel ranks have equal ones."""
    states = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 the state Megatron's data code may draw from
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    layout = _layout()
    return ShardedObject(
        "rng_state",
        [states],
        (layout["pipeline_model_parallel_size"], layout["tensor_model_parallel_size"]),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def _chunks(trainer: Trainer) -> dict[str, Any]:
    """Return the model chunks under Megatron's names for them: model, or model0, model1, ... of a rank with several."""
    if len(trainer.model) == 1:
        return {"model": trainer.model[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(trainer.model)}


def _sharded_state(trainer: Trainer, *, is_loading: bool, with_random_states: bool) -> dict[str, Any]:
    """Return the run's state, with tensors marked by their place in the whole."""
    metadata = {**SHARDING, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for updates in delayed_updates(trainer.model):
        updates.reduce_pending()  # tensor-parallel ranks are taken for copies of each other
    chunks = {name: unwrapped(chunk).sharded_state_dict(metadata=metadata) for name, chunk in _chunks(trainer).items()}
    model = chunks if len(chunks) > 1 else chunks["model"]
    state = {
        **chunks,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        "opt_param_scheduler": trainer.scheduler.state_dict(),
    }
    for entry in nested_values(model):
        if isinstance(getattr(entry, "data", None), StoredWeight):
            entry.data = entry.data.dequantize()
    if with_random_states:
        state["rng_state"] = _random_states()
    return state


def save_checkpoint(trainer: Trainer, folder: Path, position: Position) -> Path:
    """Write a checkpoint and point to it; a collective call.

    Args:
        trainer: The run's state.
        folder: Gets ``iter_<number>/`` and the latest pointer.
        position: Stored with it; `extra` must be the same on all ranks.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: The folder cannot be written to.
        TrainingError: A weight or the optimizer's state is not finite; nothing was written.
    """
    target = folder_of(folder, position.iteration)
    with trainer.parameters_in_place():
        if not trainer.has_finite_state():
            rule = "a checkpoint must hold finite weights and optimizer state"
            found = f"got NaN or Inf at step {position.iteration}"
            kept = f"Nothing was written. {_kept(folder)}"
            raise TrainingError(f"checkpoint.save: {rule}, {found}. {kept}. Lower optimizer.lr.")
    from_first_rank(lambda: _make_room(target))
    # Megatron collects the writers' results in a queue of a spawned manager process, which imports the main script
    # again and outlives a hard exit; the writers of a synchronous save are threads, so a queue in memory will do.
    filesystem_async._results_queue = queue.Queue()
    with trainer.parameters_in_place():
        state = {
            **_sharded_state(trainer, is_loading=False, with_random_states=True),
            "iteration": position.iteration,
            "consumed_train_samples": position.consumed_samples,
            "identity": _identity(trainer),
            "layout": _layout(),
            "extra": dict(position.extra),
        }
        try:
            dist_checkpointing.save(state, str(target), content_metadata=dict(SHARDING))
        except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
            raise _unwritten(target, error) from error
    torch.distributed.barrier()
    from_first_rank(lambda: _finish(target, position.iteration))
    return target


def _make_room(target: Path) -> None:
    """Make the folder of a checkpoint; one that an interrupted run left unfinished is renamed."""
    if is_finished(target):
        rule = "a finished checkpoint is never written over"
        raise CheckpointError(f"checkpoint.save: {rule}, got {str(target)!r}. Save elsewhere.")
    try:
        if target.is_dir():
            _set_aside(target, "unfinished")
        target.mkdir(parents=True)
    except OSError as error:
        raise _unwritten(target, error) from error


def _finish(target: Path, iteration: int) -> None:
    """Point to a checkpoint whose files are written, and give it its manifest."""
    pointer = target.parent / LATEST
    scratch = pointer.with_suffix(".tmp")
    try:
        files = contents(target)
        scratch.write_text(f"{iteration}\n")
        scratch.replace(pointer)
        write_manifest(target, files)
    except OSError as error:
        raise _unwritten(target, error) from error


def _newest_finished(folder: Path) -> int | None:
    return next((number for number in iterations(folder) if is_finished(folder_of(folder, number))), None)


def _kept(folder: Path) -> str:
    newest = _newest_finished(folder)
    return "There is no earlier one" if newest is None else f"The newest one stays that of step {newest}"


def _unwritten(target: Path, error: BaseException) -> CheckpointError:
    """Return the error of a checkpoint that could not be written, with the system's reason where there is one."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror.lower() if isinstance(cause, OSError) and cause.strerror else "a write failed"
    with suppress(OSError):
        if shutil.disk_usage(target.parent).free < SPACE_BYTES:
            reason = "no space left on device"
    rule = "the checkpoint must fit into its folder"
    return CheckpointError(
        f"checkpoint.save: {rule}, got {str(target)!r} ({reason}). {_kept(target.parent)}. Make room, or save "
        "elsewhere."
    )


def load_checkpoint(trainer: Trainer, folder: Path, iteration: int) -> Position:
    """Continue from a checkpoint of a folder; a collective call.

    Args:
        trainer: Gets the checkpoint's state.
        folder: The folder that an earlier run saved to.
        iteration: The result of `newest_sound`.

    Returns:
        How far that run had come.

    Raises:
        CheckpointError: It is of another model or optimizer, or cannot be read.
    """
    source = folder_of(folder, iteration)
    try:
        common = dist_checkpointing.load_common_state_dict(str(source))
    except (CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint.load: {source} must hold a complete checkpoint, but cannot be read ({error}). Write the "
            f"number of an older one into {folder / LATEST}."
        ) from error
    _require_same(common.get("identity", {}), _identity(trainer), source)
    same_layout = common.get("layout") == _layout()
    if not same_layout:
        logger.info("The checkpoint has another parallel layout: random states start fresh.")
    state = _sharded_state(trainer, is_loading=True, with_random_states=same_layout)
    fresh = _without_new_scales(trainer, state, source)
    try:
        loaded = dist_checkpointing.load(state, str(source))
    except (CheckpointingException, CheckpointException, KeyError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"checkpoint.load: {source} cannot be loaded ({error}). Is it complete?") from error
    with unrecorded(trainer.model):  # the weights of a checkpoint are no new ones
        for name, chunk in _chunks(trainer).items():
            unwrapped(chunk).load_state_dict(loaded[name], strict=not fresh)
    inner = loaded["optimizer"].get("optimizer", loaded["optimizer"])
    if inner.get("state"):  # Megatron leaves Adam's step out where it is zero (optimizer.py:836, ``if step:``)
        inner["state"].setdefault("common_step", torch.tensor(0.0))
    _take_schedule_into_groups(trainer, loaded["opt_param_scheduler"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    unshare_steps(trainer.optimizer)
    requantise_stored_weights(trainer.optimizer)
    _warn_of_another_schedule(trainer, loaded["opt_param_scheduler"])
    trainer.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if same_layout:
        states = loaded["rng_state"][0]
        random.setstate(states["random"])
        np.random.set_state(states["numpy"])  # noqa: NPY002 see _random_states
        torch.set_rng_state(states["torch"])
        tensor_parallel.random._set_cuda_rng_state(states["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])
    return Position(
        iteration=int(common["iteration"]),
        consumed_samples=int(common["consumed_train_samples"]),
        extra=common.get("extra", {}),
    )


def _without_new_scales(trainer: Trainer, state: dict[str, Any], source: Path) -> bool:
    """Leave delayed scaling's state out of the load where a checkpoint of another precision has none.

    Returns:
        Whether it was left out: scales then begin at 1, as in a fresh run.
    """
    held = set(dist_checkpointing.load_tensors_metadata(str(source)))
    missing = False
    for name in _chunks(trainer):
        chunk = state[name]
        for key in [key for key, entry in chunk.items() if ".fp8_state." in key and entry.key not in held]:
            del chunk[key]
            missing = True
    if missing:
        logger.info("The checkpoint has no delayed scales: they begin at 1, as in a fresh run.")
    return missing


def _take_schedule_into_groups(trainer: Trainer, stored: Mapping[str, Any]) -> None:
    """Give parameter groups that follow this run's schedule the checkpoint's, which the run goes on with.

    megatron-core 0.19 pairs the groups of optimizer and checkpoint by their rates too (optimizer.py,
    ``param_group_identifier_keys``) and refuses others; 0.16.1 takes over the checkpoint's.
    """
    for inner in inner_optimizers(trainer.optimizer):
        for group in inner.param_groups:
            for name in ("max_lr", "min_lr"):
                if group.get(name) == getattr(trainer.scheduler, name):
                    group[name] = stored[name]


def _warn_of_another_schedule(trainer: Trainer, stored: Mapping[str, Any]) -> None:
    """Log where the checkpoint's schedule, which the run goes on with, is not the one of this run's config."""
    for name, (key, in_samples) in _SCHEDULE.items():
        before, now = stored[name], getattr(trainer.scheduler, name)
        if before == now:
            continue
        if in_samples:
            before, now = (samples / trainer.global_batch_size for samples in (before, now))
        before, now = (f"{value:g}" if isinstance(value, float) else value for value in (before, now))
        logger.warning(
            "%s: the learning-rate schedule of the checkpoint is kept, where it is %s, got %s. Give a run that will be "
            "resumed the value of all its steps from the start.",
            key,
            before,
            now,
        )


def _require_same(stored: Mapping[str, Any], present: Mapping[str, Any], source: Path) -> None:
    """Refuse a checkpoint of another model, naming every difference."""
    differences = [
        f"{name} is {present[name]!r} here and {stored[name]!r} there"
        for name in present
        if name in stored and stored[name] != present[name]
    ]
    if differences:
        raise CheckpointError(
            f"checkpoint.load: {source} is of another run: {'; '.join(differences)}. Use the configuration that wrote "
            "it."
        )

"""`find_newest_sound` and `load_checkpoint`: the newest sound checkpoint, and its restoration."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import common as common_state
from torch.distributed.checkpoint.api import CheckpointException

from bridge.errors import CheckpointError, DamagedCheckpointError
from bridge.runtime.checkpoint.folder import (
    LATEST_FILE,
    find_load_fault,
    get_step_folder,
    is_finished,
    list_iterations,
    list_resumable_iterations,
    rename_aside,
)
from bridge.runtime.checkpoint.manifest import MANIFEST_FILE, Manifest, select_rank_files
from bridge.runtime.checkpoint.pickles import find_pickle_fault
from bridge.runtime.megatron.checkpoint.state import (
    Position,
    build_sharded_state,
    collect_identity,
    get_parallel_layout,
    name_chunks,
    restore_random_states,
)
from bridge.runtime.megatron.emulation.requantisation import (
    pause_amax_recording,
    requantise_stored_weights,
    round_masters_to_weights,
)
from bridge.runtime.megatron.model.gpt import unwrap_model
from bridge.runtime.megatron.optimizer import (
    gather_params_once,
    list_torch_optimizers,
    unshare_steps,
)
from bridge.runtime.megatron.patching import Patch, apply_patches, keep_compatible
from bridge.runtime.megatron.process.agreement import compute_on_all_ranks, compute_on_first_rank
from bridge.runtime.megatron.trainer import Trainer

logger = logging.getLogger(__name__)

COMMON_STATE_FILE = "common.pt"
"""File with the state that all ranks share, which megatron-core before 0.19 writes and needs."""
_SCHEDULE_KEYS = {
    "max_lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "lr_warmup_steps": "train.lr_warmup_iters",
    "lr_decay_steps": "train.lr_decay_iters",
    "lr_decay_style": "train.lr_decay_style",
    "end_wd": "optimizer.weight_decay",
}
"""Attribute of Megatron's scheduler -> key of the run."""
_SCHEDULE_IN_SAMPLES = ("lr_warmup_steps", "lr_decay_steps")
"""Attributes of Megatron's scheduler that count samples, where the run's key counts steps."""
TE_PICKLE_ENVIRONMENT = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
"""Variables that let Transformer Engine read the delayed scales of its modules, which are pickles.

They are safe to read: `find_newest_sound` has checked every name in them (`find_pickle_fault`).
"""


def find_newest_sound(folder: Path, *, checksum: bool = True, trust: bool = False) -> int:
    """Return the number of the newest checkpoint that may be read.

    This is a collective call.

    Args:
        folder: Folder of checkpoints.
        checksum: Whether the content of the files is compared with the manifest, or only their
            sizes.
        trust: Whether a checkpoint without a manifest is accepted.

    Raises:
        CheckpointError: The folder has no such checkpoint.
    """
    missing = compute_on_first_rank(lambda: find_load_fault(folder))
    if missing is not None:
        raise CheckpointError(str(missing))
    reasons = []
    for number, fault in _list_faults(folder, checksum=checksum, trust=trust):
        if fault is None:
            return number
        if torch.distributed.get_rank() == 0:
            logger.warning(
                "checkpoint.load: %s is skipped: %s.", get_step_folder(folder, number), fault
            )
        reasons.append(f"step {number}: {fault}")
    faults = "; ".join(reasons) or "none"
    raise CheckpointError(
        f"checkpoint.load: must hold a whole checkpoint, got {str(folder)!r} ({faults}). "
        "Give another folder, or leave it at None to start fresh."
    )


def require_no_later_checkpoint(
    folder: Path, start: Position, *, checksum: bool, trust: bool
) -> None:
    """Refuse to write into a folder with a sound checkpoint of a later step than the run's start.

    This is a collective call. Later checkpoints that are not sound are renamed, so that the run can
    write checkpoints of these steps.

    Raises:
        CheckpointError: The folder has a later checkpoint that could be resumed from.
    """
    skipped = []
    for number, fault in _list_faults(folder, checksum=checksum, trust=trust):
        if number <= start.iteration:
            break
        if fault is None:
            raise CheckpointError(
                f"checkpoint.save: the folder holds a checkpoint of step {number}, "
                f"and this run begins at step {start.iteration}, got {str(folder)!r}. "
                f"Resume with checkpoint.load={folder}, or save elsewhere."
            )
        skipped.append(get_step_folder(folder, number))

    def rename_skipped() -> None:
        for checkpoint in skipped:
            if is_finished(checkpoint):  # `save_checkpoint` renames an unfinished checkpoint itself
                rename_aside(checkpoint, "skipped")

    compute_on_first_rank(rename_skipped)


def _list_faults(folder: Path, *, checksum: bool, trust: bool) -> Iterator[tuple[int, str | None]]:
    """Yield the step of each checkpoint of a folder, newest first, with its fault.

    A fault is a clause, or None for a checkpoint without a fault. Each item is a collective call.
    """
    iterations, resumable = compute_on_first_rank(
        lambda: (list_iterations(folder), list_resumable_iterations(folder))
    )
    for iteration in iterations:
        fault: str | None = f"it is later than the one that {LATEST_FILE} names"
        if iteration in resumable:
            checkpoint = get_step_folder(folder, iteration)
            fault = _find_fault(checkpoint, checksum=checksum, trust=trust)
        yield iteration, fault


def _find_fault(checkpoint: Path, *, checksum: bool, trust: bool) -> str | None:
    """Return a clause about why a checkpoint must not be read.

    The result is None if it may be read. This is a collective call.
    """
    manifest, fault = compute_on_first_rank(
        lambda: _read_manifest(checkpoint, checksum=checksum, trust=trust)
    )
    if fault is not None:
        return fault
    if manifest is not None and checksum:
        files = select_rank_files(
            manifest.checksums, torch.distributed.get_rank(), torch.distributed.get_world_size()
        )
        faults = compute_on_all_ranks(lambda: manifest.find_content_fault(checkpoint, files))
        for rank_fault in faults:
            if rank_fault is not None:
                return rank_fault
    return compute_on_first_rank(
        lambda: find_pickle_fault(checkpoint) or _find_step_fault(checkpoint)
    )


def _find_step_fault(checkpoint: Path) -> str | None:
    """Return a clause about a checkpoint of another step than its folder's name.

    The result is None for a checkpoint of the same step.

    The step is in the state that all ranks share. A clause is also returned if the step cannot be
    read.
    """
    if (
        hasattr(common_state, "TorchCommonLoadStrategy")
        and not (checkpoint / COMMON_STATE_FILE).is_file()
    ):
        return (
            f"a later Megatron Core wrote it, without the {COMMON_STATE_FILE} that this one reads"
        )
    try:
        iteration = _load_common_state(checkpoint).get("iteration")
    except CheckpointError:
        return "the state that all ranks share cannot be read"
    if iteration is None or get_step_folder(checkpoint.parent, iteration) == checkpoint:
        return None
    return f"it holds step {iteration}"


def read_manifest_facts(checkpoint: Path) -> dict[str, Any]:
    """Return the facts in the manifest of a checkpoint, empty without a manifest.

    This is a collective call.
    """

    def read_facts() -> dict[str, Any]:
        if not is_finished(checkpoint):
            return {}
        return dict(Manifest.read(checkpoint).run)

    return compute_on_first_rank(read_facts)


def _read_manifest(
    checkpoint: Path, *, checksum: bool, trust: bool
) -> tuple[Manifest | None, str | None]:
    """Return the manifest of a checkpoint, and the fault that it shows, or None without a fault.

    A trusted checkpoint may have no manifest.
    """
    if trust and not is_finished(checkpoint):
        logger.warning(
            "checkpoint.trust: %s has no %s; nothing shows that it is whole.",
            checkpoint,
            MANIFEST_FILE,
        )
        return None, None
    try:
        manifest = Manifest.read(checkpoint)
    except DamagedCheckpointError as error:
        return None, error.reason
    if checksum and not manifest.checksums:
        fault = (
            f"{MANIFEST_FILE} holds no checksums; checkpoint.checksum=false compares sizes alone"
        )
        return None, fault
    return manifest, manifest.find_outline_fault(checkpoint)


def load_checkpoint(
    trainer: Trainer, folder: Path, iteration: int, *, rounds_masters: bool = False
) -> Position:
    """Restore a run from a checkpoint of a folder, and return how far it had come.

    This is a collective call.

    Args:
        trainer: The run, as it was built.
        folder: Folder of checkpoints.
        iteration: Number of the checkpoint.
        rounds_masters: Whether the weights are made of the master weights. It is needed if the
            checkpoint's weights have another dtype, or if other layers or another format were
            quantised.

    Raises:
        CheckpointError: The checkpoint is of another run, or cannot be read.
    """
    source = get_step_folder(folder, iteration)
    common = _load_common_state(source)
    _require_same_settings(common.get("identity", {}), collect_identity(trainer), source)
    same_layout = common.get("layout") == get_parallel_layout()
    if not same_layout:
        logger.info("The checkpoint has another parallel layout: random states start fresh.")
    state = build_sharded_state(trainer, is_loading=True, with_random_states=same_layout)
    fresh = _drop_missing_scales(trainer, state, source)
    loaded = _load_state(state, source)
    # amaxes of a checkpoint's weights are in its histories already
    with pause_amax_recording(trainer.model), patch.dict(os.environ, TE_PICKLE_ENVIRONMENT):
        for name, chunk in name_chunks(trainer).items():
            unwrap_model(chunk).load_state_dict(loaded[name], strict=not fresh)
    _copy_schedule_to_groups(trainer, loaded["opt_param_scheduler"])
    _load_optimizer(trainer, loaded["optimizer"], rounds_masters=rounds_masters)
    _warn_of_changed_schedule(trainer, loaded["opt_param_scheduler"])
    trainer.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if same_layout:
        restore_random_states(loaded["rng_state"][0])
    return Position(
        iteration=int(common.get("iteration", iteration)),
        consumed_samples=int(common.get("consumed_train_samples", 0)),
        extra=common.get("extra", {}),
    )


def _load_state(state: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, for the tensors and objects of a sharded state.

    Raises:
        CheckpointError: Megatron cannot load the checkpoint.
    """
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(source))
    except (
        CheckpointingException,
        CheckpointException,
        KeyError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"checkpoint.load: {source} cannot be loaded ({_format_reason(error)}). "
            "Use the configuration that wrote it."
        ) from error
    return loaded


def _load_common_state(source: Path) -> dict[str, Any]:
    """Return the state of a checkpoint that all ranks share.

    Raises:
        CheckpointError: The state cannot be read.
    """
    try:
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(source))
    except (CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint.load: {source} must hold a complete checkpoint, but cannot be read "
            f"({_format_reason(error)}). "
            f"Write the number of an older one into {source.parent / LATEST_FILE}."
        ) from error
    return common


def _load_optimizer(trainer: Trainer, loaded: dict[Any, Any], *, rounds_masters: bool) -> None:
    """Restore the state of the optimizer, and quantise stored weights from its masters."""
    inner = loaded.get("optimizer", loaded)
    # Transformer Engine's Adam counts its steps in the groups
    counts_in_groups = any("step" in group for group in inner.get("param_groups", ()))
    if inner.get("state") and not counts_in_groups:
        # Megatron leaves the step of torch's Adam out where it is zero (optimizer.py:836)
        inner["state"].setdefault("common_step", torch.tensor(0.0))
    # a constant loss scale has no state, and a dynamic loss scale refuses an empty state
    for state in (loaded, *loaded.values()):
        if isinstance(state, dict) and state.get("grad_scaler") == {}:
            del state["grad_scaler"]
    changes: list[Patch] = []
    for part in list_torch_optimizers(trainer.optimizer):
        if getattr(part, "store_param_remainders", False):
            changes.append(
                (part, "set_scaled_state", partial(_set_low_half, part.set_scaled_state))
            )
    with apply_patches(keep_compatible(changes)):
        trainer.optimizer.load_state_dict(loaded)
    unshare_steps(trainer.optimizer)
    with gather_params_once(trainer.model):
        requantise_stored_weights(trainer.optimizer)
        if rounds_masters:
            round_masters_to_weights(trainer.optimizer)


def _set_low_half(
    set_state: Callable[..., None],
    param: torch.Tensor,
    state_name: str,
    unscaled_state: torch.Tensor,
    *others: Any,
    **named: Any,
) -> None:
    """Take the low half of a master, which a checkpoint has as FP32 numbers.

    megatron-core 0.16.1 gathers all states in FP32 (distrib_optimizer.py:1056), and Transformer
    Engine's Adam takes the halves as the int16 that they are (fused_adam.py:378).
    """
    if state_name == "master_param" and param.dtype == torch.bfloat16:
        unscaled_state = unscaled_state.to(torch.int16)
    set_state(param, state_name, unscaled_state, *others, **named)


def _drop_missing_scales(trainer: Trainer, state: dict[str, Any], source: Path) -> bool:
    """Remove the delayed scales that a checkpoint does not have in their shape from a sharded state.

    A checkpoint of another precision has no delayed scales.

    Returns:
        Whether scales were removed. They begin at 1, as in a fresh run.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(source))
    shapes = {key: entry.global_shape for key, entry in stored.items()}
    is_left_out = False
    for name in name_chunks(trainer):
        chunk = state[name]
        for key, entry in list(chunk.items()):
            if ".fp8_state." in key and shapes.get(entry.key) != entry.global_shape:
                del chunk[key]
                is_left_out = True
    if is_left_out:
        logger.info(
            "The checkpoint has no delayed scales of this run's shape: "
            "they begin at 1, as in a fresh run."
        )
    return is_left_out


def _format_reason(error: BaseException) -> str:
    """Return the first line of an error. Of a collective error the first rank's error counts."""
    first = error
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            first = failure
            break
    line = str(first).strip().partition("\n")[0].rstrip(".")
    return line or type(first).__name__


def _copy_schedule_to_groups(trainer: Trainer, stored: Mapping[str, Any]) -> None:
    """Set the schedule of the checkpoint in parameter groups that follow this run's schedule.

    megatron-core 0.19 pairs the groups of optimizer and checkpoint also by their rates
    (optimizer.py, ``param_group_identifier_keys``), and refuses a group without a partner. 0.16.1
    takes the groups of the checkpoint.
    """
    for inner in list_torch_optimizers(trainer.optimizer):
        for group in inner.param_groups:
            for name in ("max_lr", "min_lr"):
                if group.get(name) == getattr(trainer.scheduler, name):
                    group[name] = stored[name]


def _warn_of_changed_schedule(trainer: Trainer, stored: Mapping[str, Any]) -> None:
    """Log each value of the checkpoint's schedule that differs from this run's config.

    The run goes on with the schedule of the checkpoint.
    """
    for name, key in _SCHEDULE_KEYS.items():
        before = stored[name]
        now = getattr(trainer.scheduler, name)
        if before == now:
            continue
        if name in _SCHEDULE_IN_SAMPLES:
            before = before / trainer.global_batch_size
            now = now / trainer.global_batch_size
        logger.warning(
            "%s: the learning-rate schedule of the checkpoint is kept, where it is %s, got %s. "
            "Give a run that will be resumed the value of all its steps from the start.",
            key,
            _format_value(before),
            _format_value(now),
        )


def _format_value(value: Any) -> str:
    """Return the text of a value of a schedule."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _require_same_settings(
    stored: Mapping[str, Any], present: Mapping[str, Any], source: Path
) -> None:
    """Refuse a checkpoint of a run with other settings.

    Args:
        stored: Settings in the checkpoint, of `collect_identity`.
        present: Settings of this run. A setting that the checkpoint lacks is not compared.
        source: The checkpoint.

    Raises:
        CheckpointError: A setting differs.
    """
    differences = []
    for name, value in present.items():
        if name in stored and stored[name] != value:
            differences.append(f"{name} is {value!r} here and {stored[name]!r} there")
    if differences:
        raise CheckpointError(
            f"checkpoint.load: {source} is of another run: {'; '.join(differences)}. "
            "Use the configuration that wrote it."
        )

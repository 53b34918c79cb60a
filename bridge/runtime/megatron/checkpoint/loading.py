"""Resuming: the newest checkpoint that is whole is found, and its state is given to the run."""

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
    LATEST,
    candidates,
    folder_of,
    is_finished,
    iterations,
    load_fault,
    set_aside,
)
from bridge.runtime.checkpoint.manifest import MANIFEST, Manifest, share
from bridge.runtime.checkpoint.pickles import pickle_fault
from bridge.runtime.megatron.agreement import from_all_ranks, from_first_rank
from bridge.runtime.megatron.checkpoint.state import (
    Position,
    identity,
    layout,
    named_chunks,
    restore_random_states,
    sharded_state,
)
from bridge.runtime.megatron.emulation.model import (
    requantise_stored_weights,
    round_masters_anew,
    unrecorded,
)
from bridge.runtime.megatron.gpt import unwrapped
from bridge.runtime.megatron.optimizer import inner_optimizers, one_gather, unshare_steps
from bridge.runtime.megatron.replacement import fitting, replaced
from bridge.runtime.megatron.step import Trainer

logger = logging.getLogger(__name__)

COMMON = "common.pt"
"""File with the state that all ranks share, which megatron-core before 0.19 writes and needs."""
_SCHEDULE = {
    "max_lr": ("optimizer.lr", False),
    "min_lr": ("optimizer.min_lr", False),
    "lr_warmup_steps": ("train.lr_warmup_iters", True),
    "lr_decay_steps": ("train.lr_decay_iters", True),
    "lr_decay_style": ("train.lr_decay_style", False),
    "end_wd": ("optimizer.weight_decay", False),
}
"""Attribute of Megatron's scheduler -> the run's key, and whether it counts samples, where the key counts steps."""
TE_STATES = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
"""Lets Transformer Engine read the delayed scales of its modules: `newest_sound` has read these pickles by its list."""


def newest_sound(folder: Path, *, checksum: bool = True, trust: bool = False) -> int:
    """Return the number of the newest checkpoint that may be read; a collective call.

    With `checksum` the content of the files is compared with the manifest, not their sizes alone; with `trust` a
    checkpoint without a manifest is taken too. CheckpointError where there is none.
    """
    missing = from_first_rank(lambda: load_fault(folder))
    if missing is not None:
        raise CheckpointError(str(missing))
    reasons = []
    for number, wrong in _judged(folder, checksum=checksum, trust=trust):
        if wrong is None:
            return number
        if torch.distributed.get_rank() == 0:
            logger.warning("checkpoint.load: %s is skipped: %s.", folder_of(folder, number), wrong)
        reasons.append(f"step {number}: {wrong}")
    raise CheckpointError(
        f"checkpoint.load: must hold a whole checkpoint, got {str(folder)!r} ({'; '.join(reasons) or 'none'}). Give "
        "another folder, or leave it at None to start fresh."
    )


def require_free(folder: Path, start: Position, *, checksum: bool, trust: bool) -> None:
    """Refuse to write into a folder with a checkpoint that counts and is later than where this run begins.

    A collective call. Later ones that do not count are renamed: the run will write its own.
    """
    skipped = []
    for number, wrong in _judged(folder, checksum=checksum, trust=trust):
        if number <= start.iteration:
            break
        if wrong is None:
            raise CheckpointError(
                f"checkpoint.save: the folder holds a checkpoint of step {number}, and this run begins at step "
                f"{start.iteration}, got {str(folder)!r}. Resume with checkpoint.load={folder}, or save elsewhere."
            )
        skipped.append(folder_of(folder, number))

    def put_aside() -> None:
        for checkpoint in filter(is_finished, skipped):  # a save makes room where one is not
            set_aside(checkpoint, "skipped")

    from_first_rank(put_aside)


def _judged(folder: Path, *, checksum: bool, trust: bool) -> Iterator[tuple[int, str | None]]:
    """Yield the steps of a folder's checkpoints, newest first, and why each does not count, as a clause, or None.

    Each item is a collective call. Loading, starting and renaming ask here.
    """
    numbers, pointed = from_first_rank(lambda: (iterations(folder), candidates(folder)))
    for number in numbers:
        late = None if number in pointed else f"it is later than the one that {LATEST} names"
        yield number, late or _fault(folder_of(folder, number), checksum=checksum, trust=trust)


def _fault(checkpoint: Path, *, checksum: bool, trust: bool) -> str | None:
    """Return why a checkpoint must not be read, as a clause, or None; a collective call."""
    manifest, wrong = from_first_rank(lambda: _outline(checkpoint, checksum=checksum, trust=trust))
    if wrong is None and manifest is not None and checksum:
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        found = from_all_ranks(
            lambda: manifest.content_fault(checkpoint, share(manifest.checksums, rank, ranks))
        )
        wrong = next((fault for fault in found if fault is not None), None)
    return (
        from_first_rank(lambda: pickle_fault(checkpoint) or _step_fault(checkpoint))
        if wrong is None
        else wrong
    )


def _step_fault(checkpoint: Path) -> str | None:
    """Return the fault of a checkpoint that holds another step than its folder's name says, as a clause, or None."""
    if hasattr(common_state, "TorchCommonLoadStrategy") and not (checkpoint / COMMON).is_file():
        return f"a later Megatron Core wrote it, without the {COMMON} that this one reads"
    try:
        held = _common_state(checkpoint).get("iteration")
    except CheckpointError:
        return "the state that all ranks share cannot be read"
    return (
        None
        if held is None or folder_of(checkpoint.parent, held) == checkpoint
        else f"it holds step {held}"
    )


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """Return the facts in the manifest of a checkpoint, none where it has no manifest; a collective call."""
    return from_first_rank(
        lambda: dict(Manifest.read(checkpoint).run) if is_finished(checkpoint) else {}
    )


def _outline(
    checkpoint: Path, *, checksum: bool, trust: bool
) -> tuple[Manifest | None, str | None]:
    """Return the manifest of a checkpoint and why it must not be read; a trusted one may have none."""
    if trust and not is_finished(checkpoint):
        logger.warning(
            "checkpoint.trust: %s has no %s; nothing shows that it is whole.", checkpoint, MANIFEST
        )
        return None, None
    try:
        manifest = Manifest.read(checkpoint)
    except DamagedCheckpointError as error:
        return None, error.reason
    if checksum and not manifest.checksums:
        return (
            None,
            f"{MANIFEST} holds no checksums; checkpoint.checksum=false compares sizes alone",
        )
    return manifest, manifest.outline_fault(checkpoint)


def load_checkpoint(
    trainer: Trainer, folder: Path, iteration: int, *, is_rounded_anew: bool = False
) -> Position:
    """Continue from a checkpoint of a folder, and return how far that run had come; a collective call.

    With `is_rounded_anew` the weights are made from the master weights: those of the checkpoint are of another dtype,
    or were quantised, in layers or in a format that this run does not store.
    """
    source = folder_of(folder, iteration)
    common = _common_state(source)
    _require_same(common.get("identity", {}), identity(trainer), source)
    same_layout = common.get("layout") == layout()
    if not same_layout:
        logger.info("The checkpoint has another parallel layout: random states start fresh.")
    state = sharded_state(trainer, is_loading=True, with_random_states=same_layout)
    fresh = _without_new_scales(trainer, state, source)
    try:
        loaded = dist_checkpointing.load(state, str(source))
    except (
        CheckpointingException,
        CheckpointException,
        KeyError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        remedy = "Use the configuration that wrote it."
        raise CheckpointError(
            f"checkpoint.load: {source} cannot be loaded ({_reason(error)}). {remedy}"
        ) from error
    with (
        unrecorded(trainer.model),
        patch.dict(os.environ, TE_STATES),
    ):  # the weights of a checkpoint are no new ones
        for name, chunk in named_chunks(trainer).items():
            unwrapped(chunk).load_state_dict(loaded[name], strict=not fresh)
    _take_schedule_into_groups(trainer, loaded["opt_param_scheduler"])
    _load_optimizer(trainer, loaded["optimizer"], is_rounded_anew=is_rounded_anew)
    _warn_of_another_schedule(trainer, loaded["opt_param_scheduler"])
    trainer.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    if same_layout:
        restore_random_states(loaded["rng_state"][0])
    return Position(
        iteration=int(common.get("iteration", iteration)),
        consumed_samples=int(common.get("consumed_train_samples", 0)),
        extra=common.get("extra", {}),
    )


def _common_state(source: Path) -> dict[str, Any]:
    try:
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(source))
    except (CheckpointingException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint.load: {source} must hold a complete checkpoint, but cannot be read ({_reason(error)}). Write "
            f"the number of an older one into {source.parent / LATEST}."
        ) from error
    return common


def _load_optimizer(trainer: Trainer, loaded: dict[Any, Any], *, is_rounded_anew: bool) -> None:
    """Give the optimizer its state of a checkpoint, and the stored weights the codes of its masters."""
    inner = loaded.get("optimizer", loaded)
    counts_in_groups = any(
        "step" in group for group in inner.get("param_groups", ())
    )  # Transformer Engine's Adam does
    if inner.get("state") and not counts_in_groups:
        # Megatron leaves the step of torch's Adam out where it is zero (optimizer.py:836, ``if step:``)
        inner["state"].setdefault("common_step", torch.tensor(0.0))
    for state in (
        loaded,
        *loaded.values(),
    ):  # a constant loss scale has no state; a dynamic one refuses an empty one
        if isinstance(state, dict) and state.get("grad_scaler") == {}:
            del state["grad_scaler"]
    halved: list[Any] = [
        one
        for one in inner_optimizers(trainer.optimizer)
        if getattr(one, "store_param_remainders", False)
    ]
    as_halves = (
        (one, "set_scaled_state", partial(_set_as_half, one.set_scaled_state)) for one in halved
    )
    with replaced(fitting(as_halves)):
        trainer.optimizer.load_state_dict(loaded)
    unshare_steps(trainer.optimizer)
    with one_gather(trainer.model):
        requantise_stored_weights(trainer.optimizer)
        if is_rounded_anew:
            round_masters_anew(trainer.optimizer)


def _set_as_half(
    set_state: Callable[..., None],
    param: torch.Tensor,
    state_name: str,
    unscaled_state: torch.Tensor,
    *others: Any,
    **named: Any,
) -> None:
    """Take the low half of a master, which a checkpoint holds as FP32 numbers.

    megatron-core 0.16.1 gathers all states in FP32 (distrib_optimizer.py:1056), and Transformer Engine's Adam takes the
    halves as the int16 that they are (fused_adam.py:378).
    """
    is_half = state_name == "master_param" and param.dtype == torch.bfloat16
    state = unscaled_state.to(torch.int16) if is_half else unscaled_state
    set_state(param, state_name, state, *others, **named)


def _without_new_scales(trainer: Trainer, state: dict[str, Any], source: Path) -> bool:
    """Leave delayed scaling's state out of the load where a checkpoint of another precision has none of its shape.

    Return whether it was left out: scales then begin at 1, as in a fresh run.
    """
    held = {
        key: entry.global_shape
        for key, entry in dist_checkpointing.load_tensors_metadata(str(source)).items()
    }
    missing = 0
    for name in named_chunks(trainer):
        scaling = {key: entry for key, entry in state[name].items() if ".fp8_state." in key}
        for key in [
            key for key, entry in scaling.items() if held.get(entry.key) != entry.global_shape
        ]:
            del state[name][key]
            missing += 1
    if missing:
        logger.info(
            "The checkpoint has no delayed scales of this run's shape: they begin at 1, as in a fresh run."
        )
    return missing > 0


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of torch's collective one, that of the first rank that failed."""
    first = error
    if isinstance(error, CheckpointException):
        first = next((failure for failure, _ in error.failures.values()), error)
    return str(first).strip().partition("\n")[0].rstrip(".") or type(first).__name__


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
        before, now = (
            f"{value:g}" if isinstance(value, float) else value for value in (before, now)
        )
        logger.warning(
            "%s: the learning-rate schedule of the checkpoint is kept, where it is %s, got %s. Give a run that will be "
            "resumed the value of all its steps from the start.",
            key,
            before,
            now,
        )


def _require_same(stored: Mapping[str, Any], present: Mapping[str, Any], source: Path) -> None:
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

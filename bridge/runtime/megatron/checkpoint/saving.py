"""`save_checkpoint`: writes a checkpoint with Megatron's ``dist_checkpointing``.

The pointer to the newest checkpoint and the manifest are written after its files.
"""

import multiprocessing.dummy
import queue
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from bridge.errors import CheckpointError, TrainingError
from bridge.runtime.checkpoint.folder import (
    LATEST_FILE,
    find_newest_finished,
    get_step_folder,
    is_finished,
    rename_aside,
)
from bridge.runtime.checkpoint.manifest import (
    Manifest,
    compute_checksums,
    list_file_sizes,
    select_rank_files,
)
from bridge.runtime.megatron.checkpoint.state import (
    SHARDING_METADATA,
    Position,
    build_sharded_state,
    collect_identity,
    get_parallel_layout,
)
from bridge.runtime.megatron.patching import (
    PatchTable,
    apply_patches,
    replace_by_constant,
    resolve_patches,
)
from bridge.runtime.megatron.process.agreement import compute_on_all_ranks, compute_on_first_rank
from bridge.runtime.megatron.trainer import Trainer

MIN_FREE_BYTES = 2**20
"""A disk with less free space than this is full."""
_THREAD_WRITER_PATCHES: PatchTable = {
    f"{filesystem_async.__name__}.mp.get_context": replace_by_constant(multiprocessing.dummy)
}
"""Source of Megatron's writers -> threads."""


def save_checkpoint(
    trainer: Trainer,
    folder: Path,
    position: Position,
    *,
    facts: Mapping[str, Any],
    checksum: bool = True,
) -> Path:
    """Write a checkpoint into ``iter_<number>/``, point to it, and return its folder.

    This is a collective call.

    Args:
        trainer: The run.
        folder: Folder of checkpoints.
        position: How far the run has come. Its `extra` must be equal on all ranks.
        facts: Facts about the run, for the manifest.
        checksum: Whether to write a checksum of every file into the manifest.

    Raises:
        TrainingError: A weight or the optimizer's state is not finite, and nothing is written. Or a
            write fails.
        CheckpointError: The folder has a finished checkpoint of this step.
    """
    target = get_step_folder(folder, position.iteration)
    with trainer.gather_parameters():
        if not trainer.has_finite_state():
            raise TrainingError(
                "checkpoint.save: a checkpoint must hold finite weights and optimizer state, "
                f"got NaN or Inf at step {position.iteration}. "
                f"Nothing was written. {_describe_kept_checkpoint(folder)}. Lower optimizer.lr."
            )
    try:
        _write_checkpoint(trainer, target, position, facts, checksum=checksum)
    except OSError as error:
        raise _make_write_error(target, error) from error
    return target


def _write_checkpoint(
    trainer: Trainer, target: Path, position: Position, facts: Mapping[str, Any], *, checksum: bool
) -> None:
    """Write the files of a checkpoint, then the pointer and the manifest.

    Raises:
        OSError: A file cannot be written. Every rank raises the error.
    """
    compute_on_first_rank(lambda: _make_checkpoint_folder(target))
    with trainer.gather_parameters(), _write_with_threads():
        state = {
            **build_sharded_state(trainer, is_loading=False, with_random_states=True),
            "iteration": position.iteration,
            "consumed_train_samples": position.consumed_samples,
            "identity": collect_identity(trainer),
            "layout": get_parallel_layout(),
            "extra": dict(position.extra),
        }
        try:
            dist_checkpointing.save(state, str(target), content_metadata=dict(SHARDING_METADATA))
        except (CheckpointingException, CheckpointException, RuntimeError) as error:
            raise _make_write_error(target, error) from error
    torch.distributed.barrier()
    sizes = compute_on_first_rank(lambda: list_file_sizes(target))
    files: list[str] = []
    if checksum:
        files = select_rank_files(
            sizes, torch.distributed.get_rank(), torch.distributed.get_world_size()
        )
    checksums: dict[str, str] = {}
    for rank_checksums in compute_on_all_ranks(lambda: compute_checksums(target, files)):
        checksums.update(rank_checksums)
    run = {**facts, "layout": get_parallel_layout()}
    manifest = Manifest(sizes=sizes, checksums=checksums, run=run)
    compute_on_first_rank(lambda: _write_pointer_and_manifest(target, position.iteration, manifest))


@contextmanager
def _write_with_threads() -> Iterator[None]:
    """Write checkpoints with threads, and not with processes, in a ``with`` block.

    megatron-core 0.16.1 forks a process per file, which outlives a killed run and keeps its output
    open. It collects the results in a queue of a spawned process, which imports the main script
    again (strategies/filesystem_async.py:54 and :266). Later releases write with threads.
    """
    with (
        apply_patches([(filesystem_async, "_results_queue", queue.Queue())]),
        apply_patches(resolve_patches(_THREAD_WRITER_PATCHES)),
    ):
        yield


def _make_checkpoint_folder(target: Path) -> None:
    """Make the folder of a checkpoint, and rename an unfinished checkpoint in its place."""
    if is_finished(target):
        raise CheckpointError(
            "checkpoint.save: a finished checkpoint is never written over, "
            f"got {str(target)!r}. Save elsewhere."
        )
    if target.is_dir():
        rename_aside(target, "unfinished")
    target.mkdir(parents=True)


def _write_pointer_and_manifest(target: Path, iteration: int, manifest: Manifest) -> None:
    """Write the pointer to a checkpoint and its manifest, after its files."""
    pointer = target.parent / LATEST_FILE
    scratch = pointer.with_suffix(".tmp")
    scratch.write_text(f"{iteration}\n")
    scratch.replace(pointer)
    manifest.write(target)


def _make_write_error(target: Path, error: BaseException) -> TrainingError:
    """Return the error of a checkpoint that could not be written, with the system's reason."""
    reason = "a write failed"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror.lower()
            break
        cause = cause.__cause__ or cause.__context__
    with suppress(OSError):
        if shutil.disk_usage(target.parent).free < MIN_FREE_BYTES:
            reason = "no space left on device"
    return TrainingError(
        "checkpoint.save: the checkpoint must fit into its folder, "
        f"got {str(target)!r} ({reason}). {_describe_kept_checkpoint(target.parent)}. "
        "Make room, or save elsewhere."
    )


def _describe_kept_checkpoint(folder: Path) -> str:
    """Return the sentence, without its full stop, on the checkpoint that a folder keeps."""
    newest = find_newest_finished(folder)
    if newest is None:
        return "There is no earlier one"
    return f"The newest one stays that of step {newest}"

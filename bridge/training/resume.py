"""Continuing a run from a checkpoint: which one, whether its precision allows it, and what that means."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge.checkpoint.folder import folder_of
from bridge.checkpoint.precision_change import Change, precision_changes
from bridge.errors import CheckpointError
from bridge.megatron.checkpoint.loading import facts_of, load_checkpoint
from bridge.megatron.checkpoint.state import Position
from bridge.megatron.step import Trainer
from bridge.precision.subjects import ASKED, IMPOSSIBLE
from bridge.training.config import ConfigContainer


def resume(
    config: ConfigContainer, trainer: Trainer, saved: int, *, precision: str, settings: Mapping[str, str]
) -> tuple[Position, list[str]]:
    """Continue from a checkpoint of `checkpoint.load`; a collective call.

    Return how far the run had come, and sentences about the checkpoint; CheckpointError for one of another model,
    optimizer or precision.
    """
    folder = Path(str(config.checkpoint.load))
    facts = facts_of(folder_of(folder, saved))
    changes = precision_changes(facts.get("settings") or {}, settings)
    _require_allowed(changes, folder_of(folder, saved), is_allowed=config.resume.allow_precision_change)
    start = load_checkpoint(trainer, folder, saved, is_rounded_anew=bool(changes))
    before = start.extra.get("precision", "an unknown precision")
    other = f", which was saved in {before} and goes on in {precision}" if before != precision else ""
    notes = [f"Resumed from step {start.iteration} of {folder}{other}.", *(f"{change}." for change in changes)]
    if start.iteration >= config.train.train_iters:
        notes.append(f"There is nothing left to do: train.train_iters is {config.train.train_iters}.")
    return start, notes


def _require_allowed(changes: Sequence[Change], source: Path, *, is_allowed: bool) -> None:
    """Refuse changes of precision that lose something, unless they were asked for, and those that cannot be."""
    graver = [
        change for change in changes if change.outcome == IMPOSSIBLE or (change.outcome == ASKED and not is_allowed)
    ]
    if not graver:
        return
    remedy = "Set resume.allow_precision_change=true, or use the precision that wrote it"
    if graver[0].outcome == IMPOSSIBLE:
        remedy = "Use the precision that wrote it"
    lines = [f"checkpoint.load: {source} was saved in another precision. {remedy}:", *(f"  {one}" for one in graver)]
    raise CheckpointError("\n".join(lines))

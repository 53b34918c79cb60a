"""`build_reading_from_tree`: a run of a framework whose settings are a tree, with the model of its checkpoint."""

from __future__ import annotations

from collections.abc import Collection

from bridge.preflight.file_reading import CheckpointModel, FileReading, OptionFaults
from bridge.preflight.uncertainty import Uncertainty
from bridge.read.framework.checkpoint import Checkpoint
from bridge.read.framework.framework_table import FrameworkTable
from bridge.read.framework.tree import TreeReading


def build_reading_from_tree(
    table: FrameworkTable,
    tree: TreeReading,
    checkpoint: Checkpoint,
    *,
    absent: Collection[str] = (),
    known: Collection[str] = (),
) -> FileReading:
    """Return the reading of a run; the model's fields that the tree does not state are the checkpoint's.

    Args:
        tree: The tree of the run. The fields of the checkpoint are added to its model.
        checkpoint: The checkpoint that the run starts from.
        absent: Fields of the checkpoint's model that the run does not have.
        known: Fields whose values the framework sets itself, whatever the checkpoint is.
    """
    model = tree.sections.setdefault("model", {})
    added = checkpoint.get_unstated_fields(model)
    for name in absent:
        added.pop(name, None)
    model |= added
    return FileReading(
        framework=table.title,
        underlying_framework=table.settings,
        sections=tree.sections,
        names=tree.names,
        origins={f"model.{name}": checkpoint.get_origin(name) for name in added},
        generation=tree.generation,
        notes=(
            f"Read as a run of {table.title}, by its code ({table.code}).",
            *checkpoint.read_too,
        ),
        release=table.megatron_release,
        uncertainty=Uncertainty(
            open_points=(*tree.unknown, *checkpoint.unknown),
            open_values=tree.open_values,
            unread_sources={**checkpoint.opened(model, known=known), **tree.opened},
            unread_options=(*tree.uncounted, *checkpoint.uncounted),
            no_plan_reason=tree.no_plan_reason,
        ),
        checkpoint_model=CheckpointModel(
            may_be_stated=True, no_sizes_reason=checkpoint.not_followed
        ),
        option_faults=OptionFaults(dropped_fields=tuple(tree.dropped)),
    )

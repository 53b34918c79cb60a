"""`get_packing`: the padding of the packed batches of Megatron Bridge."""

from collections.abc import Mapping
from typing import NamedTuple

from bridge.rules.context import RuleContext
from bridge.target.fields import parse_integer


class Packing(NamedTuple):
    """Padding of the packed batches of Megatron Bridge."""

    path: str
    """The setting of the multiple."""
    multiple: int
    """The length of a sample is a multiple of this number of tokens."""
    samples: int = 1
    """Samples of a micro-batch that are padded to the same length."""
    fixed: str = ""
    """The setting that pads to a fixed length instead. Empty: there is no such setting."""


def get_packing(context: RuleContext) -> Packing | None:
    """Return the padding of packed batches, or None without packing or with a fixed length."""
    data = context.data
    if data.enable_in_batch_packing and not data.defer_in_batch_packing_to_step:
        # The sequences of a micro-batch become one sequence.
        path = "data.in_batch_packing_pad_to_multiple_of"
        return Packing(path, data.in_batch_packing_pad_to_multiple_of or 1)
    options: Mapping[str, object] = {}
    if isinstance(data.dataset_kwargs, Mapping):
        options = data.dataset_kwargs
    is_packed = data.enable_offline_packing or _packs_sequences(data.packed_sequence_specs)
    multiple = parse_integer(options.get("pad_seq_length_to_mult", 16))
    if not is_packed or options.get("pad_to_max_length") or not multiple:
        return None
    return Packing(
        path="data.dataset_kwargs.pad_seq_length_to_mult",
        multiple=multiple,
        samples=context.train.micro_batch_size or 1,
        fixed="data.dataset_kwargs.pad_to_max_length",
    )


def _packs_sequences(specs: object) -> bool:
    """Return whether Megatron Bridge before 0.6 packs with these specs. A size of -1 packs nothing."""
    if specs is None:
        return False
    size = 1
    if isinstance(specs, Mapping):
        size = specs.get("packed_sequence_size", 1)
    return (parse_integer(size) or 1) > 0

"""`compare_records`: every GEMM and kind of tensor in which the records of two steps differ."""

from dataclasses import replace

from bridge.runtime.audit.gemm_formats import format_recorded_tiles
from bridge.runtime.audit.mismatch import Mismatch, fold_mismatches, make_location
from bridge.runtime.audit.record import Record


def compare_records(before: Record, after: Record) -> tuple[Mismatch, ...]:
    """Return every GEMM and kind of tensor in which two records differ.

    In a mismatch, `planned` is the text of the first record and `ran` the text of the second. A
    record without the GEMM or the kind has the text "nothing".
    """
    first = _collect_format_texts(before)
    second = _collect_format_texts(after)
    mismatches = []
    for location in {**first, **second}:
        planned = first.get(location, "nothing")
        ran = second.get(location, "nothing")
        if planned != ran:
            mismatches.append(replace(location, planned=planned, ran=ran))
    return fold_mismatches(mismatches)


def _collect_format_texts(record: Record) -> dict[Mismatch, str]:
    """Return the formats of each GEMM and the dtypes of each kind of tensor, as text.

    The key is a mismatch with a location and empty texts.
    """
    empty = Mismatch(column="differs", planned="", ran="")
    texts_of: dict[Mismatch, dict[str, None]] = {}
    for row in record.gemms:
        parts = [row.formats, format_recorded_tiles(row)]
        if row.output:
            parts.append(f"to {row.output}")
        if row.storage:
            parts.append(f"stored {row.storage}")
        location = replace(empty, **make_location(row.layer, row.module, row.gemm))
        texts_of.setdefault(location, {})[", ".join(filter(None, parts))] = None
    for tensors in record.census:
        location = replace(empty, tensors=tensors.kind)
        texts_of.setdefault(location, {})[tensors.dtype] = None
    joined = {}
    for location, texts in texts_of.items():
        joined[location] = " and ".join(texts)
    return joined

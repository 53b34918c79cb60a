"""Report of `gpu_proof.py`: its records, and a page of Markdown. It renders values made elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from operator import itemgetter
from typing import Any

Record = dict[str, Any]

PARTS = {
    "codes": "Codes and scales: Transformer Engine against the emulation, bit for bit",
    "linear": "One linear layer: outputs and gradients of the three GEMMs",
    "block": "A GPT block: Transformer Engine against the emulation",
    "steps": "Training steps of a Llama-3-8B-shaped block",
    "train": "The training command: Transformer Engine against the emulation on this GPU",
}
MAX_OVERHEAD = 0.01


def failed(record: Record) -> bool:
    """Return whether a record contradicts the claim."""
    return not record["ok"]


def step_record(scheme: str, measured: dict[str, dict[str, float]], bf16_milliseconds: float | None) -> Record:
    """Return the record of one scheme's training steps.

    Args:
        scheme: bf16, delayed, tensorwise, ...
        measured: milliseconds (median of a step) and peak_bytes of the bridge's block ("bridge"), of Megatron's from
            its own config ("megatron"), and of the hand-written one ("by_hand").
        bf16_milliseconds: of the bridge's BF16 block in the same run; None where it was not measured.
    """
    ours, megatrons, theirs = (measured[name] for name in ("bridge", "megatron", "by_hand"))
    overhead = ours["milliseconds"] / megatrons["milliseconds"] - 1
    return {
        "part": "steps",
        "scheme": scheme,
        "milliseconds": round(ours["milliseconds"], 3),
        "megatron_milliseconds": round(megatrons["milliseconds"], 3),
        "hand_written_milliseconds": round(theirs["milliseconds"], 3),
        "overhead": round(overhead, 4),
        "speed_up": None if bf16_milliseconds is None else round(bf16_milliseconds / ours["milliseconds"], 3),
        "peak_bytes": int(ours["peak_bytes"]),
        "hand_written_peak_bytes": int(theirs["peak_bytes"]),
        "ok": overhead <= MAX_OVERHEAD,
    }


def skipped_record(part: str, scheme: str, missing: list[str]) -> Record:
    """Return the record of what this machine cannot run: neither a success nor a failure."""
    return {"part": part, "scheme": scheme, "skipped": missing, "ok": True}


def runnable(part: str, schemes: Iterable[str], records: list[Record]) -> Iterator[str]:
    """Yield the schemes that this machine runs; add the record of each other one."""
    from bridge.runtime.megatron.te.machine import missing_for_te

    for scheme in schemes:
        missing = [] if scheme == "bf16" else missing_for_te(scheme)
        if missing:
            records.append(skipped_record(part, scheme, missing))
        else:
            yield scheme


def markdown(about: dict[str, str], records: list[Record]) -> str:
    """Return a page: where and when it was measured, one table per part, and the verdict."""
    lines = ["# Proof on a GPU", "", *(f"- {name}: {value}" for name, value in about.items())]
    for part, title in PARTS.items():
        mine = [record for record in records if record["part"] == part]
        if mine:
            lines += ["", f"## {title}", "", *_table(part, [record for record in mine if "skipped" not in record])]
            lines += [
                f"- {row['scheme']}: not run, missing {'; '.join(row['skipped'])}" for row in mine if "skipped" in row
            ]
    return "\n".join([*lines, "", verdict(records), ""])


def verdict(records: list[Record]) -> str:
    """Return one sentence about all records."""
    measured = [record for record in records if "skipped" not in record]
    if not measured:
        return "Nothing was measured."
    wrong = sum(failed(record) for record in measured)
    return f"{len(measured) - wrong} of {len(measured)} measurements are as claimed."


def _table(part: str, records: list[Record]) -> list[str]:
    if not records:
        return []
    if part == "codes":
        return _code_table(records)
    columns = COLUMNS[part]
    rows = (" | ".join(form(record) for form in columns.values()) for record in records)
    table = [*_head(columns), *(f"| {row} |" for row in rows)]
    ran = [f"- {record['scheme']}: {record['gemms']}" for record in records if record.get("gemms")]
    broken = [f"- {record['scheme']} failed: `{record['error']}`" for record in records if "error" in record]
    return [*table, *([""] if ran or broken else []), *ran, *broken]


Form = Callable[[Record], str]


def _number(name: str, form: str, factor: float = 1, end: str = "") -> Form:
    """Return what writes a number of a record, nothing where it was not measured."""
    return lambda record: "" if record.get(name) is None else f"{record[name] * factor:{form}}{end}"


def _yes(record: Record) -> str:
    return "yes" if record["ok"] else "**no**"


DISTANCES: dict[str, Form] = {
    "scheme": itemgetter("scheme"),
    "quantity": itemgetter("quantity"),
    "distance": _number("distance", ".2e"),
    "tolerance": _number("tolerance", ".2e"),
    "BF16's distance": _number("bf16_distance", ".2e"),
    "as claimed": _yes,
}
COLUMNS: dict[str, dict[str, Form]] = {
    "linear": DISTANCES,
    "block": DISTANCES,
    "steps": {
        "scheme": itemgetter("scheme"),
        "step ms": _number("milliseconds", ".2f"),
        "Megatron's own": _number("megatron_milliseconds", ".2f"),
        "overhead": _number("overhead", "+.1f", 100, " %"),
        "hand-written": _number("hand_written_milliseconds", ".2f"),
        "speed-up over BF16": _number("speed_up", ".2f", end="x"),
        "peak GiB": _number("peak_bytes", ".2f", 2**-30),
        "hand-written peak GiB": _number("hand_written_peak_bytes", ".2f", 2**-30),
        "as claimed": _yes,
    },
    "train": {
        "scheme": itemgetter("scheme"),
        "steps": _number("steps", "d"),
        "first loss": _number("first_loss", ".4f"),
        "first 8 apart": _number("first_distance", ".2e"),
        "mean of the last 20": _number("last_loss", ".4f"),
        "apart": _number("last_distance", ".2e"),
        "as claimed": _yes,
    },
}
"""Part -> heading of a column -> what a record has in it."""


def _code_table(records: list[Record]) -> list[str]:
    """Return one row per scheme and operand, and the arrays that differ below."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["scheme"], record["operand"]), []).append(record)
    rows = _head(("scheme", "operand", "arrays equal", "elements that differ"))
    for (scheme, operand), group in groups.items():
        equal = sum(record["ok"] for record in group)
        different, total = (sum(record[name] for record in group) for name in ("different", "elements"))
        rows.append(f"| {scheme} | {operand} | {equal} / {len(group)} | {different} of {total} |")
    wrong = [record for record in records if failed(record)]
    where = (f"{r['scheme']} {r['operand']} {r['array']} ({r['input']}, {r['dtype']}, {r['device']})" for r in wrong)
    counts = (f"{record['different']} of {record['elements']} differ" for record in wrong)
    return [*rows, "", *(f"- {place}: {count}" for place, count in zip(where, counts, strict=True))]


def _head(names: Collection[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]

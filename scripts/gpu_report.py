"""Report of `gpu_proof.py`: its records, and a page of Markdown. The values are measured elsewhere."""

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
"""Largest time of the bridge's step beyond Megatron's, as a share."""


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
    bridge, megatron, by_hand = measured["bridge"], measured["megatron"], measured["by_hand"]
    overhead = bridge["milliseconds"] / megatron["milliseconds"] - 1
    speed_up = None
    if bf16_milliseconds is not None:
        speed_up = round(bf16_milliseconds / bridge["milliseconds"], 3)
    return {
        "part": "steps",
        "scheme": scheme,
        "milliseconds": round(bridge["milliseconds"], 3),
        "megatron_milliseconds": round(megatron["milliseconds"], 3),
        "hand_written_milliseconds": round(by_hand["milliseconds"], 3),
        "overhead": round(overhead, 4),
        "speed_up": speed_up,
        "peak_bytes": int(bridge["peak_bytes"]),
        "hand_written_peak_bytes": int(by_hand["peak_bytes"]),
        "ok": overhead <= MAX_OVERHEAD,
    }


def skipped_record(part: str, scheme: str, missing: list[str]) -> Record:
    """Return the record of a scheme that this machine cannot run, which is no failure."""
    return {"part": part, "scheme": scheme, "skipped": missing, "ok": True}


def runnable(part: str, schemes: Iterable[str], records: list[Record]) -> Iterator[str]:
    """Yield the schemes that this machine runs, and add a record of each other scheme."""
    from bridge.runtime.megatron.te.machine import list_missing_for_te

    for scheme in schemes:
        missing = []
        if scheme != "bf16":
            missing = list_missing_for_te(scheme)
        if missing:
            records.append(skipped_record(part, scheme, missing))
        else:
            yield scheme


def markdown(about: dict[str, str], records: list[Record]) -> str:
    """Return a page: where and when it was measured, one table per part, and the verdict."""
    lines = ["# Proof on a GPU", ""]
    for name, value in about.items():
        lines.append(f"- {name}: {value}")
    for part, title in PARTS.items():
        of_part = [record for record in records if record["part"] == part]
        if not of_part:
            continue
        lines += ["", f"## {title}", ""]
        lines += _table(part, [record for record in of_part if "skipped" not in record])
        for record in of_part:
            if "skipped" in record:
                lines.append(f"- {record['scheme']}: not run, missing {'; '.join(record['skipped'])}")
    return "\n".join([*lines, "", verdict(records), ""])


def verdict(records: list[Record]) -> str:
    """Return one sentence about all records."""
    measured = [record for record in records if "skipped" not in record]
    if not measured:
        return "Nothing was measured."
    wrong = sum(failed(record) for record in measured)
    return f"{len(measured) - wrong} of {len(measured)} measurements are as claimed."


def _table(part: str, records: list[Record]) -> list[str]:
    """Return the lines of the table of a part, and below it the GEMMs that ran and the errors."""
    if not records:
        return []
    if part == "codes":
        return _code_table(records)
    columns = COLUMNS[part]
    lines = _head(columns)
    ran = []
    broken = []
    for record in records:
        cells = [form(record) for form in columns.values()]
        lines.append(f"| {' | '.join(cells)} |")
        if record.get("gemms"):
            ran.append(f"- {record['scheme']}: {record['gemms']}")
        if "error" in record:
            broken.append(f"- {record['scheme']} failed: `{record['error']}`")
    if ran or broken:
        lines.append("")
    return [*lines, *ran, *broken]


Form = Callable[[Record], str]
"""Text of a cell, from the record of its row."""


def _number(name: str, form: str, factor: float = 1, end: str = "") -> Form:
    """Return the form of a number, whose cell is empty where the number was not measured."""

    def cell(record: Record) -> str:
        if record.get(name) is None:
            return ""
        return f"{record[name] * factor:{form}}{end}"

    return cell


def _yes(record: Record) -> str:
    if record["ok"]:
        return "yes"
    return "**no**"


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
"""Part -> heading of a column -> form of its cells."""


def _code_table(records: list[Record]) -> list[str]:
    """Return a row per scheme and operand, and below them the arrays that differ."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["scheme"], record["operand"]), []).append(record)
    lines = _head(("scheme", "operand", "arrays equal", "elements that differ"))
    for (scheme, operand), group in groups.items():
        equal = sum(record["ok"] for record in group)
        different = sum(record["different"] for record in group)
        total = sum(record["elements"] for record in group)
        lines.append(f"| {scheme} | {operand} | {equal} / {len(group)} | {different} of {total} |")
    lines.append("")
    for record in records:
        if failed(record):
            array = f"{record['scheme']} {record['operand']} {record['array']}"
            place = f"{record['input']}, {record['dtype']}, {record['device']}"
            lines.append(f"- {array} ({place}): {record['different']} of {record['elements']} differ")
    return lines


def _head(names: Collection[str]) -> list[str]:
    """Return the two lines that begin a table."""
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]

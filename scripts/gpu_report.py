"""Report of `gpu_proof.py`: its records, and a page of Markdown. It renders values made elsewhere."""

from __future__ import annotations

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
    header, cells = _COLUMNS.get(part, (_BLOCK_HEADER, _block_cells))
    table = [*_head(header), *(f"| {' | '.join(cells(record))} |" for record in records)]
    ran = [f"- {record['scheme']}: {record['gemms']}" for record in records if record.get("gemms")]
    broken = [f"- {record['scheme']} failed: `{record['error']}`" for record in records if "error" in record]
    return [*table, *([""] if ran or broken else []), *ran, *broken]


_BLOCK_HEADER = ("scheme", "quantity", "distance", "tolerance", "BF16's distance", "as claimed")
_STEP_HEADER = (
    "scheme",
    "step ms",
    "Megatron's own",
    "overhead",
    "hand-written",
    "speed-up over BF16",
    "peak GiB",
    "hand-written peak GiB",
    "as claimed",
)

_TRAIN_HEADER = ("scheme", "steps", "first loss", "first 8 apart", "mean of the last 20", "apart", "as claimed")


def _block_cells(record: Record) -> tuple[str, ...]:
    plain = record.get("bf16_distance")
    return (
        record["scheme"],
        record["quantity"],
        f"{record['distance']:.2e}",
        f"{record['tolerance']:.2e}",
        "" if plain is None else f"{plain:.2e}",
        _yes(record["ok"]),
    )


def _step_cells(record: Record) -> tuple[str, ...]:
    speed_up = record["speed_up"]
    return (
        record["scheme"],
        f"{record['milliseconds']:.2f}",
        f"{record['megatron_milliseconds']:.2f}",
        f"{100 * record['overhead']:+.1f} %",
        f"{record['hand_written_milliseconds']:.2f}",
        "" if speed_up is None else f"{speed_up:.2f}x",
        f"{record['peak_bytes'] / 2**30:.2f}",
        f"{record['hand_written_peak_bytes'] / 2**30:.2f}",
        _yes(record["ok"]),
    )


def _train_cells(record: Record) -> tuple[str, ...]:
    values = (("first_loss", ".4f"), ("first_distance", ".2e"), ("last_loss", ".4f"), ("last_distance", ".2e"))
    found = ("" if record.get(name) is None else format(record[name], form) for name, form in values)
    return (record["scheme"], str(record["steps"]), *found, _yes(record["ok"]))


_COLUMNS = {"steps": (_STEP_HEADER, _step_cells), "train": (_TRAIN_HEADER, _train_cells)}


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


def _head(names: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _yes(ok: bool) -> str:
    return "yes" if ok else "**no**"

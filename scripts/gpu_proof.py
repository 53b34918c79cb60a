"""Proof on a GPU of the emulation's claims: ``python scripts/gpu_proof.py [PART ...] --out FOLDER``.

    codes    Transformer Engine's codes and scales against our numerics, bit for bit, for every scheme of this GPU
    linear   one linear layer: output and both gradients
    block    a GPT block: loss and gradients, within a stated tolerance
    steps    training steps of a Llama-3-8B-shaped block against a hand-written loop: time, overhead, peak memory
    train    the training command with Transformer Engine's layers and with the emulated ones: losses, and what ran

Needs a CUDA GPU, Transformer Engine and Megatron Core. Without them it prints what is missing, measures nothing and
exits 0.
Exit code 1: something was measured that is not as claimed. 2: arguments that make no sense.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_report import PARTS, Record, failed, markdown, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMES = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
PACKAGES = ("torch", "transformer-engine", "megatron-core", "precision-bridge")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"what to measure, of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="measure only this scheme; repeatable")
    parser.add_argument("--out", type=Path, help="folder for gpu_proof.json and gpu_proof.md")
    parser.add_argument("--rounds", type=int, default=30, help="steps per measurement of `steps`; medians count")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="sequences of 8192 tokens in a step of `steps`")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"PART: must be one of {', '.join(PARTS)}, got {', '.join(unknown)}")
    for name in ("rounds", "micro_batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1, got {getattr(options, name)}")
    options.parts = list(dict.fromkeys(options.parts)) or list(PARTS)
    return options


def missing() -> list[str]:
    """Return what this machine lacks, the cheapest look first: torch is loaded only where the rest is installed."""
    names = ("transformer_engine", "megatron", "torch")
    absent = [f"{name} (not installed)" for name in names if importlib.util.find_spec(name) is None]
    if absent:
        return absent
    from bridge.runtime.megatron.te.machine import list_missing_for_te

    return list_missing_for_te()


def about() -> dict[str, str]:
    """Return where and when this runs, for the report."""
    import torch

    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed as a package"
    return {
        "GPU": torch.cuda.get_device_name(),
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "CUDA": str(torch.version.cuda),
        **installed,
        "Python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def measure(part: str, options: argparse.Namespace) -> list[Record]:
    """Return the records of one part."""
    chosen: dict[str, Any] = {} if options.scheme is None else {"schemes": options.scheme}
    if part == "steps":
        chosen |= {"rounds": options.rounds, "micro_batch_size": options.micro_batch_size}
    records: list[Record] = importlib.import_module(f"gpu_{part}").records_of(**chosen)
    return records


def write(folder: Path, facts: dict[str, str], records: list[Record]) -> None:
    """Write gpu_proof.json and gpu_proof.md into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_proof.json").write_text(json.dumps({"about": facts, "records": records}, indent=2) + "\n")
    (folder / "gpu_proof.md").write_text(markdown(facts, records))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen parts and return the exit code."""
    options = parse(arguments)
    lacking = missing()
    if lacking:
        print(
            "gpu_proof needs a CUDA GPU with Transformer Engine and Megatron Core; nothing was measured. "
            f"Missing here: {'; '.join(lacking)}."
        )
        return 0
    facts, records = about(), []
    for part in options.parts:
        print(f"{part}: {PARTS[part]} ...", flush=True)
        found = measure(part, options)
        print(f"  {verdict(found)}", flush=True)
        records += found
    print(markdown(facts, records))
    if options.out is not None:
        write(options.out, facts, records)
        print(f"Written to {options.out / 'gpu_proof.json'} and {options.out / 'gpu_proof.md'}.")
    return int(any(failed(record) for record in records))


if __name__ == "__main__":
    sys.exit(main())

"""Compare the quantisers with stored golden vectors, bit for bit: ``python scripts/check_goldens.py FILE.npz``.

Each record of the file's ``__meta__`` is run through three implementations: the slow reference, plain torch, and the
C kernel (where a compiler is there). Codes and scales of both copies must be equal to the last bit; NaN codes are equal
to each other. Megatron Core and Transformer Engine are not imported, so one answer holds for all their releases;
``tests/runtime/megatron/test_te_cpu.py`` compares whole layers. Exit code 0: all equal. 1: a mismatch, or a record or
option this script does not know. 2: no such file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import reference_quantisers as reference
import torch

from bridge.precision.formats import FORMATS
from bridge.precision.schemes import WHOLE_TENSOR
from bridge.runtime.numerics import QuantSpec, quantise, update_scaling_factors, use
from bridge.runtime.numerics.quantised import pack_nibbles

COMMON = {"name", "recipe", "format", "input", "dtype", "shape"}
OPTIONS = {
    "tensorwise": {"power_of_two_scale", "eps"},
    "blockwise": {"tile", "power_of_two_scale", "eps"},
    "mxfp8": {"block", "two_d"},
    "nvfp4": {"two_d", "rht", "block"},
    "delayed": {"amax_compute_algo", "margin", "amax_history_len"},
}
BLOCKS = {"mxfp8": 32, "nvfp4": 16}
"""Scheme -> elements of a block."""
NAN_CODES = {"e4m3": (0x7F, 0xFF), "e5m2": (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), "e2m1": ()}
"""Format -> its codes of NaN."""
ARRAYS = ("q", "scale_inv", "q_t", "scale_inv_t")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Record = dict[str, Any]
Arrays = dict[str, np.ndarray]


class UnknownRecordError(Exception):
    """A record that asks for something this script does not know."""


def spec_of(record: Record) -> QuantSpec:
    """Return the quantiser that a record describes."""
    scheme = record["recipe"]
    if scheme not in OPTIONS:
        raise UnknownRecordError(f"recipe {scheme!r} is not known")
    unknown = set(record) - COMMON - OPTIONS[scheme]
    if unknown:
        raise UnknownRecordError(f"options {sorted(unknown)} are not known")
    if record["format"] not in ("e4m3", "e5m2", "e2m1"):
        raise UnknownRecordError(f"format {record['format']!r} is not known")
    row = WHOLE_TENSOR
    if scheme == "blockwise":
        row = tuple(record["tile"])
    elif scheme in ("mxfp8", "nvfp4"):
        size = record.get("block", BLOCKS[scheme])
        row = (1, size)
        if record.get("two_d"):
            row = (size, size)
    return QuantSpec(
        scheme=scheme,
        format=record["format"],
        row=row,
        column=(row[1], row[0]),
        power_of_two_scale=record.get("power_of_two_scale", scheme == "blockwise"),
        eps=record.get("eps", 0.0),
        hadamard=record.get("rht", False),
    )


def from_torch(x: torch.Tensor, spec: QuantSpec) -> Arrays:
    """Return the arrays of `quantise`, under the names of the golden file."""
    made = quantise(x, spec)
    tensors = {"q": made.codes, "scale_inv": made.scale_inv, "q_t": made.codes_t, "scale_inv_t": made.scale_inv_t}
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}


def from_reference(x: torch.Tensor, spec: QuantSpec) -> Arrays:
    """Return the slow reference's arrays, brought to the layout of the golden file."""
    dtype = str(x.dtype).removeprefix("torch.")
    x_mk = x.reshape(-1, x.shape[-1]).float().numpy()
    found: Arrays = {}
    for columnwise, suffix in ((False, ""), (True, "_t")):
        made = reference.quantise_copy(x_mk, spec, columnwise=columnwise, dtype=dtype)
        codes, scales, tile = made.codes, made.scale_inv, spec.tile(columnwise)
        if spec.scheme in ("mxfp8", "nvfp4") and tile[0] == tile[1]:
            axis = int(columnwise)
            scales = np.repeat(scales, tile[0], axis).take(range(codes.shape[axis]), axis)
        if columnwise and spec.scheme != "mxfp8":
            codes, scales = codes.T, scales.T
        if spec.format == "e2m1":
            codes = pack_nibbles(torch.from_numpy(np.ascontiguousarray(codes))).numpy()
        found[f"q{suffix}"], found[f"scale_inv{suffix}"] = codes, scales
    return found


def equal(mine: np.ndarray, golden: np.ndarray, nan_codes: tuple[int, ...] = ()) -> bool:
    """Compare bits; NaN equals NaN, of whatever sign and payload."""
    if mine.shape != golden.shape or mine.dtype != golden.dtype:
        return False
    if mine.dtype.kind == "f":
        bits = np.dtype(f"u{mine.dtype.itemsize}")
        same = np.ascontiguousarray(mine).view(bits) == np.ascontiguousarray(golden).view(bits)
        return bool(np.all(same | (np.isnan(mine) & np.isnan(golden))))
    return bool(np.all((mine == golden) | (np.isin(mine, nan_codes) & np.isin(golden, nan_codes))))


def check_quantised(record: Record, file: Any, path: str) -> list[str]:
    """Return the names of a record's arrays that differ."""
    spec = spec_of(record)
    if record["dtype"] not in DTYPES:
        raise UnknownRecordError(f"dtype {record['dtype']!r} is not known")
    missing = [key for key in (f"x/{record['input']}", f"{record['name']}.q") if key not in file]
    if missing:
        raise UnknownRecordError(f"the file has no {', '.join(missing)}")
    x = torch.from_numpy(file[f"x/{record['input']}"]).to(DTYPES[record["dtype"]])
    if path == "reference":
        made = from_reference(x, spec)
    else:
        made = from_torch(x, spec)
    wrong = []
    for name in ARRAYS:
        key = f"{record['name']}.{name}"
        if key not in file:
            continue
        nan_codes: tuple[int, ...] = ()
        if name.startswith("q"):
            nan_codes = NAN_CODES[record["format"]]
        if not equal(made[name], file[key], nan_codes):
            wrong.append(name)
    return wrong


def check_delayed(record: Record, file: Any, path: str) -> list[str]:
    """Feed a record's amaxes one step at a time; return the names of arrays that differ."""
    spec_of(record)
    golden = {name: file[f"{record['name']}.{name}"] for name in ("amax", "scale", "history")}
    maximum, margin, algo = FORMATS[record["format"]].max, record["margin"], record["amax_compute_algo"]
    length = record["amax_history_len"]
    scales, histories = [], []
    history, scale = [0.0] * length, 1.0
    history_t, scale_t = torch.zeros(length, 1), torch.ones(1)
    for amax in golden["amax"].tolist():
        seen = amax
        if np.isnan(amax):
            seen = 0.0
        if path == "reference":
            history[0] = max(history[0], seen)
            history, scale = reference.delayed_update(history, scale, maximum=maximum, margin=margin, algo=algo)
        else:
            history_t[0] = history_t[0].clamp(min=seen)
            update_scaling_factors(history_t, scale_t, torch.tensor([maximum * 2.0**-margin]), algo=algo)
            history, scale = history_t[:, 0].tolist(), scale_t.item()
        scales.append(scale)
        histories.append(list(history))
    found = {"scale": np.array(scales, np.float32), "history": np.array(histories, np.float32)}
    return [name for name, mine in found.items() if not equal(mine, golden[name])]


def main(arguments: list[str] | None = None) -> int:
    """Check one file and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="golden vectors, .npz")
    path_names = ("reference", "torch", "native")
    parser.add_argument(
        "--path", choices=path_names, action="append", help="check only this implementation; repeatable"
    )
    options = parser.parse_args(arguments)
    if not options.file.is_file():
        print(f"{options.file}: no such file.", file=sys.stderr)
        return 2
    file = np.load(options.file, allow_pickle=False)
    records = json.loads(bytes(file["__meta__"]).decode())
    failed = False
    for path in options.path or path_names:
        problem = None
        if path != "reference":
            problem = use(path)
        if problem is not None:
            print(f"{path:9}  not checked: {problem}")
            failed |= options.path is not None
            continue
        failed |= not check(records, file, path)
    return int(failed)


def check(records: list[Record], file: Any, path: str) -> bool:
    """Check all records with one implementation, print matched / total per recipe, and return whether all matched."""
    total: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    for record in records:
        recipe = str(record.get("recipe"))
        total[recipe] += 1
        try:
            if recipe == "delayed":
                wrong = check_delayed(record, file, path)
            else:
                wrong = check_quantised(record, file, path)
        except (UnknownRecordError, KeyError) as error:
            wrong = [f"unknown record: {error}"]
        matched[recipe] += not wrong
        if wrong:
            print(f"{path:9}  {record.get('name')}: {', '.join(wrong)}")
    for recipe in sorted(total):
        print(f"{path:9}  {recipe:10}  {matched[recipe]} / {total[recipe]}")
    print(f"{path:9}  {'all':10}  {sum(matched.values())} / {sum(total.values())}")
    return matched == total


if __name__ == "__main__":
    sys.exit(main())

"""The format table against torch's and ml_dtypes' own descriptions of the formats."""

import math
import subprocess
import sys

import pytest
import torch

from bridge.precision.formats import FORMATS, Format

ml_dtypes = pytest.importorskip("ml_dtypes")

TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
NAN_CODES = {"fp16": 2046, "bf16": 254, "e5m2": 6, "e4m3": 2, "e8m0": 1}
"""How many encodings are NaN, both signs together."""
ML_NAMES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn", "e8m0": "float8_e8m0fnu"}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_limits_follow_from_the_fields(row: Format) -> None:
    assert row.bits == int(row.signed) + row.exponent_bits + row.mantissa_bits
    assert row.smallest_normal == 2.0**row.min_exponent
    reserved = {"e4m3": 0, "e2m1": 0, "e8m0": 1}.get(row.name, 1)
    top = (1 << row.exponent_bits) - 1 - reserved - row.bias
    last_mantissa = 2 - 2 * row.epsilon if row.name == "e4m3" else 2 - row.epsilon
    assert row.max == last_mantissa * 2.0**top


@pytest.mark.parametrize("name", TORCH)
def test_row_agrees_with_torch_finfo(name: str) -> None:
    row, info = FORMATS[name], torch.finfo(TORCH[name])
    assert (info.bits, info.max, info.smallest_normal) == (row.bits, row.max, row.smallest_normal)
    assert info.eps == (row.epsilon if row.name != "e8m0" else 1.0)


@pytest.mark.parametrize("name", ML_NAMES)
def test_row_agrees_with_ml_dtypes_finfo(name: str) -> None:
    row, info = FORMATS[name], ml_dtypes.finfo(getattr(ml_dtypes, ML_NAMES[name]))
    assert info.bits == row.bits
    assert float(info.max) == row.max
    assert float(info.smallest_normal) == row.smallest_normal
    assert info.nmant == row.mantissa_bits
    if row.signed:
        assert float(info.smallest_subnormal) == row.smallest_normal * row.epsilon


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3", "e8m0"])
def test_nan_and_infinity_encodings_decode_as_such(name: str) -> None:
    row = FORMATS[name]
    integers = torch.int16 if row.bits == 16 else torch.uint8
    codes = torch.arange(1 << row.bits, dtype=torch.int32).to(integers)
    values = codes.view(TORCH[name]).float()
    assert int(values.isnan().sum()) == NAN_CODES[name]
    assert row.nan is not None
    assert math.isnan(values[row.nan])
    if row.infinity is None:
        assert not values.isinf().any()
    else:
        assert values[row.infinity] == math.inf


def test_every_row_names_its_source() -> None:
    assert all(row.source for row in FORMATS.values())


def test_the_tables_need_no_torch() -> None:
    code = "import sys, bridge.precision.formats, bridge.precision.schemes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

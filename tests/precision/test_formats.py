"""The format table against torch's and ml_dtypes' own descriptions of the formats."""

import math
import subprocess
import sys

import pytest
import torch

from bridge.precision.formats import FORMATS, Format

ml_dtypes = pytest.importorskip("ml_dtypes")

ML_NAMES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn", "e8m0": "float8_e8m0fnu"}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_limits_follow_from_the_fields(row: Format) -> None:
    assert row.bits == int(row.signed) + row.exponent_bits + row.mantissa_bits
    assert row.smallest_normal == 2.0**row.min_exponent
    if row.smallest_subnormal is not None:
        assert row.smallest_subnormal == row.smallest_normal * row.epsilon
    reserved = {"e4m3": 0, "e2m1": 0, "e8m0": 1}.get(row.name, 1)
    top = (1 << row.exponent_bits) - 1 - reserved - row.bias
    last_mantissa = 2 - 2 * row.epsilon if row.name == "e4m3" else 2 - row.epsilon
    assert row.max == last_mantissa * 2.0**top


@pytest.mark.parametrize("row", [row for row in FORMATS.values() if row.torch_dtype], ids=lambda row: row.name)
def test_row_agrees_with_torch_finfo(row: Format) -> None:
    info = torch.finfo(getattr(torch, row.torch_dtype or ""))
    assert (info.bits, info.max, info.smallest_normal) == (row.bits, row.max, row.smallest_normal)
    assert info.eps == (row.epsilon if row.name != "e8m0" else 1.0)


@pytest.mark.parametrize("name", ML_NAMES)
def test_row_agrees_with_ml_dtypes_finfo(name: str) -> None:
    row, info = FORMATS[name], ml_dtypes.finfo(getattr(ml_dtypes, ML_NAMES[name]))
    assert info.bits == row.bits
    assert float(info.max) == row.max
    assert float(info.smallest_normal) == row.smallest_normal
    assert info.nmant == row.mantissa_bits
    if row.smallest_subnormal is not None:
        assert float(info.smallest_subnormal) == row.smallest_subnormal


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3", "e8m0"])
def test_nan_and_infinity_encodings_decode_as_such(name: str) -> None:
    row = FORMATS[name]
    integers = torch.int16 if row.bits == 16 else torch.uint8
    codes = torch.arange(1 << row.bits, dtype=torch.int32).to(integers)
    values = codes.view(getattr(torch, row.torch_dtype or "")).float()
    assert int(values.isnan().sum()) == row.nan_codes
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

"""The rows of Transformer Engine's quantizer factories, against the quantizers that the factories themselves make.

The factories of the installed Python files are called in a process of its own, with the stand-in for the compiled part.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.precision.operand_copies import UNKNOWN_COPIES, apply_backward_override, make_scheme_copies
from bridge.precision.quantizer_factories import SHIPPED_FACTORIES, find_shipped_factory
from bridge.precision.schemes import SCHEMES, find_scheme

TE = Path(sys.prefix) / "te"
ASK = """
import json, sys
from importlib import import_module
from bridge.preflight.gpu_for_te_cpu import declare
declare("b200")
from bridge.runtime.megatron.cpu.cuda_shim import cpu_as_cuda
from bridge.runtime.pytorch.record.operand_format import SCHEME_OF_QUANTIZER
from transformer_engine.pytorch.quantization import DelayedScalingRequest, QuantizerRole

def name_of(dtype):
    return str(getattr(dtype, "name", dtype))[-4:].lower()

def copy(quantizer, columnwise, of_row=False):
    kind = type(quantizer).__name__
    if kind == "IdentityQuantizer":
        return {"scheme": None, "format": "", "of_row": of_row}
    if isinstance(quantizer, DelayedScalingRequest):
        return {"scheme": "delayed", "format": quantizer.fp8_format.name.lower(), "of_row": of_row}
    found = {"scheme": SCHEME_OF_QUANTIZER[kind], "format": name_of(quantizer.dtype), "of_row": of_row}
    if kind == "NVFP4Quantizer":
        found["square"] = quantizer.with_2d_quantization
        found["hadamard"] = quantizer.with_rht and columnwise
        found["stochastic"] = quantizer.stochastic_rounding
        found["row_scaled"] = quantizer.row_scaled_nvfp4 and not columnwise
        found["four_over_six"] = quantizer.nvfp4_use_4over6
    if kind == "Float8BlockQuantizer":
        found["square"] = quantizer.block_scaling_dim == 2
    return found

def pair(quantizer):
    if type(quantizer).__name__ == "HybridQuantizer":
        of_row = quantizer.columnwise_source == "rowwise_dequantized"
        return copy(quantizer.rowwise_quantizer, False), copy(quantizer.columnwise_quantizer, True, of_row)
    return copy(quantizer, False), copy(quantizer, True)

answer = {}
for path in json.loads(sys.argv[1]):
    module, name = path.rsplit(".", 1)
    factory = getattr(import_module(module), name)
    for kind in ("linear", "grouped_linear"):
        for operand in ("input", "weight", "grad_output"):
            role = QuantizerRole(module_type=kind, tensor_type=operand, name="fc1")
            with cpu_as_cuda():
                made = factory(role)
            answer[f"{path} {kind} {operand}"] = pair(made)
shipped = {}
for module in {path.rsplit(".", 1)[0] for path in json.loads(sys.argv[1])}:
    for name, value in vars(import_module(module)).items():
        if name.endswith("_factory") and getattr(value, "__module__", "") == module and not name.startswith("_"):
            shipped[f"{module}.{name}"] = True
print(json.dumps({"pairs": answer, "shipped": sorted(shipped)}))
"""
REFERENCES = tuple(path for path in SHIPPED_FACTORIES if ".reference_" in path)
"""Their quantizers are classes of the reference alone."""


@pytest.fixture(scope="module")
def made():
    """What the factories of Transformer Engine make for each operand."""
    if not (TE / "transformer_engine").is_dir():
        pytest.skip(f"needs Transformer Engine's Python in {TE} (make setup)")
    paths = [path for path in SHIPPED_FACTORIES if path not in REFERENCES]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, json.dumps(paths)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def described(copy):
    """Return a row's copy in the words of the process above."""
    found = {"scheme": copy.scheme, "format": copy.format, "of_row": copy.is_from_rowwise}
    if copy.scheme == "nvfp4":
        found |= {"square": copy.tile == (16, 16), "hadamard": copy.hadamard, "stochastic": copy.stochastic}
        found |= {"row_scaled": copy.is_row_scaled, "four_over_six": copy.is_four_over_six}
    if copy.scheme == "blockwise":
        found["square"] = copy.tile == (128, 128)
    if copy.scheme == "delayed":
        found["format"] = "hybrid"
    return found


def test_every_row_makes_what_transformer_engines_factory_makes(made):
    wrong = []
    for path, factory in SHIPPED_FACTORIES.items():
        if path in REFERENCES:
            continue
        for kind in ("linear", "grouped_linear"):
            copies = factory.copies(is_grouped=kind == "grouped_linear")
            for operand in ("input", "weight", "grad_output"):
                pair = copies.get_pair(operand)
                mine, theirs = [described(pair.row), described(pair.column)], made["pairs"][f"{path} {kind} {operand}"]
                if mine != theirs:
                    wrong.append((path, kind, operand, mine, theirs))
    assert wrong == []


def test_every_public_factory_of_the_modules_has_a_row(made):
    assert made["shipped"] == sorted(path for path in SHIPPED_FACTORIES if path not in REFERENCES)


def test_a_factory_of_a_team_has_no_row():
    assert find_shipped_factory("team.quantizers.make") is None
    assert find_shipped_factory(None) is None


@pytest.mark.parametrize("scheme", [row for row in SCHEMES if row.operands], ids=lambda row: row.name)
def test_the_copies_of_a_scheme_are_those_of_its_row(scheme):
    copies = make_scheme_copies(scheme, scheme.formats[0])
    assert {copies.get_gemm_scheme(gemm) for gemm in ("fprop", "dgrad", "wgrad")} == {scheme.name}
    for operand in scheme.operands:
        pair = copies.get_pair(operand.name)
        assert (pair.row.tile, pair.column.tile) == (operand.rowwise_tile, operand.columnwise_tile)
    assert (
        tuple(copies.uses_split_accumulator(gemm) for gemm in ("fprop", "dgrad", "wgrad")) == scheme.split_accumulator
    )


def test_a_backward_override_leaves_the_forward_gemm_alone_and_keeps_what_it_multiplied():
    for override, keeps_row in (("high_precision", False), ("dequantized", True)):
        copies = apply_backward_override(make_scheme_copies(find_scheme("mxfp8"), "e4m3"), override)
        assert [copies.get_gemm_scheme(gemm) for gemm in ("fprop", "dgrad", "wgrad")] == ["mxfp8", None, None]
        assert copies.saves_rowwise_input is keeps_row
        assert copies.saved_input.scheme == ("mxfp8" if keeps_row else None)


def test_copies_of_a_custom_scheme_are_not_known():
    for family in ("fp8", "fp4"):
        assert make_scheme_copies(find_scheme("custom", family), "e4m3") is UNKNOWN_COPIES

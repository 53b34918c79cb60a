"""`scripts/gpu_proof.py` where there is no GPU: what it says, how it compares, and what its pages look like."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bridge.runtime.megatron.process.training_process import training_process
from bridge.runtime.numerics import GemmPrecision, pad_scales, quantise

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
TINY = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 32,
}
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None,
    reason="needs a machine without a GPU or without Transformer Engine",
)


@pytest.fixture(scope="module")
def scripts():
    """The modules of the proof, imported as the script imports them."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        names = ("gpu_proof", "gpu_report", "gpu_codes", "gpu_block", "gpu_linear", "gpu_steps")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(SCRIPTS))


def run(*arguments, code=None):
    command = [sys.executable, *(("-c", code) if code else (str(SCRIPTS / "gpu_proof.py"), *arguments))]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPTS)


@needs_no_gpu
def test_without_a_gpu_it_says_so_and_claims_nothing(tmp_path):
    done = run("--out", str(tmp_path / "out"))
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith(
        "gpu_proof needs a CUDA GPU with Transformer Engine and Megatron Core; nothing was measured. Missing here: "
    )
    assert done.stdout.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="needs no Transformer Engine installed"
)
def test_without_transformer_engine_torch_is_not_imported():
    done = run(code="import sys, gpu_proof; gpu_proof.main([]); print('torch' in sys.modules)")
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "PART: must be one of codes, linear, block, steps, train, got speed"),
        (["--rounds", "0"], "--rounds: must be at least 1, got 0"),
        (["--micro-batch-size", "-1"], "--micro-batch-size: must be at least 1, got -1"),
        (["--scheme", "int8"], "argument --scheme: invalid choice: 'int8'"),
    ],
)
def test_arguments_without_sense_are_refused(scripts, capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        scripts.gpu_proof.parse(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_each_part_can_be_chosen(scripts):
    assert scripts.gpu_proof.parse([]).parts == ["codes", "linear", "block", "steps", "train"]
    chosen = scripts.gpu_proof.parse(["steps", "codes", "steps", "--scheme", "delayed", "--scheme", "mxfp8"])
    assert (chosen.parts, chosen.scheme) == (["steps", "codes"], ["delayed", "mxfp8"])


class TestCodes:
    def test_bits_are_compared_and_nan_equals_nan(self, scripts):
        different = scripts.gpu_codes.bits_different
        x = torch.tensor([0.0, -0.0, 1.0, float("nan")])
        assert different(x, x.clone()) == 0
        assert different(x, torch.tensor([0.0, 0.0, 1.0, -float("nan")])) == 1
        assert different(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])) == 1
        codes = torch.tensor([0x7F, 0xFF, 0x10], dtype=torch.uint8)
        flipped = torch.tensor([0xFF, 0x7F, 0x11], dtype=torch.uint8)
        assert different(codes, flipped) == 3
        assert different(codes, flipped, (0x7F, 0xFF)) == 1
        assert different(codes, codes[:2]) == 3
        assert different(codes, codes.float()) == 3

    @pytest.mark.parametrize(("scheme", "number_format"), [("delayed", "hybrid"), ("nvfp4", "e2m1")])
    def test_the_inputs_have_the_values_that_matter(self, scripts, scheme, number_format):
        spec = GemmPrecision(scheme=scheme, format=number_format).spec("input")
        inputs = scripts.gpu_codes.inputs_of((256, 384), torch.bfloat16)
        assert inputs["infinity and NaN"].isnan().any()
        assert inputs["infinity and NaN"].isinf().any()
        assert (inputs["zeros"] == 0).sum() > 0
        for x in inputs.values():
            made = quantise(x, spec, tensor_scale=2.0 if scheme == "delayed" else None)
            assert scripts.gpu_codes.our_arrays(made)["codes"].numel() > 0

    @pytest.mark.parametrize(("scheme", "number_format"), [
        ("delayed", "hybrid"),
        ("tensorwise", "e4m3"),
        ("blockwise", "e4m3"),
        ("mxfp8", "hybrid"),
        ("nvfp4", "e2m1"),
    ])  # fmt: skip
    @pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
    def test_transformer_engines_layout_is_compared_without_its_padding(self, scripts, scheme, number_format, operand):
        spec = GemmPrecision(scheme=scheme, format=number_format, disable_stochastic_rounding=scheme == "nvfp4")
        spec = spec.spec(operand)
        made = quantise(torch.randn(160, 224).bfloat16(), spec, tensor_scale=3.0 if scheme == "delayed" else None)
        theirs = as_transformer_engine(made)
        codes = scripts.gpu_codes
        records = codes.compare(codes.our_arrays(made), codes.their_arrays(theirs), spec)
        assert [record["array"] for record in records][:4] == ["codes", "scale_inv", "codes_t", "scale_inv_t"]
        assert [record["different"] for record in records] == [0] * (6 if scheme == "nvfp4" else 4)
        name = "_data" if spec.has_single_scale else "_rowwise_data"
        getattr(theirs, name).view(torch.uint8)[3, 5] ^= 0x11
        wrong = [r for r in codes.compare(codes.our_arrays(made), codes.their_arrays(theirs), spec) if not r["ok"]]
        assert [(record["array"], record["different"]) for record in wrong] == [("codes", 1)]

    def test_a_transpose_that_was_not_made_is_left_out(self, scripts):
        made = SimpleNamespace(
            _data=torch.zeros(2, 2, dtype=torch.uint8),
            _scale_inv=torch.ones(1),
            _transpose=None,
            _transpose_invalid=True,
        )
        assert set(scripts.gpu_codes.their_arrays(made)) == {"codes", "scale_inv"}


def as_transformer_engine(made):
    """A tensor with the attributes of Transformer Engine's, its scales padded with what no scale is."""
    if made.spec.has_single_scale:
        return SimpleNamespace(
            _data=made.codes.clone(), _scale_inv=made.scale_inv, _transpose=made.codes_t, _transpose_invalid=False
        )
    padded = {}
    for columnwise, name in ((False, "_rowwise_scale_inv"), (True, "_columnwise_scale_inv")):
        scales = pad_scales(made, columnwise=columnwise)
        kept = pad_scales(made, columnwise=columnwise)
        scales.fill_(77)
        height, width = made.spec.tile(columnwise)
        compact = made.get_copy(columnwise)[1]
        turned = made.spec.scheme == "blockwise" and height != width
        place = tuple(map(slice, compact.T.shape if turned else compact.shape))
        scales[place] = kept[place]
        padded[name] = scales
    amaxes = {}
    if made.spec.scheme == "nvfp4":
        amaxes = {"_amax_rowwise": made.amax, "_amax_columnwise": made.amax if made.amax_t is None else made.amax_t}
    return SimpleNamespace(_rowwise_data=made.codes.clone(), _columnwise_data=made.codes_t, **padded, **amaxes)


class TestBlock:
    def test_names_of_fused_norms_are_translated(self, scripts):
        name = scripts.gpu_block.plain_name
        assert name("layers.0.self_attention.linear_qkv.layer_norm_weight") == "layers.0.input_layernorm.weight"
        assert name("layers.3.mlp.linear_fc1.layer_norm_bias") == "layers.3.pre_mlp_layernorm.bias"
        assert name("layers.0.mlp.linear_fc1.weight") == "layers.0.mlp.linear_fc1.weight"

    def test_distance_is_relative(self, scripts):
        distance = scripts.gpu_block.relative_distance
        assert distance(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)
        assert distance(torch.zeros(2), torch.zeros(2)) == 0.0
        assert distance(torch.ones(2), torch.zeros(2)) == float("inf")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="runs the emulation's side on the CPU")
    @pytest.mark.parametrize("scheme", ["delayed", "tensorwise", "mxfp8"])
    def test_the_emulated_block_repeats_itself_and_differs_from_bf16(self, scripts, scheme):
        proof = scripts.gpu_block
        config = proof.block_config(scheme, TINY)
        with training_process(config, seed=3) as process:
            blocks = {name: proof.build_block(config, name, process.device) for name in ("local", "emulated")}
            again = proof.build_block(config, "emulated", process.device)
            for block in (blocks["emulated"], again):
                proof.copy_weights(blocks["local"], block)
            first = proof.passes(blocks["emulated"], config, process.device, 2)
            second = proof.passes(again, config, process.device, 2)
            plain = proof.passes(blocks["local"], config, process.device, 2)
        same = proof.compare_passes(scheme, second, first, plain)
        assert [record["distance"] for record in same] == [0.0] * len(same)
        assert all(record["ok"] for record in same)
        gradients = [record["bf16_distance"] for record in same if "linear" in record["quantity"]]
        assert len(gradients) == 8
        assert min(gradients) > 0.02
        unquantised = proof.compare_passes(scheme, plain, first, None)
        assert not all(record["ok"] for record in unquantised)

    def test_weights_without_a_counterpart_are_an_error(self, scripts):
        with pytest.raises(KeyError):
            scripts.gpu_block.copy_weights(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))


def test_the_linear_comparison_tells_bf16_from_low_precision(scripts):
    linear = scripts.gpu_linear
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(s, generator=generator).bfloat16() for s in ((64, 128), (96, 128), (64, 96)))
    plain = {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}
    for scheme in linear.FORMATS:
        first, second = (linear.emulated(scheme, x, w, dy) for _ in range(2))
        records = linear.compare_results(scheme, second, first, plain)
        assert [(r["quantity"], r["ok"], r["distance"]) for r in records] == [
            ("y", True, 0.0),
            ("dx", True, 0.0),
            ("dw", True, 0.0),
        ]
        assert not any(record["ok"] for record in linear.compare_results(scheme, plain, first, plain))


ABOUT = {"GPU": "NVIDIA H100", "date": "2026-01-01 00:00 UTC"}


def steps_of(bridge, megatron=10.0, by_hand=9.0):
    times = {"bridge": bridge, "megatron": megatron, "by_hand": by_hand}
    return {name: {"milliseconds": time, "peak_bytes": 2**30} for name, time in times.items()}


def test_overhead_and_speed_up_come_from_the_medians(scripts):
    record = scripts.gpu_report.step_record("delayed", steps_of(10.05), bf16_milliseconds=15.075)
    assert (record["overhead"], record["speed_up"], record["ok"]) == (0.005, 1.5, True)
    slow = scripts.gpu_report.step_record("bf16", steps_of(10.2), None)
    assert (slow["overhead"], slow["speed_up"], slow["ok"]) == (0.02, None, False)


def test_the_page_shows_every_part(scripts, tmp_path):
    report = scripts.gpu_report
    code = {
        "part": "codes",
        "scheme": "mxfp8 e4m3",
        "operand": "input",
        "input": "wide",
        "dtype": "bfloat16",
        "device": "cuda",
        "array": "codes",
        "elements": 100,
    }
    records = [
        {**code, "different": 0, "ok": True},
        {**code, "array": "scale_inv", "different": 2, "ok": False},
        report.skipped_record("codes", "nvfp4 e2m1", ["compute capability 10.0 for nvfp4 (NVIDIA H100 has 9.0)"]),
        {
            "part": "block",
            "scheme": "tensorwise",
            "quantity": "loss",
            "distance": 1e-4,
            "tolerance": 2e-3,
            "bf16_distance": None,
            "ok": True,
        },
        report.step_record("bf16", steps_of(10.0), None),
    ]
    assert report.markdown(ABOUT, records).splitlines() == [
        "# Proof on a GPU",
        "",
        "- GPU: NVIDIA H100",
        "- date: 2026-01-01 00:00 UTC",
        "",
        "## Codes and scales: Transformer Engine against the emulation, bit for bit",
        "",
        "| scheme | operand | arrays equal | elements that differ |",
        "|---|---|---|---|",
        "| mxfp8 e4m3 | input | 1 / 2 | 2 of 200 |",
        "",
        "- mxfp8 e4m3 input scale_inv (wide, bfloat16, cuda): 2 of 100 differ",
        "- nvfp4 e2m1: not run, missing compute capability 10.0 for nvfp4 (NVIDIA H100 has 9.0)",
        "",
        "## A GPT block: Transformer Engine against the emulation",
        "",
        "| scheme | quantity | distance | tolerance | BF16's distance | as claimed |",
        "|---|---|---|---|---|---|",
        "| tensorwise | loss | 1.00e-04 | 2.00e-03 |  | yes |",
        "",
        "## Training steps of a Llama-3-8B-shaped block",
        "",
        "| scheme | step ms | Megatron's own | overhead | hand-written | speed-up over BF16 | peak GiB "
        "| hand-written peak GiB | as claimed |",
        "|---|---|---|---|---|---|---|---|---|",
        "| bf16 | 10.00 | 10.00 | +0.0 % | 9.00 |  | 1.00 | 1.00 | yes |",
        "",
        "3 of 4 measurements are as claimed.",
    ]
    scripts.gpu_proof.write(tmp_path / "new", ABOUT, records)
    stored = json.loads((tmp_path / "new" / "gpu_proof.json").read_text())
    assert stored == {"about": ABOUT, "records": records}
    assert (tmp_path / "new" / "gpu_proof.md").read_text() == report.markdown(ABOUT, records)


def test_nothing_measured_is_said(scripts):
    assert scripts.gpu_report.verdict([scripts.gpu_report.skipped_record("codes", "mxfp8", ["x"])]) == (
        "Nothing was measured."
    )

"""Features files and logs of Transformer Engine's debugger, held against the debugger itself, on the CPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.plan.debug_features_file import build_features
from bridge.plan.precision_plan import PrecisionPlan, make_plan, precision_plan
from bridge.precision.debug_features import DEBUGGER_TENSOR_NAMES, DebugFeatures
from bridge.precision.schemes import GEMMS
from bridge.read.debug_log import MIN_KNOWN_PERCENTAGE, read_debug_log
from bridge.sync.prediction import predict
from tests.runtime.megatron.test_te_cpu import fresh, needs_te

SHAPE = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}
LINEAR = r".*linear_fc1"
FAKE = {"gemms_struct": [{"gemm": "fprop", "tensors": ["activation"]}, {"gemm": "dgrad", "tensors": ["weight"]}]}
CHANGED = {
    "decide-off": ("mxfp8", {"DisableFP8GEMM": {"enabled": True, "gemms": ["wgrad"]}}),
    "decide-fake": ("tensorwise", {"FakeQuant": {"enabled": True, "quant_format": "FP8E4M3", **FAKE}}),
    "decide-scaled": ("delayed", {"PerTensorScaling": {"enabled": True, "gemms": ["dgrad"], "tensors": ["weight"]}}),
}
OFF = {
    "layer": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": r"layers\.1\..*fc1"},
        "transformer_engine": {"DisableQuantizationLayer": {"enabled": True}},
    },
    "gemm": {
        "enabled": True,
        "layers": {"layer_types": ["fc2"]},
        "transformer_engine": {"DisableQuantizationGEMM": {"enabled": True, "gemms": ["wgrad"]}},
    },
}


def plan_in(scheme: str, **model: Any) -> PrecisionPlan:
    field = {"fp4": "e2m1", "fp4_recipe": scheme} if scheme == "nvfp4" else {"fp8": "hybrid", "fp8_recipe": scheme}
    return precision_plan(None, {**SHAPE, "bf16": True, **field, **model})


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a features file each, and what the debugger and a run of two steps said."""
    pytest.importorskip("nvdlfw_inspect", reason="needs nvdlfw-inspect: the extra [interop]")
    folder = tmp_path_factory.mktemp("debugger")
    files: dict[str, tuple[str, dict[str, Any]]] = {
        "off": ("tensorwise", OFF),
        "measure": ("mxfp8", build_features(plan_in("mxfp8"), "measure", every=1)),
    }
    for name, (scheme, features) in CHANGED.items():
        entry = {"layers": {"layer_name_regex_pattern": LINEAR}, "transformer_engine": features}
        files[name] = scheme, {"one": {"enabled": True, **entry}}
    for name, (scheme, content) in files.items():
        (folder / name).mkdir()
        (folder / name / "features.yaml").write_text(yaml.safe_dump(content))
        (folder / name / "scheme").write_text(scheme)
    fresh("tests.plan.te_debugger", folder)
    return folder


@needs_te
@pytest.mark.parametrize("name", CHANGED)
def test_each_tensor_of_each_gemm_is_treated_as_the_debugger_decides(said: Path, name: str) -> None:
    theirs = json.loads((said / name / "said.json").read_text())
    features = DebugFeatures.from_content(yaml.safe_load((said / name / "features.yaml").read_text()))
    run = predict(None, {"model": {**SHAPE, "bf16": True, "fp8": "hybrid", "fp8_recipe": CHANGED[name][0]}})
    (module,) = (
        module
        for module in make_plan(replace(run, features=features)).by_label["1"].modules
        if module.name == "linear_fc1"
    )
    assert module.copies is not None
    ours = {}
    for gemm in GEMMS.values():
        for operand, copy in zip((gemm.left, gemm.right), module.copies.get_gemm_operands(gemm.name), strict=True):
            decision = "Quantize" if copy.scheme == CHANGED[name][0] else "High Precision"
            if copy.rounded_to or copy.scheme not in (None, CHANGED[name][0]):
                decision = "modify_tensor()"
            ours[f"{gemm.name} {DEBUGGER_TENSOR_NAMES[operand]}"] = decision
    assert ours == theirs


@needs_te
@pytest.mark.parametrize("name", ["off", "measure"])
def test_a_run_with_the_debugger_is_as_planned(said: Path, name: str) -> None:
    found = json.loads((said / name / "said.json").read_text())
    assert found["mismatches"] == []
    if name == "off":
        formats = found["formats"]
        assert formats["1 linear_fc1 fprop"] == formats["2 linear_fc2 wgrad"] == "bf16"
        assert formats["2 linear_fc1 fprop"] == "e4m3 x e4m3 (tensorwise)"


@needs_te
def test_a_log_has_the_rows_of_our_own_telemetry(said: Path) -> None:
    ours = json.loads((said / "measure" / "said.json").read_text())["rows"]
    measured = {(row["layer"], row["module"], row["operand"]): row for row in ours}
    rows = [row for row in read_debug_log(said / "measure", plan_in("mxfp8")) if row.step == 1]
    assert {(row.layer, row.module, row.operand) for row in rows} == set(measured)
    known = 0
    for row in rows:
        own = measured[row.layer, row.module, row.operand]
        assert row.format == own["format"]
        assert row.amax == pytest.approx(own["amax"], abs=MIN_KNOWN_PERCENTAGE / 5)
        assert row.underflow == pytest.approx(own["underflow"], abs=1e-5)
        if not math.isnan(row.sqnr_db):
            assert row.sqnr_db == pytest.approx(own["sqnr_db"], abs=0.5)
            known += 1
    assert known >= 2


@needs_te
def test_the_log_is_a_table_with_early_warnings(said: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantisation-error", "--debug-log", str(said / "measure")]
    assert main(words) == 0
    assert "mlp.linear_fc1" in capsys.readouterr().out.replace("fc1", "mlp.linear_fc1")
    log = tmp_path / "nvdlfw_inspect_statistics_logs"
    log.mkdir()
    (found,) = (said / "measure" / log.name).glob("*.log")
    text = found.read_text()
    line = next(line for line in text.splitlines() if "linear_qkv_gradient_underflows%" in line)
    bad = line.replace(line.split("value=")[1], "61.5000").replace("iteration=000000", "iteration=000002")
    (log / found.name).write_text(f"{text}{bad}\n")
    assert main([*words[:2], str(tmp_path)]) == 1
    warning = "Early warning underflow-rising: 61.5 % of the grad_output of layer "
    shown = capsys.readouterr().out
    assert warning in shown
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().out == shown
    assert main(["report", str(tmp_path), "--format", "md"]) == 2
    assert "--format: has no effect on the log of Transformer Engine's debugger" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheme", "model"),
    [("mxfp8", {"fp8_param": True}), ("nvfp4", {"num_moe_experts": 4, "moe_grouped_gemm": True}), ("delayed", {})],
)
def test_each_layer_in_fp8_or_fp4_is_measured_by_one_entry(scheme: str, model: dict[str, Any]) -> None:
    plan = plan_in(scheme, num_layers=6, first_last_layers_bf16=True, **model)
    features = DebugFeatures.from_content(build_features(plan, "measure"))
    low = 0
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind == "linear":
                name = plan.paths.get_debug_name(layer.label, module.name)
                taking = [row for row in features.rows if row.matches(name)]
                assert len(taking) == (module.scheme is not None)
                low += len(taking)
    assert low == plan.linears()[0] > 0


def test_disabled_layers_are_those_that_the_plan_keeps() -> None:
    kept = plan_in("tensorwise", num_layers=6, first_last_layers_bf16=True)
    features = DebugFeatures.from_content(build_features(kept, "disable"))
    model = {**SHAPE, "num_layers": 6, "bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
    followed = make_plan(replace(predict(None, {"model": model}), features=features))
    assert followed.linears() == kept.linears()
    assert followed.linears()[0] == 16


def test_rounding_with_a_scale_per_block_cannot_be_faked() -> None:
    content = build_features(plan_in("tensorwise"), "fake")
    (struct, *_) = [entry["transformer_engine"]["FakeQuant"]["gemms_struct"] for entry in content.values()]
    assert struct[1] == {
        "gemm": "dgrad",
        "tensors_struct": [
            {"tensor": "gradient", "quant_format": "FP8E5M2"},
            {"tensor": "weight", "quant_format": "FP8E4M3"},
        ],
    }
    with pytest.raises(RunConfigError, match="rounds with a scale of the tensor, and not mxfp8"):
        build_features(plan_in("mxfp8"), "fake")


def test_commands_write_a_file_and_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file, run = Path("features.yaml"), ["model=gpt_tiny", "model.num_layers=6"]
    words = ["--write-debug-features", str(file), "--purpose", "disable"]
    assert main(["plan", "fp8_current", *run, *words]) == 0
    assert main(["plan", "fp8_delayed", *run, "--debug-features", str(file)]) == 0
    assert "16 of 25 linear layers compute in FP8 (delayed scaling)" in capsys.readouterr().out
    assert main(["plan", "fp8_delayed", *run, "--purpose", "fake"]) == 2
    assert "--purpose: needs --write-debug-features" in capsys.readouterr().err
    before = file.read_text()
    both = ["--debug-features", str(file), "--write-debug-features", str(file)]
    assert main(["plan", "fp8_delayed", *run, *both]) == 2
    assert capsys.readouterr().err == (
        "--write-debug-features: must not be a file that is read, as it would be overwritten, got "
        f"{str(file)!r}. Give another file.\n"
    )
    for every in ("0", "-5"):
        assert main(["plan", "fp8_delayed", *run, "--write-debug-features", str(file), "--every", every]) == 2
        assert capsys.readouterr().err == (
            f"--every: must be a whole number of at least 1, got {every}. Write --every 100.\n"
        )
    assert file.read_text() == before
    file.write_text(file.read_text().replace("DisableQuantizationLayer", "MyFeature"))
    assert main(["check", "fp8_delayed", *run, "--debug-features", str(file)]) == 2
    assert f"{file}: MyFeature changes the precision of layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", ": must have an entry that is on, got an empty file"),
        ("{}", ": must have an entry that is on, got {}"),
        ("- 1", ": must be a mapping of entries, got [1]"),
        ("x: null", ", x: must be a mapping with enabled and layers, got None"),
    ],
)
def test_a_file_that_is_refused_is_named(
    text: str, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "features.yaml"
    file.write_text(text)
    words = ["plan", "fp8_delayed", "model=gpt_tiny", "model.num_layers=6", "--debug-features", str(file)]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"{file}{rule}")

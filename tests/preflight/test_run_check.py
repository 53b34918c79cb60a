"""A whole run checked at once: our container, a saved run, Megatron Bridge's YAML, the showcase."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.front.python_check import check as check_run
from bridge.preflight.rule_check import check, get_report
from bridge.preflight.run import Run
from bridge.training.config import ConfigContainer
from tests.rules.cases.runs import B200, CURRENT, DENSE, H100, OVERLAP

SHOWCASE = sorted((Path(__file__).parents[2] / "docs" / "showcase").glob("*.yaml"))


def ids(report: Any) -> set[str]:
    return {one.id for one in report.findings}


def test_a_container_of_megatrons_own_configs_is_checked(megatron_owners: Any) -> None:
    made = megatron_owners(sharded=False)
    container = ConfigContainer(**made, mixed_precision="bf16_with_fp8_current_scaling_mixed")
    container.train.micro_batch_size = 1
    report = check_run(container, target=H100)
    assert ids(report) == {"PB301", "PB506"}
    assert report.exit_code() == 2


def test_what_megatron_computes_by_itself_is_nobodys_own_value(megatron_owners: Any) -> None:
    container = ConfigContainer(**megatron_owners(), mixed_precision="bf16_autocast_mixed")
    assert "PB123" not in ids(check_run(container, target=H100))


def test_a_container_against_this_machine_knows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    report = check_run(ConfigContainer(mixed_precision="bf16_mixed"), target="auto")
    assert ids(report) == {"PB524"}
    declared = check_run(ConfigContainer(mixed_precision="bf16_mixed"), target="h100x8")
    assert ids(declared) == set(), "what is set here is not set there"


@pytest.mark.parametrize("path", SHOWCASE, ids=lambda path: path.stem)
def test_a_showcase_run_has_no_error_and_no_warning(path: Path) -> None:
    run = yaml.safe_load(path.read_text(encoding="utf-8"))
    report = check_run(run, target=None)
    assert [str(one) for one in report.findings if one.severity != "info"] == []
    assert report.context.target.count in (64, 512, 2048)


def test_megatron_bridges_yaml_is_read_as_it_is_written(tmp_path: Path) -> None:
    dtype = {"_target_": "torch.bfloat16", "_call_": False}
    run: dict[str, Any] = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "mixed_precision": {
            "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
            "bf16": True,
            "params_dtype": dtype,
            "fp8": None,
            "fp8_recipe": "tensorwise",
            "first_last_layers_bf16": False,
            "num_layers_at_start_in_bf16": 0,
            "num_layers_at_end_in_bf16": 0,
            "grad_reduce_in_fp32": True,
        },
        "model": dict(DENSE, _target_="x.GPTModelProvider", first_last_layers_bf16=True, params_dtype=dtype, bf16=True),
        "optimizer": dict(OVERLAP, bf16=True, fp8_recipe="tensorwise"),
        "ddp": OVERLAP,
    }

    def checked() -> Any:
        path = tmp_path / "run_config.yaml"
        path.write_text(yaml.safe_dump(run), encoding="utf-8")
        return get_report(load_run([f"target='{B200}'"], config_file=path, strict=False))

    report = checked()
    assert ids(report) == set()
    assert report.context.model.params_dtype == "bf16"
    run["mixed_precision"]["fp8"] = "hybrid"
    assert ids(checked()) == {"PB123", "PB306"}, "the peer's 0 and 0 win over the provider's layers"


def test_a_written_value_that_equals_megatrons_default_is_not_replaced_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mixed_precision: bf16_mixed\nmodel: {bf16: false}\nddp: {grad_reduce_in_fp32: false}\n")
    found = get_report(load_run([], config_file=path, strict=False)).findings
    places = {(one.path, one.where) for one in found if one.id == "PB123"}
    assert places == {("model.bf16", "mine.yaml"), ("ddp.grad_reduce_in_fp32", "mine.yaml")}


def test_what_is_misspelt_or_mistyped_in_a_mapping_is_found_beside_everything_else() -> None:
    run = {"mixed_precision": {"bf16": "maybe", "fp8_recipee": "mxfp8", "fp8": "hybrid", "fp4": "e2m1"}}
    report = check_run(run, target=B200)
    assert {"PB121", "PB122", "PB204"} <= ids(report)
    said = {one.id: str(one) for one in report.findings}
    assert said["PB121"].startswith("mixed_precision.bf16: must be true or false, got 'maybe'.")
    assert said["PB122"].endswith("Did you mean 'fp8_recipe' or 'fp4_recipe'?")


def test_a_file_that_loads_a_checkpoint_is_asked_about_the_state_of_delayed_scaling() -> None:
    run = {"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed", "model": DENSE, "checkpoint": {"load": "/ckpt"}}

    def asked(sections: dict[str, Any]) -> set[str]:
        made = Run.from_container(sections, target="h100x8,te2.20,cuda12.9,mcore0.19.2")
        return ids(check(dataclasses.replace(made, environment={"WORLD_SIZE": "8"})))

    assert "PB542" in asked(run)
    assert "PB542" not in asked({**run, "checkpoint": {"load": None}})


def test_a_run_brings_its_own_target_silence_and_backend() -> None:
    run = {
        "mixed_precision": dict(CURRENT, fp8_param_gather=False),
        "model": dict(DENSE, num_layers=16),
        "target": H100,
        "silence": {"PB306": "speed is what counts"},
        "precision_backend": "emulated",
    }
    report = check_run(run, target=None)
    assert report.context.is_emulated
    assert ids(report) == {"PB611"}
    run["precision_backend"] = "auto"
    report = check_run(run, target=None)
    assert ids(report) == set()
    assert [(one.id, one.silenced) for one in report.silenced] == [("PB306", "speed is what counts")]
    with pytest.raises(RunConfigError, match="silence: must be a mapping of rules to reasons"):
        check_run(dict(run, silence=["PB306"]), target=None)


def test_auto_is_resolved_against_the_target_and_the_choice_is_kept() -> None:
    report = check_run(
        {"mixed_precision": "auto:fp8", "model": DENSE, "optimizer": OVERLAP, "ddp": OVERLAP}, target=B200
    )
    assert report.context.run.choice is not None
    assert report.context.run.choice.recipe == "bf16_with_mxfp8_mixed"
    assert report.precision == "bf16_with_mxfp8_mixed"
    with pytest.raises(RunConfigError, match="declare the target"):
        check_run({"mixed_precision": "auto"}, target=None)


def test_a_misspelt_override_is_found_where_the_file_states_the_right_field(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mixed_precision: bf16_mixed\nmodel: {num_layers: 4, num_layer_: 2}\n")
    findings = get_report(load_run(["model.num_layer=3"], config_file=path, strict=False)).findings
    misspelt = {(finding.path, finding.where) for finding in findings if finding.id == "PB122"}
    assert misspelt == {("model.num_layer", "command line")}

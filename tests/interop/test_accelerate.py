"""Accelerate: YAML, arguments, environment."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.errors import BridgeError
from bridge.interop import accelerate
from bridge.interop.conversion import runs_of
from bridge.interop.reading.document import Document
from bridge.precision.mode import mode_of
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.interop.properties import check_nothing_dropped, reasons

SAMPLE = Path(__file__).parent / "samples" / "accelerate" / "fp8.yaml"


def te(**settings: Any) -> dict[str, Any]:
    return {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", **settings}}


def test_a_file_of_the_questionnaire_is_read_whole() -> None:
    payload = yaml.safe_load(SAMPLE.read_text())
    imported = accelerate.import_(payload)
    config = imported.config
    assert (config.fp8, config.fp8_recipe, config.fp8_amax_history_len) == ("e4m3", "delayed", 1024)
    assert reasons(imported, "fp8_config.amax_history_length") == ["dead knob"]
    assert reasons(imported, "fp8_config.amax_compute_algorithm") == ["dead knob"]
    check_nothing_dropped({"fp8_config": payload["fp8_config"]}, imported)


@pytest.mark.parametrize(("written", "reason"), [(None, "implied default"), ("most_recent", "semantics")])
def test_most_recent_means_max(written: str | None, reason: str) -> None:
    imported = accelerate.import_(te(amax_compute_algo=written))
    assert imported.config.fp8_amax_compute_algo == "max"
    assert reasons(imported, "fp8_config.amax_compute_algo") == [reason]
    config = REGISTRY.get("bf16_with_fp8_delayed_scaling_mixed").override(fp8_amax_compute_algo="most_recent")
    assert reasons(accelerate.export(config), "fp8_amax_compute_algo") == ["approximated"]


def test_pure_e5m2_is_refused() -> None:
    with pytest.raises(BridgeError, match="must be HYBRID or E4M3"):
        accelerate.import_(te(fp8_format="E5M2"))


def test_mxfp8_through_its_one_switch() -> None:
    config = accelerate.import_(te(use_mxfp8_block_scaling=True)).config
    assert (config.fp8, config.fp8_recipe) == ("e4m3", "mxfp8")
    hybrid = accelerate.import_(te(use_mxfp8_block_scaling=True, fp8_format="HYBRID", amax_history_len=4))
    assert hybrid.config.fp8 == "e4m3"
    assert reasons(hybrid, "fp8_config.fp8_format") == ["semantics"]
    assert reasons(hybrid, "fp8_config.amax_history_len") == ["dead knob"]


@pytest.mark.parametrize("value", [[False, False, True], "(false, false, true)", "false,false,true"])
def test_a_high_precision_wgrad_is_known_to_be_dead(value: Any) -> None:
    imported = accelerate.import_(te(override_linear_precision=value))
    assert imported.config.fp8_wgrad is True
    assert reasons(imported, "fp8_config.override_linear_precision") == ["dead knob"]


def test_interval_is_dead() -> None:
    assert reasons(accelerate.import_(te(interval=1)), "fp8_config.interval") == ["dead knob"]


@pytest.mark.parametrize("recipe", ["bf16_with_fp8_subchannel_scaling_mixed", "nvfp4"])
def test_schemes_without_a_back_end_are_not_written(recipe: str) -> None:
    exported = accelerate.export(REGISTRY.get(recipe))
    assert exported.payload["mixed_precision"] == "bf16"
    assert "unsupported" in reasons(exported, "fp8") + reasons(exported, "fp4")


@pytest.mark.parametrize("backend", ["AO", "torchao", "MSAMP", None])
def test_other_back_ends_than_transformer_engines_are_not_mapped(backend: str | None) -> None:
    block = {"backend": backend} if backend else {}
    imported = accelerate.import_({"mixed_precision": "fp8", "fp8_config": {**block, "opt_level": "O1"}})
    assert (imported.config.fp8, imported.semantics, imported.recipe) == (None, "amp_o1", None)
    (loss,) = (loss for loss in imported.unmapped if loss.field == "fp8_config.backend")
    assert (loss.reason, loss.detail.partition(":")[0]) == ("unsupported", "not mapped")
    assert reasons(imported, "fp8_config.opt_level") == ["unsupported"]


def test_fsdp_reduces_in_the_compute_dtype() -> None:
    imported = accelerate.import_({"mixed_precision": "bf16", "distributed_type": "FSDP", "fsdp_config": {}})
    assert (imported.semantics, imported.config.grad_reduce_in_fp32) == ("fsdp_policy", False)


def test_deepspeed_makes_it_o2() -> None:
    payload = {"mixed_precision": "bf16", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    imported = accelerate.import_(payload)
    assert (imported.semantics, mode_of(imported.config)) == ("megatron_o2", "bf16")
    assert reasons(imported, "deepspeed_config.deepspeed_config_file") == ["unsupported"]


@pytest.mark.parametrize("precision", [None, "no", "bf16"])
@pytest.mark.parametrize("key", ["deepspeed_config_file", "hf_ds_config"])
def test_a_file_for_deepspeed_decides_the_dtype_too(precision: str | None, key: str) -> None:
    said = {"mixed_precision": precision} if precision else {}
    imported = accelerate.import_({"distributed_type": "DEEPSPEED", "deepspeed_config": {key: "z.json"}, **said})
    assert imported.recipe is None
    (loss,) = (loss for loss in imported.unmapped if loss.field == f"deepspeed_config.{key}")
    base = "bf16" if precision == "bf16" else "fp32"
    assert loss.detail == (
        f"this file decides about the dtype, loss scale and reduction; {base} runs where it has no block for it, "
        "or says auto (accelerate 1.15.0)"
    )


@pytest.mark.parametrize(("block", "runs"), [("bf16", "bf16"), ("fp16", "fp16"), ("zero_optimization", "no")])
def test_the_real_accelerator_goes_by_deepspeeds_file(block: str, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("accelerate.state", reason="needs accelerate")
    kind = state.AcceleratorState
    plugin = type("Plugin", (), {"deepspeed_config": {block: {"enabled": True}}})
    told = {"distributed_type": state.DistributedType.DEEPSPEED, "deepspeed_plugin": plugin, "_mixed_precision": "no"}
    for name, value in told.items():
        monkeypatch.setattr(kind, name, value, raising=False)
    assert kind.__new__(kind).mixed_precision == runs


@pytest.mark.parametrize("block", ["fsdp_config", "deepspeed_config"])
def test_a_template_without_a_precision_is_recognised(block: str) -> None:
    kind = block.partition("_")[0].upper()
    document = Document.of_text(f"distributed_type: {kind}\n{block}:\n  zero_stage: 1\n", "launch.yaml")
    (run,) = runs_of(document)
    assert (run.system.name, run.imported.recipe, run.imported.mode_is_stated) == ("accelerate", None, False)
    assert run.evidence == f"has `distributed_type` and `{block}`, which `accelerate launch` reads"
    assert (
        run.imported.decided_by == "the program that is launched (accelerate 1.15.0 takes no where that says nothing)"
    )
    assert run.imported.assume_default().recipe == "fp32"


def test_fp16_on_a_cpu_is_fp32_and_said_so() -> None:
    assert "semantics" in reasons(accelerate.import_({"mixed_precision": "fp16", "use_cpu": True}), "use_cpu")


def test_a_compile_back_end_is_reported() -> None:
    payload = {"mixed_precision": "bf16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    assert reasons(accelerate.import_(payload), "dynamo_config.dynamo_backend") == ["unsupported"]
    assert reasons(accelerate.import_({**payload, "dynamo_config": {"dynamo_backend": "NO"}}), "dynamo_backend") == []


def test_a_bare_no_is_taken_for_the_word() -> None:
    imported = accelerate.import_(yaml.safe_load("mixed_precision: no"))
    assert (imported.semantics, imported.config.stated) == ("unstated", frozenset())
    decides = "the dtype that the model is loaded in, since mixed_precision no only means no autocast,"
    assert imported.decided_by == decides
    assert imported.assume_default().recipe == "fp32"
    assert reasons(imported, "mixed_precision") == ["approximated"]
    assert reasons(accelerate.export(REGISTRY.get("fp32")), "fp32") == ["implied default"]


def test_the_real_launcher_fails_on_a_bare_no(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install precision-bridge[interop]")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\nmixed_precision: no\n")
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "x.py"])
    checked, _, _ = _validate_launch_command(arguments)
    with pytest.raises(AttributeError, match="lower"):
        prepare_simple_launcher_cmd_env(checked)


@pytest.mark.parametrize(
    ("payload", "mode", "told"),
    [
        ({"fp16": True}, "fp16", []),
        ({"fp16": "no"}, "fp16", []),  # the loader asks whether it is true, and a word in quotes is
        ({"fp16": False}, "fp32", []),
        ({"mixed_precision": "bf16", "fp16": True}, "fp32", ["dead knob"]),
        ({"mixed_precision": None, "fp16": True}, "fp32", ["dead knob"]),
    ],
)
def test_mixed_precision_wins_over_the_old_fp16(payload: dict[str, Any], mode: str, told: list[str]) -> None:
    imported = accelerate.import_(payload)
    assert mode_of(imported.config) == mode
    assert reasons(imported, "fp16") == told
    assert told or "fp16" in imported.mapped


@pytest.mark.parametrize(
    ("around", "semantics"),
    [
        ({"distributed_type": "NO", "deepspeed_config": {}, "fsdp_config": {}}, "amp_o1"),
        ({"distributed_type": False}, "amp_o1"),  # a bare NO
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_version": 2}}, "amp_o1"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "fsdp_policy"),
        ({"distributed_type": "DEEPSPEED", "fsdp_config": {"fsdp_version": 2}}, "megatron_o2"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_policy"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "megatron_o2"),
        ({"deepspeed_config": {"hf_ds_config": "z.json"}}, "megatron_o2"),
    ],
)
def test_what_shards_is_what_the_launcher_goes_by(around: dict[str, Any], semantics: str) -> None:
    imported = accelerate.import_({"mixed_precision": "bf16", **around})
    assert imported.semantics == semantics
    unread = around.get("fsdp_config") and semantics != "fsdp_policy"
    assert reasons(imported, "fsdp_config") == (["dead knob"] if unread else [])


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"mixed_precision": "fp32"}, "mixed_precision: must be 'no', 'fp16', 'bf16' or 'fp8', got 'fp32'"),
        ({"mixed_precision": 16}, "mixed_precision: must be a string, got 16"),
        ({"mixed_precision": True}, "mixed_precision: must be a string, got True"),
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "X"}},
            r"fp8_config\.backend: must be 'TE', 'AO' or 'MSAMP'",
        ),
    ],
)
def test_nonsense_is_one_sentence(payload: Any, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        accelerate.import_(payload)


def test_the_environment_is_read_by_its_own_names() -> None:
    imported = accelerate.import_(
        {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_AMAX_HISTORY_LEN": "32"}
    )
    assert imported.config.fp8_amax_history_len == 32


def test_only_the_arguments_form_can_say_the_scale() -> None:
    config = MixedPrecisionConfig.from_dict(
        {
            "fp16": True,
            "params_dtype": "fp32",
            "autocast_enabled": True,
            "autocast_dtype": "fp16",
            "initial_loss_scale": 8,
        }
    )
    assert reasons(accelerate.export(config), "initial_loss_scale") == ["unsupported"]
    exported = accelerate.export(config, form="arguments")
    assert exported.payload["GradScalerKwargs"]["init_scale"] == 8.0
    assert "initial_loss_scale" in exported.mapped


def test_the_real_launcher_loads_what_is_written(tmp_path: Path) -> None:
    arguments = pytest.importorskip("accelerate.commands.config.config_args", reason="needs accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate.SYSTEM.write(accelerate.export(REGISTRY.get("bf16_mixed")).payload))
    assert arguments.load_config_from_file(str(path)).mixed_precision == "bf16"


def test_an_environment_file_is_read() -> None:
    text = "# of the job\nexport ACCELERATE_MIXED_PRECISION='bf16' # BF16\nHOME=/root\n"
    (run,) = runs_of(Document.of_text(text, "job.env"))
    assert (run.system.name, run.imported.recipe) == ("accelerate", "bf16_autocast_mixed")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_megatron_lm_casts_the_weights(precision: str) -> None:
    imported = accelerate.import_({"mixed_precision": precision, "distributed_type": "MEGATRON_LM"})
    assert (imported.semantics, mode_of(imported.config)) == ("megatron_o2", precision)
    assert imported.config.autocast_enabled in (None, False)
    assert reasons(imported, "distributed_type") == ["semantics"]


def test_a_policy_in_a_file_is_dead() -> None:
    block = {"fsdp_mixed_precision_policy": "fp32"}
    payload = {"mixed_precision": "bf16", "distributed_type": "FSDP", "fsdp_config": block}
    imported = accelerate.import_(payload)
    assert imported.config.grad_reduce_in_fp32 is False
    assert reasons(imported, "fsdp_config.fsdp_mixed_precision_policy") == ["dead knob"]


def test_fp16_under_deepspeed_has_deepspeeds_scale() -> None:
    imported = accelerate.import_({"mixed_precision": "fp16", "deepspeed_config": {"zero_stage": 2}})
    assert (imported.config.initial_loss_scale, imported.recipe) == (65536, None)
    assert reasons(imported, "deepspeed_config.fp16.loss_scale") == ["implied default"]


@pytest.mark.parametrize("key", ["tf32", "torch_dtype", "fp16_backend"])
def test_a_key_that_accelerate_refuses_is_told(key: str) -> None:
    assert reasons(accelerate.import_({"mixed_precision": "bf16", key: True}), key) == ["dead knob"]


def test_false_overrides_no_gemm_as_in_accelerates_template() -> None:
    block = {"backend": "TE", "override_linear_precision": False}
    imported = accelerate.import_({"mixed_precision": "fp8", "fp8_config": block})
    assert imported.mapped["fp8_config.override_linear_precision"] == ()
    assert imported.config.fp8_wgrad

"""Lightning: precision strings and LightningCLI files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.errors import BridgeError, PayloadError
from bridge.interop import lightning
from bridge.interop.conversion import runs_of
from bridge.interop.reading.document import Document
from bridge.precision.mode import mode_of
from bridge.registry.registry import REGISTRY
from tests.interop.properties import reasons

SAMPLE = Path(__file__).parent / "samples" / "lightning" / "cli.yaml"
TE = "lightning.pytorch.plugins.TransformerEnginePrecision"


@pytest.mark.parametrize(
    ("word", "mode", "semantics"),
    [
        (None, "fp32", "fp32"),
        (32, "fp32", "fp32"),
        ("32-true", "fp32", "fp32"),
        (16, "fp16", "amp_o1"),
        ("16-mixed", "fp16", "amp_o1"),
        ("bf16-true", "bf16", "true"),
        ("16-true", "fp16", "true"),
        ("64-true", "fp32", "fp32"),
        ("transformer-engine", "bf16", "true"),
        ("transformer-engine-float16", "fp16", "true"),
    ],
)
def test_every_string(word: Any, mode: str, semantics: str) -> None:
    imported = lightning.import_(word)
    assert (mode_of(imported.config), imported.semantics) == (mode, semantics)


@pytest.mark.parametrize("word", ["bf16", "bf16-mixed"])
def test_bf16_mixed_is_autocast_here_and_o2_in_nemo(word: str) -> None:
    imported = lightning.import_(word)
    assert (imported.semantics, imported.recipe) == ("amp_o1", "bf16_autocast_mixed")


@pytest.mark.parametrize("word", ["fp8", "fp16-mixed", "BF16-mixed", "tf32", "", True])
def test_other_strings_are_refused(word: Any) -> None:
    with pytest.raises(BridgeError):
        lightning.import_(word)


def test_fp16_becomes_bf16_on_a_cpu() -> None:
    imported = lightning.import_({"precision": "16-mixed", "accelerator": "cpu"})
    assert imported.recipe == "bf16_autocast_mixed"
    assert reasons(imported, "precision") == ["semantics"]


def strategy(name: str, **arguments: Any) -> dict[str, Any]:
    return {"strategy": {"class_path": f"lightning.pytorch.strategies.{name}", "init_args": arguments}}


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        (strategy("FSDPStrategy", mixed_precision={"class_path": "x"}), "mixed_precision", "unsupported"),
        (strategy("DeepSpeedStrategy", config="ds.json"), "config", "unsupported"),
        (strategy("DeepSpeedStrategy", hysteresis=4), "hysteresis", "unsupported"),
        (strategy("DeepSpeedStrategy", loss_scale=8), "loss_scale", "unsupported"),
        (strategy("DDPStrategy", ddp_comm_hook="x.fp16_compress_hook"), "ddp_comm_hook", "unsupported"),
    ],
)
def test_other_arguments_of_a_strategy_are_reported(arguments: dict[str, Any], name: str, reason: str) -> None:
    imported = lightning.import_({"precision": "bf16-mixed", **arguments})
    assert reasons(imported, f"strategy.init_args.{name}") == [reason]


TRAINERS = ("lightning.pytorch.trainer.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer")


@pytest.mark.parametrize(
    "target", [*TRAINERS, "lightning.Trainer", "lightning.fabric.Fabric", "lightning_fabric.Fabric"]
)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("precision", ["bf16-mixed", None])
def test_a_trainer_is_known_by_its_class(target: str, nested: bool, precision: str | None) -> None:
    trainer = {"_target_": target, "accelerator": "gpu", **({"precision": precision} if precision else {})}
    payload = {"trainer": trainer, "model": {"_target_": "my.Model"}} if nested else trainer
    document = Document.of_text(yaml.safe_dump(payload), "run.yaml")
    (run,) = runs_of(document)
    assert (run.system.name, run.evidence) == ("lightning", f"makes `{target}`")
    assert run.imported.recipe == ("bf16_autocast_mixed" if precision else "fp32")
    name = "trainer.precision" if nested else "precision"
    if precision:
        assert name in run.imported.mapped
    else:
        assert reasons(run.imported, name) == ["implied default"]


@pytest.mark.parametrize("target", ["torch.nn.Linear", "nemo.lightning.Trainer", "lightning.pytorch.callbacks.Timer"])
def test_other_classes_are_no_trainer(target: str) -> None:
    document = Document.of_text(f"trainer:\n  _target_: {target}\n", "run.yaml")
    with pytest.raises(BridgeError, match="no system is recognised"):
        runs_of(document)


def test_hydras_strategies_are_read() -> None:
    sharded = {"_target_": "lightning.pytorch.strategies.FSDPStrategy", "mixed_precision": {"_target_": "x"}}
    imported = lightning.import_({"precision": "bf16-mixed", "strategy": sharded})
    assert imported.semantics == "fsdp_policy"
    assert reasons(imported, "strategy.mixed_precision") == ["unsupported"]
    assert lightning.import_({"precision": "bf16-mixed", "strategy": {"name": "fsdp"}}).semantics == "amp_o1"


def test_apex_is_named_and_refused_where_it_casts() -> None:
    unread = lightning.import_({"precision": 32, "amp_backend": "native", "amp_level": "O2"})
    assert unread.recipe == "fp32"
    assert (reasons(unread, "amp_level"), "amp_backend" in unread.mapped) == (["dead knob"], True)
    with pytest.raises(PayloadError, match="amp_backend: must be native, since Apex casts otherwise than torch"):
        lightning.import_({"precision": 16, "amp_backend": "apex"})


def test_settings_beside_the_trainer_that_look_like_precision_are_reported() -> None:
    imported = lightning.import_(
        {"matmul_precision": "high", "trainer": {"precision": 32, "half": True}, "fp16": False}
    )
    assert reasons(imported, "matmul_precision") == reasons(imported, "trainer.half") == ["unsupported"]
    assert "fp16" in imported.mapped


def test_a_file_under_fsdp_reduces_in_bf16() -> None:
    imported = lightning.import_(yaml.safe_load(SAMPLE.read_text()))
    assert (imported.semantics, imported.config.grad_reduce_in_fp32) == ("fsdp_policy", False)
    assert reasons(imported, "trainer.precision.reduce_dtype") == ["implied default"]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"plugins": [{"class_path": TE}]}, "plugins: a precision plugin is an object that a program makes"),
        (
            {"precision": "bf16-mixed", "plugins": {"class_path": "x.HalfPrecision"}},
            "and is not read, got {'class_path'",
        ),
    ],
)
def test_a_precision_plugin_is_not_read(payload: Any, message: str) -> None:
    with pytest.raises(BridgeError) as caught:
        lightning.import_(payload)
    assert message in str(caught.value)


def test_transformer_engine_without_a_recipe_has_its_own_defaults() -> None:
    config = lightning.import_("transformer-engine").config
    assert (config.fp8, config.fp8_recipe) == ("hybrid", "delayed")
    assert (config.fp8_amax_history_len, config.fp8_amax_compute_algo, config.fp8_margin) == (1024, "max", 0)


def test_delayed_scaling_leaves_as_a_plugin_and_other_schemes_do_not() -> None:
    payload = lightning.export(REGISTRY.get("bf16_with_fp8_delayed_scaling_mixed")).payload
    assert payload["plugins"][0]["init_args"]["recipe"]["fp8_format"] == "HYBRID"
    exported = lightning.export(REGISTRY.get("bf16_with_fp8_current_scaling_mixed"))
    assert exported.payload == {"precision": "bf16-mixed"}
    assert reasons(exported, "fp8") == ["unsupported"]


def test_under_fsdp_megatrons_bf16_is_carried() -> None:
    exported = lightning.export(REGISTRY.get("bf16_mixed"), strategy="fsdp")
    assert "bf16" in exported.mapped
    assert reasons(exported, "grad_reduce_in_fp32") == ["unsupported"]


def test_deepspeeds_scale_is_lightnings_own() -> None:
    imported = lightning.import_({"precision": "16-mixed", "strategy": "deepspeed_stage_2"})
    assert (imported.semantics, imported.config.initial_loss_scale) == ("megatron_o2", 65536)


def test_a_strategys_own_policy_leaves_no_recipe() -> None:
    policy = {"class_path": "torch.distributed.fsdp.MixedPrecision", "init_args": {}}
    imported = lightning.import_({"precision": "32-true", **strategy("FSDPStrategy", mixed_precision=policy)})
    assert imported.recipe is None


def test_model_parallel_is_autocast_over_fp32() -> None:
    assert lightning.import_({"precision": "bf16-mixed"}, strategy="modelparallel").semantics == "amp_o1"


def test_fp64_has_no_recipe_and_te_reports_its_format() -> None:
    assert lightning.import_("64-true").recipe is None
    imported = lightning.import_("transformer-engine")
    assert reasons(imported, "recipe.fp8_format") == ["implied default"]
    assert [loss.value for loss in imported.unmapped if loss.field == "precision"] == ["transformer-engine"]

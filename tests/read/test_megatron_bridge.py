"""Megatron Bridge: names, mappings of both shapes, and the run configs in its checkpoints."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given

from bridge.errors import PayloadError, UnknownRecipeError
from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.read.foreign.effective_fields import compute_effective_fields
from bridge.read.megatron_bridge import importer as megatron_bridge
from bridge.read.text.document import Document
from bridge.registry.mixed_precision_config import MixedPrecisionConfig, find_config_faults
from bridge.registry.registry import REGISTRY, get_mixed_precision_config
from tests.read.properties import check_export, check_return, configs, reasons

SAMPLES = Path(__file__).parent / "samples"
TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
NAMES = [recipe.name for recipe in REGISTRY.recipes() if "misnamed" not in recipe.tags]


@given(config=configs())
def test_every_field_but_tf32_and_autocast_returns(config: MixedPrecisionConfig) -> None:
    exported = megatron_bridge.export(config)
    check_export(config, exported)
    autocast = {"autocast_enabled", "params_dtype"} if config.autocast_enabled else set()
    assert {loss.field for loss in exported.unmapped} <= {"tf32", *autocast}
    check_return(config, exported, megatron_bridge.import_(exported.payload))


@pytest.mark.parametrize("shape", ["fields", "strings", "name"])
def test_every_recipe_returns_by_name_in_every_shape(shape: str) -> None:
    for name in NAMES:
        text = megatron_bridge.SYSTEM.write(megatron_bridge.export(REGISTRY.get(name), shape=shape).payload)
        assert megatron_bridge.import_(Document.from_text(text, "mp.yaml").content).recipe == name


def test_saved_runs_spell_dtypes_as_targets_and_overrides_as_strings() -> None:
    config = REGISTRY.get("bf16_mixed")
    saved = megatron_bridge.export(config).payload["mixed_precision"]
    assert saved["params_dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    assert saved["_target_"] == TARGET
    override = megatron_bridge.export(config, shape="strings").payload["mixed_precision"]
    assert override["params_dtype"] == "torch.bfloat16"
    assert "_target_" not in override
    assert not {"fp8_param", "fp4_param"} & set(saved), "only one of the two names: the order of the keys would decide"


def test_the_release_of_python_3_11_has_no_fp4_param_gather() -> None:
    exported = megatron_bridge.export(REGISTRY.get("bf16_with_nvfp4_mixed"), bridge_version="0.3.1")
    assert "fp4_param_gather" not in exported.payload["mixed_precision"]
    assert reasons(exported, "fp4_param_gather") == ["unsupported"]


def test_a_release_with_two_digits_has_the_fields_of_fp4() -> None:
    exported = megatron_bridge.export(REGISTRY.get("bf16_with_nvfp4_mixed"), bridge_version="0.10.0")
    assert "fp4_param_gather" in exported.payload["mixed_precision"]


def test_a_release_that_is_no_number_is_refused() -> None:
    with pytest.raises(PayloadError, match="bridge_version: must begin with a number, got 'main'"):
        megatron_bridge.export(REGISTRY.get("bf16_mixed"), bridge_version="main")


@pytest.mark.parametrize(
    "spelling", ["torch.bfloat16", "bf16", "bfloat16", "bf16-mixed", {"_target_": "torch.bfloat16", "_call_": False}]
)
def test_dtypes_are_read_by_field_in_every_spelling(spelling) -> None:
    config = megatron_bridge.import_({"bf16": True, "params_dtype": spelling, "autocast_dtype": spelling}).config
    assert config.to_dict()["params_dtype"] == config.to_dict()["autocast_dtype"] == "bf16"


def test_a_constructor_takes_fp8_param_gather_alone() -> None:
    values = {"_target_": TARGET, "bf16": True, "fp8": "hybrid", "fp8_param": True}
    imported = megatron_bridge.import_({"mixed_precision": values})
    assert imported.config.fp8_param_gather is False
    assert reasons(imported, "mixed_precision.fp8_param") == ["dead knob"]
    assert megatron_bridge.import_({"fp8": "hybrid", "bf16": True, "fp8_param": True}).config.fp8_param_gather is True


@pytest.mark.parametrize(
    ("keys", "on"), [(("fp8_param_gather", "fp8_param"), False), (("fp8_param", "fp8_param_gather"), True)]
)
def test_the_last_override_of_the_two_names_decides(keys, on: bool) -> None:
    values = {key: True if key == "fp8_param_gather" else None for key in keys}
    imported = megatron_bridge.import_({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", **values})
    assert imported.config.fp8_param_gather is on


def test_first_and_last_layers_alone_keep_none() -> None:
    imported = megatron_bridge.import_({"bf16": True, "fp8": "hybrid", "first_last_layers_bf16": True})
    assert imported.config.num_layers_at_start_in_bf16 == 0
    assert reasons(imported, "num_layers_at_start_in_bf16") == ["implied default"]
    assert find_config_faults(imported.config)


def test_defaults_that_decide_are_implied() -> None:
    imported = megatron_bridge.import_({"bf16": True, "fp8": "hybrid"})
    assert (imported.config.fp8_recipe, imported.config.grad_reduce_in_fp32) == ("tensorwise", True)
    assert reasons(imported, "fp8_recipe") == reasons(imported, "grad_reduce_in_fp32") == ["implied default"]


def test_a_run_config_of_a_checkpoint_is_read_and_nothing_in_it_is_made() -> None:
    document = Document.load(SAMPLES / "run_config.yaml")
    imported = megatron_bridge.import_(document.content)
    assert imported.recipe == "bf16_with_fp8_delayed_scaling_mixed"
    assert {loss.field: loss.reason for loss in imported.unmapped} == {
        "model.fp8_recipe": "dead knob",
        "ddp.grad_reduce_in_fp32": "dead knob",
    }
    more = {name: imported.config.to_dict().get(name) for name in MEGATRON_FIELDS if name in imported.config.stated}
    assert more == {"fp32_residual_connection": True, "exp_avg_dtype": "bf16"}
    assert imported.mapped["optimizer.main_params_dtype"] == ()


def test_fields_of_megatrons_own_go_to_the_sections_that_hold_them_and_come_back() -> None:
    stated = {"exp_avg_dtype": "fp8", "use_precision_aware_optimizer": True, "moe_router_dtype": "fp32"}
    config = get_mixed_precision_config("bf16_mixed").override("command line", **stated)
    for shape, dtype in (("fields", {"_target_": "torch.uint8", "_call_": False}), ("strings", "torch.uint8")):
        report = megatron_bridge.export(config, shape=shape)
        assert report.unmapped == ()
        assert report.payload["model"] == {"moe_router_dtype": "fp32"}
        assert report.payload["optimizer"] == {"use_precision_aware_optimizer": True, "exp_avg_dtype": dtype}
        back = megatron_bridge.import_(report.payload)
        assert (back.recipe, back.unmapped) == ("bf16_mixed", ())
        assert compute_effective_fields(back.config) == compute_effective_fields(config)


def test_without_mixed_precision_the_owners_decide() -> None:
    payload = {
        "mixed_precision": None,
        "model": {"bf16": True, "params_dtype": "torch.bfloat16", "enable_autocast": False},
    }
    imported = megatron_bridge.import_(
        payload | {"ddp": {"grad_reduce_in_fp32": True}, "optimizer": {"loss_scale": None}}
    )
    assert imported.recipe == "bf16_mixed"
    assert reasons(imported, "mixed_precision") == ["implied default"]


def test_a_misnamed_recipe_is_what_it_does() -> None:
    imported = megatron_bridge.import_("nanov2-bf16-with-fp8-current-scaling-mixed")
    assert imported.config.fp8_recipe == "blockwise"
    assert reasons(imported, "mixed_precision") == ["semantics"]


def test_a_name_that_is_not_registered_there_is_refused() -> None:
    with pytest.raises(UnknownRecipeError, match="16-mixed"):
        megatron_bridge.import_({"mixed_precision": "16-mixed"})


def test_an_unknown_field_is_a_dead_knob() -> None:
    assert reasons(megatron_bridge.import_({"bf16": True, "fp8_recpie": "delayed"}), "fp8_recpie") == ["dead knob"]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (3, "megatron-bridge: must be a mapping or a recipe's name, got 3. Give the parsed contents of the file."),
        (
            {"mixed_precision": [1]},
            "mixed_precision: must be a recipe's name or a mapping of fields, got [1]. Correct it in the file.",
        ),
        (
            {"_target_": "os.system", "bf16": True},
            "_target_: must name MixedPrecisionConfig, got 'os.system'. Nothing was instantiated.",
        ),
        ({"bf16": "maybe"}, "bf16: must be true or false, got 'maybe'. Correct the value there."),
        (
            {"bf16": True, "params_dtype": "bf61"},
            "params_dtype: must be the name of a dtype, got 'bf61'. Did you mean 'bf16'?",
        ),
    ],
)
def test_what_is_no_configuration_is_refused(payload, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        megatron_bridge.import_(payload)
    assert str(caught.value) == message


def test_omegaconf_reads_what_is_written() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    text = megatron_bridge.SYSTEM.write(megatron_bridge.export(REGISTRY.get("bf16_mixed")).payload)
    assert omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(text)) == yaml.safe_load(text)


def test_without_a_recipe_the_defaults_are_megatron_cores_own() -> None:
    imported = megatron_bridge.import_({"model": {"bf16": True, "fp8": "hybrid", "fp8_amax_history_len": 16}})
    config = imported.config
    assert (config.fp8_recipe, config.fp8_amax_history_len, config.grad_reduce_in_fp32) == ("delayed", 16, False)
    implied = {loss.field for loss in imported.unmapped if loss.reason == "implied default"}
    assert {"model.fp8_recipe", "model.fp8_margin", "ddp.grad_reduce_in_fp32"} <= implied
    assert "model.fp8_amax_history_len" not in implied


@pytest.mark.parametrize(("opened", "reported"), [(None, ["semantics"]), (False, ["semantics"]), (True, [])])
def test_autocast_runs_only_where_megatrons_own_switch_is_on(opened: bool | None, reported: list[str]) -> None:
    payload = megatron_bridge.export(REGISTRY.get("bf16_autocast_mixed")).payload
    payload |= {} if opened is None else {"model": {"enable_autocast": opened}}
    assert reasons(megatron_bridge.import_(payload), "mixed_precision.autocast_enabled") == reported

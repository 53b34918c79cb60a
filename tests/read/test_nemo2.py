"""NeMo 2.x: the plugin with its own defaults, in Python and as a mapping, and the recipes' names."""

from pathlib import Path

import pytest
from hypothesis import given

from bridge.errors import PayloadError
from bridge.precision.mode import get_mode
from bridge.precision.statements import is_stated
from bridge.read.nemo import nemo2
from bridge.read.text.document import Document
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.read.properties import check_export, check_return, configs, reasons

SAMPLES = Path(__file__).parent / "samples"


@given(config=configs())
def test_what_is_exported_is_carried_or_reported_and_returns(config: MixedPrecisionConfig) -> None:
    exported = nemo2.export(config)
    check_export(config, exported)
    check_return(config, exported, nemo2.import_(exported.payload))


def test_half_precision_creates_weights_in_fp32_unless_said() -> None:
    imported = nemo2.import_({"precision": "bf16-mixed"})
    assert imported.config.to_dict()["params_dtype"] == "fp32"
    assert imported.config.to_dict()["pipeline_dtype"] == "bf16"
    assert reasons(imported, "params_dtype") == ["implied default"]
    assert nemo2.import_({"precision": "16-mixed"}).config.to_dict()["pipeline_dtype"] == "fp32"


@pytest.mark.parametrize("said", ["bf16-true", "32-true", "64", "bf61"])
def test_an_unknown_precision_silently_trains_in_fp32(said: str) -> None:
    imported = nemo2.import_({"precision": said})
    assert get_mode(imported.config) == "fp32"
    assert reasons(imported, "precision") == ["semantics"]


def test_the_plugins_scheme_is_delayed() -> None:
    imported = nemo2.import_({"precision": "bf16-mixed", "fp8": "hybrid"})
    assert (imported.config.fp8_recipe, imported.config.fp8_amax_history_len) == ("delayed", 1)
    assert reasons(imported, "fp8_recipe") == ["implied default"]


def test_two_names_of_one_setting_must_agree() -> None:
    both = {"precision": "bf16-mixed", "fp8": "hybrid", "fp8_params": True}
    assert nemo2.import_(both).config.fp8_param_gather is True
    with pytest.raises(PayloadError, match="NeMo raises where they differ"):
        nemo2.import_({**both, "fp8_param_gather": False})


def test_loss_scales_are_prefixed() -> None:
    payload = {"precision": "16-mixed", "fp16_loss_scale": 128, "fp16_hysteresis": 3}
    config = nemo2.import_(payload).config
    assert (config.loss_scale, config.hysteresis) == (128, 3)
    assert nemo2.export(MixedPrecisionConfig(fp16=True, loss_scale=128)).payload["fp16_loss_scale"] == 128


def test_fp4_weights_cannot_be_said() -> None:
    exported = nemo2.export(REGISTRY.get("bf16_with_nvfp4_mixed"))
    assert reasons(exported, "fp4_param_gather") == ["unsupported"]
    assert exported.payload["fp4"] == "e2m1"


@pytest.mark.parametrize(("theirs", "ours"), nemo2.RECIPE_ARGUMENTS.items())
def test_recipes_are_known_by_name(theirs: str, ours: str) -> None:
    imported = nemo2.import_(theirs)
    assert imported.recipe == ours
    assert reasons(imported, "fp8") == (["implied default"] if "mxfp8" in theirs else [])


def test_mxfp8_recipes_have_the_values_of_2_6() -> None:
    imported = nemo2.import_("bf16_with_mxfp8_mixed")
    config = imported.config
    assert (config.fp8, config.fp8_param_gather, config.reuse_grad_buf_for_mxfp8_param_ag) == ("e4m3", True, True)
    (loss,) = (loss for loss in imported.unmapped if loss.field == "fp8")
    assert loss.detail == "the recipe's value since NeMo 2.6; it was hybrid up to 2.5"


def test_python_is_read_and_never_run(capfd) -> None:
    first, second, third = nemo2.import_all(Document.load(SAMPLES / "nemo2_plugin.py"))
    assert capfd.readouterr().out == ""
    assert (first.label, first.config.to_dict()["params_dtype"]) == ("line 12, MegatronMixedPrecision", "bf16")
    assert [loss.value for loss in first.unmapped if loss.reason == "unsupported"] == ["config.reduce"]
    assert (second.config.fp16, second.config.initial_loss_scale) == (True, 65536)
    assert (third.config.fp8_recipe, third.config.fp8) == ("mxfp8", "e4m3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "plugin.py, line 1: must be Python; '(' was never closed. Correct it there."),
        (
            "print(1)",
            "plugin.py: must call MegatronMixedPrecision or one of NeMo's precision recipes, and "
            "calls neither. Give the file that does.",
        ),
        ("(" * 500, "plugin.py, line 1: must be Python; too many nested parentheses. Correct it there."),
        (
            "MegatronMixedPrecision()",
            "nemo2: MegatronMixedPrecision needs `precision`, got none. Give 'bf16-mixed', '16-mixed' or '32'.",
        ),
    ],
)
def test_python_that_says_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        nemo2.import_(Document.from_text(text, "plugin.py"))
    assert str(caught.value) == message


def test_the_plugin_is_found_in_a_saved_run() -> None:
    plugin = nemo2.export(REGISTRY.get("bf16_mixed")).payload
    assert nemo2.import_({"trainer": {"plugins": [plugin]}}).recipe == "bf16_mixed"


def python(text: str) -> Document:
    return Document(path="train.py", kind="python", text=text)


def test_what_is_assigned_after_the_constructor_is_reported() -> None:
    made = 'p = MegatronMixedPrecision("bf16-mixed")\np.fp8 = "hybrid"\np.grad_reduce_in_fp32 = False\n'
    imported = nemo2.import_(python(made))
    assert reasons(imported, "p.fp8") == reasons(imported, "p.grad_reduce_in_fp32") == ["unsupported"]
    (loss,) = [loss for loss in imported.unmapped if loss.field == "p.fp8"]
    assert loss.detail == "line 2: assigned after the constructor, which is not followed"
    assert nemo2.import_(python("r.plugins = bf16_mixed()\nr.plugins.fp8_margin = 3\n")).recipe is None


@pytest.mark.parametrize("argument", ["precision=args.precision", "args.precision", "**kw"])
def test_a_precision_that_only_the_run_decides_is_called_that(argument: str) -> None:
    with pytest.raises(PayloadError, match="as only the run decides it, got"):
        nemo2.import_(python(f"MegatronMixedPrecision({argument})"))


def test_positional_arguments_of_the_plugin_are_read_by_their_place() -> None:
    text = "MegatronMixedPrecision('bf16-mixed', torch.bfloat16, torch.bfloat16, None, False, False, 'hybrid')"
    imported = nemo2.import_(Document.from_text(text, "plugin.py"))
    said = imported.config.to_dict()
    assert (said["params_dtype"], said["pipeline_dtype"], said["grad_reduce_in_fp32"]) == ("bf16", "bf16", False)
    assert reasons(imported, "argument 7") == ["unsupported"]
    assert reasons(imported, "params_dtype") == reasons(imported, "autocast_dtype") == []


def test_null_is_the_plugins_own_default() -> None:
    imported = nemo2.import_({"precision": "bf16-mixed", "autocast_enabled": None, "fp8_recipe": None})
    assert not imported.config.autocast_enabled
    assert not is_stated(imported.config, "autocast_enabled")
    assert {"autocast_enabled", "fp8_recipe"} <= imported.mapped.keys()


def test_the_plugin_runs_without_autocast() -> None:
    imported = nemo2.import_({"precision": "32", "autocast_enabled": True, "autocast_dtype": "torch.bfloat16"})
    assert [str(loss) for loss in imported.unmapped if loss.field == "autocast_enabled"] == [
        "autocast_enabled=True (semantics): it runs without autocast: NeMo 2.6 copies fields of the same name, and "
        "Megatron's is enable_autocast. Set enable_autocast on the model's config there, or drop it."
    ]

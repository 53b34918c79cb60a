"""NeMo 2's own plugin and recipes, from its wheel: what they say is what we read, and what we write they take."""

import importlib.util
import logging
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from bridge.precision.coercion import TORCH_NAMES, parse_dtype
from bridge.precision.mode import get_mode
from bridge.read.nemo import nemo2
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from tests.read.properties import check_export, check_return, configs

NEMO = Path(sys.prefix) / "nemo" / "nemo"
PLUGIN = NEMO / "lightning" / "pytorch" / "plugins" / "mixed_precision.py"
RECIPES = NEMO / "collections" / "llm" / "recipes" / "precision" / "mixed_precision.py"
pytestmark = pytest.mark.skipif(not PLUGIN.exists(), reason="needs NeMo's files beside the environment: make setup")
DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")


class Recorded(SimpleNamespace):
    """Stands in for nemo_run.Config, which only remembers a class and its arguments."""

    def __init__(self, _: type, **arguments: Any) -> None:
        super().__init__(**arguments)

    def __class_getitem__(cls, _: Any) -> type:
        return cls


def loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nemo() -> Any:
    """The two real modules; of the packages around them only NeMo's logger and nemo_run's Config are stand-ins."""
    pytest.importorskip("lightning", reason="needs lightning: pip install precision-bridge[interop]")
    names = ("nemo", "nemo.utils", "nemo.lightning", "nemo.lightning.pytorch", "nemo.lightning.pytorch.plugins")
    packages = {name: ModuleType(name) for name in (*names, "nemo_run")}
    packages["nemo.utils"].logging = logging.getLogger("nemo")
    packages["nemo_run"].Config = Recorded
    packages["nemo_run"].cli = SimpleNamespace(factory=lambda function: function)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in packages.items():
            patch.setitem(sys.modules, name, module)
        plugin = loaded("nemo.lightning.pytorch.plugins.mixed_precision", PLUGIN)
        patch.setitem(sys.modules, plugin.__name__, plugin)
        yield SimpleNamespace(plugin=plugin.MegatronMixedPrecision, recipes=loaded("nemo_recipes", RECIPES))


def constructed(nemo: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the real plugin holds, in a recipe's words."""
    made = nemo.plugin(**arguments).dtype_config
    held = {field.name: getattr(made, field.name) for field in fields(made)}
    return {name: parse_dtype(value) if isinstance(value, torch.dtype) else value for name, value in held.items()}


def real(payload: dict[str, Any]) -> dict[str, Any]:
    """Our payload as Hydra's instantiation would hand it to the class."""
    dtypes = {name: getattr(torch, payload[name].removeprefix("torch.")) for name in DTYPES if name in payload}
    return {name: value for name, value in {**payload, **dtypes}.items() if name != "_target_"}


def agrees(held: dict[str, Any], config: MixedPrecisionConfig) -> dict[str, tuple[Any, Any]]:
    """Each stated field that the plugin holds with another value."""
    said = config.to_dict()
    return {name: (value, held[name]) for name, value in said.items() if name in held and held[name] != value}


@pytest.mark.parametrize("name", nemo2.RECIPE_ARGUMENTS)
def test_a_recipe_of_nemo_is_what_we_say_it_is(nemo: Any, name: str) -> None:
    arguments = vars(getattr(nemo.recipes, name)())
    held = constructed(nemo, arguments)
    written = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in arguments.items()}
    assert agrees(held, nemo2.import_(name).config) == {}
    assert agrees(held, nemo2.import_(written).config) == {}
    assert nemo2.import_(written).recipe == nemo2.import_(name).recipe == nemo2.RECIPE_ARGUMENTS[name]


def test_nemo_has_no_recipe_that_we_do_not_know(nemo: Any) -> None:
    theirs = {name for name, value in vars(nemo.recipes).items() if callable(value) and name.endswith("_mixed")}
    assert theirs == set(nemo2.RECIPE_ARGUMENTS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed"},
        {"precision": 32},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed", "fp8": "hybrid"},
        {"precision": "bf16", "fp8": "e4m3", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True},
        {"precision": "bf16", "fp8": "e4m3", "fp8_params": True},
    ],
)
def test_the_plugins_own_defaults_are_what_we_say_they_are(nemo: Any, arguments: dict[str, Any]) -> None:
    imported = nemo2.import_(arguments)
    held = constructed(nemo, arguments)
    held["fp32"] = held["fp32"] or not (held["fp16"] or held["bf16"])  # with no mode at all it trains in FP32
    assert agrees(held, imported.config) == {}
    assert get_mode(imported.config) == next((mode for mode in ("fp32", "fp16", "bf16") if held[mode]), "fp32")


def test_two_names_of_one_setting_that_differ_are_refused_by_both(nemo: Any) -> None:
    arguments = {"precision": "bf16", "fp8": "e4m3", "fp8_params": True, "fp8_param_gather": False}
    with pytest.raises(ValueError, match="conflicting values"):
        nemo.plugin(**arguments)
    with pytest.raises(ValueError, match="NeMo raises where they differ"):
        nemo2.import_(arguments)


@settings(suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_what_we_write_is_what_the_plugin_holds(nemo: Any, config: MixedPrecisionConfig) -> None:
    exported = nemo2.export(config)
    check_export(config, exported)
    held = constructed(nemo, real(exported.payload))
    lost = {loss.field for loss in exported.unmapped}
    assert {name for name in agrees(held, config) if name not in lost} <= {"fp8_param"}
    written = {
        name: f"torch.{TORCH_NAMES[held[row.field]]}" if name in DTYPES else held[row.field]
        for name, row in nemo2.SETTING_ROWS.items()
        if row.field is not None and name != "fp8_params"
    }
    precision = {"precision": exported.payload["precision"]}
    check_return(config, exported, nemo2.import_({**precision, **written}))

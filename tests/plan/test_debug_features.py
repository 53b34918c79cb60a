"""The features of Transformer Engine's debugger in the plan, held against the debugger's own code and its names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bridge import get_mixed_precision_config
from bridge.errors import RunConfigError
from bridge.plan.precision_plan import PrecisionPlan, make_plan
from bridge.precision.debug_features import DebugFeatures
from bridge.sync.prediction import predict

SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 256, "bf16": True}
NAMES = tuple(
    f"model.module.module.decoder.layers.{number}.{path}"
    for number in (1, 2, 12)
    for path in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.experts.linear_fc2")
)
SELECTIONS: tuple[dict[str, Any], ...] = (
    {"layer_name_regex_pattern": r".*(fc1|self_attention).*"},
    {"layer_name_regex_pattern": r"layers\.(1|2)\.", "layer_types": ["fc2"]},
    {"layer_types": ["fc1", "qkv"]},
    {"layer_types": ["all"]},
    {"layer_numbers": [1, "3-12"]},
    {"layer_numbers": "all", "layer_types": ["fc2"]},
    {"layer_numbers": [2], "layer_types": ["fc1"]},
)


def entry(layers: dict[str, Any], **features: Any) -> dict[str, Any]:
    return {"one": {"enabled": True, "layers": layers, "transformer_engine": features}}


def planned(content: Any, recipe: str = "fp8_delayed", **model: Any) -> PrecisionPlan:
    run = predict(get_mixed_precision_config(recipe), {"model": {**SHAPE, **model}})
    return make_plan(replace(run, features=DebugFeatures.from_content(content)))


def formats(plan: PrecisionPlan, layer: str, module: str) -> dict[str, tuple[str, str]]:
    (found,) = (one for one in plan.by_label[layer].modules if one.name == module)
    items = ("fprop", "dgrad", "wgrad", "input", "weight", "grad_output")
    return {row.item: (row.format, row.scale) for row in found.rows if row.item in items}


@pytest.fixture
def inspect() -> Iterator[Any]:
    """The debugger's manager of configs, empty before and after."""
    manager = pytest.importorskip("nvdlfw_inspect.config_manager", reason="needs nvdlfw-inspect: the extra [interop]")
    manager.ConfigManager.reset()
    yield manager
    manager.ConfigManager.reset()
    for name in [name for name in sys.modules if name.startswith("nvdlfw_inspect")]:
        del sys.modules[name]


@pytest.mark.parametrize("layers", SELECTIONS, ids=str)
def test_layers_are_chosen_as_the_debugger_chooses_them(inspect: Any, layers: dict[str, Any]) -> None:
    spec = inspect.ConfigSpec()
    spec.initialize({"enabled": True, "layers": layers})
    features = DebugFeatures.from_content(entry(layers, DisableFP8Layer={"enabled": True}))
    theirs = [name for name in NAMES if inspect.is_layer_in_cfg(name, spec)]
    assert [name for name in NAMES if features.find_changes(name)] == theirs
    assert theirs


def test_names_of_layers_are_those_that_the_debugger_gives_a_live_model() -> None:
    api = pytest.importorskip("nvdlfw_inspect.api", reason="needs nvdlfw-inspect: the extra [interop]")
    from tests.trainers.live import live

    logged: list[str] = []
    with live(model={"num_layers": 3}) as run, pytest.MonkeyPatch.context() as patch:
        logger = type("Silent", (), {"log_message": lambda _self, text, **_: logged.append(text)})()
        patch.setattr(api, "get_logger", lambda: logger)
        api.infer_and_assign_layer_names(run.model)
        theirs = {getattr(module, "name", "") for chunk in run.model for module in chunk.modules()}
        plan = planned({}, num_layers=3)
    names = {
        plan.paths.get_debug_name(layer.label, module.name)
        for layer in plan.layers
        for module in layer.modules
        if module.kind == "linear"
    }
    assert len(names) == 12
    assert names <= theirs


def test_a_disabled_layer_multiplies_in_the_mode_and_stays_stored_in_fp8() -> None:
    layers = {"layer_name_regex_pattern": r"layers\.2\..*fc1"}
    plan = planned(entry(layers, DisableFP8Layer={"enabled": True}), "bf16_with_mxfp8_mixed")
    high = formats(plan, "2", "linear_fc1")
    assert {high[gemm][0] for gemm in ("fprop", "dgrad", "wgrad")} == {"bf16"}
    assert formats(plan, "3", "linear_fc1")["fprop"][0] == "e4m3"
    before = planned({}, "bf16_with_mxfp8_mixed")
    assert plan.linears() == (before.linears()[0] - 1, before.linears()[1])


def test_single_gemms_multiply_in_the_mode() -> None:
    layers = {"layer_types": ["fc1"]}
    plan = planned(entry(layers, DisableQuantizationGEMM={"enabled": True, "gemms": ["wgrad"]}))
    rows = formats(plan, "2", "linear_fc1")
    assert (rows["fprop"], rows["dgrad"], rows["wgrad"]) == (("e4m3", ""), ("e5m2 x e4m3", ""), ("bf16", ""))
    assert rows["input"] == ("e4m3 / bf16", "tensor / none")


def test_fake_quantisation_multiplies_rounded_values_in_the_mode() -> None:
    struct = [{"gemm": "fprop", "tensors": ["activation", "weight"]}, {"gemm": "dgrad", "tensors": ["gradient"]}]
    settings = {"enabled": True, "quant_format": "FP8E5M2", "gemms_struct": struct}
    rows = formats(planned(entry({"layer_types": ["fc1"]}, FakeQuant=settings)), "2", "linear_fc1")
    assert (rows["fprop"][0], rows["dgrad"][0], rows["wgrad"][0]) == ("bf16", "bf16", "e5m2 x e4m3")
    assert rows["input"] == ("bf16 / e4m3", "none / tensor, rounded to e5m2 / none")


def test_a_scale_of_the_tensor_needs_delayed_scaling() -> None:
    content = entry({"layer_types": ["fc1"]}, PerTensorScaling={"gemms": ["dgrad"], "tensors": ["weight"]})
    assert formats(planned(content), "2", "linear_fc1")["dgrad"][0] == "e5m2 x e4m3"
    with pytest.raises(RunConfigError, match="PerTensorScaling: needs delayed scaling, and .* has mxfp8"):
        planned(content, "bf16_with_mxfp8_mixed")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (
            {"a": {"enabled": True, "layers": {"exact_layer_names": ["x"]}}},
            "a: exact_layer_names ends a run",
        ),
        ({"a": {"enabled": True, "layers": {"layer_numbers": 3}}}, "a: layer_numbers must be a list, got 3"),
        (
            {"a": {"enabled": True, "layers": {"layer_name_regex_pattern": "("}}},
            "a: layer_name_regex_pattern is no regular expression",
        ),
    ],
)
def test_a_file_that_the_debugger_refuses_is_named(content: Any, rule: str) -> None:
    with pytest.raises(RunConfigError, match=rule):
        DebugFeatures.from_content(content)


REFUSED = (
    ([1], r"debug features: must be a mapping of entries, got \[1\]"),
    ({"x": None}, "x: must be a mapping with enabled and layers, got None"),
    ({"x": {"layers": {"layer_types": ["fc1"]}}}, "x: must have enabled, got layers"),
    ({"x": {"enabled": False}}, "debug features: must have an entry that is on, and x has enabled: false"),
    ({"x": {"enabled": True}}, "x: layers must be a mapping with one of .*, got None"),
    ({"x": {"enabled": True, "layers": 5, "transformer_engine": "nope"}}, "x: layers must be a mapping .*, got 5"),
    ({"x": {"enabled": True, "layers": {}}}, r"x: layers must be a mapping with one of .*, got \{\}"),
    ({"x": {"enabled": True, "layers": {"layer_types": [5]}}}, r"x: layer_types must be a list of .*, got \[5\]"),
    (
        {"x": {"enabled": True, "layers": {"layer_types": ["fc1"]}, "transformer_engine": "nope"}},
        "x: transformer_engine must be a mapping of features, got 'nope'",
    ),
)


@pytest.mark.parametrize(("content", "rule"), REFUSED)
def test_what_the_debugger_refuses_when_it_reads_a_file_is_refused(inspect: Any, content: Any, rule: str) -> None:
    from types import SimpleNamespace

    with pytest.raises(RunConfigError, match=rule) as refused:
        DebugFeatures.from_content(content)
    assert "nvdlfw-inspect 0.2.2 raises an error. " in str(refused.value)
    registry = {name: SimpleNamespace(features={}) for name in ("base", "transformer_engine")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "get_logger", lambda: SimpleNamespace(log_message=lambda *_, **__: None))
        patch.setattr(inspect, "print_rank_0", lambda _text: None)
        with pytest.raises((AssertionError, TypeError)):
            inspect.ConfigManager._load_config(content, registry)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"gemms": ["fprop", "bogus"]}, "gemms must have GEMMs of fprop, dgrad, wgrad, got 'bogus'"),
        ({"gemms_struct": [{"gemm": "bogus"}]}, "gemms_struct must have GEMMs of fprop, dgrad, wgrad, got 'bogus'"),
        ({}, "gemms must be a list, got None"),
    ],
)
def test_a_gemm_that_there_is_not_is_refused(settings: dict[str, Any], rule: str) -> None:
    content = entry({"layer_types": ["fc1"]}, DisableFP8GEMM={"enabled": True, **settings})
    with pytest.raises(RunConfigError, match=f"debug features, one.DisableFP8GEMM: {rule}"):
        DebugFeatures.from_content(content)


def test_a_part_of_a_name_that_no_layer_has_is_named() -> None:
    plan = planned(entry({"layer_types": ["fc1", "fc9"]}, DisableFP8Layer={"enabled": True}))
    notes = [note for note in plan.settings.notes if note.startswith("debug features")]
    assert notes == ["debug features, one: layer_types has 'fc9', and no linear layer of the plan has such a name"]


def test_two_entries_for_a_layer_are_refused_as_by_the_debugger(inspect: Any) -> None:
    off = {"DisableFP8Layer": {"enabled": True}}
    content = {
        name: {"enabled": True, "layers": {"layer_types": [part]}, "transformer_engine": off}
        for name, part in (("a", "fc1"), ("b", "linear_fc"))
    }
    with pytest.raises(RunConfigError, match=r"a and b: both take the layer .*linear_fc1"):
        DebugFeatures.from_content(content).find_changes(NAMES[1])
    for one in content.values():
        spec = inspect.ConfigSpec()
        spec.initialize(one)
        spec.add_extension("transformer_engine", off)
        inspect.ConfigManager.configs.append(spec)
    with pytest.raises(ValueError, match="multiple debug configs"):
        inspect.ConfigManager.get_config_for_layer(NAMES[1])

"""Megatron Bridge's own module, from its wheel, beside ours: the same recipes written into the same configs."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from bridge.errors import PrecisionTypeError, UnknownFieldError
from bridge.front.python_check import check as check_run
from bridge.precision.coercion import parse_dtype
from bridge.precision.mode import get_mode
from bridge.precision.precision_config import MODE_SWITCHES
from bridge.precision.statements import get_ambiguous_fields, get_source, is_stated
from bridge.preflight.check_context import CheckContext
from bridge.preflight.run import Run
from bridge.registry.registry import REGISTRY
from bridge.registry.synchronize import synchronize
from bridge.training import mixed_precision as ours
from bridge.training.config import ConfigContainer, runtime_config_update
from tests import releases

ROOT = Path(__file__).parents[2]
WHEELS = [prefix / "peer/megatron/bridge" for prefix in (Path(sys.prefix), ROOT / ".venv")]
PEER = next((wheel for wheel in WHEELS if wheel.exists()), WHEELS[0])
pytestmark = [
    pytest.mark.skipif(not PEER.exists(), reason="needs Megatron Bridge's file beside the environment: make setup"),
    pytest.mark.filterwarnings("ignore"),
]
RECIPES = sorted(REGISTRY.names())
OURS_ALONE = {"fp32", "bf16_autocast_mixed", "nanov2_bf16_with_fp8_subchannel_scaling_mixed"}
SHARED = [name for name in RECIPES if name not in OURS_ALONE]
COUNTS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
DIFFERENT = {
    ("model", "autocast_dtype"): "derived from the mode, where the peer leaves None",
    ("model", "num_layers_at_start_in_bf16"): "Megatron's own 1 stays where first_last_layers_bf16 is off",
    ("model", "num_layers_at_end_in_bf16"): "Megatron's own 1 stays where first_last_layers_bf16 is off",
    ("model", "fp8_recipe"): "no FP8 recipe is left in a run without FP8",
    ("optimizer", "fp8_recipe"): "no FP8 recipe is left in a run without FP8",
}
"""Owner and field that ours leaves otherwise than the peer, on purpose -> why."""


@pytest.fixture(scope="module")
def wheel() -> Iterator[None]:
    """The wheel's package without its `__init__`s, which import everything else; its files load as they are."""
    pytest.importorskip("megatron.core")
    before = set(sys.modules)
    for name in ("", ".models", ".training", ".utils"):
        package = ModuleType(f"megatron.bridge{name}")
        package.__path__ = [str(PEER / name.removeprefix("."))]
        sys.modules[package.__name__] = package
    models: Any = sys.modules["megatron.bridge.models"]
    models.GPTModelProvider = models.T5ModelProvider = object  # the peer's module names them in annotations
    yield
    for name in set(sys.modules) - before:
        if name.startswith("megatron.bridge"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def peer(wheel: None) -> Iterator[Any]:
    """The real module."""
    module = importlib.import_module("megatron.bridge.training.mixed_precision")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "is_te_min_version", lambda _: True)  # no Transformer Engine is needed to compare
        yield module


def plain(value: Any) -> Any:
    return parse_dtype(value) if isinstance(value, torch.dtype) else value


def written(owners: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {
        (role, field.name): str(getattr(owner, field.name))
        for role, owner in owners.items()
        for field in dataclasses.fields(owner)
    }


def test_every_recipe_of_the_peer_is_here_under_both_spellings(peer: Any) -> None:
    theirs = {name for name in peer.MIXED_PRECISION_RECIPES if "-" not in name}
    assert set(RECIPES) - theirs == OURS_ALONE
    listed = [name for name in ours.MIXED_PRECISION_RECIPES if name.replace("-", "_") not in OURS_ALONE]
    assert sorted(listed) == sorted(peer.MIXED_PRECISION_RECIPES)
    assert set(listed) <= ours.MIXED_PRECISION_RECIPES.copy().keys()


def test_import_star_and_dir_have_what_the_peers_module_has(peer: Any) -> None:
    space: dict[str, Any] = {}
    exec("from bridge.training.mixed_precision import *", space)  # noqa: S102
    theirs = {name for name in vars(peer) if getattr(vars(peer)[name], "__module__", None) == peer.__name__}
    assert {name for name in space if not name.startswith("_")} == theirs | {"MIXED_PRECISION_RECIPES"}
    assert theirs | OURS_ALONE <= set(dir(ours))
    assert space["bf16_mixed"] is ours.MIXED_PRECISION_RECIPES["bf16_mixed"]


@pytest.mark.parametrize("name", SHARED)
def test_a_recipe_reads_and_writes_as_the_peers_does(name: str, peer: Any, megatron_owners) -> None:
    theirs, mine = peer.get_mixed_precision_config(name), ours.get_mixed_precision_config(name)
    theirs.finalize()
    fields = [field.name for field in dataclasses.fields(theirs)]
    assert {f: plain(getattr(mine, f)) for f in fields} == {f: plain(getattr(theirs, f)) for f in fields}

    left, right = megatron_owners(), megatron_owners()
    theirs.setup(*left.values())
    mine.setup(*right.values())
    one, two = written(left), written(right)
    differs = {place for place in one if one[place] != two[place]}
    assert differs <= DIFFERENT.keys()
    if mine.fp8:
        assert not differs & {("model", "fp8_recipe"), ("optimizer", "fp8_recipe")}
    if mine.first_last_layers_bf16:
        assert not any(field.startswith("num_layers") for _, field in differs)


def test_the_class_takes_what_the_peers_takes_and_has_its_defaults(peer: Any) -> None:
    theirs, mine = peer.MixedPrecisionConfig(), ours.MixedPrecisionConfig()
    theirs.finalize()
    for field in dataclasses.fields(theirs):
        assert plain(getattr(mine, field.name)) == plain(getattr(theirs, field.name)), field.name


# -- an object of the peer's class ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_final", [False, True], ids=["as made", "finalized"])
@pytest.mark.parametrize("name", SHARED)
def test_an_object_of_the_peers_class_writes_what_our_recipe_of_that_name_writes(
    name: str, is_final: bool, peer: Any, megatron_owners
) -> None:
    theirs = peer.get_mixed_precision_config(name)
    if is_final:
        theirs.finalize()
    mine = ours.get_mixed_precision_config(theirs)
    fields = dataclasses.fields(theirs)
    away = {f.name for f in fields if getattr(theirs, f.name) != f.default and f.name not in ("fp8_param", "fp4_param")}
    schemes = {f"{family}_recipe" for family in ("fp8", "fp4") if getattr(theirs, family)}
    counts = COUNTS if away.intersection(COUNTS) else ()
    assert mine.stated == {*MODE_SWITCHES, *away, *schemes, *counts}
    left, right = megatron_owners(), megatron_owners()
    synchronize(theirs, **left)
    synchronize(name, **right)
    assert written(left) == written(right)


def test_what_was_changed_in_a_recipe_of_the_peer_is_stated_also_where_it_is_the_default(peer: Any) -> None:
    theirs = peer.bf16_with_fp8_current_scaling_mixed()
    theirs.first_last_layers_bf16 = False
    mine = ours.get_mixed_precision_config(theirs)
    assert (is_stated(mine, "first_last_layers_bf16"), get_ambiguous_fields(mine)) == (True, frozenset())


def test_a_default_of_the_peers_class_that_may_have_been_meant_is_a_warning_where_the_model_keeps_its_own_value(
    peer: Any, megatron_owners: Any
) -> None:
    theirs = peer.MixedPrecisionConfig(bf16=True, fp8="hybrid", first_last_layers_bf16=False)
    report = synchronize(theirs, model=megatron_owners(num_layers=4, first_last_layers_bf16=True)["model"])
    assert [(one.id, one.severity, one.path) for one in report.findings if one.id == "PB133"] == [
        ("PB133", "warning", "model.first_last_layers_bf16")
    ]


def test_every_way_in_takes_an_object_of_the_peers_class(peer: Any, megatron_owners) -> None:
    theirs = peer.bf16_with_fp8_current_scaling_mixed()
    assert get_source(ours.get_mixed_precision_config(theirs), "fp8") == "Megatron Bridge's config"
    owners = megatron_owners()
    model = owners["model"]
    assert ours.update_config_with_precision_overrides(theirs, model) is model
    assert model.fp8 == "hybrid"
    container = ConfigContainer(mixed_precision=theirs, **megatron_owners())
    assert check_run(container, target="h100x8").verdict != "error"
    report = runtime_config_update(container)
    assert report is not None
    assert report.precision.startswith("bf16=True, params_dtype=bf16")
    assert isinstance(container.mixed_precision, ours.MixedPrecisionConfig)
    assert container.model.fp8_recipe == "tensorwise"


def test_a_subclass_of_the_peers_class_is_one_of_its_objects_and_what_has_no_place_here_is_refused(peer: Any) -> None:
    @dataclasses.dataclass(kw_only=True)
    class Team(peer.MixedPrecisionConfig):
        routed: int = 3

    assert get_mode(ours.get_mixed_precision_config(Team(bf16=True))) == "bf16"
    with pytest.raises(UnknownFieldError) as caught:
        ours.get_mixed_precision_config(Team(bf16=True, routed=4))
    assert str(caught.value) == (
        "mixed_precision.routed: is a field of Megatron Bridge's config that has no counterpart here, got 4. "
        "Leave it at its default."
    )


def test_a_class_of_that_name_from_elsewhere_is_refused() -> None:
    other = dataclasses.make_dataclass("MixedPrecisionConfig", [("bf16", bool, True)])
    for given in (other(), SimpleNamespace(bf16=True), other):
        with pytest.raises(PrecisionTypeError, match="must be a recipe's name or a MixedPrecisionConfig"):
            ours.get_mixed_precision_config(given)


# -- our object in the peer's run config ---------------------------------------------------------------------------


def as_read(saved: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return the mapping of a precision as the peer's reader of a run's YAML resolves it."""
    whole = OmegaConf.create({"mixed_precision": saved, **sections}, flags={"allow_objects": True})
    return OmegaConf.to_container(whole, resolve=True)["mixed_precision"]  # type: ignore[index, call-overload]


@pytest.mark.parametrize("name", SHARED)
def test_the_mapping_of_a_saved_run_builds_the_peers_config(name: str, peer: Any) -> None:
    saved = as_read(ours.get_mixed_precision_config(name).to_cfg_dict())
    cls = peer.MixedPrecisionConfig
    assert saved.pop("_target_") == f"{cls.__module__}.{cls.__qualname__}"
    assert list(saved) == [field.name for field in dataclasses.fields(cls)]
    theirs = peer.get_mixed_precision_config(name)
    theirs.finalize()
    if theirs.fp8 is None:
        theirs.fp8_recipe = None  # the optimizer takes any other for a run in FP8
    assert cls(**saved) == theirs


@pytest.mark.parametrize("model", [{"first_last_layers_bf16": True}, {"transformer": {"first_last_layers_bf16": True}}])
def test_a_field_that_the_recipe_leaves_to_the_model_is_saved_as_what_the_model_holds(
    model: Any, megatron_owners: Any
) -> None:
    config = ours.bf16_with_mxfp8_mixed()
    assert as_read(config.to_cfg_dict())["first_last_layers_bf16"] is False
    assert as_read(config.to_cfg_dict(), model=model)["first_last_layers_bf16"] is True
    config.setup(megatron_owners(num_layers=4, first_last_layers_bf16=True)["model"])
    assert config.to_cfg_dict()["first_last_layers_bf16"] is True, "what the owner holds, once it is known"
    assert config.override(first_last_layers_bf16=False).to_cfg_dict()["first_last_layers_bf16"] is False


def test_a_field_without_a_place_in_a_saved_run_is_named_until_an_owner_holds_it(caplog: Any, megatron_owners) -> None:
    config = ours.MixedPrecisionConfig(bf16=True, moe_router_dtype="fp32")
    config.to_cfg_dict()
    assert caplog.messages == [
        "mixed_precision: a file of Megatron Bridge has no place for moe_router_dtype before setup"
    ]
    config.setup(megatron_owners()["model"])
    caplog.clear()
    config.to_cfg_dict()
    assert caplog.messages == []


def test_what_the_peer_would_switch_off_is_spelt_out_in_a_saved_run() -> None:
    saved = as_read(ours.MixedPrecisionConfig(fp16=True, fp8="e4m3", first_last_layers_bf16=True).to_cfg_dict())
    assert (saved["params_dtype"], saved["pipeline_dtype"], saved["autocast_dtype"]) == (torch.half, torch.half, None)
    assert (saved["num_layers_at_start_in_bf16"], saved["num_layers_at_end_in_bf16"]) == (1, 1)
    stated = ours.MixedPrecisionConfig(bf16=True, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    assert stated.to_cfg_dict()["num_layers_at_end_in_bf16"] == 0


def test_megatrons_own_container_writes_our_config_and_bridges_reader_builds_its_own(peer: Any, tmp_path: Path) -> None:
    container = pytest.importorskip("megatron.training.config.container", reason=releases.NO_TRAINING)
    reader = importlib.import_module("megatron.bridge.utils.instantiate_utils")

    @dataclasses.dataclass(kw_only=True)
    class Run(container.ConfigContainerBase):
        mixed_precision: Any = None

    run = Run(mixed_precision=ours.bf16_with_mxfp8_mixed())
    assert reader.instantiate(as_read(run.to_dict()["mixed_precision"])) == peer.bf16_with_mxfp8_mixed()
    run.to_yaml(str(tmp_path / "run_config.yaml"))
    import yaml

    read = yaml.safe_load((tmp_path / "run_config.yaml").read_text())
    assert reader.instantiate(as_read(read["mixed_precision"])) == peer.bf16_with_mxfp8_mixed()


# -- the peer's model configs as owners ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer_config(wheel: None) -> Any:
    """The wheel's `TransformerConfig`, whose `__post_init__` waits for `finalize`."""
    return importlib.import_module("megatron.bridge.models.transformer_config").TransformerConfig


SHAPE = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}


def test_a_providers_layers_are_kept_through_a_config_that_hands_attributes_on(transformer_config: Any) -> None:
    held = transformer_config(**SHAPE, first_last_layers_bf16=True)
    report = ours.bf16_with_mxfp8_mixed().setup(Proxy(held))
    kept = (held.first_last_layers_bf16, held.num_layers_at_start_in_bf16, held.num_layers_at_end_in_bf16)
    assert kept == (True, 1, 1)
    assert report.row("model.first_last_layers_bf16").verdict == "keep"
    assert held.fp8 == "e4m3"
    assert ours.bf16_with_mxfp8_mixed().setup(Proxy(held)).changes == ()
    seen, direct = (
        CheckContext(Run.from_configs("bf16_with_mxfp8_mixed", model=model)) for model in (Proxy(held), held)
    )
    assert seen.model.values == direct.model.values


def test_megatron_lms_own_model_config_is_looked_through() -> None:
    gpt = pytest.importorskip("megatron.training.models.gpt", reason=releases.NO_TRAINING)
    from megatron.core.transformer import TransformerConfig

    config = gpt.GPTModelConfig(transformer=TransformerConfig(**SHAPE, first_last_layers_bf16=True))
    report = synchronize("bf16_with_mxfp8_mixed", model=config)
    assert report.row("model.first_last_layers_bf16").verdict == "keep"
    assert (config.transformer.fp8, config.transformer.num_layers_at_end_in_bf16) == ("e4m3", 1)


class Proxy:
    """Hands on what it does not have, as `GPTModelConfig` of Megatron-LM and Megatron Bridge does."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "transformer"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        held = vars(self).get("transformer")
        if held is not None and hasattr(held, name):
            setattr(held, name, value)
        else:
            super().__setattr__(name, value)


def test_what_megatron_will_refuse_of_a_provider_is_a_warning_now_and_its_own_error_later(
    transformer_config: Any,
) -> None:
    provider = transformer_config(**{**SHAPE, "num_layers": 1})
    config = ours.get_mixed_precision_config("nemotron_h_bf16_with_fp8_current_scaling_mixed")
    (finding,) = config.setup(provider).findings
    assert (finding.severity, finding.path, finding.where) == ("warning", "model", "with the recipe's values")
    assert "num_layers_at_start_in_bf16" in finding.rule
    with pytest.raises(ValueError, match="num_layers_at_start_in_bf16"):
        provider.finalize()
    provider.num_layers = 8
    provider.finalize()
    assert config.setup(provider).findings == ()


def test_a_provider_that_is_not_complete_yet_is_no_business_of_the_recipes(transformer_config: Any) -> None:
    provider = transformer_config(**SHAPE, cpu_offloading=True, cpu_offloading_num_layers=9)
    assert ours.bf16_mixed().setup(provider).findings == ()
    provider.finalize = None  # an attribute of that name on the object changes nothing: the class decides
    assert ours.bf16_mixed().setup(provider).findings == ()

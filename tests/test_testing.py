"""`RecipeConformance` fails for each fault that it is there to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge import MixedPrecisionConfig, register
from bridge.errors import PrecisionConfigError, RecipeSourceError, RunConfigError, SyncCheckError
from bridge.testing import RecipeConformance

pytestmark = pytest.mark.usefixtures("registered")


class Conformance(RecipeConformance):
    """Its name is none that pytest collects; its methods are called here."""

    target = "h100x8,te2.9,cuda12.9,mcore0.16"


def made(**stated: Any) -> str:
    @register
    def a_recipe_under_test() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(**stated)

    return "a_recipe_under_test"


def test_a_sound_recipe_passes_every_test() -> None:
    recipe, tests = made(bf16=True, fp8="hybrid", fp8_recipe="tensorwise"), Conformance()
    methods = [getattr(tests, name) for name in dir(tests) if name.startswith("test_")]
    assert len(methods) == 5
    for method in methods:
        method(recipe)


def test_a_contradiction_is_found() -> None:
    recipe = made(bf16=True, fp16=True)
    with pytest.raises(PrecisionConfigError):
        Conformance().test_can_be_right(recipe)


def test_a_field_without_effect_is_found() -> None:
    recipe = made(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", fp8_margin=2)
    with pytest.raises(AssertionError, match=r"(?s)a_recipe_under_test:.*mixed_precision.fp8_margin: has no effect"):
        Conformance().test_every_stated_field_reaches_megatron(recipe)


def test_a_silenced_rule_is_not_found() -> None:
    class Silenced(Conformance):
        silence = {"PB210": "read by our own Transformer Engine"}  # noqa: RUF012

    recipe = made(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", fp8_margin=2)
    Silenced().test_every_stated_field_reaches_megatron(recipe)


def test_what_megatron_refuses_is_found() -> None:
    recipe = made(bf16=True, fp8="hybrid", first_last_layers_bf16=True, num_layers_at_start_in_bf16=99)
    with pytest.raises(SyncCheckError):
        Conformance().test_every_stated_field_reaches_megatron(recipe)


def test_a_scheme_that_the_target_cannot_run_is_found() -> None:
    recipe = made(bf16=True, fp8="e4m3", fp8_recipe="mxfp8")
    with pytest.raises(AssertionError, match=r"(?s)a_recipe_under_test:.*PB602 target.gpu"):
        Conformance().test_passes_the_check(recipe)


def test_a_recipe_whose_values_move_is_found() -> None:
    values = iter([False, True])

    @register(name="a_recipe_under_test")
    def moving() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=next(values))

    with pytest.raises(AssertionError, match=r"a second sync changes\n  ddp.grad_reduce_in_fp32: False -> True"):
        Conformance().test_a_second_sync_changes_nothing("a_recipe_under_test")
    values = iter([False, True])
    with pytest.raises(AssertionError, match="YAML returns"):
        Conformance().test_returns_from_yaml("a_recipe_under_test")


def test_the_recipes_of_a_package_and_of_a_folder_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "mixed_precision"
    folder.mkdir()
    (folder / "team_bf16.yaml").write_text("defaults: [bf16_mixed, _self_]\ngrad_reduce_in_fp32: false\n")

    class Found(RecipeConformance):
        package = "precision_bridge_recipes.unscaled"
        recipes = ("fp32",)
        config_dir = tmp_path

    names = Found.recipe_names()
    assert {"bf16_mixed", "fp16_mixed"} < set(names)
    assert "bf16_with_mxfp8_mixed" not in names
    assert names.count("fp32") == 1
    assert names[-1] == "team_bf16"
    assert not Found.precision("team_bf16").grad_reduce_in_fp32


def test_nothing_to_test_and_no_target_are_refused() -> None:
    class Empty(RecipeConformance):
        pass

    class Gone(RecipeConformance):
        package = "acme_gone"

    with pytest.raises(RecipeSourceError) as missing:
        Gone.recipe_names()
    assert str(missing.value).startswith("package: there is no module 'acme_gone'.")

    with pytest.raises(RunConfigError) as caught:
        Empty.recipe_names()
    assert str(caught.value) == "Empty: has no recipe to test, got None. Set package, recipes or config_dir."
    with pytest.raises(RunConfigError) as caught:
        Empty().test_passes_the_check("bf16_mixed")
    assert str(caught.value) == "Empty.target: needs GPUs and versions, got ''. Set h100x8,te2.9,cuda12.9, for example."

"""`to_config`: what a composed config has under `mixed_precision`, as a config with its sources."""

import copy
import os
from typing import Any

import pytest
from omegaconf import MISSING, DictConfig, OmegaConf

from bridge import MixedPrecisionConfig, register, to_config
from bridge.errors import (
    PrecisionConfigError,
    PrecisionTypeError,
    UnknownFieldError,
    UnknownRecipeError,
)
from bridge.precision.statements import get_recipe_name, get_source, is_stated
from bridge.registry.hydra_group import RecipeSource
from bridge.registry.registry import REGISTRY


def node(recipe: str) -> Any:
    """The node that the group gives, merged into a config as Hydra does."""
    whole = OmegaConf.merge({"lr": 1}, {"mixed_precision": {}})
    loaded = RecipeSource("recipes", "recipes://").load_config(f"mixed_precision/{recipe}")
    OmegaConf.update(whole, "mixed_precision", loaded.config, merge=False)
    return whole.mixed_precision


def test_a_name_a_config_and_a_mapping_are_taken() -> None:
    assert get_recipe_name(to_config("bf16-mixed")) == "bf16_mixed"
    config = MixedPrecisionConfig(fp16=True)
    assert to_config(config) is config
    assert to_config({"bf16": True, "fp8_margin": "2", "fp8": "e4m3"}).to_dict() == {
        "bf16": True,
        "fp8": "e4m3",
        "fp8_margin": 2,
    }


def test_fields_of_the_recipe_keep_it_as_their_source_and_others_are_the_configurations() -> None:
    given = node("fp8_current")
    given.fp8_margin = 2
    given.num_layers_at_end_in_bf16 = 3
    config = to_config(given)
    assert get_recipe_name(config) == "bf16_with_fp8_current_scaling_mixed"
    assert get_source(config, "fp8") == "recipe bf16_with_fp8_current_scaling_mixed"
    assert get_source(config, "fp8_margin") == get_source(config, "num_layers_at_end_in_bf16") == "configuration"


def test_a_recipe_sets_its_environment_variables_where_it_is_read_and_not_where_it_is_composed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_A_RECIPE", "before")

    @register
    def with_variable() -> MixedPrecisionConfig:
        os.environ["OF_A_RECIPE"] = "set"
        return MixedPrecisionConfig(bf16=True)

    try:
        given = node("with_variable")
        assert os.environ["OF_A_RECIPE"] == "before"
        assert get_recipe_name(to_config(given)) == "with_variable"
        assert os.environ["OF_A_RECIPE"] == "set"
    finally:
        REGISTRY.remove("with_variable")


def test_a_field_that_was_taken_out_is_unstated() -> None:
    given = node("bf16_mixed")
    del given["grad_reduce_in_fp32"]
    assert not is_stated(to_config(given), "grad_reduce_in_fp32")


def test_the_recipe_is_known_in_a_copy_and_not_of_two() -> None:
    assert get_recipe_name(to_config(copy.deepcopy(node("bf16_mixed")))) == "bf16_mixed"
    both = OmegaConf.merge(node("bf16_mixed"), node("bf16_with_fp8_current_scaling_mixed"))
    assert get_recipe_name(to_config(both)) is None
    assert get_source(to_config(both), "fp8") == "configuration"


def test_references_are_resolved() -> None:
    whole = OmegaConf.create({"half": True, "mixed_precision": {"bf16": "${half}"}})
    assert to_config(whole.mixed_precision).bf16


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, PrecisionTypeError, "mixed_precision: must be a recipe's name or a MixedPrecisionConfig, got None."),
        ("bf17", UnknownRecipeError, "Unknown mixed-precision recipe 'bf17'."),
        ({"bf17": True}, UnknownFieldError, "mixed_precision.bf17: no such field."),
        ({"bf16": "maybe"}, PrecisionTypeError, "mixed_precision.bf16: "),
        ({"bf16": True, "fp16": True}, PrecisionConfigError, "The mixed-precision config can never be right:"),
        (DictConfig({"bf16": "${no}"}), PrecisionTypeError, "bf16: cannot be resolved: Interpolation key 'no'"),
        (DictConfig({"bf16": MISSING}), PrecisionTypeError, "bf16: cannot be resolved: Missing mandatory value: bf16."),
        (
            {},
            PrecisionTypeError,
            "mixed_precision: states no field of a precision, got {}. Choose a recipe by its name; "
            "`auto` is resolved by `precision-bridge train` alone.",
        ),
    ],
)
def test_what_is_no_precision_is_refused(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        to_config(given)
    assert str(caught.value).startswith(message)

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge import BridgeError, MixedPrecisionConfig, get_mixed_precision_config
from bridge.errors import BridgeWarning, PrecisionTypeError, UnknownFieldError, UnknownRecipeError
from bridge.precision.coercion import DTYPE_SPELLINGS, get_torch_dtype, parse_dtype
from bridge.precision.mode import format_label
from bridge.precision.precision_config import MEGATRON_BRIDGE_FIELDS, MEGATRON_FIELDS
from bridge.precision.statements import (
    get_recipe_name,
    get_source,
    get_switches_put_aside,
    is_reset_to_none,
    list_field_names,
    list_fields_over_recipe,
)
from bridge.precision.yaml_text import from_yaml, to_yaml
from bridge.registry.mixed_precision_config import find_config_faults
from bridge.registry.registry import REGISTRY, register
from tests.precision.module_lists import module_lists

PEER = json.loads((Path(__file__).parents[1] / "recipes/peer_recipes.json").read_text())

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, "bf16", "torch.float16", None])
VALUES = {
    "bool": st.booleans(),
    "int": st.integers(0, 4096),
    "float": st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 2**40),
    "dtype": DTYPES,
    "rows": module_lists(),
    "name": st.sampled_from(["e4m3", "hybrid", "e2m1", "tensorwise", "delayed", "mxfp8", "max", "nvfp4"]),
    "names": st.lists(st.sampled_from(["all", "*.router.weight", "decoder.*"]), max_size=2),
    "format": st.sampled_from(["fp32", "mxfp8", "bf16", torch.float64]),
}


def kind(name: str) -> str:
    return inspect.getattr_static(MixedPrecisionConfig, name).kind


def any_fields() -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries(
        {}, optional={name: VALUES[kind(name)] for name in list_field_names(MixedPrecisionConfig)}
    )


def test_annotations_can_be_evaluated_although_torch_is_not_imported() -> None:
    code = (
        "import sys, typing, bridge; before = 'torch' in sys.modules; "
        "hints = typing.get_type_hints(bridge.MixedPrecisionConfig); "
        "print(before, hints['params_dtype'], hints['bf16'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False typing.Union[torch.dtype, str, NoneType] <class 'bool'> True\n"
    assert set(typing.get_type_hints(MixedPrecisionConfig)) == {
        *list_field_names(MixedPrecisionConfig),
        "_origin",
    }


def test_the_signature_names_every_field_with_its_default() -> None:
    parameters = inspect.signature(MixedPrecisionConfig).parameters
    assert {name: one.default for name, one in parameters.items()} == {
        name: getattr(MixedPrecisionConfig, name) for name in list_field_names(MixedPrecisionConfig)
    }

    @dataclasses.dataclass(kw_only=True)
    class Team(MixedPrecisionConfig):
        name: str
        fp8_margin: int = 9
        notes: list[str] = dataclasses.field(default_factory=list)

    mine = inspect.signature(Team).parameters
    assert (mine["name"].default, mine["fp8_margin"].default) == (inspect.Parameter.empty, 9)
    assert str(mine["notes"]) == "notes: list[str] = <factory>"
    inspect.signature(Team).bind(name="us", bf16=True)


def test_it_has_the_fields_of_megatron_bridge_first_and_in_its_order() -> None:
    names = list_field_names(MixedPrecisionConfig)
    assert names == (*PEER["defaults"], "tf32", *MEGATRON_FIELDS, "modules")
    assert (list(MEGATRON_BRIDGE_FIELDS), len(names)) == (list(PEER["defaults"]), 64)
    assert [f.name for f in dataclasses.fields(MixedPrecisionConfig)] == list(list_field_names(MixedPrecisionConfig))


@pytest.mark.parametrize("name", PEER["defaults"])
def test_every_default_reads_as_at_megatron_bridge(name: str) -> None:
    assert getattr(MixedPrecisionConfig(), name) == PEER["defaults"][name]
    assert next(f for f in dataclasses.fields(MixedPrecisionConfig) if f.name == name).default == PEER["defaults"][name]


def test_a_field_is_stated_once_it_is_given_assigned_or_named_and_unstated_by_del() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8=None)
    config.fp8_margin = 0
    assert config.stated == {"bf16", "fp8", "fp8_margin"}
    del config.fp8_margin
    assert config.stated == {"bf16", "fp8"}
    assert config.fp8_margin == 0


def test_stating_weights_in_fp8_by_either_name_means_both() -> None:
    for name in ("fp8_param", "fp8_param_gather"):
        config = MixedPrecisionConfig(**{name: True})
        assert (config.fp8_param, config.fp8_param_gather) == (True, True)
    for name in ("fp4_param", "fp4_param_gather"):
        config = MixedPrecisionConfig(**{name: True})
        assert (config.fp4_param, config.fp4_param_gather) == (True, True)


def test_names_of_one_setting_that_differ_read_as_the_gathers_and_finalize_says_so() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_param=True, fp8_param_gather=False)
    assert (config.fp8_param, config.fp8_param_gather) == (False, False)
    with pytest.raises(BridgeError) as caught:
        config.finalize()
    assert str(caught.value) == (
        "The mixed-precision config can never be right:\n"
        "  mixed_precision.fp8_param: is another name of fp8_param_gather, which says False and is the one that is "
        "read, got True. Give one of the two names; or give both the same value."
    )


def test_a_later_assignment_to_one_name_of_a_setting_changes_both() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_param_gather=True)
    config.fp8_param = False
    assert config.fp8_param_gather is False
    assert find_config_faults(config) == []
    assert dataclasses.replace(MixedPrecisionConfig(fp8_param_gather=True), fp8_param=False).fp8_param_gather is False


def test_replace_keeps_what_was_stated_and_adds_what_is_named_even_a_default() -> None:
    config = MixedPrecisionConfig(bf16=True, loss_scale=8.0)
    changed = dataclasses.replace(config, first_last_layers_bf16=False, fp8="e4m3")
    assert changed.stated == {"bf16", "loss_scale", "first_last_layers_bf16", "fp8"}
    assert config.stated == {"bf16", "loss_scale"}


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), dataclasses.replace],  # noqa: S301
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_copies_keep_what_was_stated_and_share_nothing(duplicate) -> None:
    config = MixedPrecisionConfig(bf16=True, params_dtype="bf16", fp8_param=True)
    twin = duplicate(config)
    assert twin == config
    assert twin.stated == config.stated
    twin.fp16 = True
    assert config.stated == {"bf16", "params_dtype", "fp8_param"}


def test_replacing_a_subclass_keeps_its_own_fields_and_what_was_stated() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Team(MixedPrecisionConfig):
        owner: str = "nobody"
        notes: list[str] = dataclasses.field(default_factory=list)

    team = Team(bf16=True, owner="us")
    assert team.stated == {"bf16"}
    changed = dataclasses.replace(team, fp8="e4m3")
    assert (changed.owner, changed.stated, changed.notes) == ("us", {"bf16", "fp8"}, [])
    with pytest.raises(TypeError, match="no such field"):
        Team(owners="us")


def test_a_subclass_may_give_a_field_another_default() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Team(MixedPrecisionConfig):
        fp8_margin: int = 9
        grad_reduce_in_fp32 = False

    team = Team(bf16=True)
    assert (team.fp8_margin, team.grad_reduce_in_fp32, team.stated) == (9, False, {"bf16"})
    assert Team(fp8_margin=3).to_dict() == {"fp8_margin": 3}
    assert list_field_names(Team) == list_field_names(MixedPrecisionConfig)


@given(any_fields())
def test_construction_never_refuses_a_value_of_the_right_type(fields: dict[str, object]) -> None:
    config = MixedPrecisionConfig(**fields)
    for name, value in fields.items():
        setattr(config, name, value)
    find_config_faults(config)


@given(any_fields())
def test_round_trips_through_dict_yaml_json_and_repr_are_exact(fields: dict[str, object]) -> None:
    config = MixedPrecisionConfig(**fields)
    for back in (
        MixedPrecisionConfig.from_dict(config.to_dict()),
        from_yaml(MixedPrecisionConfig, to_yaml(config)),
        eval(repr(config)),  # noqa: S307
    ):
        assert back.to_dict() == config.to_dict()
        assert back == config
        assert back.stated == config.stated
        assert all(is_reset_to_none(back, name) == is_reset_to_none(config, name) for name in list_field_names(config))


def test_every_spelling_of_a_dtype_is_taken_and_reads_as_the_torch_dtype() -> None:
    for spelling in ("bf16", "BF16", "bfloat16", "torch.bfloat16", torch.bfloat16):
        assert MixedPrecisionConfig(params_dtype=spelling).params_dtype is torch.bfloat16
    for spelling in ("half", "fp16", "float16", "torch.half", torch.half):
        assert MixedPrecisionConfig(autocast_dtype=spelling).autocast_dtype is torch.float16
    for spelling, token in DTYPE_SPELLINGS.items():
        assert parse_dtype(get_torch_dtype(parse_dtype(spelling))) == token


def test_a_dtype_that_is_none_of_torchs_is_named_with_the_nearest() -> None:
    with pytest.raises(PrecisionTypeError) as caught:
        MixedPrecisionConfig(params_dtype="bloat16")
    assert str(caught.value) == (
        "mixed_precision.params_dtype: must be the name of a dtype, got 'bloat16'. "
        "Did you mean 'bfloat16', 'float16' or 'bfloat'?"
    )


def test_a_dtype_of_none_takes_the_statement_back() -> None:
    config = MixedPrecisionConfig(params_dtype=torch.bfloat16)
    config.params_dtype = None
    assert config.stated == frozenset()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp8_margin": "two"}, "mixed_precision.fp8_margin: must be a whole number, got 'two'."),
        ({"bf16": "maybe"}, "mixed_precision.bf16: must be true or false, got 'maybe'."),
        ({"fp8": True}, "mixed_precision.fp8: must be a name, got True. Use 'hybrid' or 'e4m3'."),
        ({"hysteresis": 1.5}, "mixed_precision.hysteresis: must be a whole number, got 1.5."),
        ({"loss_scale": True}, "mixed_precision.loss_scale: must be a number, got True."),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_one_sentence(values: dict[str, object], message: str) -> None:
    with pytest.raises(PrecisionTypeError) as caught:
        MixedPrecisionConfig(**values)
    assert str(caught.value) == message


def test_python_reads_the_spellings_of_yaml_and_command_lines() -> None:
    for spelling in ("no", "Off", "false", "0"):
        assert MixedPrecisionConfig(bf16=spelling) == from_yaml(MixedPrecisionConfig, f"bf16: '{spelling}'")
        assert MixedPrecisionConfig(bf16=spelling).bf16 is False
    assert MixedPrecisionConfig(fp8_margin="2").fp8_margin == 2


def test_a_refused_assignment_changes_nothing() -> None:
    config = MixedPrecisionConfig(bf16=True)
    with pytest.raises(PrecisionTypeError):
        config.override(fp16=True, fp8_margin="two")
    assert config.stated == {"bf16"}


def test_a_misspelt_field_is_refused_with_the_nearest() -> None:
    config = MixedPrecisionConfig()
    with pytest.raises(UnknownFieldError) as caught:
        config.fp8_marign = 2  # type: ignore[attr-defined]
    assert str(caught.value).startswith("mixed_precision.fp8_marign: no such field. Did you mean 'fp8_margin'")
    with pytest.raises(UnknownFieldError, match="Did you mean 'fp8_recipe'"):
        _ = config.fp8_recip
    assert not hasattr(config, "fp8_recip")
    with pytest.raises(TypeError, match="no such field"):
        MixedPrecisionConfig(bf61=True)
    with pytest.raises(UnknownFieldError):
        MixedPrecisionConfig.from_dict({"bf61": True})


def test_yaml_surprises_are_coerced_by_the_type_of_the_field() -> None:
    text = "bf16: on\nfp8: off\nloss_scale: 1e-5\nhysteresis: '2'\nloss_scale_window: 1e3\nparams_dtype: bfloat16"
    config = from_yaml(MixedPrecisionConfig, text)
    assert config.to_dict() == {
        "bf16": True,
        "params_dtype": "bf16",
        "fp8": None,
        "loss_scale": 1e-5,
        "loss_scale_window": 1000.0,
        "hysteresis": 2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8: on", "mixed_precision.fp8: must be a name, got True. Use 'hybrid' or 'e4m3'."),
        ("bf16: maybe", "mixed_precision.bf16: must be true or false, got 'maybe'."),
        ("hysteresis: off", "mixed_precision.hysteresis: must be a whole number, got False."),
        ("- bf16", "mixed_precision: must be a mapping of fields, got ['bf16']."),
    ],
)
def test_yaml_that_cannot_be_coerced_is_refused(text: str, message: str) -> None:
    with pytest.raises(PrecisionTypeError) as caught:
        from_yaml(MixedPrecisionConfig, text)
    assert str(caught.value) == message


def test_yaml_never_runs_code() -> None:
    with pytest.raises(PrecisionTypeError):
        from_yaml(MixedPrecisionConfig, "fp8: !!python/object/apply:os.system ['true']")


def test_the_source_of_a_statement_is_remembered_until_somebody_else_states_it() -> None:
    config = MixedPrecisionConfig.from_dict({"bf16": True, "fp8": "e4m3"}, source="team.yaml")
    config.override("command line", fp8="hybrid")
    assert get_source(config, "bf16") == "team.yaml"
    assert get_source(config, "fp8") == "command line"
    assert get_source(config, "fp8_margin") == "default"
    config.fp8 = "e4m3"
    assert get_source(config, "fp8") == "stated"


def test_the_label_names_the_recipe_and_what_was_stated_beside_it() -> None:
    config = get_mixed_precision_config("bf16_mixed")
    assert format_label(config) == "bf16_mixed"
    assert (
        format_label(config.override("command line", grad_reduce_in_fp32=False))
        == "bf16_mixed, grad_reduce_in_fp32=False"
    )
    assert format_label(MixedPrecisionConfig(bf16=True, fp8="e4m3")) == "bf16=True, fp8=e4m3"
    assert format_label(MixedPrecisionConfig(fp16=False, bf16=True, fp8=None)) == "bf16=True"
    assert format_label(config.override(fp8=None)) == "bf16_mixed, grad_reduce_in_fp32=False, fp8=None"
    assert format_label(MixedPrecisionConfig()) == "fp32"


def test_megatrons_recipe_enums_are_plain_names_here() -> None:
    from megatron.core.enums import Fp8Recipe

    config = MixedPrecisionConfig(fp8_recipe=Fp8Recipe.mxfp8)
    assert type(config.fp8_recipe) is str
    assert config.fp8_recipe == "mxfp8"


def test_equality_compares_readings_as_a_plain_dataclass_would() -> None:
    assert MixedPrecisionConfig(bf16=True) == MixedPrecisionConfig(bf16=True, fp8_margin=0)
    assert MixedPrecisionConfig(bf16=True) != MixedPrecisionConfig(fp16=True)
    assert MixedPrecisionConfig() != "bf16"


GATHER, REUSE = "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"


@pytest.mark.parametrize("name", ["fp8_param_gather", "fp8_param"])
def test_the_reused_buffer_of_a_recipe_goes_off_and_on_with_the_gather_that_somebody_states(name: str) -> None:
    config = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    setattr(config, name, False)
    config.finalize()
    assert getattr(config, REUSE) is False
    assert get_source(config, REUSE) == "follows fp8_param_gather"
    assert get_switches_put_aside(config) == {REUSE: "recipe bf16_with_mxfp8_mixed"}
    again = pickle.loads(pickle.dumps(copy.deepcopy(dataclasses.replace(config))))  # noqa: S301
    for one in (config, again):
        setattr(one, name, True)
        assert (getattr(one, REUSE), get_source(one, REUSE)) == (True, "recipe bf16_with_mxfp8_mixed")
        assert get_switches_put_aside(one) == {}


def test_the_reused_buffer_follows_on_every_way_to_state_a_field() -> None:
    recipe = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    for config in (
        dataclasses.replace(recipe, fp8_param_gather=False),
        get_mixed_precision_config("bf16_with_mxfp8_mixed").override("command line", fp8_param=False),
        MixedPrecisionConfig.from_dict(recipe.to_dict(), source="team.yaml").override("command line", fp8_param=False),
    ):
        assert find_config_faults(config) == []
        assert config.to_dict()[REUSE] is False
        assert find_config_faults(MixedPrecisionConfig.from_dict(config.to_dict())) == []


def test_a_recipes_function_that_is_called_directly_makes_what_its_name_makes() -> None:
    from precision_bridge_recipes.mxfp8 import bf16_with_mxfp8_mixed

    config = bf16_with_mxfp8_mixed()
    named = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    assert (get_recipe_name(config), format_label(config), config.sources) == (
        get_recipe_name(named),
        format_label(named),
        named.sources,
    )
    assert set(config.sources.values()) == {"recipe bf16_with_mxfp8_mixed"}
    config.fp8_param_gather = False
    config.finalize()
    assert (config.reuse_grad_buf_for_mxfp8_param_ag, get_switches_put_aside(config)) == (
        False,
        {REUSE: "recipe bf16_with_mxfp8_mixed"},
    )


def test_a_recipe_that_is_built_on_another_by_a_call_or_by_name_owns_every_statement(registered: None) -> None:
    from precision_bridge_recipes.mxfp8 import bf16_with_mxfp8_mixed

    @register
    def by_call() -> MixedPrecisionConfig:
        base = bf16_with_mxfp8_mixed()
        base.fp8_param_gather = False
        return base

    @register
    def by_name() -> MixedPrecisionConfig:
        return get_mixed_precision_config("by_call").override(loss_scale=8.0)

    for name, config in (("by_call", by_call()), ("by_name", by_name()), ("by_name", REGISTRY.get("by_name"))):
        config.finalize()
        assert set(config.sources.values()) <= {f"recipe {name}", "follows fp8_param_gather"}
        assert list_fields_over_recipe(config) == ()


def test_the_short_names_of_the_peers_performance_scripts_are_the_recipes_they_mean() -> None:
    for short, name in (
        ("bf16", "bf16_mixed"),
        ("fp8_mx", "bf16_with_mxfp8_mixed"),
        ("fp8_sc", "bf16_with_fp8_subchannel_scaling_mixed"),
        ("nvfp4", "bf16_with_nvfp4_mixed"),
    ):
        assert get_recipe_name(get_mixed_precision_config(short)) == name
    with pytest.raises(UnknownRecipeError) as caught:
        get_mixed_precision_config("fp8-cs")
    assert str(caught.value) == (
        "Unknown mixed-precision recipe 'fp8-cs'. Megatron Bridge's performance scripts mean "
        "bf16_with_fp8_current_scaling_mixed with first_last_layers_bf16=False by it. Choose that recipe, and state "
        "that field."
    )


def test_who_states_both_contradicts_himself() -> None:
    both = {GATHER: False, REUSE: True}
    for config in (
        MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", **both),
        get_mixed_precision_config("bf16_with_mxfp8_mixed").override("command line", **both),
        get_mixed_precision_config("bf16_with_mxfp8_mixed").override(fp8_param_gather=False).override(**{REUSE: True}),
    ):
        assert [fault.path for fault in find_config_faults(config)] == [f"mixed_precision.{REUSE}"]
        assert get_switches_put_aside(config) == {}
    later = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", fp8_param_gather=True, **{REUSE: True})
    later.fp8_param_gather = False
    assert find_config_faults(later), "said by nobody in particular, as the other"


def test_the_older_name_of_override_works_and_warns_once() -> None:
    config = MixedPrecisionConfig(bf16=True)
    with pytest.warns(BridgeWarning) as caught:
        assert config.state("team.yaml", fp8="hybrid") is config
    assert [str(one.message) for one in caught] == [
        "MixedPrecisionConfig.state() is called override() since 0.2. Replace the name; the arguments stay."
    ]
    assert caught[0].filename == __file__
    assert (config.fp8, config.sources) == ("hybrid", {"fp8": "team.yaml"})

"""`finalize()` asks the rules that need the precision alone, and raises with their sentences."""

import pytest

from bridge import MixedPrecisionConfig, get_mixed_precision_config
from bridge.errors import PrecisionConfigError
from bridge.precision.mode import get_mode, get_scheme
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.registry.mixed_precision_config import find_config_faults
from bridge.rules.rulebook import RULES

PREFIX = "mixed_precision."

BROKEN = [
    (
        "PB101",
        {"bf16": True, "fp16": True},
        "bf16: only one of fp32, fp16 and bf16 can be on, got ['fp16', 'bf16']. Keep one and set the others to False.",
    ),
    (
        "PB101",
        {"bf16": True, "fp16": True, "fp32": True},
        "bf16: only one of fp32, fp16 and bf16 can be on, got ['fp32', 'fp16', 'bf16']. Keep one and set the "
        "others to False.",
    ),
    (
        "PB117",
        {"bf16": False, "params_dtype": "bf16", "pipeline_dtype": "bf16"},
        "bf16: is off, and params_dtype is bf16: without a mode a run is in fp32, got False. State bf16=True; or drop "
        "params_dtype and pipeline_dtype for a run in fp32.",
    ),
    (
        "PB204",
        {"bf16": True, "fp8": "e4m3", "fp4": "e2m1"},
        "fp4: cannot be combined with FP8, which is 'e4m3', got 'e2m1'. Set fp8=None for an FP4 run; or set "
        "fp4=None for an FP8 run.",
    ),
    ("PB201", {"bf16": True, "fp8": "hibrid"}, "fp8: must be 'e4m3' or 'hybrid', got 'hibrid'. Did you mean 'hybrid'?"),
    (
        "PB201",
        {"bf16": True, "fp8": "e5m2"},
        "fp8: must be 'e4m3' or 'hybrid', got 'e5m2'. Use 'hybrid' for E5M2 gradients; nothing trains with "
        "E5M2 in the forward pass.",
    ),
    (
        "PB201",
        {"bf16": True, "fp8": "mxfp8"},
        "fp8: must be 'e4m3' or 'hybrid', got 'mxfp8'. State fp8_recipe='mxfp8', which is a scheme, and 'e4m3' "
        "or 'hybrid' here.",
    ),
    (
        "PB202",
        {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwize"},
        "fp8_recipe: must be 'delayed', 'tensorwise', 'blockwise', 'mxfp8' or 'custom', got 'tensorwize'. Did"
        " you mean 'tensorwise'?",
    ),
    (
        "PB203",
        {"bf16": True, "fp8_amax_compute_algo": "median"},
        "fp8_amax_compute_algo: must be 'most_recent' or 'max', got 'median'. Use 'most_recent' or 'max'.",
    ),
    ("PB201", {"bf16": True, "fp4": "e3m0"}, "fp4: must be 'e2m1', got 'e3m0'. Use 'e2m1'."),
    (
        "PB202",
        {"bf16": True, "fp4": "e2m1", "fp4_recipe": "mxfp4"},
        "fp4_recipe: must be 'nvfp4' or 'custom', got 'mxfp4'. Did you mean 'nvfp4'?",
    ),
    (
        "PB205",
        {"bf16": True, "fp8_recipe": "mxfp8"},
        "fp8_recipe: a scheme needs a format: without fp8 this is a plain BF16 run, got 'mxfp8'. State "
        "fp8='e4m3' too; or drop fp8_recipe.",
    ),
    (
        "PB205",
        {"bf16": True, "fp8_recipe": "tensorwise"},
        "fp8_recipe: a scheme needs a format: without fp8 this is a plain BF16 run, got 'tensorwise'. State "
        "fp8='hybrid' too; or drop fp8_recipe.",
    ),
    (
        "PB205",
        {"bf16": True, "fp4_recipe": "nvfp4"},
        "fp4_recipe: a scheme needs a format: without fp4 this is a plain BF16 run, got 'nvfp4'. State "
        "fp4='e2m1' too; or drop fp4_recipe.",
    ),
    (
        "PB263",
        {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed", "first_last_layers_bf16": True},
        "first_last_layers_bf16: delayed scaling cannot keep layers in BF16: its FP8 context spans the whole "
        "block, got True. Use fp8_recipe='tensorwise'; or set first_last_layers_bf16=False.",
    ),
    (
        "PB218",
        {"bf16": True, "exp_avg_dtype": "fp64"},
        "exp_avg_dtype: must be 'fp32', 'fp16', 'bf16' or 'fp8', got 'fp64'. Use one of these.",
    ),
    (
        "PB261",
        {
            "bf16": True,
            "fp8": "hybrid",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 0,
            "num_layers_at_end_in_bf16": 0,
        },
        "first_last_layers_bf16: both layer counts are 0, so no layer is kept in BF16, got True. State a "
        "count above 0; or leave both unstated (Megatron keeps 1 and 1); or set it to False.",
    ),
    (
        "PB128",
        {"bf16": True, "num_layers_at_end_in_bf16": -1},
        "num_layers_at_end_in_bf16: must be at least 0, got -1. Use 0 or more.",
    ),
    ("PB128", {"fp8_amax_history_len": 0}, "fp8_amax_history_len: must be at least 1, got 0. Use 1 or more."),
    ("PB128", {"fp8_margin": -1}, "fp8_margin: must be at least 0, got -1. Use 0 or more."),
    ("PB128", {"hysteresis": 0}, "hysteresis: must be at least 1, got 0. Use 1 or more."),
    (
        "PB304",
        {"bf16": True, "fp8": "e4m3", "fp8_param": True, "fp8_param_gather": False},
        "fp8_param: is another name of fp8_param_gather, which says False and is the one that is read, got "
        "True. Give one of the two names; or give both the same value.",
    ),
    (
        "PB305",
        {"bf16": True, "fp8_param_gather": True},
        "fp8_param_gather: weights can be stored in FP8 only in an fp8 run, got True. Set it to False; or state"
        " fp8='e4m3'.",
    ),
    (
        "PB305",
        {"bf16": True, "fp4_param": True},
        "fp4_param: weights can be stored in FP4 only in an fp4 run, got True. Set it to False; or state fp4='e2m1'.",
    ),
    (
        "PB244",
        {"bf16": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
        "reuse_grad_buf_for_mxfp8_param_ag: the gradient buffer can be reused only where weights are gathered"
        " as MXFP8 (fp8_param_gather), got True. Set it to False; or gather the weights of an MXFP8 recipe in"
        " FP8.",
    ),
    (
        "PB244",
        {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
        "reuse_grad_buf_for_mxfp8_param_ag: the gradient buffer can be reused only where weights are gathered"
        " as MXFP8 (fp8_param_gather), got True. Set it to False; or gather the weights of an MXFP8 recipe in"
        " FP8.",
    ),
    (
        "PB102",
        {"bf16": True, "params_dtype": "fp16"},
        "params_dtype: must be bf16 or fp32 in a run whose mode is bf16, got 'fp16'. Drop it: it follows the "
        "mode; or switch the mode on that it belongs to.",
    ),
    (
        "PB102",
        {"fp32": True, "pipeline_dtype": "bf16"},
        "pipeline_dtype: must be fp32 in a run whose mode is fp32, got 'bf16'. Drop it: it follows the mode; "
        "or switch the mode on that it belongs to.",
    ),
    (
        "PB102",
        {"bf16": True, "params_dtype": "e4m3"},
        "params_dtype: must be bf16 or fp32 in a run whose mode is bf16, got 'e4m3'. Drop it: it follows the "
        "mode; or switch the mode on that it belongs to.",
    ),
    (
        "PB113",
        {"autocast_dtype": "fp64"},
        "autocast_dtype: must be bf16, fp16 or fp32, got 'fp64'. Use one of these; or drop it.",
    ),
    (
        "PB104",
        {"fp32": True, "autocast_enabled": True},
        "autocast_enabled: autocast needs a half-precision dtype to cast to, and would cast to fp32, got "
        "True. State autocast_dtype='bf16'; or set autocast_enabled=False.",
    ),
    (
        "PB141",
        {"fp16": True, "loss_scale": 0},
        "loss_scale: must be above 0 and finite in FP32; Megatron takes 0 for unset, got 0. Use a number above 0, or "
        "None: dynamic under FP16, no scale otherwise.",
    ),
    (
        "PB141",
        {"min_loss_scale": 0.0},
        "min_loss_scale: must be above 0 and finite in FP32, got 0.0. Use 1.0, Megatron's default.",
    ),
    (
        "PB143",
        {"loss_scale_window": 1000.5},
        "loss_scale_window: must be a whole number of steps, at least 1: the scaler compares it with a step "
        "count by ==, and a fraction never grows, got 1000.5. Use 1000, Megatron's default.",
    ),
    (
        "PB141",
        {"fp16": True, "initial_loss_scale": None},
        "initial_loss_scale: must be a number: a dynamic scale has to begin somewhere, got None. Use "
        "4294967296, Megatron's default.",
    ),
    (
        "PB141",
        {"initial_loss_scale": float("inf")},
        "initial_loss_scale: must be above 0 and finite in FP32, got inf. Use 4294967296, Megatron's default.",
    ),
    (
        "PB142",
        {"initial_loss_scale": 0.5},
        "initial_loss_scale: must not be below min_loss_scale, which is 1.0, got 0.5. Raise it; or lower "
        "min_loss_scale.",
    ),
]


@pytest.mark.parametrize(("rule", "fields", "message"), BROKEN, ids=[f"{b[0]}-{i}" for i, b in enumerate(BROKEN)])
def test_a_config_that_breaks_one_rule_is_refused_with_its_sentence(
    rule: str, fields: dict[str, object], message: str
) -> None:
    config = MixedPrecisionConfig(**fields)
    assert [(fault.id, str(fault)) for fault in find_config_faults(config)] == [(rule, PREFIX + message)]
    with pytest.raises(PrecisionConfigError) as caught:
        config.finalize()
    assert str(caught.value).splitlines()[1:] == [f"  {PREFIX}{message}"]
    assert find_config_faults(config) == [one for one in check(Run.from_configs(config)).findings if one.id == rule]


def test_every_rule_that_finalize_asks_has_a_config_that_breaks_it() -> None:
    asked = {rule.id for rule in RULES if rule.is_of_finalize}
    assert asked == {name for name, _, _ in BROKEN}


def test_a_format_that_mxfp8_was_not_made_for_is_a_warning() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="mxfp8")
    config.finalize()
    assert [one.severity for one in check(Run.from_configs(config)).findings if one.id == "PB206"] == ["warning"]


def test_finalize_raises_all_faults_at_once() -> None:
    config = MixedPrecisionConfig(bf16=True, fp16=True, fp8="e5m2", loss_scale_window=0)
    with pytest.raises(PrecisionConfigError) as caught:
        config.finalize()
    assert [finding.path for finding in caught.value.findings] == [
        PREFIX + "bf16",
        PREFIX + "loss_scale_window",
        PREFIX + "fp8",
    ]
    assert isinstance(caught.value, ValueError)


def test_a_full_dump_of_a_config_without_fp8_is_no_scheme_without_a_format() -> None:
    dump = get_mixed_precision_config("bf16_mixed").to_dict(full=True)
    assert find_config_faults(MixedPrecisionConfig.from_dict(dump)) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8": None, "fp8_recipe": "delayed"},
        {"fp4": "e2m1", "fp8_recipe": "delayed"},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "fp4_recipe": "nvfp4"},
        {"fp8": "hybrid", "fp4": None, "fp4_recipe": "custom"},
        {"fp8": None, "fp8_recipe": "mxfp8"},
        {"fp8": None, "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
    ],
    ids=str,
)
def test_what_belongs_to_a_format_that_is_said_to_be_off_is_no_fault(fields: dict[str, object]) -> None:
    MixedPrecisionConfig(bf16=True, **fields).finalize()


@pytest.mark.parametrize("family", ["fp8", "fp4"])
def test_a_scheme_and_nothing_but_a_scheme_is_a_fault(family: str) -> None:
    config = get_mixed_precision_config("bf16_mixed").override(**{f"{family}_recipe": "custom"})
    assert [fault.path for fault in find_config_faults(config)] == [f"{PREFIX}{family}_recipe"]


def test_stored_weights_of_the_format_that_is_not_on_are_a_slip_unless_it_is_said_to_be_off() -> None:
    config = MixedPrecisionConfig(bf16=True, fp4="e2m1", fp8_param_gather=True)
    assert [fault.path for fault in find_config_faults(config)] == [PREFIX + "fp8_param_gather"]
    assert find_config_faults(config.override(fp8=None)) == []


def test_turning_fp8_off_on_an_fp8_recipe_leaves_a_run_without_it() -> None:
    config = get_mixed_precision_config("mxfp8")
    config.fp8 = None
    assert find_config_faults(config) == []
    assert (get_mode(config), get_scheme(config)) == ("bf16", None)


@pytest.mark.parametrize("field", ["loss_scale", "loss_scale_window", "initial_loss_scale", "min_loss_scale"])
def test_an_integer_that_no_float_holds_is_a_fault(field: str) -> None:
    faults = find_config_faults(MixedPrecisionConfig(fp16=True, **{field: 10**400}))
    assert faults[0].path == PREFIX + field

"""Megatron-LM's arguments: read as its own parser reads them, with its own defaults."""

import argparse
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from bridge.errors import PayloadError, PrecisionConfigError, PrecisionTypeError
from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.read.foreign.effective_fields import compute_effective_fields
from bridge.read.megatron_lm import importer as megatron_lm
from bridge.read.megatron_lm.flags import FLAGS, OTHER_SETTINGS, SWITCH_PATTERN, get_dest
from bridge.read.text.document import Document
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.sync.field_routes import OLDEST_VERSION, get_routes
from bridge.target.fields import OWNER_DEFAULTS
from tests import releases
from tests.read.properties import check_export, check_return, configs, reasons

SAMPLES = Path(__file__).parent / "samples"


def read(*words: str, **context: Any):
    return megatron_lm.import_(list(words), **context)


def sample(name: str, **context: Any):
    return megatron_lm.import_all(megatron_lm.read(Document.load(SAMPLES / name)), **context)


@given(config=configs())
def test_what_is_exported_is_carried_or_reported_and_returns(config: MixedPrecisionConfig) -> None:
    exported = megatron_lm.export(config)
    check_export(config, exported)
    check_return(config, exported, megatron_lm.import_(exported.payload))


@pytest.mark.parametrize("name", [recipe.name for recipe in REGISTRY.recipes() if "misnamed" not in recipe.tags])
def test_every_recipe_returns_by_name_through_a_script(name: str) -> None:
    exported = megatron_lm.export(REGISTRY.get(name))
    script = Document.from_text(megatron_lm.write(exported.payload), "args.sh")
    (imported,) = megatron_lm.import_all(script)
    assert imported.mode_is_stated is any(word in ("--bf16", "--fp16") for word in exported.payload)
    assert imported.assume_default().recipe == (name if not exported.unmapped else "fp32")


# -- Megatron-LM's own parser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    pytest.importorskip("megatron.training.arguments", reason=releases.NO_TRAINING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = importlib.import_module("megatron.training.arguments")
    built = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("network_size", "mixed_precision", "transformer_engine", "training", "distributed", "learning_rate"):
        for candidate in (f"_add_{name}_args",):
            if hasattr(arguments, candidate):
                getattr(arguments, candidate)(built)
    return built


def test_exported_arguments_pass_megatrons_own_parser_and_mean_the_same(parser) -> None:
    taken = {option for action in parser._actions for option in action.option_strings}
    for recipe in REGISTRY.recipes():
        if "misnamed" in recipe.tags:
            continue
        payload = megatron_lm.export(REGISTRY.get(recipe.name)).payload
        if not {word for word in payload if word.startswith("--")} <= taken:
            continue  # a group this release builds elsewhere
        space = parser.parse_args(payload)
        config = REGISTRY.get(recipe.name)
        assert (space.fp8, space.fp4) == (config.fp8, config.fp4)
        if config.fp8:
            assert str(getattr(space.fp8_recipe, "value", space.fp8_recipe)) == config.fp8_recipe


def test_our_rows_are_megatrons_flags_with_megatrons_defaults(parser) -> None:
    actions = {option: action for action in parser._actions for option in action.option_strings}
    checked = 0
    for flag in FLAGS:
        action = actions.get(flag.option)
        if action is None or flag.sets is not None:
            continue
        assert (action.nargs == 0) == (flag.kind != "value"), flag.option
        checked += 1
    by_dest = {action.dest: action for action in actions.values()}
    for name, row in OTHER_SETTINGS.items():
        if name in by_dest:
            assert [by_dest[name].default] == [*row.harmless], name
            checked += 1
    assert checked > 15
    assert [name for name, action in actions.items() if SWITCH_PATTERN.fullmatch(name) and action.nargs != 0] == []
    assert actions["--fp8-recipe"].default == "delayed"


def test_our_rows_reach_fields_of_megatrons_configs(megatron_owners) -> None:
    owners = megatron_owners()
    homes = {
        "fp8_param_gather": ("ddp", "fp8_param_gather"),
        "fp4_param_gather": ("model", "fp4_param"),
        "grad_reduce_in_fp32": ("ddp", "grad_reduce_in_fp32"),
        "autocast_enabled": ("model", "enable_autocast"),
    }
    homes |= {field: (get_routes(field)[0].owner, field) for field in MEGATRON_FIELDS}
    for flag in FLAGS:
        if flag.field in MEGATRON_FIELDS and get_routes(flag.field)[0].since != OLDEST_VERSION:  # not in every release
            assert flag.field in OWNER_DEFAULTS[homes[flag.field][0]]
            continue
        owner, attribute = homes.get(flag.field, ("model", flag.field))
        assert hasattr(owners[owner], attribute) or hasattr(owners["optimizer"], attribute), flag.option


# -- defaults and traps -----------------------------------------------------------------------------------------------


def test_without_a_flag_it_is_a_run_in_fp32_by_default() -> None:
    imported = read("--num-layers", "2")
    assert (imported.semantics, imported.recipe) == ("fp32", "fp32")
    assert reasons(imported, "--bf16") == ["implied default"]


@pytest.mark.parametrize(
    ("words", "in_fp32", "reported"),
    [
        (("--bf16",), True, {"--accumulate-allreduce-grads-in-fp32": ["implied default"]}),
        (("--fp16",), False, {"--accumulate-allreduce-grads-in-fp32": ["implied default"]}),
        (("--bf16", "--grad-reduce-in-bf16"), False, {}),
        (("--fp16", "--grad-reduce-in-bf16"), False, {"--grad-reduce-in-bf16": ["dead knob"]}),
        (("--grad-reduce-in-bf16",), True, {"--grad-reduce-in-bf16": ["dead knob"]}),
        (("--fp16", "--accumulate-allreduce-grads-in-fp32"), True, {}),
        (
            ("--bf16", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
            False,
            {"--accumulate-allreduce-grads-in-fp32": ["dead knob"], "--grad-reduce-in-bf16": []},
        ),
        (("--bf16", "--main-grads-dtype", "bf16"), False, {"--main-grads-dtype": []}),
    ],
)
def test_gradients_are_reduced_as_validate_args_decides(words, in_fp32: bool, reported) -> None:
    imported = read(*words)
    assert imported.config.grad_reduce_in_fp32 is in_fp32
    for field, expected in reported.items():
        assert reasons(imported, field) == expected


def test_a_format_alone_means_delayed_scaling() -> None:
    imported = read("--bf16", "--fp8-format", "hybrid")
    assert imported.config.fp8_recipe == "delayed"
    assert (imported.config.fp8_amax_history_len, imported.config.fp8_amax_compute_algo) == (1, "most_recent")
    for field in ("--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"):
        assert reasons(imported, field) == ["implied default"]


def test_the_default_scheme_of_a_recipe_is_written_out() -> None:
    words = megatron_lm.export(MixedPrecisionConfig(bf16=True, fp8="hybrid")).payload
    assert words[words.index("--fp8-recipe") + 1] == "tensorwise"


def test_layers_kept_in_bf16_are_one_and_one_unless_said() -> None:
    imported = read("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--first-last-layers-bf16")
    assert (imported.config.num_layers_at_start_in_bf16, imported.config.num_layers_at_end_in_bf16) == (1, 1)
    assert reasons(imported, "--num-layers-at-start-in-bf16") == ["implied default"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-margin", "3"), "--fp8-margin"),
        (
            ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "blockwise", "--fp8-amax-compute-algo", "max"),
            "--fp8-amax-compute-algo",
        ),
        (("--bf16", "--fp8-recipe", "mxfp8"), "--fp8-recipe"),
        (("--bf16", "--fp8-format", "hybrid", "--fp8-interval", "10"), "--fp8-interval"),
        (("--bf16", "--fp8-format", "hybrid", "--no-fp8-wgrad"), "--no-fp8-wgrad"),
        (("--bf16", "--initial-loss-scale", "65536"), "--initial-loss-scale"),
        (("--fp16", "--loss-scale", "128", "--hysteresis", "4"), "--hysteresis"),
        (("--bf16", "--fp8-format", "hybrid", "--fp8-param-gather", "--use-torch-fsdp2"), "--fp8-param-gather"),
        (("--bf16", "--num-layers-at-end-in-bf16", "4"), "--num-layers-at-end-in-bf16"),
    ],
)
def test_what_has_no_effect_is_named(words, field: str) -> None:
    assert reasons(read(*words), field) == ["dead knob"]


def test_a_setting_that_is_not_read_may_be_null() -> None:
    imported = megatron_lm.import_({"bf16": True, "autocast_dtype": "null", "fp8_recipe": "auto"})
    assert (imported.recipe, reasons(imported, "autocast_dtype"), reasons(imported, "fp8_recipe")) == (
        "bf16_mixed",
        [],
        [],
    )


def test_sharding_takes_settings_back() -> None:
    words = (
        "--bf16",
        "--fp8-format",
        "e4m3",
        "--fp8-recipe",
        "mxfp8",
        "--fp8-param-gather",
        "--reuse-grad-buf-for-mxfp8-param-ag",
    )
    assert read(*words, "--use-distributed-optimizer").config.reuse_grad_buf_for_mxfp8_param_ag is True
    under = read(*words, "--use-megatron-fsdp")
    assert under.config.reuse_grad_buf_for_mxfp8_param_ag is False
    assert reasons(under, "--reuse-grad-buf-for-mxfp8-param-ag") == ["dead knob"]
    assert under.config.grad_reduce_in_fp32 is False
    assert reasons(under, "--megatron-fsdp-main-grads-dtype") == ["implied default"]
    assert reasons(under, "--accumulate-allreduce-grads-in-fp32") == []


def test_a_loss_scale_of_zero_is_unset() -> None:
    assert read("--fp16", "--loss-scale", "0").config.loss_scale is None


def test_flags_of_old_releases_are_known() -> None:
    assert read("--bf16", "--fp8-hybrid").config.fp8 == "hybrid"
    assert read("--bf16", "--fp8-e4m3").config.fp8 == "e4m3"
    assert read("--fp16", "--fp32-allreduce").config.grad_reduce_in_fp32 is True


@pytest.mark.parametrize("option", sorted(f"--{name.replace('_', '-')}" for name in OTHER_SETTINGS))
def test_a_setting_without_a_field_is_reported_and_its_default_is_not(option: str) -> None:
    row = OTHER_SETTINGS[get_dest(option)]
    (default,) = row.harmless
    words = ("--bf16", option) if default is False else ("--bf16", option, "bf16" if default != "bf16" else "mxfp8")
    assert reasons(read(*words), option) == [row.reason]
    if default not in (None, False):
        assert reasons(read("--bf16", option, str(default)), option) == []


def test_a_flag_that_nobody_knows_is_not_dropped() -> None:
    imported = read("--bf16", "--my-fp8-trick", "7", "--num-layers", "2", "--overlap-grad-reduce")
    assert [(loss.field, loss.value) for loss in imported.unmapped if loss.reason == "unsupported"] == [
        ("--my-fp8-trick", "7")
    ]


def test_each_flag_that_bears_on_precision_is_carried_or_reported() -> None:
    words = [
        "--fp16",
        "--fp8-format",
        "e4m3",
        "--fp8-recipe",
        "custom",
        "--fp8-quantizer-factory",
        "a.b",
        "--hysteresis",
        "3",
    ]
    words += ["--transformer-impl", "local", "--exp-avg-dtype=fp8", "--moe-router-dtype", "fp32", "--fp8-output-proj"]
    words += ["--accumulate-allreduce-grads-in-fp32", "--fp4-param-gather", "--loss-scale-window", "500"]
    imported = read(*words)
    known = {*imported.mapped, *(loss.field for loss in imported.unmapped)}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bf16", "--fp8-format"], "--fp8-format: must be followed by a value, got none. Complete the arguments."),
        (
            ["--fp16", "--hysteresis", "two"],
            "--hysteresis: must be a whole number, got 'two'. Correct the value there.",
        ),
        (["--fp16", "--loss-scale", "x"], "--loss-scale: must be a number, got 'x'. Correct the value there."),
        (
            [1, [2]],
            "megatron-lm: must be arguments, a mapping of them, or a launch script, got a list. "
            "Give the contents of the file.",
        ),
        (
            None,
            "megatron-lm: must be arguments, a mapping of them, or a launch script, got a NoneType. "
            "Give the contents of the file.",
        ),
    ],
)
def test_what_megatrons_parser_refuses_is_refused(words, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        megatron_lm.import_(words)
    assert str(caught.value) == message


def test_only_configs_that_can_be_right_are_exported() -> None:
    with pytest.raises(PrecisionTypeError):
        megatron_lm.export("bf16_mixed")
    with pytest.raises(PrecisionConfigError):
        megatron_lm.export(MixedPrecisionConfig(bf16=True, fp16=True))


@pytest.mark.parametrize(
    ("words", "carried"),
    [
        (("--bf16", "--fp16", "False"), {"bf16": True, "fp16": False}),
        (("--fp16=False", "--bf16"), {"bf16": True, "fp16": False}),
        (("--bf16", "true"), {"bf16": True}),
        (("--bf16", "--fp8-format", "hybrid", "--fp8-param-gather", "0"), {"fp8_param_gather": False}),
        (("--bf16", "--grad-reduce-in-bf16", "NO"), {"grad_reduce_in_fp32": True}),
        (("--bf16", "--fp8-output-proj", "off"), {"bf16": True}),
    ],
)
def test_a_word_behind_a_switch_is_meant_and_refused(words, carried) -> None:
    option = argparse.ArgumentParser(exit_on_error=False)
    for flag in {word.partition("=")[0] for word in words if word.startswith("--")} - {"--fp8-format"}:
        option.add_argument(flag, action="store_true")
    option.add_argument("--fp8-format")
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        option.parse_args(words)
    imported = read(*words)
    assert {name: getattr(imported.config, name) for name in carried} == carried
    (loss,) = [loss for loss in imported.unmapped if loss.reason == "semantics"]
    assert "parser takes no value after it and refuses to start; it is read as" in loss.detail
    assert loss.value == (words[-1] if loss.field != "--fp16" else "False")


# -- files ------------------------------------------------------------------------------------------------------------


def test_arrays_with_comments_are_read() -> None:
    (run,) = sample("gpt_arrays.sh")
    assert run.recipe == "bf16_with_fp8_delayed_scaling_mixed"
    assert run.label == "line 42, pretrain_gpt.py"


def test_an_options_string_inside_sh_c_is_read() -> None:
    (run,) = sample("options_string.sbatch")
    assert run.config.fp16
    assert (run.config.initial_loss_scale, run.config.min_loss_scale, run.config.hysteresis) == (65536, 0.5, 4)
    assert reasons(run, "$@") == ["unsupported"]


def test_branches_that_matter_are_both_reported() -> None:
    without, with_fp16, with_fp8 = sample("branches.sh")
    assert (with_fp8.config.fp8_recipe, without.recipe) == ("mxfp8", "bf16_mixed")
    assert 'line 13, if [ "$USE_FP8" = "1" ]' in with_fp8.label
    assert reasons(without, "line 7, if [[ $PRECISION == bf16 ]]") == ["unsupported"]
    assert (get_mode(with_fp16.config), "line 9, elif [[ $PRECISION == fp16 ]]" in with_fp16.label) == ("fp16", True)
    (half,) = sample("branches.sh", variables={"PRECISION": "fp16", "1": "0"})
    assert (half.config.fp16, half.config.loss_scale) == (True, 4096)


def test_each_of_several_launches_is_a_run() -> None:
    runs = sample("several.sh")
    assert [(get_mode(run.config) if run.mode_is_stated else None, get_scheme(run.config)) for run in runs] == [
        ("fp16", None),
        (None, None),
        ("bf16", "blockwise"),
        ("bf16", "tensorwise"),
    ]


def test_a_file_of_arguments_that_others_source_is_read() -> None:
    (run,) = sample("conf_only.sh")
    assert (run.recipe, run.label) == ("bf16_mixed", "arguments in MODEL_ARGS")
    assert run.mapped["--attention-softmax-in-fp32"] == (), "the default of Megatron Core's own class"


def test_the_awkward_script_is_read() -> None:
    runs = sample("awkward.sh")
    assert [(get_mode(run.config), run.config.fp8, run.config.tf32) for run in runs] == [
        ("bf16", None, False),
        ("fp16", None, False),
        ("fp32", None, False),
        ("bf16", "hybrid", False),
    ]
    assert reasons(runs[0], "NVTE_FP8_DPA_BWD") == ["unsupported"]
    assert [loss.value for loss in runs[0].unmapped if loss.field == "--loss-scale"] == ["$(cat scale.txt)"]
    assert reasons(runs[0], "heredoc on line 18") == ["unsupported"]
    assert reasons(runs[2], "${EXTRA_ARGS}") == ["unsupported"]


def test_the_test_suites_yaml_is_read() -> None:
    (run,) = sample("model_config.yaml")
    assert run.config.to_dict(full=True) | {} == run.config.to_dict(full=True)
    assert (run.config.fp8_recipe, run.config.grad_reduce_in_fp32, run.config.tf32) == ("tensorwise", False, False)
    assert run.mapped["--moe-router-dtype"] == ("moe_router_dtype",)
    assert "--fp16" in run.mapped


def test_an_argument_file_with_all_defaults_is_read() -> None:
    (run,) = sample("yaml_cfg.yaml")
    assert run.recipe == "bf16_mixed"
    assert {loss.field for loss in run.unmapped} == {"transformer_impl", "accumulate_allreduce_grads_in_fp32"}
    assert reasons(run, "accumulate_allreduce_grads_in_fp32") == ["dead knob"]


def test_an_argument_file_of_underscored_keys_is_read() -> None:
    (run,) = sample("moe_args.yaml")
    assert run.recipe == "bf16_with_mxfp8_mixed"
    assert run.mapped["exp_avg_dtype"] == ("exp_avg_dtype",)
    assert (run.config.exp_avg_dtype, run.mapped["main_grads_dtype"]) == (torch.bfloat16, ())


def test_arguments_as_one_string_are_read() -> None:
    assert (
        compute_effective_fields(megatron_lm.import_(["--bf16", "--fp4-format", "e2m1"]).config)["fp4_recipe"]
        == "nvfp4"
    )


def test_an_unresolved_variable_leaves_the_mode_unstated() -> None:
    (run,) = megatron_lm.import_all(Document.from_text("torchrun pretrain_gpt.py --num-layers 2 $MODEL_ARGS", "run.sh"))
    assert run.decided_by == "$MODEL_ARGS, which only the run knows,"
    assert run.semantics == "unstated"


def test_fp4_weights_bring_the_recipe_that_the_precision_aware_optimizer_needs() -> None:
    stored = {"bf16": True, "fp4": "e2m1", "fp4_param_gather": True, "use_precision_aware_optimizer": True}
    words = megatron_lm.export(MixedPrecisionConfig(**stored)).payload
    assert words[words.index("--fp8-recipe") + 1] == "tensorwise"
    plain = MixedPrecisionConfig(**{**stored, "fp4_param_gather": False})
    assert "--fp8-recipe" not in megatron_lm.export(plain).payload

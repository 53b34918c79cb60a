"""For each of these systems: nothing is dropped, what is carried returns, and no payload breaks an import."""

import importlib
import inspect
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bridge.convert import systems
from bridge.errors import BridgeError, PrecisionConfigError, PrecisionTypeError
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign_system_signs import DOCUMENT_KINDS
from bridge.read.megatron_lm.module_recipe.stage_files import LAYOUT_KEYS
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.read.properties import (
    check_export,
    check_import,
    check_nothing_dropped,
    check_return,
    configs,
    payloads,
    survives,
)

NAMES = ("axolotl", "deepspeed", "huggingface")
MEGATRONS = ("megatron_bridge", "megatron_lm", "nemo1", "nemo2")
"""These write for Megatron Core; what they export is tested in their own files, with their own readers."""
WRITTEN_PART = "torch_autocast"
"""Of DeepSpeed: it is written and not read."""
MODULES = {
    name: importlib.import_module(systems.SYSTEM_MODULES[name.replace("_", "-")]) for name in (*NAMES, *MEGATRONS)
}
KEYS = {
    "axolotl": "bf16 fp16 fp8 fp8_config recipe fp8_enable_fsdp_float8_all_gather fsdp_version fsdp_config tf32 "
    "bfloat16 float16 float32 adapter load_in_8bit optimizer deepspeed fsdp torch_compile attn_implementation "
    "fp32_norms mixed_precision_policy float8 cpu_ram_efficient_loading",
    "deepspeed": "fp16 bf16 bfloat16 enabled loss_scale initial_scale_power loss_scale_window hysteresis "
    "min_loss_scale torch_autocast dtype data_types grad_accum_dtype communication_data_type param_dtype amp fp8 "
    "zero_optimization zero_quantized_weights auto_cast consecutive_hysteresis bf16_master_weights_and_grads "
    "lower_precision_safe_modules",
    "huggingface": "bf16 fp16 bf16_full_eval fp16_full_eval tf32 torch_compile use_cpu fp16_opt_level deepspeed optim",
    "megatron_bridge": "mixed_precision bf16 fp16 fp32 fp8 fp8_recipe fp4 params_dtype _target_ model optimizer ddp "
    "fp8_param fp8_param_gather hysteresis first_last_layers_bf16 num_layers_at_start_in_bf16 grad_reduce_in_fp32",
    "megatron_lm": "MODEL_ARGS ENV_VARS --bf16 --fp8-format --fp8-recipe bf16 fp16 fp8_format fp8_recipe loss_scale "
    "language_model model_parallel NVIDIA_TF32_OVERRIDE hysteresis grad_reduce_in_bf16 fp8_margin --main-grads-dtype",
    "nemo1": "trainer model precision megatron_amp_O2 fp8 fp8_e4m3 fp8_hybrid transformer_engine mcore_gpt fp8_margin "
    "native_amp_init_scale native_amp_growth_interval hysteresis optim grad_sync_dtype reduce_amax fp8_params strategy",
    "nemo2": "precision params_dtype pipeline_dtype fp8 fp8_recipe fp8_params fp8_param_gather fp16_loss_scale "
    "plugins trainer fp4 first_last_layers_bf16 fp8_amax_history_len",
}


@pytest.fixture(params=NAMES)
def system(request: pytest.FixtureRequest) -> ModuleType:
    return MODULES[request.param]


@given(config=configs())
@pytest.mark.parametrize("name", NAMES)
def test_stated_fields_are_carried_or_reported_and_what_is_carried_returns(
    name: str, config: MixedPrecisionConfig
) -> None:
    module = MODULES[name]
    exported = module.export(config)
    check_export(config, exported)
    if WRITTEN_PART not in exported.payload:
        imported = module.import_(exported.payload)
        check_import(imported)
        check_return(config, exported, imported)


SWITCH = st.booleans() | st.none()
SETTINGS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "axolotl": st.fixed_dictionaries(
        {},
        optional={
            "bf16": SWITCH | st.just("auto"),
            "tf32": SWITCH | st.just("auto"),
            "fp8_config": st.sampled_from([None, {"recipe": "rowwise"}, {"recipe": "tensorwise"}]),
            "optimizer": st.sampled_from(["adamw_bnb_8bit", "ao_adamw_fp8"]),
            "attn_implementation": st.just("fp8"),
            "torch_compile": SWITCH | st.just("auto"),
            "deepspeed": st.just("zero3.json"),
            "fp8_enable_fsdp_float8_all_gather": st.just(False),
            "quantization": st.just({"weight_dtype": "int4"}),
            **dict.fromkeys(("fp16", "fp8", "bfloat16", "float16", "float32", "load_in_4bit", "gptq"), SWITCH),
            **dict.fromkeys(("load_in_8bit", "embeddings_skip_upcast", "float8", "loss_scale_fp16"), SWITCH),
        },
    ),
    "deepspeed": st.fixed_dictionaries(
        {},
        optional={
            "fp16": st.fixed_dictionaries(
                {"enabled": st.booleans() | st.just("auto")},
                optional={
                    "loss_scale": st.sampled_from([0, 128.0, "auto"]),
                    "initial_scale_power": st.integers(0, 32),
                    "loss_scale_window": st.integers(1, 2000),
                    "hysteresis": st.integers(1, 4),
                    "min_loss_scale": st.integers(1, 4),
                    "auto_cast": st.booleans(),
                    "consecutive_hysteresis": st.booleans(),
                    "fp16_master_weights_and_grads": st.booleans(),
                },
            ),
            "bf16": st.fixed_dictionaries(
                {"enabled": st.booleans() | st.just("auto")},
                optional={
                    "immediate_grad_update": st.booleans(),
                    "check_grad_overflow": st.booleans(),
                    "bf16_master_weights_and_grads": st.booleans(),
                    "bf16_optimizer_states": st.booleans(),
                },
            ),
            "torch_autocast": st.fixed_dictionaries(
                {"enabled": st.booleans(), "dtype": st.sampled_from(["bfloat16", "fp16"])},
                optional={
                    "lower_precision_safe_modules": st.just(["a.B"]),
                },
            ),
            "data_types": st.fixed_dictionaries(
                {}, optional={"grad_accum_dtype": st.sampled_from(["fp32", "bf16", "fp16"])}
            ),
            "communication_data_type": st.sampled_from(["fp32", "bf16", "fp16", None]),
            "fp8": st.just({"enabled": True}),
        },
    ),
}


@given(data=st.data())
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_no_setting_is_dropped(name: str, data: st.DataObject) -> None:
    payload = data.draw(SETTINGS[name])
    try:
        imported = MODULES[name].import_(payload)
    except BridgeError:
        return  # two modes at once, and the like
    check_nothing_dropped(payload, imported)


@given(data=st.data())
@pytest.mark.parametrize("name", [*NAMES, *MEGATRONS])
def test_no_payload_breaks_an_import(name: str, data: st.DataObject) -> None:
    # what Megatron itself refuses only later is imported as it stands, and no export takes it
    survives(MODULES[name].import_, data.draw(payloads(KEYS[name].split())), sound=name not in MEGATRONS)


def test_every_recipe_leaves_and_returns(system: ModuleType) -> None:
    for recipe in REGISTRY.recipes():
        if "misnamed" in recipe.tags:
            continue
        config = REGISTRY.get(recipe.name)
        exported = system.export(config)
        check_export(config, exported)
        text = system.SYSTEM.write(exported.payload)
        again = json.loads(text) if DOCUMENT_KINDS[system.SYSTEM.name][0] == "json" else yaml.safe_load(text)
        if WRITTEN_PART not in exported.payload:
            check_return(config, exported, system.import_(again))


def test_what_is_no_config_is_refused(system: ModuleType) -> None:
    for bad in (None, "bf16_mixed", 3, {}):
        with pytest.raises(PrecisionTypeError, match="must be a MixedPrecisionConfig"):
            system.export(bad)


def test_a_config_that_can_never_be_right_is_refused(system: ModuleType) -> None:
    with pytest.raises(PrecisionConfigError, match="only one of fp32, fp16 and bf16 can be on"):
        system.export(MixedPrecisionConfig(bf16=True, fp16=True))


def test_importing_the_systems_imports_no_framework() -> None:
    code = (
        "import sys\n"
        f"for module in {[systems.SYSTEM_MODULES[name] for name in NAMES]}: __import__(module)\n"
        "print([m for m in ('torch', 'transformers', 'torchao', 'deepspeed', 'megatron')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("semantics", "recipe"),
    [("megatron_o2", "bf16_mixed"), ("fsdp_policy", "bf16_mixed"), ("amp_o1", None), ("true", None)],
)
def test_a_recipe_is_named_only_where_it_keeps_the_same_master_weights(semantics: str, recipe: str | None) -> None:
    builder = ImportBuilder("another system")
    builder.map("bf16", bf16=True, params_dtype="bf16")
    assert builder.finish(semantics).recipe == recipe


@pytest.mark.parametrize("scheme", ["fp8", "fp4"])
def test_a_scheme_without_a_mode_is_reported(scheme: str) -> None:
    builder = ImportBuilder("another system")
    builder.map(scheme, **{scheme: {"fp8": "hybrid", "fp4": "e2m1"}[scheme]})
    builder.leave_mode("the recipe that the program loads")
    imported = builder.finish("megatron_o2")
    assert [str(loss) for loss in imported.unmapped if loss.field == scheme] == [
        f"{scheme}={imported.config.to_dict()[scheme]!r} (unsupported): no mode is stated with it; the recipe that the "
        "program loads decides in what all but its GEMMs runs. State bf16, fp16 or fp32 with it."
    ]


def test_each_key_of_the_context_is_an_argument_of_the_functions_it_names() -> None:
    for name, module in MODULES.items():
        for key in module.SYSTEM.context:
            for use, function in (("import", module.SYSTEM.import_), ("export", module.SYSTEM.export)):
                parameters = inspect.signature(function).parameters
                takes = key.name in parameters or ("layout" in parameters and key in LAYOUT_KEYS)
                assert takes is (use in key.use), f"{name}: {use} takes {key.name}: {takes}"

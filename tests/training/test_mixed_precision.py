"""Code written for Megatron Bridge, with only the import line changed."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bridge.errors import SyncCheckError, UnknownRecipeError
from bridge.training.config import (
    ConfigContainer,
    DistributedDataParallelConfig,
    OptimizerConfig,
    runtime_config_update,
)
from bridge.training.mixed_precision import (
    MIXED_PRECISION_RECIPES,
    MixedPrecisionConfig,
    bf16_mixed,
    bf16_with_fp8_current_scaling_mixed,
    get_mixed_precision_config,
    register,
    update_config_with_precision_overrides,
)


def test_the_documented_half_precision_examples() -> None:
    config = ConfigContainer(mixed_precision="bf16_mixed")
    assert config.mixed_precision == "bf16_mixed"
    custom = MixedPrecisionConfig(
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,
    )
    config = ConfigContainer(mixed_precision=custom)
    runtime_config_update(config)
    assert config.mixed_precision is custom


def test_the_documented_custom_fp8_example_runs_and_its_dead_settings_are_reported(megatron_owners) -> None:
    fp8_config = MixedPrecisionConfig(
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        fp8="hybrid",
        fp8_recipe="tensorwise",
        fp8_margin=0,
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
        fp8_param_gather=True,
    )
    report = runtime_config_update(ConfigContainer(mixed_precision=fp8_config, **megatron_owners()))
    assert report is not None
    assert [finding.path for finding in report.findings] == [
        "mixed_precision.fp8_amax_history_len",
        "mixed_precision.fp8_amax_compute_algo",
    ]


def test_the_documented_registration_example(registered: None) -> None:
    @register
    def my_custom_fp8_recipe() -> MixedPrecisionConfig:
        """Custom FP8 recipe with specific settings for my use case."""
        return MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", fp8_param_gather=True)

    config = get_mixed_precision_config("my_custom_fp8_recipe")
    assert config == my_custom_fp8_recipe()
    assert "my-custom-fp8-recipe" in MIXED_PRECISION_RECIPES


def test_the_documented_synchronisation_example(megatron_owners) -> None:
    owners = megatron_owners()
    model_config, optimizer_config = owners["model"], owners["optimizer"]
    model_config.bf16 = False
    optimizer_config.bf16 = False
    config = ConfigContainer(model=model_config, optimizer=optimizer_config, mixed_precision="bf16_mixed")
    report = runtime_config_update(config)
    assert (model_config.bf16, optimizer_config.bf16) == (True, True)
    assert report is not None
    for owner in ("model", "optimizer"):
        row = report.row(f"{owner}.bf16")
        assert (row.old, row.new, row.by) == (False, True, "recipe bf16_mixed")


def test_the_way_megatron_bridge_derives_a_config_from_a_recipe() -> None:
    config = bf16_mixed()
    config.fp8 = "hybrid"
    config.fp8_recipe = "tensorwise"
    config.fp8_param_gather = True
    config.first_last_layers_bf16 = True
    config.num_layers_at_start_in_bf16 = 1
    config.num_layers_at_end_in_bf16 = 1
    assert config == bf16_with_fp8_current_scaling_mixed()
    config.finalize()


def test_setup_takes_any_objects_and_the_last_two_are_optional(megatron_owners) -> None:
    owners = megatron_owners()
    get_mixed_precision_config("bf16_mixed").setup(owners["model"], owners["optimizer"], owners["ddp"])
    assert owners["ddp"].grad_reduce_in_fp32 is True
    model = SimpleNamespace(bf16=False, params_dtype=None)
    get_mixed_precision_config("bf16_mixed").setup(model)
    assert model.params_dtype is torch.bfloat16


def test_update_config_returns_the_same_object_with_the_precision_of_its_role(megatron_owners) -> None:
    owners = megatron_owners()
    for owner in owners.values():
        assert update_config_with_precision_overrides(get_mixed_precision_config("bf16_mixed"), owner) is owner
    assert owners["model"].params_dtype is torch.bfloat16
    assert owners["optimizer"].fp8_recipe is None


def test_update_config_takes_an_object_of_no_known_class() -> None:
    anything = SimpleNamespace(
        bf16=False, grad_reduce_in_fp32=False, loss_scale=None, fp8_param_gather=True, enable_autocast=False, other=1
    )
    config = MixedPrecisionConfig(bf16=True, loss_scale=1024.0, autocast_enabled=True)
    assert update_config_with_precision_overrides(config, anything) is anything
    told = {name: value for name, value in vars(anything).items() if not name.startswith("_")}
    assert told == {
        "bf16": True,
        "grad_reduce_in_fp32": True,
        "loss_scale": 1024.0,
        "fp8_param_gather": False,
        "enable_autocast": True,
        "other": 1,
    }


def test_runtime_config_update_resolves_the_name_and_is_strict(megatron_owners) -> None:
    config = ConfigContainer(mixed_precision="bf16-mixed", **megatron_owners())
    runtime_config_update(config)
    assert config.mixed_precision == bf16_mixed()
    with pytest.raises(UnknownRecipeError):
        runtime_config_update(ConfigContainer(mixed_precision="bf61"))
    with pytest.raises(SyncCheckError):
        runtime_config_update(ConfigContainer(mixed_precision="mxfp8", **megatron_owners(sharded=False)))
    assert runtime_config_update(ConfigContainer()) is None


def test_megatrons_own_config_classes_can_be_imported_from_here() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig as Ddp
    from megatron.core.optimizer import OptimizerConfig as Optimizer

    assert OptimizerConfig is Optimizer
    assert DistributedDataParallelConfig is Ddp


def test_signatures_are_those_the_peers_callers_use() -> None:
    assert list(inspect.signature(MixedPrecisionConfig.setup).parameters)[1:] == [
        "model_config",
        "optimizer_config",
        "ddp_config",
    ]
    assert list(inspect.signature(update_config_with_precision_overrides).parameters) == [
        "mixed_precision_config",
        "config",
    ]


def test_importing_the_compatible_module_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, bridge.training.mixed_precision; print('torch' in sys.modules, 'megatron' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"

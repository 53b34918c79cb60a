"""Code written for Megatron Bridge, with only the import line changed."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bridge.training.config as training_config
import bridge.training.mixed_precision as compatible
from bridge.errors import PrecisionTypeError, SyncCheckError, UnknownRecipeError
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

ROOT = Path(__file__).parents[2]


def test_the_documented_half_precision_examples(megatron_owners) -> None:
    config = ConfigContainer(mixed_precision="bf16_mixed")
    assert config.mixed_precision == "bf16_mixed"
    custom = MixedPrecisionConfig(
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,
    )
    config = ConfigContainer(mixed_precision=custom, **megatron_owners())
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
    assert sorted(finding.path for finding in report.findings) == [
        "mixed_precision.fp8_amax_compute_algo",
        "mixed_precision.fp8_amax_history_len",
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
        assert (row.old, row.new, row.by.name) == (False, True, "recipe bf16_mixed")


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


def test_megatrons_config_classes_can_be_imported_from_here_and_wait_for_finalize() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig as Ddp
    from megatron.core.optimizer import OptimizerConfig as Optimizer

    assert issubclass(OptimizerConfig, Optimizer)
    assert issubclass(DistributedDataParallelConfig, Ddp)
    config = ConfigContainer(
        optimizer=OptimizerConfig(lr=1e-4, bf16=True),
        ddp=DistributedDataParallelConfig(reuse_grad_buf_for_mxfp8_param_ag=True),
        mixed_precision="bf16_mixed",
    )
    runtime_config_update(config)
    for owner in (config.optimizer, config.ddp):
        owner.finalize()


@pytest.mark.parametrize(
    "name", ["TrainingConfig", "SchedulerConfig", "GPTDatasetConfig", "OptimizerConfigOverrideProvider"]
)
def test_a_section_of_the_peers_trainer_is_answered_with_the_page_that_says_what_is_here(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from bridge.training.config import {name}")  # noqa: S102
    assert str(caught.value) == (
        f"{name} is not provided by bridge.training.config: the trainer's sections stay with Megatron Bridge. Import "
        "it from there; docs/howto/migrate-from-megatron-bridge.md says what is here."
    )
    assert (ROOT / "docs/howto/migrate-from-megatron-bridge.md").exists()


def test_any_other_name_is_an_attribute_error_as_ever() -> None:
    assert not hasattr(training_config, "apply_environment_variables")
    with pytest.raises(AttributeError, match=r"docs/howto/migrate-from-megatron-bridge.md says what is here"):
        training_config.nothing_like_it  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'TrainingConfg'"):
        training_config.TrainingConfg  # noqa: B018


def test_recipes_are_names_of_the_module(registered: None) -> None:
    @register
    def added_later() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True)

    assert {"bf16_mixed", "added_later", "MixedPrecisionConfig"} <= set(dir(compatible))
    functions = dict(inspect.getmembers(compatible, inspect.isfunction))
    assert functions["bf16_mixed"] is bf16_mixed
    assert set(compatible.__all__) <= set(dir(compatible))


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


def test_asking_for_the_modules_names_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\nfrom bridge.training.mixed_precision import *\nimport bridge.training.mixed_precision as m\n"
        "dir(m); list(m.MIXED_PRECISION_RECIPES.copy())\nprint('torch' in sys.modules, 'megatron' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_an_object_without_a_field_of_a_precision_is_left_alone_with_a_warning(caplog) -> None:
    held = SimpleNamespace(other=1)
    assert update_config_with_precision_overrides(get_mixed_precision_config("bf16_mixed"), held) is held
    assert vars(held) == {"other": 1}
    assert caplog.messages == ["SimpleNamespace has no field of a precision; it is left as it is"]


def test_what_the_compatible_face_keeps_and_finds_is_logged(caplog, megatron_owners) -> None:
    owners = megatron_owners(first_last_layers_bf16=True)
    get_mixed_precision_config("bf16_with_mxfp8_mixed").setup(*owners.values())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(line.startswith("model.first_last_layers_bf16: True (keep, ") for line in lines)
    assert len(set(lines)) == len(lines)


def test_what_is_no_config_object_is_refused() -> None:
    config = get_mixed_precision_config("bf16_mixed")
    with pytest.raises(PrecisionTypeError, match=r"^config: must be the config object of this owner, got 3\. "):
        update_config_with_precision_overrides(config, 3)
    with pytest.raises(PrecisionTypeError, match=r"^config: must be a ConfigContainer, got 3\. "):
        runtime_config_update(3)
    with pytest.raises(PrecisionTypeError, match=r"^model: a sync writes into at least one of model, optimizer, ddp"):
        runtime_config_update(ConfigContainer(mixed_precision="bf16_mixed"))

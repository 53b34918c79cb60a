"""What a run refuses before anything is built."""

import math

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from bridge.errors import RunConfigError, SyncCheckError
from bridge.runtime.megatron.gpt import GPTConfig
from bridge.target.versions import parse_version
from bridge.training.config import (
    ConfigContainer,
    LoggingConfig,
    TrainConfig,
    runtime_config_update,
)
from bridge.training.loop import warn_about_untested_release
from bridge.training.value_checks import require_sane_values


def container(**sections):
    model = GPTConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    return ConfigContainer(
        model=model, optimizer=OptimizerConfig(lr=1e-3), ddp=DistributedDataParallelConfig(), **sections
    )


def test_numbers_that_no_run_can_begin_with_are_refused_all_at_once() -> None:
    config = container(
        train=TrainConfig(micro_batch_size=0, train_iters=-5, eval_iters=-1, seed=-1, lr_warmup_iters=0),
        logging=LoggingConfig(log_interval=0),
    )
    config.optimizer.lr = float("nan")
    with pytest.raises(RunConfigError) as caught:
        require_sane_values(config)
    assert str(caught.value).splitlines() == [
        "train.train_iters: must be at least 1, got -5. Use 1 or more.",
        "train.micro_batch_size: must be at least 1, got 0. Use 1 or more.",
        "train.eval_iters: must be at least 0, got -1. Use 0 or more.",
        "train.seed: must be at least 0, got -1. Use 0 or more.",
        "logging.log_interval: must be at least 1, got 0. Use 1 or more.",
        "optimizer.lr: must be at least 0, got nan. Use 0 or more.",
    ]


@pytest.mark.parametrize(
    ("section", "name", "value", "rule"),
    [
        ("optimizer", "lr", math.inf, "must be finite"),
        ("optimizer", "clip_grad", math.nan, "must be at least 0"),
        ("model", "hidden_dropout", 2, "must be less than 1"),
        ("model", "attention_dropout", math.nan, "must be at least 0"),
        ("model", "layernorm_epsilon", math.nan, "must be at least 0"),
        ("model", "init_method_std", math.inf, "must be finite"),
        ("optimizer", "adam_beta1", 2, "must be less than 1"),
        ("optimizer", "adam_beta2", 1.0, "must be less than 1"),
        ("optimizer", "adam_eps", -1, "must be at least 0"),
        ("train", "seed", 10**20, "must be less than 2147483648"),
        ("data", "seed", 10**20, "must be less than 2147483648"),
    ],
)
def test_a_value_outside_its_range_is_refused(section, name, value, rule) -> None:
    config = container(train=TrainConfig(lr_warmup_iters=0))
    setattr(getattr(config, section), name, value)
    with pytest.raises(RunConfigError) as caught:
        require_sane_values(config)
    assert str(caught.value).startswith(f"{section}.{name}: {rule}, got {value!r}. ")
    assert "\n" not in str(caught.value)


def test_sane_values_pass() -> None:
    require_sane_values(container(train=TrainConfig(eval_interval=0, lr_warmup_iters=0)))


def test_without_a_recipe_model_and_optimizer_have_to_agree() -> None:
    config = container()
    config.model.bf16 = True
    with pytest.raises(SyncCheckError) as caught:
        runtime_config_update(config)
    assert str(caught.value) == (
        "Without a recipe the owners' own settings have to agree:\n"
        "  model.bf16: must equal optimizer.bf16, which is False, got True. "
        "Give both the same value, or choose a recipe."
    )


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("0.16.1", True), ("0.19.2", True), ("0.20.0", True), ("0.21.0", False), ("0.15.0", False)],
)
def test_a_megatron_core_outside_what_was_tested_is_warned_of(version, is_tested, caplog) -> None:
    warn_about_untested_release(parse_version(version))
    expected = f"megatron-core: the tested releases are 0.16.1 to 0.20, got {version}. Compare a short run."
    assert caplog.messages == ([] if is_tested else [expected])

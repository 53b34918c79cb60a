"""Plain data decoded by the annotations of the installed Megatron Core's own classes, and of small ones."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal

import pytest
import torch
from megatron.core.quantization.quant_config import RecipeConfig

from bridge.errors import RunConfigError, WrongValueError
from bridge.front.container import build_container
from bridge.front.decode import decode_fields, decode_value
from bridge.front.loader import make_run
from bridge.precision.statements import get_recipe_name
from bridge.preflight.last_sync import apply_last_sync
from bridge.preflight.origins import Origins
from bridge.preflight.problems import Problems
from bridge.read.run_input import RunInput
from bridge.registry.mixed_precision_config import MixedPrecisionConfig


class Colour(enum.Enum):
    red = 1
    green = 2


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (True, bool, True),
        ("off", bool, False),
        ("12", int, 12),
        (3.0, int, 3),
        ("1e-5", float, 1e-5),
        (2, float, 2),
        ("text", str, "text"),
        (False, str | None, None),
        (None, int | None, None),
        ("bf16", torch.dtype, torch.bfloat16),
        ("torch.float32", torch.dtype | None, torch.float32),
        ("hybrid", Literal["e4m3", "hybrid"] | None, "hybrid"),
        (False, Literal["e4m3", "hybrid"] | None, None),
        ("none", Literal["none", "local"], "none"),
        ("3", Literal[2, 3], 3),
        ("GREEN", Colour, Colour.green),
        ([1, "2"], list[int], [1, 2]),
        ([1, 2], tuple[int, int] | None, (1, 2)),
        (["a"], tuple[str, ...], ("a",)),
        ([1, 0], int | list[int], [1, 0]),
        (4, int | list[int] | None, 4),
        ("a", str | list[str], "a"),
        (["a", "b"], str | Colour | list[str] | list[Colour], ["a", "b"]),
    ],
)
def test_a_value_is_decoded_by_its_annotation(value: Any, annotation: Any, expected: Any) -> None:
    decoded = decode_value(value, annotation)
    assert (decoded, type(decoded)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "annotation", "clause"),
    [
        (1, bool, "must be true or false, got 1"),
        (1.5, int, "must be a whole number, got 1.5"),
        (True, int, "must be a whole number, got True"),
        ("many", float, "must be a number, got 'many'"),
        (5, str, "must be text, got 5. Quote it."),
        (
            False,
            str,
            "must be text, got False. YAML reads an unquoted yes, no, on or off as a switch; quote it.",
        ),
        (None, int, "must be a whole number, got None"),
        ("blue", Colour, "must be one of red, green, got 'blue'. Use 'red' or 'green'."),
        (3, list[int], "must be a list, got 3. Write [a, b]."),
        ([1, 2, 3], tuple[int, int], "must have 2 items, got [1, 2, 3]. Give all of them."),
    ],
)
def test_a_value_that_does_not_fit_is_refused(value: Any, annotation: Any, clause: str) -> None:
    with pytest.raises(WrongValueError) as caught:
        decode_value(value, annotation)
    assert str(caught.value) == clause


def _megatron_classes() -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from bridge.runtime.megatron.model.gpt import GPTConfig

    return {"model": GPTConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}


@pytest.mark.parametrize("section", ["model", "optimizer", "ddp"])
def test_every_default_of_megatrons_classes_survives_a_trip_through_plain_data(section: str) -> None:
    from bridge.front.plain_config import value_to_plain

    owner = _megatron_classes()[section]
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(owner)
        if field.default is not dataclasses.MISSING and field.name[0] != "_" and not callable(field.default)
    }
    problems = Problems(Origins())
    plain = {name: value_to_plain(value) for name, value in defaults.items()}
    decoded = decode_fields(plain, owner, section=section, problems=problems)
    problems.raise_any()
    assert decoded == defaults


def test_fields_that_hold_functions_or_objects_are_refused_by_name() -> None:
    values = {"timers": "mine", "quant_recipe": "mine", "grad_scale_func": "mine"}
    problems = Problems(Origins())
    assert decode_fields(values, _megatron_classes()["model"], section="model", problems=problems) == {}
    with pytest.raises(RunConfigError) as caught:
        problems.raise_any()
    assert str(caught.value) == (
        "3 settings of this run cannot be used:\n"
        "  model.timers: holds a function, which a configuration cannot describe, got 'mine' (configuration). "
        "Set it in Python.\n"
        "  model.quant_recipe: is the content of a file of configs and matchers, not its path, got 'mine' "
        "(configuration). Write the content.\n"
        "  model.grad_scale_func: holds a function, which a configuration cannot describe, got 'mine' (configuration). "
        "Set it in Python."
    )


def test_a_per_module_recipe_stands_in_a_run_as_the_content_of_its_file() -> None:
    file = {
        "configs": {"high": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}},
        "matchers": {"qkv": {"config": "high", "type": "glob", "pattern": "*.linear_qkv", "enabled": True}},
    }
    problems = Problems(Origins())
    decoded = decode_fields({"quant_recipe": file}, _megatron_classes()["model"], section="model", problems=problems)
    problems.raise_any()
    assert decoded["quant_recipe"].configs == file["configs"]
    assert [matcher.pattern for matcher in decoded["quant_recipe"].matchers] == ["*.linear_qkv"]
    wrong = {"matchers": {"qkv": {"config": "high", "pattern": "*", "enabled": True}}}
    decode_fields({"quant_recipe": wrong}, _megatron_classes()["model"], section="model", problems=problems)
    with pytest.raises(RunConfigError, match='RecipeConfig .Matcher must specify a "type" field'):
        problems.raise_any()


def test_a_run_can_be_described_in_plain_python_data() -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "params_dtype": "torch.float32"}
    run = build_container(
        *make_run(RunInput(sections={"model": model, "optimizer": {"lr": "1e-3"}, "mixed_precision": "bf16-mixed"}))
    )
    assert run.model is not None
    assert run.optimizer is not None
    assert (run.model.params_dtype, run.optimizer.lr) == (torch.float32, 1e-3)
    assert isinstance(run.mixed_precision, MixedPrecisionConfig)
    assert get_recipe_name(run.mixed_precision) == "bf16_mixed"
    assert run.train.train_iters == 400


def test_functions_and_enums_are_read_as_megatron_bridge_writes_them() -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "attention_backend": 5}
    run = build_container(
        *make_run(RunInput(sections={"model": {**model, "activation_func": "torch.nn.functional.silu"}}))
    )
    assert run.model is not None
    assert (run.model.activation_func, run.model.attention_backend.name) == (torch.nn.functional.silu, "auto")


def test_a_pipelined_model_can_be_built_before_its_precision_is_written() -> None:
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "pipeline_model_parallel_size": 2}
    run = build_container(*make_run(RunInput(sections={"model": model, "mixed_precision": {"bf16": True}})))
    assert run.model is not None
    assert run.model.pipeline_dtype is None
    report = apply_last_sync(run, run.mixed_precision)
    assert report is not None
    assert run.model.pipeline_dtype is torch.bfloat16
    assert (report.row("model.pipeline_dtype").old, report.row("model.pipeline_dtype").verdict) == (None, "derive")


def test_gradient_buffers_are_reused_for_weights_that_the_precision_stores() -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    precision = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}
    reused = {"reuse_grad_buf_for_mxfp8_param_ag": True, "use_distributed_optimizer": True}
    sections = {"model": model, "ddp": reused, "optimizer": reused, "mixed_precision": {**precision, **reused}}
    del sections["mixed_precision"]["use_distributed_optimizer"]
    run = build_container(*make_run(RunInput(sections=sections)))
    assert run.ddp is not None
    assert run.ddp.fp8_param_gather is False, "the sync writes it"
    apply_last_sync(run, run.mixed_precision)
    assert run.ddp.fp8_param_gather is True


def test_a_recipe_of_modules_is_read_as_megatron_bridge_saves_its_object() -> None:
    saved = {"config_dict": {"kept": {"training_recipe": {}}}, "matchers": [{"config_key": "kept", "pattern": "*.fc1"}]}
    read = decode_value(saved, RecipeConfig)
    assert [(one.pattern, one.config_key) for one in read.matchers] == [("*.fc1", "kept")]
    assert read.configs == saved["config_dict"]

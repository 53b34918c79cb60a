"""The faults verified in the peer, one by one: what it does silently is reported here, or cannot happen."""

import subprocess
import sys
from typing import Any

import pytest
from precision_bridge_recipes.blockwise import _warn_of_the_name

from bridge.errors import PrecisionConfigError, UnknownRecipeError
from bridge.preflight.check_context import CheckContext
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.registry.synchronize import synchronize
from bridge.target.declaration import parse_target
from tests.rules.cases.runs import (
    B200,
    CURRENT,
    DENSE,
    H100,
    MXFP8,
    NVFP4,
    OVERLAP,
    OVERLAPPED,
    PRECISION_AWARE,
)


def found(setup: CheckContext) -> dict[str, str]:
    return {one.id: one.severity for one in check(setup.run).findings}


def test_v1_an_overwritten_value_is_reported_before_and_after(megatron_owners: Any) -> None:
    made = megatron_owners()
    made["ddp"].grad_reduce_in_fp32 = True
    precision = REGISTRY.get("bf16_mixed").override(grad_reduce_in_fp32=False)
    (finding,) = (one for one in check(Run.from_configs(precision, **made)).findings if one.id == "PB123")
    assert (finding.path, finding.value) == ("ddp.grad_reduce_in_fp32", True)
    assert [row.attribute for row in synchronize(precision, **made).overrides] == ["grad_reduce_in_fp32"]


@pytest.mark.parametrize("recipe", ["bf16_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"])
def test_v2_layers_that_a_provider_keeps_stay_kept(recipe: str) -> None:
    provider = dict(DENSE, first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    setup = CheckContext(Run.from_configs(recipe, model=provider))
    low = recipe != "bf16_mixed"
    assert setup.model.first_last_layers_bf16 is low, "kept under FP8 and FP4; nothing to keep in BF16"
    assert (setup.model.num_layers_at_start_in_bf16, setup.model.num_layers_at_end_in_bf16) == (1, 1)


def test_v3_an_inactive_scheme_does_not_reach_the_optimizer() -> None:
    setup = CheckContext(Run.from_configs("bf16_mixed", model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP))
    assert setup.optimizer.fp8_recipe is None
    assert "PB347" not in found(setup)
    by_hand = CheckContext(
        Run.from_configs(
            model=dict(DENSE, bf16=True), optimizer=dict(PRECISION_AWARE, bf16=True, fp8_recipe="tensorwise")
        )
    )
    assert found(by_hand)["PB347"] == "warning"


def test_v4_a_name_that_says_something_else_is_reported() -> None:
    _warn_of_the_name.cache_clear()
    with pytest.warns(match="the name says current scaling, the values are blockwise"):
        config = REGISTRY.get("nanov2_bf16_with_fp8_current_scaling_mixed")
    assert found(CheckContext(Run.from_configs(config, target=parse_target(H100))))["PB125"] == "warning"
    honest = REGISTRY.get("nanov2_bf16_with_fp8_subchannel_scaling_mixed")
    assert "PB125" not in found(CheckContext(Run.from_configs(honest, target=parse_target(H100))))


def test_v5_layers_kept_without_counts_are_one_and_one() -> None:
    setup = CheckContext(
        Run.from_configs(REGISTRY.get("bf16_with_mxfp8_mixed").override(first_last_layers_bf16=True), model=DENSE)
    )
    assert (setup.model.num_layers_at_start_in_bf16, setup.model.num_layers_at_end_in_bf16) == (1, 1)
    zeros = {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0}
    assert (
        found(CheckContext(Run.from_configs(dict(MXFP8, first_last_layers_bf16=True, **zeros), model=DENSE)))["PB261"]
        == "error"
    )


def test_v6_a_buffer_reused_for_weights_that_are_not_in_fp8_is_refused() -> None:
    both = {"fp8_param": False, "reuse_grad_buf_for_mxfp8_param_ag": True}
    config = REGISTRY.get("bf16_with_mxfp8_mixed").override(**both)
    assert found(CheckContext(Run.from_configs(config)))["PB244"] == "error"
    with pytest.raises(PrecisionConfigError, match="reuse_grad_buf_for_mxfp8_param_ag"):
        config.finalize()
    follows = REGISTRY.get("bf16_with_mxfp8_mixed").override(fp8_param=False)
    assert "PB244" not in found(CheckContext(Run.from_configs(follows)))


@pytest.mark.parametrize(
    ("stated", "rule"),
    [
        ({"bf16": True, "fp8_recipe": "mxfp8"}, "PB205"),
        ({"bf16": True, "fp8": "e5m2"}, "PB201"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwize"}, "PB202"),
        ({"bf16": True, "fp16": True, "fp32": True}, "PB101"),
    ],
)
def test_v7_what_the_peers_finalize_accepts_is_refused(stated: dict[str, Any], rule: str) -> None:
    assert found(CheckContext(Run.from_configs(stated)))[rule] == "error"
    with pytest.raises(PrecisionConfigError):
        MixedPrecisionConfig.from_dict(stated).finalize()


@pytest.mark.parametrize(
    ("stated", "paths"),
    [
        ({"fp4": "e2m1", "fp8": None, "fp8_recipe": "delayed"}, ["fp8_recipe"]),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "fp4_recipe": "custom"}, ["fp4_recipe"]),
        (dict(MXFP8, fp8=None), ["fp8_recipe", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"]),
    ],
    ids=["an FP4 run", "an FP8 run", "an FP8 recipe with FP8 off"],
)
def test_what_is_left_over_of_a_format_that_is_off_has_no_effect_and_is_no_error(
    stated: dict[str, Any], paths: list[str]
) -> None:
    setup = CheckContext(Run.from_configs(dict(stated, bf16=True)))
    assert not {"PB205", "PB244", "PB305"} & set(found(setup))
    inert = [one.path for one in check(setup.run).findings if one.rule.startswith("has no effect: no FP")]
    assert inert == [f"mixed_precision.{path}" for path in paths]


def test_v8_an_unknown_recipe_is_answered_shortly_with_the_nearest() -> None:
    with pytest.raises(UnknownRecipeError) as error:
        CheckContext(Run.from_configs("bf16_with_mxfp_mixed"))
    assert "bf16_with_mxfp8_mixed" in error.value.matches
    assert len(str(error.value)) < 250


def test_v9_nvfp4_on_hopper_is_refused_before_a_gpu_is_held() -> None:
    for gpu in ("a100", "h100", "h200"):
        target = parse_target(f"{gpu}x8,te2.14,cuda12.9,mcore0.19.2")
        assert found(CheckContext(Run.from_configs(NVFP4, target=target)))["PB602"] == "error"
    assert "PB602" not in found(CheckContext(Run.from_configs(NVFP4, target=parse_target(B200))))


@pytest.mark.parametrize(("te", "fires"), [("2.6", True), ("2.7.2", True), ("2.8", False)])
def test_v10_two_buffer_modes_need_transformer_engine_2_8_whatever_megatrons_gate_says(te: str, fires: bool) -> None:
    target = parse_target(f"h100x8,te{te},cuda12.9,mcore0.19.2")
    setup = CheckContext(Run.from_configs(CURRENT, model=OVERLAPPED, optimizer=OVERLAP, ddp=OVERLAP, target=target))
    assert ("PB267" in found(setup)) is fires


def test_v11_a_flag_that_upstream_turns_off_is_reported() -> None:
    fsdp2 = CheckContext(
        Run.from_configs(CURRENT, model=DENSE, ddp={"use_torch_fsdp2": True}, target=parse_target(H100))
    )
    assert found(fsdp2)["PB321"] == "warning"
    megatron = CheckContext(
        Run.from_configs(MXFP8, model=DENSE, ddp=dict(OVERLAP, use_megatron_fsdp=True), target=parse_target(B200))
    )
    assert found(megatron)["PB324"] == "warning"


def test_v12_layer_counts_are_checked_under_fp4_too(megatron_owners: Any) -> None:
    beyond = dict(NVFP4, num_layers_at_end_in_bf16=100)
    assert (
        found(CheckContext(Run.from_configs(beyond, model=DENSE, optimizer=OVERLAP, ddp=OVERLAP)))["PB265"] == "error"
    )
    made = megatron_owners(fp4="e2m1", num_layers_at_end_in_bf16=100, first_last_layers_bf16=True)
    assert made["model"].num_layers_at_end_in_bf16 == 100, "Megatron accepts it"


def test_none_of_this_imports_megatron_or_torch() -> None:
    code = (
        "import sys\nfrom bridge.front.python_check import check as check_run\n"
        "run = {'mixed_precision': 'bf16_with_mxfp8_mixed', 'model': {'num_layers': 2}}\n"
        "report = check_run(run, target='h100x8')\n"
        "print(report.verdict, [name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "error []\n"

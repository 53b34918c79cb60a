"""The synchroniser against the installed Megatron's own classes."""

import contextlib
import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge import MixedPrecisionConfig, get_mixed_precision_config, synchronize
from bridge.errors import (
    PrecisionConfigError,
    SyncCheckError,
    SyncConflictError,
    UnknownPolicyError,
)
from bridge.precision.mode import get_mode, get_scheme
from bridge.registry.registry import REGISTRY
from bridge.sync.owner import SYNC_MEMORY_ATTRIBUTE
from tests.precision.test_precision_config import any_fields

pytestmark = pytest.mark.filterwarnings("ignore::bridge.errors.BridgeWarning")

RECIPES = REGISTRY.names()


def state(owner: object) -> dict[str, object]:
    return {name: value for name, value in vars(owner).items() if name != SYNC_MEMORY_ATTRIBUTE and not callable(value)}


def validate(owners: dict[str, object]) -> None:
    for owner in owners.values():
        copy.copy(owner).__post_init__()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("start", ["fresh", "conflicting"])
def test_a_recipe_goes_through_megatrons_validation_and_a_second_sync_changes_nothing(
    name: str, start: str, megatron_owners, conflicting
) -> None:
    owners = megatron_owners() if start == "fresh" else conflicting()
    config = get_mixed_precision_config(name)
    synchronize(config, **owners, strict=True)
    validate(owners)
    model, optimizer, ddp = owners["model"], owners["optimizer"], owners["ddp"]
    assert (model.fp16, model.bf16) == (optimizer.fp16, optimizer.bf16) == (config.fp16, config.bf16)
    assert (
        model.params_dtype
        is optimizer.params_dtype
        is getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[get_mode(config)])
    )
    assert model.pipeline_dtype is model.params_dtype
    assert model.autocast_dtype is (config.autocast_dtype or model.params_dtype)
    assert (model.fp8, model.fp4) == (config.fp8, config.fp4)
    assert optimizer.fp8_recipe == (config.fp8_recipe if config.fp8 else None)
    assert model.fp8_param is ddp.fp8_param_gather is bool(config.fp8 and config.fp8_param)
    assert model.fp4_param is bool(config.fp4 and config.fp4_param)
    assert model.fp4_param is getattr(ddp, "fp4_param_gather", model.fp4_param)
    assert optimizer.reuse_grad_buf_for_mxfp8_param_ag is ddp.reuse_grad_buf_for_mxfp8_param_ag
    before = {role: state(owner) for role, owner in owners.items()}
    again = synchronize(config, **owners, strict=True)
    assert again.changes == ()
    assert {role: state(owner) for role, owner in owners.items()} == before


class Stubborn:
    """A DDP config whose last attribute refuses to be set."""

    def __init__(self) -> None:
        self.grad_reduce_in_fp32 = False
        self._gather = False

    @property
    def fp8_param_gather(self) -> bool:
        return self._gather

    @fp8_param_gather.setter
    def fp8_param_gather(self, value: bool) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize("name", RECIPES)
def test_a_failure_half_way_leaves_all_three_owners_untouched(name: str, conflicting) -> None:
    owners = conflicting() | {"ddp": Stubborn()}
    config = get_mixed_precision_config(name)
    if not config.fp8_param:
        config = MixedPrecisionConfig.from_dict(config.to_dict())
        if config.fp4 or not get_scheme(config):
            owners["ddp"].__class__ = type(
                "MoreStubborn", (Stubborn,), {"grad_reduce_in_fp32": property(lambda s: None)}
            )
            vars(owners["ddp"]).pop("grad_reduce_in_fp32")
        else:
            config.fp8_param = True
    before = {role: dict(vars(owner)) for role, owner in owners.items()}
    with pytest.raises(SyncCheckError, match="cannot be set"):
        synchronize(config, **owners)
    assert {role: dict(vars(owner)) for role, owner in owners.items()} == before


def test_what_the_recipe_does_not_state_and_somebody_set_is_kept(megatron_owners) -> None:
    owners = megatron_owners(first_last_layers_bf16=True, num_layers_at_end_in_bf16=2)
    owners["optimizer"].loss_scale = 1024.0
    report = synchronize("bf16_with_mxfp8_mixed", **owners)
    model = owners["model"]
    assert (model.first_last_layers_bf16, model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16) == (
        True,
        1,
        2,
    )
    assert owners["optimizer"].loss_scale == 1024.0
    assert report.row("optimizer.loss_scale").verdict == "keep"


def test_first_and_last_layers_without_counts_never_end_as_zero(megatron_owners) -> None:
    owners = megatron_owners(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    config = get_mixed_precision_config("mxfp8").override(first_last_layers_bf16=True)
    report = synchronize(config, **owners)
    assert (owners["model"].num_layers_at_start_in_bf16, owners["model"].num_layers_at_end_in_bf16) == (1, 1)
    assert report.row("model.num_layers_at_end_in_bf16").verdict == "override"
    assert synchronize(config, **owners).changes == ()


def test_a_sync_starts_from_the_owners_own_values_not_from_an_earlier_recipe(megatron_owners) -> None:
    for first in RECIPES:
        twice, once = megatron_owners(first_last_layers_bf16=True), megatron_owners(first_last_layers_bf16=True)
        with contextlib.suppress(SyncCheckError):  # Megatron refuses kept layers under delayed scaling
            synchronize(first, **twice)
        synchronize("bf16_with_fp8_subchannel_scaling_mixed", **twice)
        synchronize("bf16_with_fp8_subchannel_scaling_mixed", **once)
        assert {r: state(o) for r, o in twice.items()} == {r: state(o) for r, o in once.items()}, first


def test_a_value_changed_after_a_sync_is_somebodys_own_again(megatron_owners) -> None:
    owners = megatron_owners()
    synchronize("bf16_with_fp8_delayed_scaling_mixed", **owners)
    owners["model"].fp8_amax_history_len = 16
    synchronize("bf16_with_fp8_current_scaling_mixed", **owners)
    assert owners["model"].fp8_amax_history_len == 16


def test_conflicts_can_be_an_error_and_then_nothing_is_changed(megatron_owners) -> None:
    owners = megatron_owners(fp8="e4m3")
    owners["optimizer"].fp16 = True
    before = {role: dict(vars(owner)) for role, owner in owners.items()}
    with pytest.raises(SyncConflictError) as caught:
        synchronize("bf16_mixed", **owners, on_conflict="error")
    assert str(caught.value) == (
        "The recipe 'bf16_mixed' and the configs disagree; nothing was changed:\n"
        "  model.fp8: its own value differs from None of the recipe (the mode is bf16), got 'e4m3' (set by you or your "
        "model provider). Drop one of the two, or use on_conflict='override'.\n"
        "  optimizer.fp16: its own value differs from False of the recipe (the mode is bf16), got True (set by you or "
        "your model provider). Drop one of the two, or use on_conflict='override'."
    )
    assert {role: dict(vars(owner)) for role, owner in owners.items()} == before


def test_conflicts_can_be_kept_but_not_the_mode(megatron_owners) -> None:
    owners = megatron_owners()
    owners["ddp"].grad_reduce_in_fp32 = True
    assert synchronize("fp16_mixed", **owners, on_conflict="keep").row("ddp.grad_reduce_in_fp32").verdict == "keep"
    assert owners["ddp"].grad_reduce_in_fp32 is True
    owners = megatron_owners(fp8="hybrid", fp8_recipe="tensorwise", fp16=True)
    synchronize("bf16_mixed", **owners, on_conflict="keep")  # the mode is the recipe's in any case
    model = owners["model"]
    assert (model.fp16, model.bf16, model.fp8, model.fp8_recipe) == (False, True, None, "delayed")


def test_an_unknown_policy_is_refused(megatron_owners) -> None:
    with pytest.raises(ValueError, match="on_conflict: must be one of override, error, keep, got 'ask'"):
        synchronize("bf16_mixed", **megatron_owners(), on_conflict="ask")
    with pytest.raises(UnknownPolicyError, match=r"got 'raise'\. Did you mean 'error'\?$") as caught:
        synchronize("bf16_mixed", **megatron_owners(), on_conflict="raise")
    assert caught.value.matches == ("error",)


def test_what_megatron_derives_is_right_after_the_sync(megatron_owners, monkeypatch) -> None:
    owners = megatron_owners()
    owners["optimizer"].use_precision_aware_optimizer = True
    report = synchronize("bf16_mixed", **owners)
    assert owners["optimizer"].use_precision_aware_optimizer_no_fp8_or_ds_fp8 is True
    assert owners["model"].autocast_dtype is torch.bfloat16
    assert report.row("optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8").verdict == "derive"
    owners = megatron_owners()
    owners["optimizer"].use_precision_aware_optimizer = True
    synchronize("bf16_with_fp8_current_scaling_mixed", **owners)
    assert owners["optimizer"].use_precision_aware_optimizer_no_fp8_or_ds_fp8 is False


def test_a_switch_of_recipes_gives_the_nan_check_back(megatron_owners) -> None:
    ddp = megatron_owners()["ddp"]
    ddp.check_for_nan_in_grad = True
    synchronize("fp16_mixed", ddp=ddp)
    assert ddp.check_for_nan_in_grad is False
    synchronize("bf16_mixed", ddp=ddp)
    assert ddp.check_for_nan_in_grad is True


def test_an_owners_value_that_a_recipe_put_away_is_no_conflict_when_it_comes_back(megatron_owners) -> None:
    ddp = megatron_owners()["ddp"]
    ddp.fp8_param_gather = True
    synchronize("bf16_mixed", ddp=ddp)
    synchronize("bf16_with_fp8_current_scaling_mixed", ddp=ddp, on_conflict="error")
    assert ddp.fp8_param_gather is True


def test_what_megatron_computed_is_nobodys_own_value(megatron_owners) -> None:
    owners = megatron_owners()
    report = synchronize("bf16_autocast_mixed", **owners, on_conflict="error")
    assert report.overrides == ()
    assert owners["model"].autocast_dtype is torch.bfloat16


def test_fp32_turns_autocast_off(megatron_owners) -> None:
    model = megatron_owners(enable_autocast=True, autocast_dtype=torch.float16)["model"]
    synchronize("fp32", model=model)
    assert (model.enable_autocast, model.autocast_dtype) == (False, torch.float32)


def test_fp16_with_a_dynamic_scale_survives_its_first_overflow(megatron_owners) -> None:
    from bridge.training.config import TrainConfig

    for scale, checked in ((None, False), (1024.0, True)):
        owners, train = megatron_owners(), TrainConfig()
        owners["ddp"].check_for_nan_in_grad = True
        synchronize(MixedPrecisionConfig(fp16=True, loss_scale=scale), **owners, train=train)
        assert (owners["ddp"].check_for_nan_in_grad, train.check_for_nan_in_loss) == (checked, checked)


def test_tf32_is_left_to_the_start_of_the_run(megatron_owners) -> None:
    before = torch.get_float32_matmul_precision()
    report = synchronize(MixedPrecisionConfig(fp32=True, tf32=True), **megatron_owners())
    assert report.row("process.float32_matmul_precision").new == "high"
    assert torch.get_float32_matmul_precision() == before


DEPENDS_ON_THE_OWNER = ("layers", "factory", "precision-aware", "Transformer Engine", "swiglu", "dispatcher")
"""Its depth, a custom scheme's factory, its optimizer, its activation, its experts."""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(any_fields(), st.booleans())
def test_a_random_config_is_either_named_faulty_or_passes_megatrons_validation(
    megatron_owners, conflicting, fields: dict[str, object], fresh: bool
) -> None:
    owners = megatron_owners() if fresh else conflicting()
    before = {role: dict(vars(owner)) for role, owner in owners.items()}
    config = MixedPrecisionConfig(**fields)
    try:
        config.finalize()
    except PrecisionConfigError:
        with pytest.raises(PrecisionConfigError):
            synchronize(config, **owners)
        assert {role: dict(vars(owner)) for role, owner in owners.items()} == before
        return
    try:
        synchronize(config, **owners)
    except SyncCheckError as error:  # only what depends on the owner
        assert any(reason in str(error) for reason in DEPENDS_ON_THE_OWNER), error
        assert {role: dict(vars(owner)) for role, owner in owners.items()} == before
        return
    validate(owners)
    assert synchronize(config, **owners).changes == ()


# -- statements that have no effect, or that say nothing -----------------------------------------------------------


def test_layers_in_bf16_are_written_as_stated_in_a_run_without_low_precision(megatron_owners) -> None:
    counts = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 0}
    for stated in (counts, dict.fromkeys(counts, 0)):
        model = megatron_owners()["model"]
        config = MixedPrecisionConfig(bf16=True, first_last_layers_bf16=True, **stated)
        report = synchronize(config, model=model)
        assert {name: getattr(model, name) for name in stated} == stated
        assert model.first_last_layers_bf16 is True
        (finding,) = (one for one in report.findings if one.path == "mixed_precision.first_last_layers_bf16")
        assert (finding.id, finding.severity) == ("PB269", "warning")
        assert "has no effect: every layer of this run is in BF16" in str(finding)
        assert synchronize(config, model=model).changes == ()
    model = megatron_owners(first_last_layers_bf16=True)["model"]
    synchronize(MixedPrecisionConfig(bf16=True), model=model)
    assert model.first_last_layers_bf16 is False, "not stated: put out of action, as any field of a format that is off"


def test_the_switch_against_bf16_sums_is_set_by_a_sync_that_writes_and_by_no_other(megatron_owners) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    stated = {"bf16": True, "disable_bf16_reduced_precision_matmul": True}
    try:
        matmul.allow_bf16_reduced_precision_reduction = True
        owners = megatron_owners()
        with pytest.raises(SyncCheckError):
            synchronize(MixedPrecisionConfig(**stated, activation_func_fp8_input_store=True), **owners)
        assert matmul.allow_bf16_reduced_precision_reduction is True, "refused: nothing was changed"
        synchronize(MixedPrecisionConfig(**stated), **owners)
        assert (
            owners["model"].disable_bf16_reduced_precision_matmul,
            matmul.allow_bf16_reduced_precision_reduction,
        ) == (True, False)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before

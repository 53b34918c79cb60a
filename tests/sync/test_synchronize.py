"""The synchroniser against the installed Megatron's own classes."""

import contextlib
import copy
import dataclasses
import logging
import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge import (
    ConfigContainer,
    MixedPrecisionConfig,
    get_mixed_precision_config,
    runtime_config_update,
    synchronize,
)
from bridge.errors import (
    PrecisionConfigError,
    PrecisionTypeError,
    SyncCheckError,
    SyncConflictError,
    UnknownPolicyError,
)
from bridge.preflight.check import check
from bridge.preflight.setup import Setup
from bridge.registry.registry import REGISTRY
from bridge.sync.owner import WRITTEN
from tests.precision.test_config import any_fields

pytestmark = pytest.mark.filterwarnings("ignore::bridge.errors.BridgeWarning")

RECIPES = REGISTRY.names()

CONFLICTS = {
    "model": {
        "fp16": True,
        "bf16": True,
        "params_dtype": torch.float16,
        "pipeline_dtype": torch.float16,
        "autocast_dtype": torch.float16,
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param": True,
        "fp8_margin": 7,
        "fp8_amax_history_len": 77,
        "fp8_amax_compute_algo": "max",
        "fp4": "e2m1",
        "fp4_param": True,
        "num_layers_at_start_in_bf16": 3,
        "num_layers_at_end_in_bf16": 3,
    },
    "optimizer": {
        "fp16": True,
        "bf16": True,
        "params_dtype": torch.float16,
        "fp8_recipe": "mxfp8",
        "initial_loss_scale": 2.0,
        "loss_scale_window": 3,
        "hysteresis": 7,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "ddp": {
        "grad_reduce_in_fp32": True,
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
        "check_for_nan_in_grad": True,
    },
}


def state(owner: object) -> dict[str, object]:
    return {name: value for name, value in vars(owner).items() if name != WRITTEN and not callable(value)}


def validate(owners: dict[str, object]) -> None:
    for owner in owners.values():
        copy.copy(owner).__post_init__()  # type: ignore[attr-defined]


@pytest.fixture
def conflicting(megatron_owners):
    def make():
        owners = megatron_owners()
        for role, values in CONFLICTS.items():
            for name, value in values.items():
                setattr(owners[role], name, value)
        return owners

    return make


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
        is getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[config.mode])
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
        if config.fp4 or not config.scheme:
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


def test_the_table_names_old_and_new_verdict_who_and_why(conflicting) -> None:
    report = synchronize("bf16_with_fp8_current_scaling_mixed", **conflicting())
    rows = {f"{row.owner}.{row.attribute}": row for row in report.rows}
    told = {path: (row.old, row.new, row.verdict, row.by) for path, row in rows.items()}
    recipe = "recipe bf16_with_fp8_current_scaling_mixed"
    assert told["model.fp16"] == (True, False, "override", "mode")
    assert told["model.bf16"] == (True, True, "agree", recipe)
    assert told["model.fp8"] == ("e4m3", "hybrid", "override", recipe)
    assert told["model.fp4"] == ("e2m1", None, "override", "mode")
    assert told["model.fp4_param"] == (True, False, "neutralise", "mode")
    assert told["model.fp8_margin"] == (7, 7, "keep", "model")
    assert told["optimizer.hysteresis"] == (7, 7, "keep", "optimizer")
    assert told["optimizer.reuse_grad_buf_for_mxfp8_param_ag"] == (True, False, "neutralise", "mode")
    assert told["model.num_layers_at_start_in_bf16"] == (3, 1, "override", recipe)
    assert {row.owner for row in report.rows} == {"model", "optimizer", "ddp"}


def test_overrides_of_own_values_are_logged_as_warnings(megatron_owners, caplog) -> None:
    owners = megatron_owners(fp8="e4m3")
    with caplog.at_level(logging.INFO):
        synchronize("bf16_mixed", **owners).log(logging.getLogger("test"))
    logged = {record.getMessage(): record.levelname for record in caplog.records}
    assert logged["model.fp8: 'e4m3' -> None (override, mode: the mode is bf16)"] == "WARNING"


def test_a_sync_logs_each_override_once_whoever_starts_it(megatron_owners, caplog) -> None:
    config = get_mixed_precision_config("bf16_mixed")

    def of(owners):
        return [owners["model"], owners["optimizer"], owners["ddp"]]

    for start in (
        lambda owners: synchronize(config, **owners),
        lambda owners: config.setup(*of(owners)),
        lambda owners: runtime_config_update(ConfigContainer(mixed_precision=config, **owners)),
    ):
        caplog.clear()
        start(megatron_owners(fp8="e4m3"))
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("WARNING", "model.fp8: 'e4m3' -> None (override, mode: the mode is bf16)")
        ]


def test_what_the_check_has_printed_already_the_sync_does_not_log_again(megatron_owners) -> None:
    made = megatron_owners(fp8="e4m3")
    config = get_mixed_precision_config("bf16_mixed").state("command line", hysteresis=4)
    known = {(finding.id, finding.path) for finding in check(Setup(config, **made)).findings}
    report = synchronize(config, **made)
    assert {"PB144", "PB123"} <= {rule for rule, _ in known}
    assert (len(report.lines()), len(report.lines(known))) == (3, 1)


def test_a_printed_report_is_its_changes_and_findings(megatron_owners) -> None:
    config = get_mixed_precision_config("bf16_mixed").state("command line", hysteresis=4)
    lines = str(synchronize(config, model=megatron_owners()["model"])).splitlines()
    assert lines == [
        "bf16_mixed, hysteresis=4: 4 fields written (model 4).",
        "  model.bf16: False -> True (set, recipe bf16_mixed: stated)",
        "  model.params_dtype: 'fp32' -> 'bf16' (set, recipe bf16_mixed: stated)",
        "  model.pipeline_dtype: None -> 'bf16' (set, recipe bf16_mixed: stated)",
        "  model.autocast_dtype: 'fp32' -> 'bf16' (derive, mode: follows params_dtype)",
        "warning: mixed_precision.hysteresis: has no effect: a BF16 run has no dynamic loss scale, got 4 "
        "(command line). Drop it; or choose an fp16 recipe without loss_scale.",
    ]


def test_a_sync_without_an_owner_is_an_error() -> None:
    for start in (lambda: synchronize("bf16_mixed"), lambda: get_mixed_precision_config("bf16_mixed").setup(None)):
        with pytest.raises(PrecisionTypeError, match="a sync writes into at least one of model, optimizer, ddp"):
            start()


def test_keep_is_named_as_a_remedy_where_it_keeps(megatron_owners) -> None:
    owners = megatron_owners()
    owners["ddp"].grad_reduce_in_fp32 = True
    with pytest.raises(SyncConflictError) as caught:
        synchronize(MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False), **owners, on_conflict="error")
    assert str(caught.value).endswith("use on_conflict='override' or 'keep'.")


def test_log_of_a_sync_is_one_line_where_nothing_was_overridden(megatron_owners, caplog, tmp_path) -> None:
    report = synchronize("bf16_mixed", **megatron_owners())
    with caplog.at_level(logging.INFO):
        report.log(logging.getLogger("test"), file=tmp_path / "sync.txt")
    assert [record.getMessage() for record in caplog.records] == [
        f"bf16_mixed: 7 fields written (model 4, optimizer 2, ddp 1). Each is in {tmp_path / 'sync.txt'}"
    ]


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


def test_a_model_provider_with_other_defaults_counts_as_somebody_who_set_them() -> None:
    from megatron.core.transformer import TransformerConfig

    @dataclasses.dataclass
    class Nemotron(TransformerConfig):
        first_last_layers_bf16: bool = True

    model = Nemotron(num_layers=4, hidden_size=64, num_attention_heads=4)
    report = synchronize("bf16_with_mxfp8_mixed", model=model)
    assert report.row("model.first_last_layers_bf16").verdict == "keep"
    assert (model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16) == (1, 1)


def test_first_and_last_layers_without_counts_never_end_as_zero(megatron_owners) -> None:
    owners = megatron_owners(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    config = get_mixed_precision_config("mxfp8").state(first_last_layers_bf16=True)
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


def test_a_conflict_and_a_row_name_the_config_that_states_the_value(megatron_owners) -> None:
    owners = megatron_owners()
    owners["ddp"].grad_reduce_in_fp32 = True
    config = MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)
    with pytest.raises(SyncConflictError, match="differs from False of the config that states it, got True"):
        synchronize(config, **owners, on_conflict="error")
    kept = str(synchronize(config, **owners, on_conflict="keep"))
    assert "  ddp.grad_reduce_in_fp32: True (keep, ddp: its own value; the recipe says False)\n" in f"{kept}\n"
    row = synchronize(config, **owners).row("ddp.grad_reduce_in_fp32")
    assert str(row) == "ddp.grad_reduce_in_fp32: True -> False (override, stated)"


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


def test_a_stated_value_that_megatron_replaces_is_a_finding(megatron_owners) -> None:
    owners = megatron_owners()
    owners["model"].apply_query_key_layer_scaling = True
    config = get_mixed_precision_config("fp16_mixed").state(attention_softmax_in_fp32=False)
    report = synchronize(config, **owners)
    assert owners["model"].attention_softmax_in_fp32 is True
    assert [(found.severity, str(found)) for found in report.findings] == [
        (
            "warning",
            "model.attention_softmax_in_fp32: Megatron's own __post_init__ sets it to True, got False. "
            "Drop it, or set apply_query_key_layer_scaling=False.",
        )
    ]
    owners["model"].apply_query_key_layer_scaling = False
    assert not synchronize(config, **owners).findings


def test_an_owner_that_megatron_refused_before_is_a_warning(megatron_owners) -> None:
    owners = megatron_owners()
    owners["optimizer"].use_precision_aware_optimizer = True  # needs Transformer Engine
    report = synchronize("bf16_mixed", **owners)
    assert [(f.severity, f.path) for f in report.findings] == [("warning", "optimizer")]
    assert "as it was before the recipe, too" in str(report.findings[0])


def test_a_teams_properties_are_rolled_back_too() -> None:
    class Nested:
        def __init__(self) -> None:
            self.inner = {"bf16": False}

        @property
        def bf16(self) -> bool:
            return self.inner["bf16"]

        @bf16.setter
        def bf16(self, value: bool) -> None:
            self.inner["bf16"] = value

        @property
        def params_dtype(self) -> None:
            return None

    nested = Nested()
    with pytest.raises(SyncCheckError) as caught:
        synchronize("bf16_mixed", model=nested)
    assert nested.bf16 is False
    assert "model.params_dtype: cannot be set (AttributeError: " in str(caught.value)


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


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ({"model": {"bf16": False}}, "model: must be a config object in that role, got {'bf16': False}. "),
        (
            {"model": SimpleNamespace},
            "model: must be a config object in that role, got <class 'types.SimpleNamespace'>",
        ),
    ],
)
def test_what_cannot_be_an_owner_is_refused(owners, message: str) -> None:
    with pytest.raises(PrecisionTypeError) as caught:
        synchronize("bf16_mixed", **owners)
    assert str(caught.value).startswith(message)


def test_swapped_and_shared_owners_are_refused(megatron_owners) -> None:
    owners = megatron_owners()
    with pytest.raises(PrecisionTypeError, match="Give it as optimizer"):
        synchronize("bf16_mixed", model=owners["optimizer"])
    shared = SimpleNamespace(bf16=False)
    with pytest.raises(PrecisionTypeError, match="is the same object as model"):
        synchronize("bf16_mixed", model=shared, optimizer=shared)


def test_fp16_with_a_dynamic_scale_survives_its_first_overflow(megatron_owners) -> None:
    from bridge.training.config import TrainConfig

    for scale, checked in ((None, False), (1024.0, True)):
        owners, train = megatron_owners(), TrainConfig()
        owners["ddp"].check_for_nan_in_grad = True
        synchronize(MixedPrecisionConfig(fp16=True, loss_scale=scale), **owners, train=train)
        assert (owners["ddp"].check_for_nan_in_grad, train.check_for_nan_in_loss) == (checked, checked)


@pytest.mark.parametrize(
    ("fields", "path", "part"),
    [
        (
            {"fp8": "hybrid", "fp8_wgrad": False},
            "fp8_wgrad",
            "Transformer Engine 2.0 and later run the weight gradient in FP8 too",
        ),
        ({"fp8": "hybrid", "fp8_margin": 2}, "fp8_margin", "tensorwise scaling does not read it (only delayed)"),
        ({"fp8_margin": 2}, "fp8_margin", "no FP8 or FP4 in this BF16 run"),
        (
            {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_dot_product_attention": True},
            "fp8_dot_product_attention",
            "blockwise scaling does not read it (only delayed, mxfp8, nvfp4, tensorwise)",
        ),
        (
            {"fp8": "hybrid", "num_layers_at_end_in_bf16": 2},
            "num_layers_at_end_in_bf16",
            "first_last_layers_bf16 is off",
        ),
        ({"first_last_layers_bf16": True}, "first_last_layers_bf16", "every layer of this run is in BF16"),
        ({"hysteresis": 4}, "hysteresis", "a BF16 run has no dynamic loss scale"),
        ({"autocast_dtype": "fp16"}, "autocast_dtype", "autocast is off"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_stated_field_without_effect_is_a_finding(fields, path, part, megatron_owners) -> None:
    report = synchronize(MixedPrecisionConfig(bf16=True, **fields), **megatron_owners())
    assert [(f.path, f.severity) for f in report.findings] == [(f"mixed_precision.{path}", "warning")]
    assert part in report.findings[0].rule


def test_a_loss_scale_that_megatrons_fp32_optimizer_ignores_is_a_finding(megatron_owners) -> None:
    config = MixedPrecisionConfig(fp32=True, loss_scale=8.0)
    assert [f.path for f in synchronize(config, **megatron_owners(sharded=False)).findings] == [
        "mixed_precision.loss_scale"
    ]
    assert synchronize(config, **megatron_owners()).findings == ()


def test_weights_in_fp8_without_a_sharded_optimizer_are_refused_where_it_counts(megatron_owners) -> None:
    owners = megatron_owners(sharded=False)
    report = synchronize("bf16_with_fp8_current_scaling_mixed", **owners)
    assert [(f.path, f.severity) for f in report.findings] == [("mixed_precision.fp8_param_gather", "error")]
    with pytest.raises(SyncCheckError):
        synchronize("bf16_with_fp8_current_scaling_mixed", **megatron_owners(sharded=False), strict=True)


def test_mxfp8_weights_without_the_reused_buffer_are_refused_where_it_counts(megatron_owners) -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", fp8_param=True)
    with pytest.raises(SyncCheckError, match="MXFP8 weights need reuse_grad_buf_for_mxfp8_param_ag"):
        synchronize(config, **megatron_owners(), strict=True)


def test_a_config_that_can_never_be_right_changes_nothing(megatron_owners) -> None:
    owners = megatron_owners()
    before = dict(vars(owners["model"]))
    with pytest.raises(PrecisionConfigError):
        synchronize(MixedPrecisionConfig(bf16=True, fp16=True), **owners)
    assert vars(owners["model"]) == before


def test_more_layers_in_bf16_than_the_model_has_is_megatrons_own_error_in_one_sentence(megatron_owners) -> None:
    config = get_mixed_precision_config("fp8_current").state(num_layers_at_end_in_bf16=99)
    with pytest.raises(SyncCheckError) as caught:
        synchronize(config, **megatron_owners())
    assert "num_layers_at_end_in_bf16" in str(caught.value)
    assert str(caught.value).count("\n") == 1


def test_tf32_is_left_to_the_start_of_the_run(megatron_owners) -> None:
    before = torch.get_float32_matmul_precision()
    report = synchronize(MixedPrecisionConfig(fp32=True, tf32=True), **megatron_owners())
    assert report.row("process.float32_matmul_precision").new == "high"
    assert torch.get_float32_matmul_precision() == before


def test_the_report_is_json(conflicting) -> None:
    import json

    told = json.loads(json.dumps(synchronize("bf16_with_nvfp4_mixed", **conflicting()).to_dict()))
    assert {row["verdict"] for row in told["rows"]} >= {"override", "neutralise", "agree", "keep"}
    assert {"owner": "model", "attribute": "fp4", "field": "fp4", "old": "e2m1", "new": "e2m1"}.items() <= next(
        row for row in told["rows"] if row["attribute"] == "fp4"
    ).items()


def test_objects_of_no_known_class_get_same_named_fields() -> None:
    model = SimpleNamespace(bf16=False, fp16=True, params_dtype=torch.float32, fp8="x", num_layers_at_end_in_bf16=5)
    optimizer = SimpleNamespace(bf16=False, fp8_recipe="tensorwise", loss_scale=2.0)
    synchronize("bf16_mixed", model=model, optimizer=optimizer, ddp=SimpleNamespace(grad_reduce_in_fp32=False))
    assert (model.bf16, model.fp16, model.params_dtype, model.fp8) == (True, False, torch.bfloat16, None)
    assert (optimizer.bf16, optimizer.fp8_recipe) == (True, None)


def test_slots_and_mocks_can_be_owners() -> None:
    class Slotted:
        __slots__ = ("bf16", "grad_reduce_in_fp32")

    slotted = Slotted()
    slotted.bf16 = slotted.grad_reduce_in_fp32 = False
    synchronize("bf16_mixed", model=slotted, ddp=MagicMock())
    assert slotted.bf16 is True


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


def test_an_owner_without_any_field_of_a_precision_is_refused(megatron_owners) -> None:
    with pytest.raises(PrecisionTypeError, match=r"^model: has no field of a precision, got <object object at .*>\. "):
        synchronize("bf16_mixed", **(megatron_owners() | {"model": object()}))
    with pytest.raises(PrecisionTypeError, match=r"^ddp: has no field of a precision, got namespace\(other=1\)\. "):
        synchronize("bf16_mixed", ddp=SimpleNamespace(other=1))


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


def test_a_dtype_stated_as_none_stays_none_in_an_owner_of_no_class_of_megatrons(megatron_owners) -> None:
    config = MixedPrecisionConfig(bf16=True, params_dtype=None)
    plain = SimpleNamespace(bf16=False, params_dtype=torch.float32, pipeline_dtype=torch.float32)
    for one in (config, copy.deepcopy(config), dataclasses.replace(config), pickle.loads(pickle.dumps(config))):  # noqa: S301
        owner = copy.copy(plain)
        synchronize(one, model=owner)
        assert (owner.params_dtype, owner.pipeline_dtype) == (None, torch.bfloat16)
    held = SimpleNamespace(bf16=False, fp8_param=True, exp_avg_dtype=torch.bfloat16)
    synchronize(MixedPrecisionConfig(bf16=True, exp_avg_dtype=None), model=held)
    assert held.exp_avg_dtype is torch.bfloat16, "None of a field that no None stands for states nothing"
    config.params_dtype = "bf16"
    del config.params_dtype
    synchronize(config, model=plain)
    assert plain.params_dtype is torch.bfloat16, "no longer stated"
    model = megatron_owners()["model"]
    synchronize(MixedPrecisionConfig(bf16=True, params_dtype=None), model=model)
    assert model.params_dtype is torch.bfloat16, "Megatron's own class needs one"


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
        ) == (
            True,
            False,
        )
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before

"""One setting with two homes: what one owner was given and the recipe leaves open holds in both."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from bridge import MixedPrecisionConfig, synchronize
from bridge.errors import SyncCheckError

MXFP8 = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}


def test_weights_that_ddp_gathers_in_fp8_are_stored_so_by_the_model(megatron_owners) -> None:
    owners = megatron_owners()
    owners["ddp"].fp8_param_gather = True
    report = synchronize(MixedPrecisionConfig(bf16=True, fp8="hybrid"), **owners)
    assert (owners["model"].fp8_param, owners["ddp"].fp8_param_gather) == (True, True)
    assert report.row("ddp.fp8_param_gather").verdict == "keep"
    row = report.row("model.fp8_param")
    assert (row.old, row.new, row.verdict, row.by.name) == (False, True, "derive", "ddp")
    assert row.why == "as ddp.fp8_param_gather, which has a value of its own that the recipe does not state"
    assert synchronize(MixedPrecisionConfig(bf16=True, fp8="hybrid"), **owners).changes == ()
    synchronize(MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_param=False), **owners)
    assert (owners["model"].fp8_param, owners["ddp"].fp8_param_gather) == (False, False)


def test_weights_that_the_model_stores_in_fp8_are_gathered_so_by_ddp(megatron_owners) -> None:
    owners = megatron_owners(fp8="e4m3", fp8_param=True)
    report = synchronize(MixedPrecisionConfig(bf16=True, fp8="hybrid"), **owners)
    assert owners["ddp"].fp8_param_gather is True
    assert report.row("ddp.fp8_param_gather").by.name == "model"


@pytest.mark.parametrize(("holder", "other"), [("model", "optimizer"), ("optimizer", "model")])
def test_a_scheme_of_one_owners_own_is_the_scheme_of_the_run(holder: str, other: str, megatron_owners) -> None:
    owners = megatron_owners()
    owners[holder].fp8_recipe = "mxfp8"
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_margin=2)
    report = synchronize(config, **owners)
    assert (owners["model"].fp8_recipe, owners["optimizer"].fp8_recipe) == ("mxfp8", "mxfp8")
    assert report.row(f"{holder}.fp8_recipe").verdict == "keep"
    assert report.row(f"{other}.fp8_recipe").by.name == holder
    assert "mxfp8 scaling does not read it" in report.findings[0].rule
    assert synchronize(config, **owners).changes == ()


def test_a_kept_scheme_that_was_not_made_for_the_recipes_format_is_a_warning(megatron_owners) -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid")
    (finding,) = synchronize(config, **megatron_owners(fp8_recipe="mxfp8")).findings
    assert (finding.id, finding.severity) == ("PB206", "warning")
    assert synchronize(config, **megatron_owners(fp8_recipe="mxfp8"), strict=True).findings == (finding,)


def test_a_buffer_that_one_owner_reuses_is_reused_by_the_other(megatron_owners) -> None:
    for holder in ("optimizer", "ddp"):
        owners = megatron_owners(fp8_recipe="mxfp8")
        owners[holder].reuse_grad_buf_for_mxfp8_param_ag = True
        config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_param_gather=True)
        synchronize(config, **owners, strict=True)
        assert owners["optimizer"].reuse_grad_buf_for_mxfp8_param_ag is True
        assert owners["ddp"].reuse_grad_buf_for_mxfp8_param_ag is True


def test_what_ddp_stores_in_fp8_of_its_own_needs_what_a_recipe_that_says_so_needs(megatron_owners) -> None:
    owners = megatron_owners(sharded=False)
    owners["ddp"].fp8_param_gather = True
    (finding,) = synchronize(MixedPrecisionConfig(bf16=True, fp8="hybrid"), **owners).findings
    assert (finding.severity, finding.path, finding.where) == ("error", "ddp.fp8_param_gather", "ddp")
    owners = megatron_owners()
    owners["ddp"].fp8_param_gather = True
    with pytest.raises(SyncCheckError, match="MXFP8 weights need reuse_grad_buf_for_mxfp8_param_ag"):
        synchronize(MixedPrecisionConfig(**MXFP8), **owners, strict=True)


def test_two_owners_that_contradict_each_other_are_both_named_and_left_alone(megatron_owners) -> None:
    owners = megatron_owners(fp8_recipe="mxfp8")
    owners["optimizer"].fp8_recipe = "blockwise"
    before = {role: dict(vars(owner)) for role, owner in owners.items()}
    with pytest.raises(SyncCheckError) as caught:
        synchronize(MixedPrecisionConfig(bf16=True, fp8="e4m3"), **owners)
    assert str(caught.value) == (
        "The recipe 'mixed_precision' cannot be written into these configs; nothing was changed:\n"
        "  model.fp8_recipe: must equal optimizer.fp8_recipe, which is 'blockwise': it is one setting in two places, "
        "got 'mxfp8'. Give both the same value; or let a recipe state it, which writes both."
    )
    assert {role: dict(vars(owner)) for role, owner in owners.items()} == before


def test_what_this_megatron_has_no_home_for_is_not_invented(megatron_owners) -> None:
    owners = megatron_owners(fp4="e2m1", fp4_param=True)
    had = hasattr(owners["ddp"], "fp4_param_gather")
    synchronize(MixedPrecisionConfig(bf16=True, fp4="e2m1"), **owners)
    assert hasattr(owners["ddp"], "fp4_param_gather") == had


def test_autocast_lands_under_both_names_of_it() -> None:
    from megatron.core.transformer import TransformerConfig

    @dataclasses.dataclass
    class Provider(TransformerConfig):
        autocast_enabled: bool = False

    shape = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    config = MixedPrecisionConfig(bf16=True, autocast_enabled=True, autocast_dtype=torch.bfloat16)
    provider = Provider(**shape)
    report = config.setup(provider)
    assert (provider.autocast_enabled, provider.enable_autocast) == (True, True)
    assert {report.row(f"model.{name}").verdict for name in ("autocast_enabled", "enable_autocast")} == {"set"}
    assert config.setup(provider).changes == ()
    provider = Provider(**shape, enable_autocast=True)
    report = MixedPrecisionConfig(bf16=True).setup(provider)
    assert (provider.autocast_enabled, provider.enable_autocast) == (True, True)
    assert report.row("model.autocast_enabled").by.name == "model"
    plain = SimpleNamespace(bf16=False, autocast_enabled=False)
    config.setup(plain)
    assert plain.autocast_enabled is True


@pytest.mark.parametrize(
    ("fields", "paths", "rule"),
    [
        (
            {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp8": None, "fp8_recipe": "delayed"},
            ["fp8_recipe"],
            "has no effect: no FP8 in this NVFP4 run",
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed", "fp4_recipe": "custom"},
            ["fp4_recipe"],
            "has no effect: no FP4 in this DELAYED run",
        ),
        (
            {"fp8": None, "fp8_recipe": "mxfp8", "fp8_param": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
            ["fp8_recipe", "fp8_param", "reuse_grad_buf_for_mxfp8_param_ag"],
            "has no effect: no FP8 in this BF16 run",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "fp4_recipe": "nvfp4"}, [], ""),
    ],
    ids=["nvfp4 with fp8_recipe", "fp8 with fp4_recipe", "what an FP8 recipe leaves over", "the default scheme"],
)
def test_what_is_left_over_of_a_format_that_is_off_is_put_out_of_action_and_said(
    fields, paths, rule, megatron_owners
) -> None:
    owners = megatron_owners()
    config = MixedPrecisionConfig(bf16=True, **fields)
    report = synchronize(config, **owners)
    found = [finding for finding in report.findings if finding.id != "PB129"]
    assert [finding.path for finding in found] == [f"mixed_precision.{path}" for path in paths]
    assert {(finding.rule, finding.severity) for finding in found} == ({(rule, "warning")} if paths else set())
    assert (owners["model"].fp8, owners["model"].fp4) == (config.fp8, config.fp4)
    if not config.fp8:
        assert (owners["optimizer"].fp8_recipe, owners["model"].fp8_param) == (None, False)
        assert owners["ddp"].reuse_grad_buf_for_mxfp8_param_ag is False

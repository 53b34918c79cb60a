"""What sharding makes of a precision: settled before a run as Megatron Bridge's runtime settles it, said otherwise."""

import pytest

from bridge import get_mixed_precision_config, synchronize
from bridge.errors import SyncCheckError

BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
SWITCH = "use_distributed_optimizer"


def findings(report):
    """All but what Megatron-FSDP of 0.19 and later does to `grad_reduce_in_fp32`, which the recipes state."""
    return [finding for finding in report.findings if not finding.path.endswith("grad_reduce_in_fp32")]


def under_fsdp(megatron_owners, *, sharded: bool = True):
    owners = megatron_owners(sharded=sharded)
    owners["ddp"].use_megatron_fsdp = True
    return owners


def test_megatron_fsdp_turns_the_reused_buffer_off_before_a_run(megatron_owners) -> None:
    owners = under_fsdp(megatron_owners)
    report = synchronize("bf16_with_mxfp8_mixed", **owners, strict=True)
    assert (getattr(owners["optimizer"], BUFFER), getattr(owners["ddp"], BUFFER)) == (False, False)
    assert owners["ddp"].fp8_param_gather is True
    row = report.row(f"ddp.{BUFFER}")
    assert (row.new, row.by.name, row.why) == (False, "ddp", "Megatron-FSDP does not implement it")
    (finding,) = findings(report)
    assert (finding.severity, str(finding)) == (
        "info",
        f"mixed_precision.{BUFFER}: has no effect: Megatron-FSDP does not implement it, and it is turned off before a "
        "run, got True (recipe bf16_with_mxfp8_mixed). Set it to False, as runtime_config_update does; or use the "
        "distributed optimizer.",
    )
    assert synchronize("bf16_with_mxfp8_mixed", **owners, strict=True).changes == ()


def test_who_states_the_buffer_himself_is_warned(megatron_owners) -> None:
    config = get_mixed_precision_config("mxfp8").override("command line", **{BUFFER: True})
    (finding,) = findings(synchronize(config, **under_fsdp(megatron_owners), strict=True))
    assert (finding.severity, finding.where) == ("warning", "command line")


def test_a_buffer_of_an_owners_own_goes_off_with_a_warning(megatron_owners) -> None:
    owners = under_fsdp(megatron_owners)
    setattr(owners["ddp"], BUFFER, True)
    config = get_mixed_precision_config("mxfp8")
    delattr(config, BUFFER)
    report = synchronize(config, **owners, strict=True)
    assert (getattr(owners["optimizer"], BUFFER), getattr(owners["ddp"], BUFFER)) == (False, False)
    assert report.row(f"ddp.{BUFFER}").replaces_set_value is True


def test_a_sync_that_is_not_the_last_writes_as_the_peers_setup_and_says_what_comes(megatron_owners) -> None:
    owners = under_fsdp(megatron_owners)
    (finding,) = findings(synchronize("bf16_with_mxfp8_mixed", **owners))
    assert getattr(owners["ddp"], BUFFER) is True
    assert (finding.id, finding.severity) == ("PB324", "warning")


@pytest.mark.parametrize(("on", "off"), [("optimizer", "ddp"), ("ddp", "optimizer")])
@pytest.mark.parametrize("name", [SWITCH, "overlap_param_gather"])
def test_a_switch_that_is_on_in_one_of_the_two_is_turned_on_in_both(
    name: str, on: str, off: str, megatron_owners
) -> None:
    owners = megatron_owners()
    setattr(owners[on], name, True)
    setattr(owners[off], name, False)
    (finding,) = synchronize("bf16_mixed", **owners).findings
    assert getattr(owners[off], name) is False
    assert str(finding) == (
        f"{off}.{name}: has to be on: {on}.{name} is, got False. Set {off}.{name}=True, as runtime_config_update does."
    )
    report = synchronize("bf16_mixed", **owners, strict=True)
    assert (getattr(owners[on], name), getattr(owners[off], name)) == (True, True)
    row = report.row(f"{off}.{name}")
    assert (row.old, row.new, row.verdict, row.by.name) == (False, True, "derive", on)
    assert [(f.severity, f.path, f.where) for f in report.findings] == [
        ("warning", f"{off}.{name}", "turned on before the run")
    ]
    assert synchronize("bf16_mixed", **owners, strict=True).changes == ()


def test_megatron_fsdp_shards_the_optimizer(megatron_owners) -> None:
    owners = under_fsdp(megatron_owners, sharded=False)
    report = synchronize("bf16_mixed", **owners, strict=True)
    assert (getattr(owners["optimizer"], SWITCH), getattr(owners["ddp"], SWITCH)) == (True, True)
    assert {f.rule for f in findings(report)} == {"has to be on: Megatron-FSDP always shards the optimizer"}


def test_after_a_refusal_the_switches_are_as_they_were(megatron_owners) -> None:
    owners = megatron_owners()
    setattr(owners["ddp"], SWITCH, False)
    config = get_mixed_precision_config("mxfp8").override(fp8_param_gather=True, **{BUFFER: False})
    with pytest.raises(SyncCheckError, match="MXFP8 weights need"):
        synchronize(config, **owners, strict=True)
    assert getattr(owners["ddp"], SWITCH) is False


def test_one_of_the_two_alone_is_left_as_it_is(megatron_owners) -> None:
    ddp = megatron_owners(sharded=False)["ddp"]
    assert synchronize("bf16_mixed", ddp=ddp, strict=True).findings == ()
    assert ddp.use_distributed_optimizer is False


def test_a_buffer_put_aside_with_the_gather_is_reported(megatron_owners) -> None:
    owners = megatron_owners()
    config = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    config.fp8_param_gather = False
    report = synchronize(config, **owners, strict=True)
    assert (owners["model"].fp8_param, owners["ddp"].fp8_param_gather) == (False, False)
    assert (getattr(owners["optimizer"], BUFFER), getattr(owners["ddp"], BUFFER)) == (False, False)
    assert report.row(f"ddp.{BUFFER}").by.name == "follows fp8_param_gather"
    (finding,) = report.findings
    assert (finding.severity, finding.path) == ("info", f"mixed_precision.{BUFFER}")
    assert finding.rule == (
        "is off, because a later statement turned off what it needs; recipe bf16_with_mxfp8_mixed had turned it on"
    )

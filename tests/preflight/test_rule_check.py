"""The check as a whole: verdicts, silence, odd input, speed."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import RunConfigError
from bridge.model.section import SECTION_NAMES
from bridge.precision.statements import list_field_names
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.registry.mixed_precision_config import MixedPrecisionConfig, find_config_faults
from bridge.registry.registry import REGISTRY
from bridge.rules.rulebook import RULES
from bridge.target.declaration import parse_target
from bridge.target.fields import OWNER_FIELDS
from bridge.target.gpus import GPUS
from bridge.target.target import Target
from tests.rules.cases import CASES
from tests.rules.cases.runs import CURRENT, DENSE, H100, OVERLAP
from tests.rules.situations import run_of, setup_of


@pytest.mark.parametrize("name", sorted(set(REGISTRY.names()) - {"nanov2_bf16_with_fp8_current_scaling_mixed"}))
def test_no_built_in_recipe_has_an_error_or_warning_of_its_own(name: str) -> None:
    report = check(Run.from_configs(name))
    assert [str(one) for one in report.findings if one.severity != "info"] == []


def test_a_report_is_sorted_and_counts_into_an_exit_code() -> None:
    said = dict(CURRENT, fp8_margin=2, fp8_recipe="tensorwize")
    report = check(Run.from_configs(said, model=DENSE, optimizer=OVERLAP, ddp=OVERLAP, target=parse_target(H100)))
    assert [one.severity for one in report.findings] == sorted(
        (one.severity for one in report.findings), key=["error", "warning", "info"].index
    )
    assert (report.verdict, report.exit_code(), report.exit_code(strict=True)) == ("error", 2, 2)
    warned = check(Run.from_configs(dict(CURRENT, fp8_margin=2), target=parse_target(H100)))
    assert (warned.verdict, warned.exit_code(), warned.exit_code(strict=True)) == ("warning", 0, 1)
    clean = check(Run.from_configs("bf16_mixed"))
    assert (clean.verdict, clean.exit_code(), clean.exit_code(strict=True)) == ("ok", 0, 0)


def test_a_silenced_rule_is_kept_apart_with_its_reason() -> None:
    setup = setup_of(CASES["PB243"][0])
    report = check(setup.run, silenced={"PB243": "this branch of Megatron keeps its own copy"})
    assert "PB243" not in {one.id for one in report.findings}
    (silenced,) = report.silenced
    assert (silenced.id, silenced.silenced) == ("PB243", "this branch of Megatron keeps its own copy")
    assert report.exit_code(strict=True) == 0


@pytest.mark.parametrize(
    ("silenced", "message"),
    [
        (
            {"PB24": "x"},
            "silence.PB24: must name a rule or an early warning, got 'PB24'. Did you mean 'PB241', 'PB242' or 'PB243'?",
        ),
        ({"PB243": " "}, "silence.PB243: needs a reason, got ' '. Write PB243=why it is all right."),
    ],
)
def test_a_rule_is_silenced_by_its_id_with_a_reason(silenced: dict[str, str], message: str) -> None:
    with pytest.raises(RunConfigError) as error:
        check(Run.from_configs("bf16_mixed"), silenced=silenced)
    assert str(error.value) == message


def test_owners_may_be_mappings_objects_or_absent() -> None:
    model = {"num_layers": 4, "fp8": "hybrid", "fp8_recipe": "delayed", "first_last_layers_bf16": True}
    slotted = type("Slotted", (), {"__slots__": tuple(model)})()
    for name, value in model.items():
        setattr(slotted, name, value)
    for owner in (model, SimpleNamespace(**model), slotted):
        assert "PB263" in {one.id for one in check(Run.from_configs(model=owner)).findings}
    assert check(Run.from_configs()).verdict == "ok"


def test_every_fault_of_a_config_alone_is_an_error_of_the_check() -> None:
    """`finalize()` refuses what can never be right; the check says it too, beside everything else."""
    faulty = [
        {"bf16": True, "fp16": True},
        {"fp8": "hybrid", "fp4": "e2m1", "bf16": True},
        {"fp8": "e5m2"},
        {"fp8": "mxfp8"},
        {"fp8": "hybrid", "fp8_recipe": "tensorwize"},
        {"fp8_amax_compute_algo": "largest"},
        {"fp4": "e3m0"},
        {"fp4": "e2m1", "fp4_recipe": "mxfp4"},
        {"fp8_recipe": "mxfp8"},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "first_last_layers_bf16": True},
        {
            "fp8": "hybrid",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 0,
            "num_layers_at_end_in_bf16": 0,
        },
        {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_margin": -1},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 0},
        {"hysteresis": 0},
        {"fp8": "hybrid", "fp8_param": True, "fp8_param_gather": False},
        {"fp8_param_gather": True},
        {"fp4_param": True},
        {"reuse_grad_buf_for_mxfp8_param_ag": True},
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
        {"bf16": True, "params_dtype": "fp16"},
        {"bf16": True, "pipeline_dtype": "fp16"},
        {"fp32": True, "autocast_enabled": True},
        {"loss_scale": 0.0},
        {"min_loss_scale": -1.0},
        {"loss_scale_window": 0.5},
        {"fp16": True, "initial_loss_scale": None},
        {"initial_loss_scale": 1.0, "min_loss_scale": 2.0},
    ]
    for values in faulty:
        config = MixedPrecisionConfig.from_dict(values)
        assert find_config_faults(config), values
        assert check(Run.from_configs(config)).verdict == "error", values


NAMES = sorted({name for role in ("model", "optimizer", "ddp") for name in OWNER_FIELDS[role]})
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(allow_nan=True),
    st.sampled_from(
        ["hybrid", "e4m3", "e2m1", "mxfp8", "bf16", "fp32", "none", "no", "", "adam", "muon", "local", "1"]
    ),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["_target_", "configs", "a"]), st.text(max_size=5), max_size=2),
)


@given(
    name=st.sampled_from([None, "bf16_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed", "fp16_mixed"]),
    sections=st.fixed_dictionaries(
        {
            role: st.one_of(
                st.none(), st.dictionaries(st.sampled_from(sorted(OWNER_FIELDS[role])), VALUES, max_size=12)
            )
            for role in SECTION_NAMES
        }
    ),
    gpu=st.sampled_from([None, *GPUS]),
    environment=st.one_of(st.none(), st.just({"NVTE_BACKWARD_OVERRIDE": "x", "ACCELERATE_MIXED_PRECISION": "fp8"})),
    backend=st.sampled_from([None, "te", "emulated"]),
)
def test_no_values_make_the_check_raise_or_a_rule_stumble(
    name: str | None, sections: Any, gpu: str | None, environment: Any, backend: str | None
) -> None:
    target = Target(gpu=GPUS[gpu] if gpu else None, count=8)
    report = check(Run.from_configs(name, **sections, target=target, environment=environment, backend=backend))
    assert [one for one in report.findings if "could not be judged" in one.rule] == []
    assert report.context.gradient_flow
    assert report.precision


@given(stated=st.dictionaries(st.sampled_from(list_field_names(MixedPrecisionConfig)), VALUES, max_size=8))
def test_no_statements_make_the_check_raise(stated: dict[str, Any]) -> None:
    report = check(Run.from_configs({name: value for name, value in stated.items() if value is not None}, model=DENSE))
    assert [one for one in report.findings if "could not be judged" in one.rule] == []


def test_a_rule_that_stumbles_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses
    import sys

    module = sys.modules["bridge.preflight.rule_check"]
    broken = dataclasses.replace(RULES[0], when=lambda run: run.no_such_thing)
    monkeypatch.setattr(module, "RULES", (broken, *RULES[1:]))
    report = check(run_of(CASES["PB243"][0]))
    assert {one.id: one.severity for one in report.findings} == {"PB243": "error", RULES[0].id: "warning"}

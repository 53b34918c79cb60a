"""Each rule against a run that breaks it, one that does not, and its own negation."""

import dataclasses
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from bridge.precision.precision_config import MEGATRON_FIELDS
from bridge.preflight.check_context import CheckContext
from bridge.preflight.rule_check import check
from bridge.rules import rulebook, topics
from bridge.rules.context import PRECISION_OWNERS, RuleContext
from bridge.rules.rule import EVIDENCE, SEVERITIES, SYNC_REACTIONS, evaluate_rule, evaluate_rules
from bridge.rules.rulebook import RULES, RULES_BY_ID, TOPICS
from bridge.target.fields import OWNER_DEFAULTS
from tests.rules.cases import CASES
from tests.rules.cases.runs import BF16_MODEL, CURRENT, CURRENT_ALL, DENSE, H100, INTERLEAVED
from tests.rules.situations import run_of, setup_of

check_module = sys.modules["bridge.preflight.rule_check"]
EXAMPLES = Path(rulebook.__file__).with_name("expected_findings.yaml")
MESSAGES = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))
IDS = [rule.id for rule in RULES]


def said_by(setup: CheckContext) -> set[str]:
    return {finding.id for finding in check(setup.run).findings}


@pytest.mark.parametrize("name", IDS)
def test_a_rule_speaks_word_for_word_of_the_run_that_breaks_it_and_of_nothing_beside_it(name: str) -> None:
    breaks, passes = (check(run_of(case)).findings for case in CASES[name])
    assert MESSAGES[name]
    assert [f"{one.severity} {one}" for one in breaks if one.id == name] == MESSAGES[name]
    assert {one.id for one in breaks} - {one.id for one in passes} == {name}
    assert name not in {one.id for one in passes}


def test_a_negated_predicate_does_not_pass_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tuple(
        dataclasses.replace(rule, when=lambda run, rule=rule: not rule.find_violations(run)) for rule in RULES
    )
    for name in IDS:
        own = [one for one in rules if one.id == name]
        monkeypatch.setattr(check_module, "RULES", own)
        assert name not in said_by(setup_of(CASES[name][0])), name


def test_every_rule_is_a_whole_row() -> None:
    for rule in RULES:
        assert re.fullmatch(r"PB\d{3}", rule.id)
        assert rule.severity in SEVERITIES, rule.id
        assert re.fullmatch(r"[a-z0-9_]+(\.[A-Za-z0-9_]+)?", rule.setting), rule.id
        assert rule.message, rule.id
        assert rule.evidence in EVIDENCE, rule.id
        assert rule.sync is None or rule.sync in SYNC_REACTIONS, rule.id
        assert rule.severity == "error" or not rule.is_of_finalize, rule.id
        assert rule.title, rule.id
        assert not rule.message.endswith(".")
        assert rule.remedies, rule.id
        assert all(not way.endswith(".") for way in rule.remedies)
        dated = re.search(r"\d+\.\d+|20\d\d|issues? \d+|pull requests? \d+|this (check|project)", rule.source)
        assert dated, f"{rule.id}: its source names no version, date or thread"
        if rule.evidence == "weak":
            assert rule.severity != "error", "what rests on weak evidence is a warning that says so"


def test_a_field_of_an_owner_is_judged_as_it_is_in_the_precision() -> None:
    judged = set()
    for name, (breaks, _) in CASES.items():
        precision = breaks.get("precision")
        moved = {key: precision[key] for key in precision if key in MEGATRON_FIELDS} if type(precision) is dict else {}
        if not moved or RULES_BY_ID[name].is_of_finalize:  # one is about the value in the precision itself
            continue
        rest = {key: value for key, value in precision.items() if key not in moved}
        roles = {key: next(role for role in PRECISION_OWNERS if key in OWNER_DEFAULTS[role]) for key in moved}
        sections = {
            role: {**(breaks.get(role) or {}), **{key: moved[key] for key in moved if roles[key] == role}}
            for role in {*roles.values()}
        }
        assert name in said_by(setup_of({**breaks, "precision": rest, **sections})), name
        judged.add(name)
    assert len(judged) > 5


@pytest.mark.parametrize("asker", ["finalize", "sync"])
def test_a_rule_reads_no_more_than_its_asker_knows(asker: str) -> None:
    rules = [rule for rule in RULES if (rule.is_of_finalize if asker == "finalize" else rule.sync is not None)]
    for case in CASES.values():
        setup = setup_of(case[0])
        if setup.precision is None:
            continue
        context = RuleContext.from_precision(setup.precision)
        if asker == "sync":
            known = {"views": setup.views, "present": setup.present, "rows": setup.rows, "target": setup.target}
            context = RuleContext(setup.precision, **known)
        assert [one.rule for one in evaluate_rules(rules, context) if "could not be judged" in one.rule] == []


def test_ids_are_unique_in_order_and_complete() -> None:
    assert sorted(set(IDS)) == IDS
    assert sorted(CASES) == IDS
    assert sorted(MESSAGES) == IDS
    assert sum(len(rules) for rules in TOPICS.values()) == len(RULES)


def test_a_rule_for_other_versions_says_nothing() -> None:
    for rule in RULES:
        breaks = setup_of(CASES[rule.id][0])
        for versions in rule.versions:
            held = getattr(breaks.target, versions.product)
            assert versions.holds(held) is True, f"{rule.id}: its case has to be inside its range"


def test_where_the_version_is_unknown_a_finding_is_milder_and_says_on_which_it_depends() -> None:
    rule = RULES_BY_ID["PB241"]
    said = dict(CASES["PB241"][0], target="b200x8,te2.14,cuda12.9")
    (finding,) = (one for one in check(run_of(said)).findings if one.id == "PB241")
    assert (rule.severity, finding.severity) == ("error", "warning")
    assert finding.depends_on == "megatron-core before 0.18"
    assert "(holds for megatron-core before 0.18; the target does not say which it is)" in finding.rule


def test_a_version_that_is_known_in_part_decides_where_it_can() -> None:
    rule = RULES_BY_ID["PB303"]  # since megatron-core 0.17.1
    case = CASES["PB303"][0]
    outcome = {}
    for version in ("0.16", "0.17", "0.17.0", "0.17.1", "0.18"):
        setup = setup_of(dict(case, target=f"h100x8,te2.9,cuda12.9,mcore{version}"))
        found = evaluate_rule(rule, setup)
        outcome[version] = found[0].severity if found else None
    assert outcome == {"0.16": None, "0.17": "warning", "0.17.0": None, "0.17.1": "error", "0.18": "error"}


def severities(case: dict[str, object], *names: str) -> list[str]:
    return [one.severity for one in check(run_of(case)).findings if one.id in names]


def test_what_the_frameworks_own_recipes_hold_is_no_error_and_no_warning() -> None:
    """A default that does nothing is worth a line, and what Megatron runs all the same is not refused."""
    te = {"model": dict(DENSE, attention_softmax_in_fp32=False), "target": H100}
    assert severities({**te, "precision": "bf16_mixed"}, "PB445") == ["info"]
    (finding,) = (one for one in check(run_of({**te, "precision": "bf16_mixed"})).findings if one.id == "PB445")
    assert finding.remedy == "Leave it, which changes nothing."
    assert severities({**te, "precision": {"bf16": True, "attention_softmax_in_fp32": False}}, "PB445") == ["warning"]
    counts = {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    saved = {"precision": dict(CURRENT_ALL, **counts), "model": DENSE, "target": H100}
    assert severities(saved, "PB262") == ["info"]
    gathers = {"use_distributed_optimizer": True, "overlap_param_gather_with_optimizer_step": True}
    interleaved = dict(DENSE, **INTERLEAVED, overlap_p2p_comm=True)
    assert severities({"model": interleaved, "optimizer": gathers, "ddp": gathers}, "PB351") == ["warning"]
    assert severities({"model": DENSE, "optimizer": gathers, "ddp": gathers}, "PB351") == ["error"]
    muon = {"optimizer": "dist_muon", "use_distributed_optimizer": False}
    stored = {"precision": CURRENT, "model": DENSE, "optimizer": muon, "ddp": {"use_distributed_optimizer": False}}
    assert severities({**stored, "target": "h100x8,te2.9,cuda12.9,mcore0.18.2"}, "PB301") == ["warning"]
    assert severities({**stored, "target": H100}, "PB301") == []  # from 0.19 on the layer-wise optimizer gathers them


def test_block_scales_in_fp32_are_turned_off_by_0_since_a_framework_may_set_an_unset_variable() -> None:
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    precision = "bf16_with_fp8_subchannel_scaling_mixed"
    case = {"precision": precision, "model": DENSE, "target": H100, "environment": {name: "1"}}
    (finding,) = [one for one in check(run_of(case)).findings if one.id == "PB527"]
    assert finding.remedies == (
        "set it to 0, unless a rollout has FP32 scales too",
        "set it on every rank and keep it with the run",
    )
    assert severities({**case, "environment": {name: "0"}}, "PB527") == []


def test_low_gradients_are_a_default_only_where_nobody_stated_them() -> None:
    run = {"model": BF16_MODEL, "optimizer": {"bf16": True}, "target": H100}
    found = {
        name: [one.rule for one in check(run_of({**run, "ddp": ddp})).findings if one.id == "PB361"]
        for name, ddp in {"default": {}, "stated": {"grad_reduce_in_fp32": False}}.items()
    }
    ends = ": gradients are accumulated over micro-batches and ranks in BF16"
    parser = "while Megatron-LM's argument parser turns it on for BF16"
    assert found == {
        "default": [f"is Megatron's class default, {parser}{ends}"],
        "stated": [f"is stated as False{ends}"],
    }


def test_a_field_that_looks_like_a_stated_one_is_a_providers_own() -> None:
    assert severities({"model": dict(DENSE, q_lora_rank=64, p_lora_rank=64)}, "PB122") == []
    assert severities({"model": dict(DENSE, p_lora_rank=64)}, "PB122") == ["error"]


def test_an_empty_tuple_is_the_default_that_the_table_has_as_a_list() -> None:
    case = {"precision": "bf16_mixed", "model": DENSE, "ddp": {"param_name_patterns_for_fp32_local_accumulation": ()}}
    assert severities({**case, "target": H100}, "PB365", "PB366") == []


HYBRID = {
    **DENSE,
    "hybrid_layer_pattern": "M*" * 16,
    "num_layers": 32,
    "mamba_num_groups": 6,
    "tensor_model_parallel_size": 4,
}
SEQUENCE = {**DENSE, "seq_length": 4100, "context_parallel_size": 4}
EXPERTS = {**DENSE, "num_moe_experts": 8, "moe_ffn_hidden_size": 1024}


@pytest.mark.parametrize(
    ("model", "field", "by"),
    [
        ({**EXPERTS, "expert_model_parallel_size": 2}, "num_moe_experts", None),
        ({**EXPERTS, "expert_model_parallel_size": 6}, "num_moe_experts", "EP 6"),
        (HYBRID, "mamba_num_groups", "TP 4"),
        ({**HYBRID, "mamba_num_groups": 8}, "mamba_num_groups", None),
        (SEQUENCE, "seq_length", "two chunks on each of CP 4"),
        ({**SEQUENCE, "seq_length": 4104}, "seq_length", None),
        ({**SEQUENCE, "context_parallel_size": 1}, "seq_length", None),
    ],
)
def test_a_size_that_does_not_divide_over_its_ranks_is_an_error(model: dict, field: str, by: str | None) -> None:
    said = check(run_of(CASES["PB408"][0] | {"model": model}))
    found = [one.rule for one in said.findings if (one.id, one.path) == ("PB408", f"model.{field}")]
    assert found == ([] if by is None else [f"does not divide by {by}: each rank has to get the same part"])


def test_every_file_of_topics_is_a_topic() -> None:
    evaluated = {rule.id for rule in RULES}
    for path in Path(topics.__file__).parent.rglob("*.py"):
        if path.name == "__init__.py":
            continue
        module = import_module(f"bridge.rules.topics.{path.parent.name}.{path.stem}")
        for rule in getattr(module, "RULES", ()):
            assert rule.id in evaluated, f"{path.name} has no row in TOPICS of bridge/rules/rulebook.py"

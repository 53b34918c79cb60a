"""An answer is as strong as its weakest origin: a rule that rests on an assumed or open value judges nothing."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from bridge.front.loader import load_run
from bridge.model.read_tracking import AttributeView, TrackedValues, track_reads, tracked_property
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.rules.rule import RuleFinding
from bridge.rules.rulebook import RULES_BY_ID
from tests.rules.cases import CASES
from tests.rules.situations import run_of

SECTIONS = ("model", "optimizer", "ddp", "train", "data", "peft")
DECIDER = "train.py"


def inputs_of(case: dict[str, Any]) -> Iterator[str]:
    """Yield the settings that a run of the cases states in its sections."""
    for section in SECTIONS:
        held = case.get(section)
        if isinstance(held, dict):
            yield from (f"{section}.{name}" for name in held)


def without(case: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a run without one of its settings."""
    section, _, name = path.partition(".")
    return {**case, section: {key: value for key, value in case[section].items() if key != name}}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenRun(Run):
    """A run one of whose settings is open."""

    open_path: str

    has_any_decider = True

    def find_decider(self, path: str) -> str | None:
        return DECIDER if path == self.open_path else None


def found(case: dict[str, Any], name: str, open_path: str | None = None) -> list[RuleFinding]:
    """Return what a rule finds in a run, one of whose settings may be open."""
    run = run_of(case)
    if open_path is not None:
        run = OpenRun(
            **{field.name: getattr(run, field.name) for field in dataclasses.fields(run)}, open_path=open_path
        )
    return [one for one in check(run).findings if one.id == name]


def places(findings: list[RuleFinding]) -> set[tuple[str, str]]:
    """Return where findings are, and how severe they are."""
    return {(one.severity, one.path) for one in findings}


def test_no_error_and_no_warning_stays_where_an_input_that_decides_it_is_open() -> None:
    judged, left = 0, []
    for name, (breaks, _) in CASES.items():
        if name == "PB121":  # a value of a wrong type is stated
            continue
        broken = places(found(breaks, name))
        for path in inputs_of(breaks):
            decided = broken - places(found(without(breaks, path), name))
            if not decided:
                continue  # the rule finds the same without this setting
            judged += 1
            for place in decided & places(found(breaks, name, path)):
                if place[0] != "info":
                    left.append(f"{name} with {path} open: {place}")
    assert judged > 150
    assert left == []


def test_a_rule_that_cannot_be_judged_names_the_setting_and_what_decides_it() -> None:
    breaks = CASES["PB346"][0]
    (one,) = found(breaks, "PB346", "optimizer.use_precision_aware_optimizer")
    assert one.severity == "info"
    assert one.unknown == {"optimizer.use_precision_aware_optimizer": DECIDER}
    assert one.rule == (
        "cannot be judged: optimizer.use_precision_aware_optimizer is not known, since train.py may set it; the rule "
        f"is about: {RULES_BY_ID['PB346'].title}"
    )
    assert one.remedies == ("state what is known: optimizer.use_precision_aware_optimizer=VALUE",)


def test_an_info_that_cannot_be_judged_is_not_made() -> None:
    breaks = CASES["PB132"][0]
    names = {one.path for one in found(breaks, "PB132")}
    assert {one.path for one in found(breaks, "PB132", "model.hidden_dropout")} == names - {"model.hidden_dropout"}


def test_a_value_that_is_kept_notes_its_settings_for_each_reader() -> None:
    class Run:
        def __init__(self) -> None:
            self.model = AttributeView(TrackedValues("model", {"num_layers": 4, "bf16": True}))

        @tracked_property
        def layers(self) -> int:
            return self.model.num_layers  # type: ignore[no-any-return]

    run = Run()
    for _ in range(2):
        with track_reads() as outer:
            with track_reads() as inner:
                assert run.layers == 4
            assert run.model.bf16
        assert [*inner] == ["model.num_layers"]
        assert [*outer] == ["model.num_layers", "model.bf16"]


def test_a_rule_with_many_unknown_settings_is_judged_where_each_of_them_is_stated(tmp_path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 30 --hidden-size 64 --num-attention-heads 4 "
        "--pipeline-model-parallel-size 4 --fp16 --deepspeed --pp-partition-method type:transformer\n",
        encoding="utf-8",
    )
    run = load_run(config_file=file)
    (one,) = [one for one in check(run).findings if one.id == "PB413"]
    assert len(one.unknown) > 3
    assert one.remedies == ("state each of them, which --json lists",)
    overrides = []
    for path in one.unknown:
        owner_name, _, name = path.partition(".")
        value = run.prediction.values.get(owner_name, {}).get(name)
        overrides.append(f"{path}={'null' if value is None else str(value).lower()}")
    (one,) = [one for one in check(load_run(overrides, config_file=file)).findings if one.id == "PB413"]
    assert (one.severity, dict(one.unknown)) == ("error", {})

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bridge import errors
from bridge.convert.conversion import import_runs
from bridge.errors import BridgeError, Finding, PayloadError, close_matches, did_you_mean
from bridge.front.loader import load_run
from bridge.read.text.document import Document
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.training.mixed_precision import get_mixed_precision_config
from tests.work import calls

FINDING = Finding(path="model.fp8", rule="must be a format", value="x", where="command line", remedy="Use 'e4m3'.")
ERRORS = [
    errors.PrecisionConfigError("Never right:", [FINDING]),
    errors.SyncConflictError("They disagree:", [FINDING]),
    errors.SyncCheckError("Refused:", [FINDING]),
    errors.UnknownRecipeError("Unknown.", ["bf16_mixed"]),
    errors.UnknownFieldError("Unknown.", ["fp8"]),
    errors.RunConfigError("Unknown.", ["train"]),
    errors.DuplicateRecipeError("twice", ("a.py:1", "b.py:2")),
    errors.PrecisionTypeError.of("mixed_precision.hysteresis", "must be a whole number", 1.5, "Use 2."),
    errors.TrainingError("NaN."),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_between_processes(error: errors.BridgeError) -> None:
    back = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_every_error_is_a_bridge_error_with_an_exit_code() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert {cls.exit_code for cls in classes if issubclass(cls, errors.BridgeError)} == {1, 2}
    assert [cls.__name__ for cls in classes if not issubclass(cls, errors.BridgeError)] == [
        "BridgeWarning",
        "WrongValueError",  # never leaves the package: its caller adds the path
    ]


def test_an_error_about_a_setting_carries_its_parts() -> None:
    error = errors.PrecisionTypeError.of("mixed_precision.hysteresis", "must be a whole number", 1.5, "Use 2.")
    assert str(error) == "mixed_precision.hysteresis: must be a whole number, got 1.5. Use 2."
    parts = (error.path, error.rule, error.value, error.remedy)
    assert parts == ("mixed_precision.hysteresis", "must be a whole number", 1.5, "Use 2.")


def test_a_finding_reads_as_path_rule_value_origin_and_remedy() -> None:
    assert str(FINDING) == "model.fp8: must be a format, got 'x' (command line). Use 'e4m3'."


def test_close_matches_ignores_case_and_hyphens() -> None:
    assert close_matches("BF16-MIXD", ["bf16_mixed", "mxfp8"]) == ["bf16_mixed"]
    assert close_matches("zzz", ["bf16_mixed"]) == []
    assert close_matches("bf16", ["bf16", "fp16"]) == ["fp16"], "never the word itself"
    assert did_you_mean(["a", "b", "c"]) == "Did you mean 'a', 'b' or 'c'?"
    assert did_you_mean([]) == ""


@pytest.mark.parametrize("size", [10, 4_000])
def test_message_is_bounded_whatever_the_input(size: int, tmp_path: Path) -> None:
    long, many = "k" * size, {f"field_{number}": number for number in range(size)}
    file = tmp_path / "run.yaml"
    file.write_text("model: {num_layers: 2}\n")
    odd = tmp_path / "odd.yaml"
    odd.write_text(f"{long}: 1\n")
    held = [tmp_path / f"held_{number}.yaml" for number in range(3)]
    for path, fields in zip(held, ({long: long}, many, {"fp8_margin": [[many]]}), strict=True):
        path.write_text(json.dumps({"mixed_precision": fields}))
    refused: list[Callable[[], object]] = [
        lambda: load_run((), config_file=odd),
        *(partial(load_run, (), config_file=path) for path in held),
        lambda: load_run([f"mixed_precision={long}"], config_file=file),
        lambda: load_run([".".join(["model", *(["a"] * min(size, 1_000)), "="])], config_file=file),
        lambda: get_mixed_precision_config(long),
        lambda: MixedPrecisionConfig.from_dict({long: 1}),
        lambda: import_runs(Document.from_bytes(f"#!/bin/bash\n{long} --bf16\n".encode(), "x.sh")),
        lambda: import_runs(Document.from_bytes(json.dumps({"precision": long, **many}).encode(), f"{long}.json")),
    ]
    for refuse in refused:
        with pytest.raises(BridgeError) as raised:
            refuse()
        lines = str(raised.value).split("\n")
        assert len(lines) <= 50, lines[-1]
        assert max(map(len, lines)) <= 600
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # noqa: S301  our own


def test_long_message_keeps_path_and_remedy() -> None:
    message = str(PayloadError(f"model.a: must be a number, got {['x'] * 5_000!r}. Give one."))
    assert message.startswith("model.a: must be a number, got ['x', ")
    assert message.endswith("'x']. Give one.")


def test_thousands_of_unknown_fields_are_judged_soon(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n" + "".join(f"  fp8_{number}: 1\n" for number in range(10_000)))

    def read() -> None:
        with pytest.raises(BridgeError, match="no such field"):
            load_run((), config_file=file)

    assert calls(read) < 20_000_000

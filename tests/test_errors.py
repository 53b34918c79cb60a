import pickle

import pytest

from bridge import errors
from bridge.errors import Finding, close_matches, did_you_mean

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
    assert did_you_mean(["a", "b", "c"]) == "Did you mean 'a', 'b' or 'c'?"
    assert did_you_mean([]) == ""

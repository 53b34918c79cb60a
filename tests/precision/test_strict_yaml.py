"""The YAML reader of recipes, run configs and other systems' files; more refusals in interop/test_document.py."""

import pytest

from bridge.errors import PrecisionTypeError, RunConfigError
from bridge.precision.strict_yaml import load_documents
from bridge.precision.yaml_text import from_yaml
from bridge.registry.mixed_precision_config import MixedPrecisionConfig


def test_a_recipe_in_yaml_with_a_key_twice_is_refused() -> None:
    with pytest.raises(PrecisionTypeError) as caught:
        from_yaml(MixedPrecisionConfig, "bf16: true\nfp8: hybrid\nfp8: e4m3\n")
    rule = "mixed_precision, line 3: the key 'fp8' must not stand twice in one mapping"
    assert str(caught.value) == f"{rule}. Keep one of the two."


def test_the_caller_chooses_the_class_of_the_error() -> None:
    with pytest.raises(RunConfigError, match=r"^run\.yaml, line 1: must be plain data, and the tag '!x' is not"):
        load_documents("a: !x 1", "run.yaml", error=RunConfigError)


def test_a_merge_is_no_repetition_in_whatever_order_mappings_are_built() -> None:
    text = "c: &c {k: 0, j: 2}\nx:\n  y: &b {<<: *c, k: 1}\nrun: {<<: *b, m: 3}"
    (read,) = load_documents(text, "x.yaml")
    assert read == {"c": {"k": 0, "j": 2}, "x": {"y": {"k": 1, "j": 2}}, "run": {"k": 1, "j": 2, "m": 3}}
    (read,) = load_documents("a: &a {key: 1}\nb: &b {key: 2, other: 3}\nboth: {<<: [*a, *b]}", "x.yaml")
    assert read["both"] == {"key": 1, "other": 3}


def test_an_allowed_repetition_is_noted_and_the_last_value_is_read() -> None:
    notes: list[tuple[str, object, int]] = []
    text = "a: 1\nb: 2\na: 3\n"
    assert load_documents(text, "x.yaml", may_repeat=lambda key: key == "a", repeated=notes) == ({"a": 3, "b": 2},)
    assert notes == [("a", 3, 3)]
    with pytest.raises(Exception, match="the key 'a' must not stand twice"):
        load_documents("a: {x: 1}\na: {y: 2}", "x.yaml", may_repeat=lambda _: True)


@pytest.mark.parametrize("value", ["!!int abc", '!!int ""', "!!float x", "!!bool maybe", "!!set word", "0b_"])
def test_a_value_that_its_tag_does_not_fit_is_refused(value: str) -> None:
    with pytest.raises(RunConfigError, match=r"^x\.yaml(, line 1)?: must be YAML; "):
        load_documents(f"a: {value}", "x.yaml", error=RunConfigError)

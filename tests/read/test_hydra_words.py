"""Overrides of a command line: the outside oracle is Hydra's own parser, and its code that applies them."""

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.hydra_overrides import apply_hydra_overrides, parse_hydra_overrides

WORDS = [
    *("a.b=1", "a.c=true", "+a.new=e4m3", "++a.b=0.5", "a.text='x y'", "a.list=[1,2]", "+n.m.o=null", "~a.gone"),
    *("a.small=1e-6", "+a.names=['console','wandb']"),
]
HELD = {"a": {"b": 0, "c": False, "text": "t", "list": [], "gone": 1, "small": 1.0}}
NOT_TAKEN = {"a.absent=1": "a.absent", "+a.b=1": "a.b", "~a.absent": "a.absent"}


def test_words_are_what_hydra_parses_and_the_tree_is_what_it_makes() -> None:
    parsed = OverridesParser.create().parse_overrides(WORDS)
    words = parse_hydra_overrides(map(ShellWord, WORDS))
    assert [word.key for word in words] == [one.key_or_group for one in parsed]
    config = OmegaConf.create(HELD)
    OmegaConf.set_struct(config, True)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    values = {"a": dict(HELD["a"])}
    assert apply_hydra_overrides(values, words, is_complete=True) == []
    assert values == OmegaConf.to_container(config)


@pytest.mark.parametrize("word", NOT_TAKEN)
def test_a_word_that_hydra_refuses_is_a_finding(word: str) -> None:
    config = OmegaConf.create(HELD)
    OmegaConf.set_struct(config, True)
    with pytest.raises(Exception, match=r"."):
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides([word]), config)
    (finding,) = apply_hydra_overrides(
        {"a": dict(HELD["a"])}, parse_hydra_overrides([ShellWord(word)]), is_complete=True
    )
    assert finding.path == NOT_TAKEN[word]
    assert (
        apply_hydra_overrides({"a": dict(HELD["a"])}, parse_hydra_overrides([ShellWord(word)]), is_complete=False) == []
    )


def test_words_of_other_programs_are_no_overrides() -> None:
    assert parse_hydra_overrides(map(ShellWord, ("--config", "a.yaml", "2>&1", "name"))) == []
    assert apply_hydra_overrides({"a": {}}, parse_hydra_overrides([ShellWord("HOME=/x")]), is_complete=True) == []


def test_a_value_that_only_the_run_knows_is_late() -> None:
    late, known = parse_hydra_overrides([ShellWord("a.b=$SIZE"), ShellWord("a.c=2")])
    assert (late.is_open, late.value) == (True, "$SIZE")
    assert (known.is_open, known.value) == (False, 2)

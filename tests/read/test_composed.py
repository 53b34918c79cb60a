"""Files that inherit from each other: the outside oracle is OmegaConf, with the resolvers that NeMo-RL registers."""

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from bridge.errors import PayloadError
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.inherited_config import is_unresolved, read_inherited_config, resolve_interpolations

BASE = """
policy:
  precision: bfloat16
  sizes: [1, 2]
  batch: 4
  length: 512
  tokens: ${mul:${policy.length}, ${policy.batch}}
  megatron_cfg: {enabled: false, pipeline_dtype: "${policy.precision}", optimizer: {lr: 1.0e-5, bf16: true}}
  generation: {precision: "${..precision}", top_p: 0.5, val_top_p: "${.top_p}"}
data: {train: {name: a}, validation: {name: b}}
"""
CHILD = """
defaults: base.yaml
policy:
  length: 1024
  sizes: [3]
  megatron_cfg: {enabled: true, optimizer: {lr: null}}
data: {_override_: true, other: "x-${policy.precision}"}
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "conf" / "child.yaml"
    path.parent.mkdir()
    path.write_text(CHILD.replace("base.yaml", "../base.yaml"))
    return path


def test_a_file_over_its_base_is_what_omegaconf_makes_of_them(child: Path) -> None:
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    try:
        base, own = OmegaConf.create(BASE), OmegaConf.create(CHILD)
        own.pop("defaults")
        base.pop("data")
        own.data.pop("_override_")
        wanted = OmegaConf.to_container(OmegaConf.merge(base, own), resolve=True)
    finally:
        OmegaConf.clear_resolver("mul")
    config = read_inherited_config(child, yaml.safe_load(child.read_text()))
    assert resolve_interpolations(config.values) == wanted
    assert config.read == ["../base.yaml"]
    assert config.missing == []
    assert config.origins["policy.precision"] == "../base.yaml"
    assert "policy.length" not in config.origins


def test_a_base_that_is_not_there_is_named_and_the_file_counts_alone(tmp_path: Path) -> None:
    config = read_inherited_config(tmp_path / "a.yaml", {"defaults": ["gone.yaml", "${oc.env:X}"], "a": 1})
    assert config.values == {"a": 1}
    assert config.missing == ["gone.yaml", "${oc.env:X}"]


def test_files_that_inherit_in_a_circle_are_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"defaults: {other}.yaml\n")
    with pytest.raises(PayloadError, match="must not inherit from each other in a circle"):
        read_inherited_config(tmp_path / "a.yaml", {"defaults": "b.yaml"})


@pytest.mark.parametrize("values", [{"a": {"x": "${a}"}}, {"a": "${b}", "b": "${a}"}, {"a": ["${a}"] * 9}])
def test_interpolations_in_a_circle_stay_as_they_are_written(values: dict[str, object]) -> None:
    assert resolve_interpolations(values) == values


def test_an_interpolation_that_only_the_run_decides_stays_as_it_is_written() -> None:
    values = resolve_interpolations(
        {"a": "${oc.env:HOME}/x", "b": "${gone.key}", "c": "${a}", "d": "${d}", "e": "n-${c}"}
    )
    assert values == {"a": "${oc.env:HOME}/x", "b": "${gone.key}", "c": "${a}", "d": "${d}", "e": "n-${c}"}
    assert all(is_unresolved(value) for value in values.values())


def test_a_mandatory_value_leaves_the_value_of_the_base(child: Path) -> None:
    config = read_inherited_config(child, {"defaults": "../base.yaml", "policy": {"precision": "???", "new": "???"}})
    assert get_dotted_value(config.values, "policy.precision") == "bfloat16"
    assert is_unresolved(get_dotted_value(config.values, "policy.new"))

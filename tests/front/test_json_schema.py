"""The JSON Schema of recipes and of runs takes what is read, and refuses what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.cli.main import main
from bridge.errors import BridgeError
from bridge.front.json_schema import build_recipe_schema, build_run_schema
from bridge.front.loader import load_run
from bridge.precision.yaml_text import to_yaml
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY

ROOT = Path(__file__).parents[2]
TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def is_of_type(value: object, name: str) -> bool:
    return isinstance(value, TYPES[name]) and (name != "number" or not isinstance(value, bool))


def faults(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Return what a schema of the words that are used here refuses of a value."""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(is_of_type(value, name) for name in types):
        return [f"{path}: type"]
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        return [f"{path}: enum"]
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return [f"{path}: pattern"]
    if "anyOf" in schema and all(faults(value, one, path) for one in schema["anyOf"]):
        return [f"{path}: {faults(value, schema['anyOf'][-1], path)}"]
    found = []
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in schema.get("properties", {}):
            found += faults(inner, schema["properties"][key], f"{path}.{key}")
        elif schema.get("additionalProperties") is False:
            found.append(f"{path}.{key}: unknown")
    for number, inner in enumerate(value) if isinstance(value, list) else ():
        found += faults(inner, schema.get("items", {}), f"{path}[{number}]")
    return found


@pytest.mark.filterwarnings("ignore::bridge.errors.BridgeWarning")  # a name that says another scheme
@pytest.mark.parametrize("name", REGISTRY.names())
def test_every_built_in_recipe_is_valid(name: str) -> None:
    recipe = yaml.safe_load(to_yaml(REGISTRY.get(name)))
    assert faults(recipe, build_recipe_schema()) == []
    assert faults({"mixed_precision": recipe}, build_run_schema()) == []


def test_every_field_has_a_schema_that_takes_its_default() -> None:
    config = MixedPrecisionConfig(bf16=True).to_dict(full=True)
    assert set(build_recipe_schema()["properties"]) == {*config, "defaults"}
    assert faults(config, build_recipe_schema()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "showcase").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_of_the_showcase_is_valid(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if "_target_" not in content:  # Megatron Bridge's own form
        assert faults(content, build_run_schema()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_every_group_of_the_config_tree_is_a_valid_section(path: Path) -> None:
    section = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "defaults"}
    assert faults({path.parent.name: section}, build_run_schema()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("bf16", value) for value in (True, "yes", "Off", 1, "1", None, 2, "maybe", [True])],
        *[("params_dtype", value) for value in ("bf16", "torch.bfloat16", "BFloat16", None, "bf61", True)],
        *[("exp_avg_dtype", value) for value in ("fp8", "fp16", "fp7")],
        *[("fp8_margin", value) for value in (0, "2", None, "two", True)],
        *[("loss_scale", value) for value in (1.5, "1e-5", "x")],
        *[("modules", value) for value in ([{"select": "*.linear_qkv", "precision": "bf16"}], [3], 3)],
        *[("fp8", value) for value in ("hybrid", None, 3)],
        ("fp8_marign", 2),
    ],
)
def test_the_schema_takes_what_the_reader_takes(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"mixed_precision": {field: value}}))
    try:
        load_run(config_file=path, strict=False)
        is_read = True
    except BridgeError:
        is_read = False
    is_valid = not faults({field: value}, build_recipe_schema())
    assert is_valid or not is_read, "a value that is read is refused by the schema"
    if field not in ("fp8_margin", "bf16") or value is not None:
        assert is_valid is is_read


def test_a_schema_is_printed_for_recipes_and_for_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for words, made in ((["--schema"], build_recipe_schema()), (["--schema", "run"], build_run_schema())):
        assert main(["recipes", *words]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made))
    assert main(["recipes", "bf16_mixed", "--schema"]) == 2

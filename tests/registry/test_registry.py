import argparse
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bridge import (
    MIXED_PRECISION_RECIPES,
    MixedPrecisionConfig,
    get_mixed_precision_config,
    register,
)
from bridge.errors import DuplicateRecipeError, RecipeSourceError, UnknownRecipeError
from bridge.precision.statements import get_recipe_name
from bridge.registry.registry import REGISTRY, Registry, load_recipes_from
from tests.plugins import python_path


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.fixture
def registry() -> Registry:
    return Registry(plugins=False)


def test_register_works_bare_and_with_arguments(registry: Registry) -> None:
    @registry.register
    def bare() -> MixedPrecisionConfig:
        """First line."""
        return MixedPrecisionConfig(bf16=True)

    @registry.register(name="team-fp8", tags=("ours",), aliases=["t8"])
    def anything() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True, fp8="e4m3")

    assert registry.names() == ["bare", "team_fp8"]
    assert registry.recipe("bare").summary == "First line."
    assert registry.recipe("t8").tags == ("ours",)
    for spelling in ("team_fp8", "team-fp8", "t8"):
        assert get_recipe_name(registry.get(spelling)) == "team_fp8"
    assert bare().bf16


def test_every_lookup_makes_a_fresh_object() -> None:
    first = get_mixed_precision_config("bf16_mixed")
    first.fp8 = "hybrid"
    assert get_mixed_precision_config("bf16_mixed").fp8 is None


def test_a_config_is_returned_as_it_is() -> None:
    config = MixedPrecisionConfig()
    assert get_mixed_precision_config(config) is config


def test_two_functions_under_one_name_are_an_error_that_names_both_places(registry: Registry, tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"team{number}.py").write_text(
            "\n" * number
            + "def clash():\n    from bridge import MixedPrecisionConfig\n    return MixedPrecisionConfig()\n"
        )
    spaces: list[dict[str, object]] = [{}, {}]
    for number, space in enumerate(spaces, start=1):
        path = tmp_path / f"team{number}.py"
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": f"team{number}"}, space)  # noqa: S102
    registry.register(spaces[0]["clash"])
    with pytest.raises(DuplicateRecipeError) as caught:
        registry.register(spaces[1]["clash"])
    assert str(caught.value) == (
        f"Recipe 'clash' is defined twice: in {tmp_path}/team1.py:2 and in {tmp_path}/team2.py:3. "
        "Rename one of the two functions, or give one another name with @register(name=...)."
    )


def test_two_definitions_in_one_file_are_an_error(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    path.write_text("@register\ndef same(): ...\n\n@register\ndef same(): ...\n")
    with pytest.raises(DuplicateRecipeError):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "twice", "register": registry.register})  # noqa: S102


def test_running_the_same_definition_again_replaces_it(registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "cell.py"
    for body in ("def mine(): ...", "# edited\n\n@register\ndef mine(): ..."):
        text = body if "@register" in body else f"@register\n{body}"
        path.write_text(text)
        exec(compile(text, str(path), "exec"), {"__name__": "cell", "register": registry.register})  # noqa: S102
    for number in (1, 2):  # a notebook's cells have no file
        source = "@register\ndef cell(): ...\n"
        code = compile(source, f"<ipython-input-{number}>", "exec")
        exec(code, {"__name__": "__main__", "register": registry.register})  # noqa: S102
    assert registry.names() == ["mine", "cell"]


def test_an_alias_may_not_take_anothers_name(registry: Registry) -> None:
    @registry.register
    def taken() -> MixedPrecisionConfig:
        return MixedPrecisionConfig()

    with pytest.raises(DuplicateRecipeError):

        @registry.register(aliases=("taken",))
        def other() -> MixedPrecisionConfig:
            return MixedPrecisionConfig()

    assert registry.names() == ["taken"]


def test_an_unknown_name_is_a_short_value_error_with_the_nearest_first() -> None:
    with pytest.raises(ValueError, match=r"^Unknown mixed-precision recipe") as caught:
        get_mixed_precision_config("bf16_with_fp8_curent_scaling_mixed")
    assert isinstance(caught.value, UnknownRecipeError)
    assert caught.value.matches[0] == "bf16_with_fp8_current_scaling_mixed"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("error", [KeyError("missing"), ValueError("odd"), TypeError("no")])
def test_an_error_inside_a_recipe_is_shown_as_that_error(registry: Registry, error: Exception) -> None:
    @registry.register
    def broken() -> MixedPrecisionConfig:
        raise error

    with pytest.raises(type(error)) as caught:
        registry.get("broken")
    assert caught.value is error


def test_a_recipe_that_returns_something_else_is_refused_by_name(registry: Registry) -> None:
    @registry.register
    def forgot() -> MixedPrecisionConfig:  # type: ignore[return]
        MixedPrecisionConfig(bf16=True)

    with pytest.raises(RecipeSourceError, match=r"^Recipe 'forgot' .* must return a MixedPrecisionConfig, got None\."):
        registry.get("forgot")


def test_the_mapping_is_live_and_takes_every_spelling(registered: None) -> None:
    @register
    def added_for_the_mapping() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True)

    assert MIXED_PRECISION_RECIPES["added-for-the-mapping"] is added_for_the_mapping
    assert "added_for_the_mapping" in list(MIXED_PRECISION_RECIPES)
    assert "mxfp8" in MIXED_PRECISION_RECIPES
    assert list(MIXED_PRECISION_RECIPES)[-2:] == ["added_for_the_mapping", "added-for-the-mapping"]
    assert len(MIXED_PRECISION_RECIPES) == len(list(MIXED_PRECISION_RECIPES)) == 2 * len(REGISTRY.names()) - 1  # fp32
    assert MIXED_PRECISION_RECIPES.get("nothing") is None
    MIXED_PRECISION_RECIPES["by_item"] = added_for_the_mapping
    assert get_mixed_precision_config("by-item").bf16
    del MIXED_PRECISION_RECIPES["by_item"]
    assert "by_item" not in MIXED_PRECISION_RECIPES


def test_the_mappings_copy_is_a_dictionary_that_does_not_change(registered: None) -> None:
    before = MIXED_PRECISION_RECIPES.copy()
    assert type(before) is dict
    assert before == dict(MIXED_PRECISION_RECIPES)
    assert before["bf16-mixed"] is before["bf16_mixed"]

    @register
    def later() -> MixedPrecisionConfig:
        return MixedPrecisionConfig(bf16=True)

    assert "later" not in before
    assert "later" in MIXED_PRECISION_RECIPES.copy()


def test_names_of_the_mapping_can_be_the_choices_of_a_command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=list(MIXED_PRECISION_RECIPES.keys()))
    for name in ("bf16-mixed", "bf16_mixed"):
        assert get_recipe_name(get_mixed_precision_config(parser.parse_args(["--recipe", name]).recipe)) == "bf16_mixed"


TEAM = """
from bridge import MixedPrecisionConfig, register

@register
def team_recipe() -> MixedPrecisionConfig:
    return MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)
"""


def test_recipes_come_from_files_and_modules_that_the_environment_names(tmp_path: Path) -> None:
    (tmp_path / "team_file.py").write_text(TEAM)
    (tmp_path / "team_module.py").write_text(TEAM.replace("team_recipe", "module_recipe"))
    done = run(
        "from bridge import get_mixed_precision_config as get\n"
        "print(get('team-recipe').grad_reduce_in_fp32, get('module_recipe').bf16)",
        BRIDGE_RECIPES=f"{tmp_path}/team_file.py:team_module",
        PYTHONPATH=python_path(tmp_path),
    )
    assert done.stdout == "False True\n", done.stderr


def test_a_broken_source_is_reported_by_name_and_does_not_take_the_others_down(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "good.py").write_text(TEAM)
    done = run(
        "from bridge import get_mixed_precision_config as get\n"
        "print(get('team_recipe').bf16, get('bf16_mixed').bf16)\n"
        "get('nothing_like_it')",
        BRIDGE_RECIPES=f"{tmp_path}/bad.py:{tmp_path}/good.py:{tmp_path}/none.py",
    )
    assert done.stdout == "True True\n"
    assert f"'{tmp_path}/bad.py' failed to load: No module named 'no_such_module_at_all'" in done.stderr
    assert f"there is no file '{tmp_path}/none.py'" in done.stderr


def test_an_installed_plugin_brings_its_recipes_and_a_broken_one_is_named(tmp_path: Path) -> None:
    for name, body in {"good_plugin": TEAM, "bad_plugin": "raise RuntimeError('half finished')"}.items():
        (tmp_path / f"{name}.py").write_text(body)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[bridge.recipes]\n{name} = {name}\n")
    done = run(
        "from bridge.registry.registry import REGISTRY\n"
        "print('team_recipe' in REGISTRY, 'bf16_mixed' in REGISTRY, REGISTRY.broken)",
        PYTHONPATH=python_path(tmp_path),
    )
    assert done.stdout == "True True {\"plugin 'bad_plugin' (bad_plugin)\": 'RuntimeError: half finished'}\n", (
        done.stderr
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py", "recipes_from: there is no file 'nowhere.py'. Give the path of an existing .py file."),
        (
            "no_such_package.recipes",
            "recipes_from: there is no module 'no_such_package.recipes'. "
            "Give a module that can be imported, or the path of a .py file.",
        ),
    ],
)
def test_a_named_source_that_is_not_there_is_an_error(name: str, message: str) -> None:
    with pytest.raises(RecipeSourceError) as caught:
        load_recipes_from(name)
    assert str(caught.value) == message


def test_a_named_file_is_loaded_once(tmp_path: Path, registered: None) -> None:
    path = tmp_path / "once.py"
    path.write_text(TEAM.replace("team_recipe", "loaded_once"))
    load_recipes_from([str(path), str(path)])
    assert "loaded_once" in REGISTRY


def test_the_built_ins_are_a_plugin_and_the_bridge_does_not_import_them() -> None:
    done = run(
        """
        import sys, bridge
        print("precision_bridge_recipes" in sys.modules)
        bridge.get_mixed_precision_config("fp32")
        print("precision_bridge_recipes" in sys.modules)
        """
    )
    assert done.stdout == "False\nTrue\n", done.stderr


def test_who_takes_a_built_in_recipes_name_is_told_and_the_built_ins_stay(tmp_path: Path) -> None:
    (tmp_path / "dup.py").write_text(TEAM.replace("team_recipe", "bf16_mixed"))
    done = run("import dup", PYTHONPATH=python_path(tmp_path))
    assert "DuplicateRecipeError: Recipe 'bf16_mixed' is defined twice" in done.stderr
    done = run(
        "from bridge.registry.registry import load_recipes_from\n"
        "from bridge import get_mixed_precision_config as get\n"
        f"try: load_recipes_from('{tmp_path}/dup.py')\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(get('bf16_mixed').grad_reduce_in_fp32, get('mxfp8').fp8)"
    )
    assert done.stdout == "DuplicateRecipeError\nTrue e4m3\n", done.stderr


def test_a_recipe_file_that_exits_is_a_broken_source(tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n")
    done = run(
        "import bridge; print(bridge.get_mixed_precision_config('fp32').fp32)", BRIDGE_RECIPES=f"{tmp_path}/quits.py"
    )
    assert done.stdout == "True\n"
    assert "SystemExit" in done.stderr


def test_threads_may_ask_at_once() -> None:
    done = run(
        """
        from concurrent.futures import ThreadPoolExecutor
        from bridge import get_mixed_precision_config as get
        with ThreadPoolExecutor(8) as pool:
            print(sum(c.bf16 for c in pool.map(get, ["bf16_mixed"] * 64)))
        """
    )
    assert done.stdout == "64\n", done.stderr


def test_threads_that_register_lose_no_alias(registry: Registry) -> None:
    def add(number: int) -> None:
        for part in range(50):
            name = f"thread_{number}_{part}"
            registry.register(name=name, aliases=(f"{name}_a", f"{name}_b"))(lambda: MixedPrecisionConfig(bf16=True))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, range(8)))
    finally:
        sys.setswitchinterval(before)
    aliases = registry.aliases()
    assert len([name for name in registry.names() if name.startswith("thread_")]) == 400
    assert len([alias for alias in aliases if alias.startswith("thread_")]) == 800


def test_a_recipe_that_needs_arguments_is_refused_when_it_is_registered(registry: Registry) -> None:
    with pytest.raises(RecipeSourceError) as caught:

        @registry.register
        def wants(layers):
            return MixedPrecisionConfig()

    assert str(caught.value) == "Recipe 'wants': is called without arguments, and needs layers. Give them defaults."


def test_definitions_made_in_a_loop_are_different_ones(registry: Registry) -> None:
    def make(layers: int):
        def recipe() -> MixedPrecisionConfig:
            return MixedPrecisionConfig(num_layers_at_end_in_bf16=layers)

        return recipe

    registry.register(name="kept")(make(1))
    with pytest.raises(DuplicateRecipeError):
        registry.register(name="kept")(make(2))


def test_a_recipe_that_hands_out_one_object_still_makes_fresh_ones(registry: Registry) -> None:
    shared = MixedPrecisionConfig(bf16=True)
    registry.register(name="shared")(lambda: shared)
    registry.get("shared").fp8 = "e4m3"
    assert registry.get("shared").fp8 is None


def test_a_recipe_that_asks_for_itself_is_refused(registry: Registry) -> None:
    @registry.register
    def one() -> MixedPrecisionConfig:
        return registry.get("two")

    @registry.register
    def two() -> MixedPrecisionConfig:
        return registry.get("one")

    @registry.register
    def alone() -> MixedPrecisionConfig:
        return registry.get("alone")

    with pytest.raises(RecipeSourceError, match=r"^Recipe 'alone' \(.*\): asks for itself\. Build it on another"):
        registry.get("alone")
    for _ in range(2):  # the refusal leaves nothing behind
        with pytest.raises(RecipeSourceError, match=r"^Recipe 'one' \(.*\): asks for itself through 'two'\. "):
            registry.get("one")


def test_a_name_is_found_in_capitals_too():
    assert get_recipe_name(get_mixed_precision_config("BF16-MIXED")) == "bf16_mixed"

"""Files that no command may hang on, read without end, or end in a traceback over."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.cli.main import main
from tests import warm


def bomb() -> str:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{after}: &{after} [{', '.join(9 * [f'*{name}'])}]" for name, after in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    return "\n".join(lines)


FILES: dict[str, Callable[[], str]] = {
    "bomb": bomb,
    "large": lambda: "model: {}\n" + "# x\n" * 13_000_000,
    "deep": lambda: f"model: {'[' * 5000}{']' * 5000}",
    "recursive": lambda: "model: &a {x: *a}",
    "digits": lambda: f"train: {{seed: {'9' * 6000}}}",
}
RULES = {
    "bomb": "must not hold more than 200000 values, aliases written out",
    "large": "a configuration must not be larger than 512 KiB",
    "deep": "nesting must not be deeper than 64",
    "recursive": "the alias *a must follow its anchor",
    "digits": "a number must have fewer digits",
    "pipe": "must be a regular file, got a named pipe",
    "x" * 5000: "File name too long",
}


OF_A_TREE = {"pipe": "no such option"}
"""A rule that is another one where the file is an option of a group of the config tree."""


@pytest.mark.parametrize(
    "words", [("check", "--config"), ("plan", "--config"), ("convert",), ("check", "--config-dir", ".")], ids=" ".join
)
@pytest.mark.parametrize("name", RULES, ids=lambda name: name[:9])
def test_a_file_that_is_no_configuration_is_one_sentence(words: tuple[str, ...], name: str, tmp_path: Path) -> None:
    is_tree = "--config-dir" in words
    folder = tmp_path / "model" if is_tree else tmp_path
    folder.mkdir(exist_ok=True)
    if name == "pipe":
        os.mkfifo(folder / ("pipe.yaml" if is_tree else name))
    elif name in FILES:
        (folder / f"{name}.yaml").write_text(FILES[name]())
    given = f"{name}.yaml" if name in FILES else name
    given = f"model={name}" if is_tree else given
    done = warm.run([str(warm.COMMAND), *words, given], cwd=tmp_path)
    assert done.returncode == 2
    assert (OF_A_TREE.get(name, RULES[name]) if is_tree else RULES[name]) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    done = warm.run([str(warm.COMMAND), "check", "--brief", "x" * 5000 + ".yaml"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"{'x' * 100} ... {'x' * 89}.yaml: there is no such file or folder. Give the path of one.\n",
    )


def test_references_of_a_tree_that_multiply_are_refused(tmp_path: Path) -> None:
    doubled = [f"b{n}: ${{b{n - 1}}}${{b{n - 1}}}" for n in range(1, 31)]
    chains = {
        "text": ["b0: xxxxxxxxxx", *doubled],
        "lists": ["b0: [x]", *(f"b{n}: ['${{b{n - 1}}}', '${{b{n - 1}}}']" for n in range(1, 31))],
        "large": [f"b0: {'x' * 100_000}", *doubled],
    }
    for name, lines in chains.items():
        content = ["defaults: [config, _self_]", "data: {path: '${b30}'}", *lines]
        (tmp_path / f"{name}.yaml").write_text("\n".join(content))
        words = ["check", "--config-dir", tmp_path, "--config-name", name, "model=gpt_tiny"]
        done = warm.run([str(warm.COMMAND), *words], cwd=tmp_path)
        fact = f"references that multiply are refused ({name}.yaml). Correct the reference."
        assert (done.returncode, done.stderr) == (2, f"data.path: cannot be resolved: {fact}\n")


def test_recipes_from_of_a_checked_config_is_listed_and_run_with_trust_alone(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("recipes_from: [lab/evil.py]\nmixed_precision: bf16_mixed\n")
    (tmp_path / "house.yaml").write_text("defaults: [config, _self_]\nrecipes_from: lab/evil.py\n")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "evil.py").write_text("open('ran', 'w').close()\n")
    shapes = {"run.yaml": ["--config", "run.yaml"], "house": ["--config-dir", ".", "--config-name", "house"]}
    for name, given in shapes.items():
        for command in ("check", "plan"):
            done = warm.run([str(warm.COMMAND), command, *given, "model.num_layers=2"], cwd=tmp_path)
            fact = "recipes_from names lab/evil.py, which is Python and was not run"
            assert done.stderr.splitlines()[0] == f"warning: {name}: {fact}. Give --trust to run it."
            assert not (tmp_path / "ran").exists()
        warm.run([str(warm.COMMAND), "check", *given, "--trust"], cwd=tmp_path)
        assert (tmp_path / "ran").exists()
        (tmp_path / "ran").unlink()


DEEP = 100_000
DEEPLY_NESTED = {
    "run.yaml": f"model: {'[' * DEEP}{']' * DEEP}\n",
    "run.json": f'{{"model": {"[" * DEEP}{"]" * DEEP}}}',
    "run.toml": f"model = {'[' * DEEP}{']' * DEEP}\n",
    "run.py": f"import megatron.bridge\nx = {'[' * DEEP}{']' * DEEP}\n",
    "run.sh": f"{'[[ ' * (DEEP // 2)}{']] ' * (DEEP // 2)}\n",
    "log.txt": f"{'-' * DEEP} nothing\n{'[' * DEEP}\n",
}


@pytest.mark.parametrize("words", [["check", "--config"], ["memory", "--config"], ["convert"]], ids=" ".join)
@pytest.mark.parametrize("name", DEEPLY_NESTED)
def test_nested_brackets_are_refused_in_one_sentence(name: str, words: list[str], tmp_path: Path, capsys) -> None:
    path = tmp_path / name
    path.write_text(DEEPLY_NESTED[name])
    assert main([*words, str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert len(printed.err) < 600
    assert "recursion" not in printed.err


def test_nested_brackets_in_an_override_are_a_text(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python run_recipe.py --recipe a mixed_precision.fp8_recipe={'[' * DEEP}\n")
    assert main(["convert", str(path)]) == 0
    assert "mode: not stated; the recipe a decides" in capsys.readouterr().out

"""`find_model_arguments`: the arguments of a model that a launch script of miles asks a Python file of its clone for.

    MODEL_ARGS_LINE="$(python3 "${REPO_ROOT}/miles/utils/external_utils/model_args_utils.py" "qwen3-4B")"
    read -ra MODEL_ARGS <<< "${MODEL_ARGS_LINE}"

The file `scripts/models/qwen3-4B.py` has a function that returns the arguments as a text: constants, names of the file,
and calls of two functions of miles. It is read, and nothing in it runs; a file with anything else in it is not read.

Source: radixark/miles 31f1ca96 of 2026-08-21, miles/utils/external_utils/model_args_utils.py and scripts/models.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bridge.errors import PayloadError
from bridge.read.framework.launcher.expressions import FAULTS
from bridge.read.framework.launcher.program import LauncherProgram
from bridge.read.framework.launcher.values import (
    Call,
    Frame,
    Function,
    PathEndError,
    UnknownValueError,
    Value,
    get_plain,
)
from bridge.read.launch.shell_word import ShellWord

MODEL_ARGUMENTS_PROGRAM = "model_args_utils.py"
MODEL_ARGUMENTS_CALL = re.compile(
    r"(?P<line>\w+)=\"?\$\(\s*python3?\s+[^\n|;]*model_args_utils\.py\"?\s+\"?(?P<model>[\w.${}-]+)\"?\s*\)[^\n]*\n"
    r"[\s\S]*?read\s+-ra\s+(?P<name>\w+)\s+<<<\s*\"?\$\{?(?P=line)\}?"
)
A_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
"""A variable with the name of the model's file; it is read where the script writes one text into it."""
MODELS_FOLDER = Path("scripts", "models")
MODEL_FUNCTION = "model_args"
MAX_SOURCED_FILES = 4
"""Files of models that are derived from each other."""
ARGUMENTS_READ_FROM_FILE = "{name}: read from {path}."


class ModelArguments(NamedTuple):
    """The variables of a script that hold the arguments of a model."""

    variables: Mapping[str, str]
    read_too: tuple[str, ...] = ()
    """As in `FileReading`."""


def find_model_arguments(
    text: str, path: str, environment: Mapping[str, str] | None = None
) -> ModelArguments:
    """Return the variables of a script that hold a model's arguments.

    There is none for a file that is absent or not read.

    Args:
        text: The script.
        environment: Variables that its environment sets.
    """
    if MODEL_ARGUMENTS_PROGRAM not in text:
        return ModelArguments({})
    variables: dict[str, str] = {}
    read_too: list[str] = []
    for call in MODEL_ARGUMENTS_CALL.finditer(text):
        name = f"{_text_of(call['model'], text)}.py"
        file = _find_model_file(Path(path), name)
        if file is None:
            continue
        arguments = evaluate_model_file(file, environment=environment)
        if arguments is not None:
            variables[call["name"]] = str(ShellWord.from_text(arguments))
            read_too.append(
                ARGUMENTS_READ_FROM_FILE.format(name=call["name"], path=MODELS_FOLDER / name)
            )
    return ModelArguments(variables, tuple(read_too))


def _text_of(word: str, script: str) -> str:
    """Return a word of a script; a variable that one plain text is written into is that text."""
    variable = A_VARIABLE.fullmatch(word)
    if variable is None:
        return word
    written: list[str] = re.findall(rf"(?<![\w-]){variable[1]}=(\S*)", script)
    if len(written) != 1:
        return word
    text = written[0].strip("\"'")
    if re.fullmatch(r"[\w.-]+", text) is None:
        return word
    return text


def evaluate_model_file(
    file: Path,
    options: Mapping[str, Value] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    depth: int = MAX_SOURCED_FILES,
) -> str | None:
    """Return the arguments that a model's file returns, on one line.

    Args:
        options: Arguments of its function.
        environment: Variables of the environment that are stated.
        depth: Files of models that may be derived from each other.

    Returns:
        None if the file has more in it than is read.
    """
    try:
        return _ModelFile(file, environment or {}, depth).evaluate_arguments(options or {})
    except (OSError, UnicodeDecodeError, PayloadError, PathEndError, *FAULTS):
        return None


class _ModelFile(LauncherProgram):
    """A model's file while its function is followed."""

    def __init__(self, file: Path, environment: Mapping[str, str], depth: int) -> None:
        super().__init__(file, environment)
        self.depth = depth

    def evaluate_arguments(self, options: Mapping[str, Value]) -> str:
        """Return the text that the function of the file returns.

        Raises:
            UnknownValueError: A part of the text is not read.
        """
        function = self.load_functions().names[MODEL_FUNCTION].content
        if not isinstance(function, Function):
            raise UnknownValueError(MODEL_FUNCTION)
        text = " ".join(self.follow_function(function, (), options).text.split())
        if ShellWord.from_text(text).is_open:
            raise UnknownValueError(MODEL_FUNCTION)
        return text

    def call_imported(self, path: str, node: ast.Call, call: Call, frame: Frame) -> Value:
        """Return the value of a call of a function of miles."""
        name = path.rpartition(".")[2]
        names: set[str] = set()
        if name == "moe_layer_freq":
            layer_count = int(str(get_plain(call.options["nlayers"], names)))
            dense_count = int(str(get_plain(call.options["first_k_dense_replace"], names)))
            dense = ["0"] * min(dense_count, layer_count)
            frequencies = [*dense, *["1"] * (layer_count - dense_count)]
            return Value(f"[{','.join(frequencies)}]", frozenset(names))
        if name == "load_sibling_model_args" and self.depth:
            other = self.path.with_name(f"{get_plain(call.arguments[1], names)}.py")
            text = evaluate_model_file(
                other, call.options, environment=self.variables, depth=self.depth - 1
            )
            if text is not None:
                return Value(text)
        return super().call_imported(path, node, call, frame)


def _find_model_file(path: Path, name: str) -> Path | None:
    """Return a model's file in the clone that a script lies in; None outside of one."""
    for folder in path.resolve().parents:
        if (folder / MODELS_FOLDER / name).is_file():
            return folder / MODELS_FOLDER / name
    return None

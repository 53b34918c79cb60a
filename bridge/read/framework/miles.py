"""`find_model_arguments`: the arguments of a model that a launch script of miles asks a Python file of its clone for.

    MODEL_ARGS_LINE="$(python3 "${REPO_ROOT}/miles/utils/external_utils/model_args_utils.py" "qwen3-4B")"
    read -ra MODEL_ARGS <<< "${MODEL_ARGS_LINE}"

The file `scripts/models/qwen3-4B.py` has a function that returns the arguments as a text. It is read, and nothing in it
runs. A file with anything else than the following is not read:

    NAME = value                                     of the file or of the function
    "--num-layers", 61, None, NAME, f"{NAME}"
    N + M, N * M                                     of whole numbers
    a if NAME is not None else b
    os.environ.get(...) or value                     a variable of the environment counts as unset
    int(...), moe_layer_freq(...), load_sibling_model_args(...)

Source: radixark/miles 31f1ca96 of 2026-08-21, miles/utils/external_utils/model_args_utils.py and scripts/models.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
Value = str | int | None


class ModelArguments(NamedTuple):
    """The variables of a script that hold the arguments of a model."""

    variables: Mapping[str, str]
    read_too: tuple[str, ...] = ()
    """As in `FileReading`."""


def find_model_arguments(text: str, path: str) -> ModelArguments:
    """Return the variables of a script that hold a model's arguments; none of a file that is absent or not read."""
    variables: dict[str, str] = {}
    read_too: list[str] = []
    for call in MODEL_ARGUMENTS_CALL.finditer(text):
        name = f"{_text_of(call['model'], text)}.py"
        file = _find_model_file(Path(path), name)
        if file is None:
            continue
        arguments = evaluate_model_file(file)
        if arguments is not None:
            variables[call["name"]] = arguments
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
    file: Path, stated: Mapping[str, Value] | None = None, depth: int = MAX_SOURCED_FILES
) -> str | None:
    """Return the arguments that a model's file returns, on one line; None where it has more in it than is read."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        return _ModelFileEvaluator(file, depth).evaluate_function(tree, stated or {})
    except (
        OSError,
        UnicodeDecodeError,
        SyntaxError,
        RecursionError,
        TypeError,
        LookupError,
        ValueError,
        _UnreadError,
    ):
        return None


class _UnreadError(Exception):
    """A piece of a file that is not read."""


class _ModelFileEvaluator:
    """One model's file while it is read; _UnreadError for what is not read."""

    def __init__(self, file: Path, depth: int) -> None:
        self.file, self.depth = file, depth
        self.names: dict[str, Value] = {"__file__": str(file)}

    def evaluate_function(self, tree: ast.Module, stated: Mapping[str, Value]) -> str:
        """Return what the function of the file returns with these arguments."""
        for node in tree.body:
            if isinstance(node, ast.Assign):
                self._assign(node)
        (function,) = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == MODEL_FUNCTION
        ]
        parameters = function.args
        parameter_nodes = [*parameters.args, *parameters.kwonlyargs]
        defaults = [*parameters.defaults, *parameters.kw_defaults]
        is_variadic = parameters.posonlyargs or parameters.vararg or parameters.kwarg
        if len(parameter_nodes) != len(defaults) or is_variadic:
            raise _UnreadError(MODEL_FUNCTION)
        for argument, default in zip(parameter_nodes, defaults, strict=True):
            if argument.arg in stated:
                self.names[argument.arg] = stated[argument.arg]
            elif default is not None:
                self.names[argument.arg] = self._value(default)
        for node in function.body:
            if isinstance(node, ast.Assign):
                self._assign(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # its docstring
            elif isinstance(node, ast.Return) and node.value is not None:
                return " ".join(str(self._value(node.value)).split())
            else:
                raise _UnreadError(ast.dump(node))
        raise _UnreadError(MODEL_FUNCTION)

    def _assign(self, node: ast.Assign) -> None:
        (target,) = node.targets
        if not isinstance(target, ast.Name):
            raise _UnreadError(ast.dump(target))
        self.names[target.id] = self._value(node.value)

    def _value(self, node: ast.expr) -> Value:
        """Return the value of an expression."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | None):
            return node.value
        if isinstance(node, ast.Name):
            return self.names[node.id]
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self._value(part)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None:
            return self._value(node.value)
        if isinstance(node, ast.BinOp):
            return self._evaluate_binary(node)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return self._evaluate_or(node.values)
        if isinstance(node, ast.IfExp):
            if self._evaluate_condition(node.test):
                return self._value(node.body)
            return self._value(node.orelse)
        if isinstance(node, ast.Call):
            return self._evaluate_call(node)
        raise _UnreadError(ast.dump(node))

    def _evaluate_or(self, values: list[ast.expr]) -> Value:
        """Return the first value that is set; a variable of the environment is not."""
        for value in values:
            if ast.unparse(value).startswith("os.environ.get("):
                continue
            result = self._value(value)
            if result:
                return result
        raise _UnreadError("or")

    def _evaluate_condition(self, test: ast.expr) -> bool:
        """Return whether `name is not None` holds."""
        match test:
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return self._value(left) is not None
        raise _UnreadError(ast.dump(test))

    def _evaluate_binary(self, node: ast.BinOp) -> int:
        """Return the sum or the product of two numbers of layers or of sizes."""
        left, right = self._value(node.left), self._value(node.right)
        if isinstance(left, int) and isinstance(right, int):
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Mult):
                return left * right
        raise _UnreadError(ast.dump(node))

    def _evaluate_call(self, node: ast.Call) -> Value:
        name = ast.unparse(node.func)
        keywords = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
        if name == "int" and not keywords:
            return int(str(self._value(node.args[0])))
        if name == "moe_layer_freq" and not node.args:
            layers = int(str(keywords["nlayers"]))
            dense = int(str(keywords["first_k_dense_replace"]))
            return f"[{','.join(['0'] * min(dense, layers) + ['1'] * (layers - dense))}]"
        if name == "load_sibling_model_args" and self.depth:
            other = self.file.with_name(f"{self._value(node.args[1])}.py")
            arguments = evaluate_model_file(other, keywords, self.depth - 1)
            if arguments is not None:
                return arguments
        raise _UnreadError(name)


def _find_model_file(path: Path, name: str) -> Path | None:
    """Return a model's file in the clone that a script lies in; None outside of one."""
    for folder in path.resolve().parents:
        if (folder / MODELS_FOLDER / name).is_file():
            return folder / MODELS_FOLDER / name
    return None

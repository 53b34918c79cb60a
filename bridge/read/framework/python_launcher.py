"""`maybe_read_launcher`: a Python launcher of slime or miles as the launch script that it stands for.

    MODEL_TYPE = "qwen3-4B"
    U.execute_train(train_args=f"--lr {lr} ", num_gpus_per_node=8, megatron_model_type=MODEL_TYPE)

`execute_train` composes a command of bash and starts it. So a launcher is the script with this
command, on the line of the call. Each default that decides something is a condition of the script:

    if [ "$MILES_SCRIPT_TRAIN_FP8" = True ]; then ray job submit ...; else ray job submit ...; fi

Source: THUDM/slime 624b824a slime/utils/external_utils/command_utils.py execute_train, typer_utils.py
dataclass_cli; radixark/miles 31f1ca96 miles/utils/external_utils/command_utils.py execute_train,
miles/utils/typer_utils.py dataclass_cli, both of 2026-08-21.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bridge.errors import PayloadError, UnreadFileError
from bridge.read.framework.launcher.expressions import OpenCondition
from bridge.read.framework.launcher.program import LauncherProgram
from bridge.read.framework.launcher.values import (
    PathEndError,
    Start,
    UnknownValueError,
    Value,
    format_name,
    get_plain,
    make_open_value,
)
from bridge.read.framework.miles import evaluate_model_file
from bridge.read.text.document import Document

LAUNCHER_PATTERN = re.compile(
    r"^\s*(?:import|from)\s+(?:(?P<package>slime|miles)|scripts|tests)\b", re.MULTILINE
)
"""The import of the framework, or of another launcher."""
CALL_PATTERN = re.compile(r"execute_train\(")
MILES = "miles"
"""The framework whose launchers import each other."""
MODELS_FOLDER = Path("scripts", "models")
MAX_BRANCHES = 48
"""Other answers of conditions for which a launcher is followed again."""
BOOLEAN_WORDS = {"0": "1", "1": "0", "true": "false", "false": "true"}
"""Texts of a variable that switch something -> the other text."""
NO_START_MESSAGE = (
    "{path}: must start a run with nothing overridden, and {reason}. "
    'Add --context variables="{pair}" with an option of the launcher.'
)
NO_START_KIND = "starts no run with nothing overridden"
NO_CALL = "no statement that is followed calls `execute_train`"


class _Branch(NamedTuple):
    """An answer of a condition that the launcher does not decide."""

    test: str
    """The condition of bash for it."""
    variables: Mapping[str, str]
    """Variables that give this answer."""
    forced: tuple[str, ...] = ()
    """Conditions whose answer no variable gives."""


def maybe_read_launcher(document: Document, variables: Mapping[str, str]) -> Document | None:
    """Return the launch script that a Python launcher stands for; None for any other document.

    Args:
        document: The file.
        variables: Variables of the environment and options of the command line that are stated.

    Raises:
        UnreadFileError: The launcher starts no run, or is no Python.
    """
    package = LAUNCHER_PATTERN.search(document.text)
    if document.kind != "python" or package is None or "__main__" not in document.text:
        return None
    path = Path(document.path)
    try:
        package_name = package["package"] or MILES
        script = _Launcher(path, package_name, variables).write_script()
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    except UnreadFileError:
        if CALL_PATTERN.search(document.text):
            raise
        return None
    return Document(path=document.path, text=script, kind="shell")


class _Launcher:
    """A launcher, which is followed once for each branch."""

    def __init__(self, path: Path, package: str, variables: Mapping[str, str]) -> None:
        self.path = path
        self.prefix = f"{package}_SCRIPT_".upper()
        self.variables = variables
        self.files: dict[str, Path | None] = {}
        """As in `LauncherProgram`."""
        self.skipped: list[str] = []
        """Commands that are not followed again, since they start no run."""
        self.model_arguments: dict[tuple[Path, frozenset[tuple[str, str]]], str | None] = {}
        """A model's file and the variables -> its arguments; None for a file that is not read."""
        self.end = ""
        """The error that ends the launcher with nothing overridden; empty without one."""
        self.end_names: frozenset[str] = frozenset()
        """Variables on whose defaults the condition of this error rests."""

    def write_script(self) -> str:
        """Return the script: each line of a call has the commands of every branch.

        Raises:
            UnreadFileError: No branch starts a run.
        """
        program = self._make_program(self.variables)
        first = self._list_commands(program)
        self.skipped = program.list_commands_without_start()
        others: list[tuple[_Branch, dict[int, list[str]]]] = []
        for branch in [*_list_branches(program)][:MAX_BRANCHES]:
            variables = {**self.variables, **branch.variables}
            commands = self._list_commands(self._make_program(variables, branch.forced))
            if commands and commands != first:
                others.append((branch, commands))
        if not first:
            raise self._make_refusal(branch for branch, _ in others)
        lines = sorted({*first, *(line for _, commands in others for line in commands)})
        texts = [""] * lines[-1]
        for line in lines:
            texts[line - 1] = _write_line(first.get(line, []), others, line)
        return "\n".join(texts) + "\n"

    def _make_program(
        self, variables: Mapping[str, str], forced: Iterable[str] = ()
    ) -> LauncherProgram:
        """Return the launcher before it is followed. The arguments are those of `LauncherProgram`."""
        return LauncherProgram(
            self.path, variables, forced, self.prefix, files=self.files, skipped=self.skipped
        )

    def _make_refusal(self, branches: Iterable[_Branch]) -> UnreadFileError:
        """Return the refusal of a launcher that starts nothing with nothing overridden.

        Args:
            branches: The branches that start a run.
        """
        pair = f"{min(self.end_names, default='NAME')}=VALUE"
        for branch in branches:
            for name, value in branch.variables.items():
                pair = f"{name}={shlex.quote(value)}"
        reason = self.end or NO_CALL
        sentence = NO_START_MESSAGE.format(path=self.path, reason=reason, pair=pair)
        return UnreadFileError(sentence, kind=NO_START_KIND)

    def _list_commands(self, program: LauncherProgram) -> dict[int, list[str]]:
        """Return line of a call -> its commands, each once, on one path of the launcher."""
        try:
            program.run()
        except PathEndError as error:
            if not self.end:
                self.end = str(error)
                self.end_names = error.names
        commands: dict[int, list[str]] = {}
        for start in program.starts:
            command = self._write_command(start, program.variables)
            of_line = commands.setdefault(start.line, [])
            if command not in of_line:
                of_line.append(command)
        return commands

    def _write_command(self, start: Start, variables: Mapping[str, str]) -> str:
        """Return the command of bash that a call of `execute_train` starts."""
        arguments = start.arguments
        program = arguments.get("train_script", Value("train.py")).text
        train_arguments = arguments.get("train_args", make_open_value("train_args")).text
        environment = self._write_environment(arguments.get("extra_env_vars", Value({})))
        source, model = self._write_model(start, variables)
        command = f"ray job submit {environment} -- python3 {start.package}/{program} {model} "
        return source + " ".join(f"{command}{train_arguments}".split())

    def _write_environment(self, variables: Value) -> str:
        """Return the option with the variables of the job."""
        if variables == Value(None):
            variables = Value({})
        content = variables.content
        if not isinstance(content, dict):
            return f'--runtime-env-json="{variables.text}"'
        texts = {str(name): value.text for name, value in content.items()}
        return f"--runtime-env-json={shlex.quote(json.dumps({'env_vars': texts}))}"

    def _write_model(self, start: Start, variables: Mapping[str, str]) -> tuple[str, str]:
        """Return the command before the start that reads a model's arguments, and these arguments."""
        kind = start.arguments.get("megatron_model_type", Value())
        try:
            name = get_plain(kind, set())
        except UnknownValueError:
            if kind.late_name:
                return "", kind.text
            return "", make_open_value(f"{MODELS_FOLDER}/{kind.text}.py").text
        if name is None:
            return "", ""
        for folder in self.path.resolve().parents:
            file = folder / MODELS_FOLDER / f"{name}.py"
            if start.package == MILES and file.is_file():
                arguments = self._evaluate_model_file(file, variables)
                if arguments is not None:
                    return "", " ".join(_quote(word) for word in arguments.split())
        if start.package == MILES:
            return "", make_open_value(f"{MODELS_FOLDER}/{name}.py").text
        file = Path(f"/{start.package}") / MODELS_FOLDER / f"{name}.sh"
        for folder in self.path.resolve().parents:
            if (folder / MODELS_FOLDER / file.name).is_file():
                parents = len(self.path.resolve().parent.relative_to(folder).parts)
                file = Path(*[".."] * parents, MODELS_FOLDER, file.name)
        return f'source "{file}" && ', '"${MODEL_ARGS[@]}"'

    def _evaluate_model_file(self, file: Path, variables: Mapping[str, str]) -> str | None:
        """Return the arguments of a model's file; None for a file that is not read."""
        key = (file, frozenset(variables.items()))
        if key not in self.model_arguments:
            self.model_arguments[key] = evaluate_model_file(file, environment=variables)
        return self.model_arguments[key]


def _quote(word: str) -> str:
    """Return a word of a model's arguments as bash reads it; a variable in it stays one."""
    if "$" in word:
        return f'"{word}"'
    return shlex.quote(word)


def _write_line(
    first: list[str], others: list[tuple[_Branch, dict[int, list[str]]]], line: int
) -> str:
    """Return the commands of a line on each branch, as a condition of bash."""
    text = _join(first)
    for branch, commands in reversed(others):
        if commands.get(line, []) != first:
            text = f"if {branch.test}; then {_join(commands.get(line, []))}; else {text}; fi"
    return text


def _join(commands: list[str]) -> str:
    return "; ".join(commands) or "true"


def _list_branches(program: LauncherProgram) -> Iterator[_Branch]:
    """Yield the branches of a launcher that it does not take with nothing overridden, each once."""
    known: set[str] = set()
    for condition in program.conditions.values():
        branches = [*_list_variable_branches(condition, program)]
        if not branches and not condition.is_assertion:
            source = condition.source
            if condition.holds:
                source = f"not {source}".replace("not not ", "")
            test = f'[ "${format_name(source)}" ]'
            branches = [_Branch(test, {}, (condition.text,))]
        for branch in branches:
            if branch.test not in known:
                known.add(branch.test)
                yield branch


def _list_variable_branches(
    condition: OpenCondition, program: LauncherProgram
) -> Iterator[_Branch]:
    """Yield a branch for each value of a variable with which a condition may have another answer."""
    for name in sorted(condition.names):
        default = program.defaults.get(name)
        values: list[object] = []
        if isinstance(default, bool):
            values.append(not default)
        elif isinstance(default, str) and default.lower() in BOOLEAN_WORDS:
            values.append(BOOLEAN_WORDS[default.lower()])
        elif default is not None:
            candidates = (*condition.constants, *program.choices.get(name, ()))
            values += [value for value in candidates if type(value) is type(default)]
        for value in values:
            if value != default:
                test = f'[ "${name}" = {shlex.quote(str(value))} ]'
                yield _Branch(test, {name: str(value)})

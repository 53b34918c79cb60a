"""`read_program`: a Python file whose functions make runs of Megatron Bridge; `read_recipe`: one recipe by its name.

A run is a function that returns a container, or one that starts a training with it. Nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.errors import PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import FileReading, RunChoice
from bridge.read.megatron_bridge.program_container import (
    build_reading_from_container,
    refuse_checkpoint,
)
from bridge.read.megatron_bridge.evaluator import TOO_LONG, Evaluator
from bridge.read.megatron_bridge.source_library import Library, Module, find_library
from bridge.read.megatron_bridge.recipe_process import ASK_OPTION, read_container_from_process
from bridge.read.megatron_bridge.values import Function, Object, Value
from bridge.read.text.document import Document
from bridge.read.text.python_calls import parse_python, format_source

CONTAINER_NAME = "ConfigContainer"
START_NAMES = ("pretrain", "finetune")
READ_BY_SYNTAX = "Read by its syntax: {label}{library}."
WITH_SOURCE = ", with the source of Megatron Bridge next to it"
WITHOUT_SOURCE = "; the source of Megatron Bridge is not at hand"
NO_RUN_IN_PROGRAM = (
    "{path}: imports Megatron Bridge, and no public function of it returns a new ConfigContainer or calls pretrain() "
    "or finetune(). {remedy}"
)
ALIASES_REMEDY = "It names recipes of other files: give one of those."
PART_REMEDY = "Give the program, or the recipe, that uses it."
NO_CONTAINER = "{path}: {label} makes no container that can be followed by its syntax; {decider} decides. {remedy}"
RUN_CONFIG_REMEDY = "Give the run_config.yaml of a checkpoint of the run."


def read_program(document: Document, choice: RunChoice) -> FileReading:
    """Return what a Python program says of one of its runs.

    Raises:
        UnreadFileError: No function of it makes a run.
        RunConfigError: There is no run of that number.
    """
    path = Path(document.path)
    library = find_library(path)
    try:
        tree = parse_python(document.text, document.path)
    except PayloadError as error:
        raise UnreadFileError(str(error), kind="no Python") from None
    module = library.make_module(path, tree)
    functions = list_run_functions(module)
    if not functions:
        remedy = PART_REMEDY if module.defined else ALIASES_REMEDY
        raise UnreadFileError(
            NO_RUN_IN_PROGRAM.format(path=path, remedy=remedy), kind="a part of a run"
        )
    number = choice.number or 1
    if not 1 <= number <= len(functions):
        rule = f"must be from 1 to {len(functions)}, the runs of {path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
    function = functions[number - 1]
    if choice.asks_megatron_bridge:
        if _starts_training(function.node):
            rule = f"calls a recipe, and {function.node.name} starts a training"
            raise RunConfigError.of(ASK_OPTION, rule, True, "Drop it, or give a recipe.")
        refuse_checkpoint(choice, path)
        reading = read_container_from_process(library, function, path)
    else:
        reading = read_function(library, function, path, choice)
    labels: tuple[str, ...] = ()
    if len(functions) > 1:
        labels = tuple(map(format_label, functions))
    return replace(reading, runs=labels, number=number)


def read_function(
    library: Library,
    function: Function,
    path: Path,
    choice: RunChoice,
    arguments: Mapping[str, Value] | None = None,
) -> FileReading:
    """Return what the container of a function says of a run.

    Args:
        library: The source of Megatron Bridge.
        function: The function that makes the container, or starts a training with it.
        path: The file that is read.
        choice: The folder of the checkpoint that the command line states is in it.
        arguments: Those that the function is called with, by parameter.
    """
    evaluator = Evaluator(library)
    value = evaluator.evaluate_function(function, arguments)
    if evaluator.starts.containers:
        value = evaluator.starts.containers[0]
    if evaluator.is_exhausted:
        value = Object(decider=TOO_LONG)
    label = format_label(function)
    if not isinstance(value, Object) or not (value.kind.endswith(CONTAINER_NAME) or value.fields):
        decider = getattr(value, "decider", "") or "only the run"
        message = NO_CONTAINER.format(
            path=path, label=label, decider=decider, remedy=RUN_CONFIG_REMEDY
        )
        raise UnreadFileError(message, kind="only the run knows its container")
    reading = build_reading_from_container(value, evaluator, path, function.node.name, choice)
    source = WITHOUT_SOURCE if library.root is None else WITH_SOURCE
    return replace(
        reading, read_too=(READ_BY_SYNTAX.format(label=label, library=source), *reading.read_too)
    )


def format_label(function: Function) -> str:
    """Return which run a function makes: "line 93, llama3_8b_pretrain_config"."""
    return f"line {function.node.lineno}, {function.node.name}"


def list_run_functions(module: Module) -> Sequence[Function]:
    """Return the functions of a file that make runs, in its order: those that start a training, or else its recipes."""
    functions = [node for node in module.defined.values() if isinstance(node, ast.FunctionDef)]
    starting = [node for node in functions if _starts_training(node)]
    chosen = starting or [node for node in functions if _is_recipe(node)]
    return [Function(module=module, node=node) for node in chosen]


def _starts_training(node: ast.FunctionDef) -> bool:
    """Return whether a function calls one that starts a training."""
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Call)
            and format_source(inner.func).rpartition(".")[2] in START_NAMES
        ):
            return True
    return False


def _is_recipe(node: ast.FunctionDef) -> bool:
    """Return whether a function is a recipe: it returns a container, and gets none."""
    if (
        node.name.startswith("_")
        or node.returns is None
        or CONTAINER_NAME not in format_source(node.returns)
    ):
        return False
    parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    for parameter in parameters:
        if parameter.annotation is not None and CONTAINER_NAME in format_source(
            parameter.annotation
        ):
            return False
    return True

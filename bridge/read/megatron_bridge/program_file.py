"""`read_program`: a Python file whose functions make runs of Megatron Bridge.

A function makes a run if it returns a container, or starts a training run with one. It is followed by
its syntax, and is never imported or run. `read_function` reads one such function.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.errors import PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.launches import Launches
from bridge.preflight.run_choice import RunChoice
from bridge.read.megatron_bridge.evaluator import TOO_LONG, Evaluator
from bridge.read.megatron_bridge.program_container import (
    build_reading_from_container,
    refuse_checkpoint,
)
from bridge.read.megatron_bridge.recipe_process import ASK_OPTION, read_container_from_process
from bridge.read.megatron_bridge.source_library import Library, Module, find_library
from bridge.read.megatron_bridge.values import Function, Object, Value
from bridge.read.run_keys import PRECISION_KEY
from bridge.read.text.document import Document
from bridge.read.text.python_calls import format_source, parse_python
from bridge.registry.registry import REGISTRY

CONTAINER_NAME = "ConfigContainer"
REGISTER_DECORATOR = "register"
"""Decorator of a function that makes a precision, whose name the precision has then.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987d src/megatron/bridge/training/mixed_precision.py register."""
START_NAMES = ("pretrain", "finetune")
"""Functions of Megatron Bridge that start a training run."""
LENGTHS_DIFFER = (
    "The sequence length: the recipe states {data} for the data and {model} for the model. The program that starts the "
    "recipe makes them equal; the length of the model counts here."
)
READ_WITH_SOURCE = "Read by its syntax: {label}, with the source of Megatron Bridge next to it."
READ_WITHOUT_SOURCE = "Read by its syntax: {label}; the source of Megatron Bridge is not at hand."
NO_RUN_OF_ALIASES = (
    "{path}: imports Megatron Bridge, and no public function of it returns a new ConfigContainer or calls pretrain() "
    "or finetune(). It names recipes of other files: give one of those."
)
"""Refusal of a file without functions."""
NO_RUN_OF_PART = (
    "{path}: imports Megatron Bridge, and no public function of it returns a new ConfigContainer or calls pretrain() "
    "or finetune(). Give the program, or the recipe, that uses it."
)
"""Refusal of a file whose functions make no run."""
NO_CONTAINER = (
    "{path}: {label} makes no container that can be followed by its syntax; {decider} decides. "
    "Give the run_config.yaml of a checkpoint of the run."
)


def read_program(document: Document, choice: RunChoice) -> FileReading:
    """Return one of the runs that a Python program makes.

    Raises:
        UnreadFileError: The file is no Python, or no function of it makes a run that can be read.
        RunConfigError: There is no run of this number.
    """
    path = Path(document.path)
    library = find_library(path)
    functions = _load_run_functions(document, library, path)
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
        if not _starts_training(function.node):
            reading = _drop_unequal_length(reading)
    labels: tuple[str, ...] = ()
    if len(functions) > 1:
        labels = tuple(map(format_label, functions))
    return replace(reading, launches=Launches(labels=labels, number=number))


def _drop_unequal_length(reading: FileReading) -> FileReading:
    """Return the reading of a recipe without a length of the data that is not that of the model.

    The programs of Megatron Bridge that start a recipe make the two lengths equal. One of them takes
    the length of the data, and another one that of the model.

    Source: NVIDIA-NeMo/Megatron-Bridge 067f987d scripts/training/recipe_runner.py
    sync_model_dataset_sequence_length, scripts/performance/utils/overrides.py set_user_overrides.
    """
    model, data = reading.sections.get("model"), reading.sections.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return reading
    length, data_length = model.get("seq_length"), data.get("seq_length")
    if length is None or data_length is None or length == data_length:
        return reading
    other_data = dict(data)
    del other_data["seq_length"]
    sentence = LENGTHS_DIFFER.format(data=data_length, model=length)
    uncertainty = reading.uncertainty
    uncertainty = replace(uncertainty, open_points=(*uncertainty.open_points, sentence))
    return replace(
        reading, sections={**reading.sections, "data": other_data}, uncertainty=uncertainty
    )


def _load_run_functions(document: Document, library: Library, path: Path) -> Sequence[Function]:
    """Return the functions of a program that make runs.

    Raises:
        UnreadFileError: The file is no Python, or no function of it makes a run.
    """
    try:
        tree = parse_python(document.text, document.path)
    except PayloadError as error:
        raise UnreadFileError(str(error), kind="no Python") from None
    module = library.make_module(path, tree)
    functions = list_run_functions(module)
    if not functions:
        message = NO_RUN_OF_ALIASES
        if module.defined:
            message = NO_RUN_OF_PART
        raise UnreadFileError(message.format(path=path), kind="a part of a run")
    return functions


def read_function(
    library: Library,
    function: Function,
    path: Path,
    choice: RunChoice,
    arguments: Mapping[str, Value] | None = None,
) -> FileReading:
    """Return the run of the container that a function makes.

    Args:
        library: The source of Megatron Bridge.
        function: The function that makes the container, or starts a training run with it.
        path: The file that is read.
        choice: The choices of the command line, among them the folder of the checkpoint.
        arguments: Parameter of the function -> its argument.

    Raises:
        UnreadFileError: The container is known only when the program runs.
    """
    evaluator = Evaluator(library)
    container = evaluator.evaluate_function(function, arguments)
    return read_result(evaluator, container, function, path, choice)


def read_result(
    evaluator: Evaluator, container: Value, function: Function, path: Path, choice: RunChoice
) -> FileReading:
    """Return the run of the container that a followed function returned.

    Args:
        evaluator: The evaluator that followed the function.
        container: The value that the function returned.
        path: The file that is read.
        choice: The choices of the command line, among them the folder of the checkpoint.

    Raises:
        UnreadFileError: The container is known only when the program runs.
    """
    if evaluator.starts.containers:
        container = evaluator.starts.containers[0]
    if evaluator.is_exhausted:
        container = Object(decider=TOO_LONG)
    label = format_label(function)
    if not isinstance(container, Object) or not _is_container(container):
        decider = "only the run"
        if isinstance(container, Object) and container.decider:
            decider = container.decider
        message = NO_CONTAINER.format(path=path, label=label, decider=decider)
        raise UnreadFileError(message, kind="only the run knows its container")
    _resolve_registered_precision(evaluator, container, function.module)
    reading = build_reading_from_container(container, evaluator, path, function.node.name, choice)
    sentence = READ_WITH_SOURCE
    if evaluator.library.root is None:
        sentence = READ_WITHOUT_SOURCE
    return reading.with_first_note(sentence.format(label=label))


def _resolve_registered_precision(evaluator: Evaluator, container: Object, module: Module) -> None:
    """Write a precision that the module of a recipe registers itself over its name in the container."""
    stated = container.fields.get(PRECISION_KEY)
    if stated is None or not isinstance(stated.value, str) or stated.value in REGISTRY:
        return
    function = evaluator.library.resolve_name(module, stated.value)
    if not isinstance(function, Function):
        return
    decorators = [format_source(node) for node in function.node.decorator_list]
    if REGISTER_DECORATOR in decorators:
        precision = evaluator.evaluate_function(function)
        evaluator.state(container, PRECISION_KEY, precision, stated.origin)


def _is_container(value: Object) -> bool:
    """Return whether an object is a container: by its class, or by the fields that are set in it."""
    return value.kind.endswith(CONTAINER_NAME) or bool(value.fields)


def format_label(function: Function) -> str:
    """Return the label of the run that a function makes: "line 93, llama3_8b_pretrain_config"."""
    return f"line {function.node.lineno}, {function.node.name}"


def list_run_functions(module: Module) -> Sequence[Function]:
    """Return the functions of a file that make runs, in the order of the file.

    They are the functions that start a training run, or else the recipes.
    """
    functions = [node for node in module.defined.values() if isinstance(node, ast.FunctionDef)]
    run_functions = [node for node in functions if _starts_training(node)]
    if not run_functions:
        run_functions = [node for node in functions if _is_recipe(node)]
    return [Function(module=module, node=node) for node in run_functions]


def _starts_training(node: ast.FunctionDef) -> bool:
    """Return whether a function calls one that starts a training run."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = format_source(inner.func).rpartition(".")[2]
            if name in START_NAMES:
                return True
    return False


def _is_recipe(node: ast.FunctionDef) -> bool:
    """Return whether a public function is a recipe: it returns a container, and takes none."""
    if node.name.startswith("_") or not _names_container(node.returns):
        return False
    parameters = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return not any(_names_container(parameter.annotation) for parameter in parameters)


def _names_container(annotation: ast.expr | None) -> bool:
    """Return whether a type annotation names the class of a container."""
    return annotation is not None and CONTAINER_NAME in format_source(annotation)

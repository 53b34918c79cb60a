"""`read_launch`: a start of Megatron Bridge's `run_recipe.py`, whose recipe is named on its command line.

The function of the recipe is found by its name in the source of Megatron Bridge, and its container is
read. The options and overrides of the command line are written over it. If the function is not found,
every setting that the command line does not state is open, with the recipe as its decider.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987d scripts/training/run_recipe.py, recipe_runner.py and recipe_metadata.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.preflight.uncertainty import Uncertainty
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.launch.launch import Launch
from bridge.read.launch.launched_ranks import count_launched_ranks
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_bridge.program_container import REPORTED_SECTIONS, refuse_checkpoint
from bridge.read.megatron_bridge.program_file import read_function
from bridge.read.megatron_bridge.recipe_process import read_container_from_process
from bridge.read.megatron_bridge.source_library import (
    BENCHMARK_NAME,
    BENCHMARKS_PACKAGE,
    Library,
    find_library,
)
from bridge.read.megatron_bridge.values import Function, Value
from bridge.read.run_keys import OWNER_SECTIONS, PRECISION_KEY
from bridge.read.text.command_arguments import CommandArguments
from bridge.read.text.hydra_overrides import (
    HydraOverride,
    apply_hydra_overrides,
    parse_hydra_overrides,
)
from bridge.registry.registry import REGISTRY

TABLE_NAME = "megatron_bridge"
TASK_OF_MODE = {"lora": "peft", "dora": "peft"}
"""Value of `--mode` -> the task in a recipe's name, if the two differ."""
SECTION_NAMES = {"dataset": "data"}
"""Name of a section in Megatron Bridge -> ours."""
ADAPTER_PARAMETERS = ("peft_scheme", "peft")
"""Parameters of a recipe that take the mode of a training run with adapters. The first one counts."""
RECIPE_NOT_AT_HAND = "the recipe {name}, which is not at hand,"
RECIPE_NOT_FOUND = (
    "The recipe {name} is looked up in a checkout of Megatron Bridge above the file, then in the installed package, "
    "and found in neither."
)
DETERMINISTIC_OPTION = "--deterministic"
DETERMINISTIC_OVERRIDE = "model.deterministic_mode=true"
OVERRIDES_NOT_READ = "{word}: may hold further overrides, which are not read."
NOTE_NOT_READ = "{note}: is not read."
PRESET_ORIGIN = "{program} gives the data of --dataset the length of the recipe's model"
LENGTH_ORIGIN = "{program} sets model.seq_length to that of the dataset"
NUMBER_OF_GPUS = "The number of GPUs: "
"""Beginning of the sentence about the GPUs in a recipe's name."""
LAUNCHED_GPUS = (
    "The number of GPUs: {ranks}, as many as the processes of the launch. "
    "Add --target {gpu}x{ranks}, for example."
)
DEFAULT_GPU = "h100"
"""Kind of GPU in messages if the name of the recipe has none."""
PIPELINE_SIZES = (
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
)
LAYOUT = "pipeline_model_parallel_layout"
LAYOUT_BUILDER = "_pipeline_model_parallel_layout_builder"
"""Attribute of a recipe's model with a function that makes the layout for other sizes."""
LAYOUT_BUILDER_SOURCE = "the function that builds the recipe's layout for other pipeline sizes"
STAGE_SIZES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
SIZES_FOR_OTHER_STAGES = "{program}, for other stages than those of the recipe"
OTHER_SIZES_STATED = (
    f"{NUMBER_OF_GPUS}the command line states parallel sizes over those of the recipe, "
    "and not the GPUs."
)
BENCHMARK_ORIGIN = "{program}, for a recipe of its benchmarks in BF16"
RECIPE_IS_FOUND = "The recipe is {name} of {module}."
PRECISION_MODES = ("fp32", "fp16", "bf16")


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return the run of one launch in a script.

    Args:
        launch: The launch of `run_recipe.py`.
        choice: The choices of the command line. Megatron Bridge itself calls the recipe if it asks
            for that.
    """
    arguments = CommandArguments(launch.arguments)
    library = find_library(script)
    recipe_name = _find_recipe_name(arguments)
    function = library.recipe(recipe_name)
    if function is None:
        refuse_checkpoint(choice, script)
        reading = _build_reading_without_recipe(recipe_name or "of the run")
    elif choice.asks_megatron_bridge:
        refuse_checkpoint(choice, script)
        reading = read_container_from_process(library, function, script)
    else:
        reading = _read_recipe(library, function, arguments, script, choice)
    reading = replace(reading, names={**SECTION_NAMES, **reading.names})
    if function is not None and "dataset" in arguments.options:
        reading = _apply_dataset_preset(reading, launch.name)
    overrides = [
        *_collect_option_overrides(launch.arguments),
        *parse_hydra_overrides(launch.arguments),
    ]
    reading = apply_overrides(reading, overrides, f"{script.name}:{launch.line}")
    if function is not None:
        reading = _sync_pipeline_layout(reading, launch.name, library, overrides)
        reading = _apply_program_settings(reading, launch, function, overrides)
    ranks = count_launched_ranks(launch.runner)
    if ranks is not None:
        sentence = LAUNCHED_GPUS.format(ranks=ranks, gpu=_get_gpu_kind(function))
        reading = _replace_gpu_sentence(reading, sentence)
    elif any(override.key.endswith("_parallel_size") for override in overrides):
        reading = _replace_gpu_sentence(reading, OTHER_SIZES_STATED)
    return _add_launch_notes(reading, launch, arguments)


def _apply_program_settings(
    reading: FileReading, launch: Launch, function: Function, overrides: Sequence[HydraOverride]
) -> FileReading:
    """Return a reading with the settings that `run_recipe.py` itself writes after the overrides."""
    reading = _apply_dataset_length(reading, launch.name)
    if not _uses_precision_aware_optimizer(function, reading, overrides):
        return reading
    origin = BENCHMARK_ORIGIN.format(program=launch.name)
    return _replace_field(reading, "optimizer", "use_precision_aware_optimizer", True, origin)


def _add_launch_notes(
    reading: FileReading, launch: Launch, arguments: CommandArguments
) -> FileReading:
    """Return a reading with the environment of a launch, and sentences about its parts that are not read."""
    open_words = [str(word) for word in launch.arguments if word.startswith("$")]
    sentences = _describe_program_options(arguments)
    for word in open_words:
        sentences.append(OVERRIDES_NOT_READ.format(word=word))
    for note in launch.notes:
        sentences.append(NOTE_NOT_READ.format(note=note))
    environment = dict(reading.environment)
    for key, value in launch.environment.items():
        if not value.is_open:
            environment[key] = str(value)
    uncertainty = replace(
        reading.uncertainty,
        open_points=(*reading.uncertainty.open_points, *dict.fromkeys(sentences)),
        unread_options=(*reading.uncertainty.unread_options, *open_words),
    )
    return replace(reading, environment=environment, uncertainty=uncertainty)


def _get_gpu_kind(function: Function | None) -> str:
    """Return the kind of GPU that the name of a recipe has, or the default kind."""
    if function is not None:
        benchmark = BENCHMARK_NAME.search(function.node.name)
        if benchmark is not None:
            return benchmark["gpu"]
    return DEFAULT_GPU


def _replace_gpu_sentence(reading: FileReading, replacement: str) -> FileReading:
    """Return a reading with another sentence about the number of GPUs.

    The number in the name of the recipe does not count: the command line states the processes, or
    other parallel sizes.
    """
    sentences: list[str] = []
    for sentence in reading.uncertainty.open_points:
        if not sentence.startswith(NUMBER_OF_GPUS):
            sentences.append(sentence)
    open_points = (*sentences, replacement)
    return replace(reading, uncertainty=replace(reading.uncertainty, open_points=open_points))


def _build_reading_without_recipe(name: str) -> FileReading:
    """Return the reading of a run whose recipe is not found: the recipe decides every setting."""
    decider = RECIPE_NOT_AT_HAND.format(name=name)
    return FileReading(
        framework=MEGATRON_BRIDGE,
        sections={owner: {} for owner in OWNER_SECTIONS},
        uncertainty=Uncertainty(
            open_points=(RECIPE_NOT_FOUND.format(name=name),),
            mode_decider=decider,
            default_decider=decider,
        ),
    )


def _find_recipe_name(arguments: CommandArguments) -> str:
    """Return the name of the recipe's function, of `--recipe` or else of `--model`; empty without both.

    The name may have variables in it, which are known only when the run starts.
    """
    recipe = arguments.options.get("recipe") or arguments.open_values.get("recipe")
    if isinstance(recipe, str):
        return recipe
    model = arguments.options.get("model") or arguments.open_values.get("model")
    if not isinstance(model, str):
        return ""
    mode = str(arguments.options.get("mode", "pretrain"))
    task = TASK_OF_MODE.get(mode, mode)
    return f"{model}_{task}_config"


def _read_recipe(
    library: Library,
    function: Function,
    command_arguments: CommandArguments,
    script: Path,
    choice: RunChoice,
) -> FileReading:
    """Return the run of a recipe's function. A mode with adapters is passed to the function."""
    mode = command_arguments.options.get("mode")
    signature = function.node.args
    parameters = [parameter.arg for parameter in (*signature.args, *signature.kwonlyargs)]
    arguments: dict[str, Value] = {}
    for parameter in ADAPTER_PARAMETERS:
        if mode in TASK_OF_MODE and parameter in parameters:
            arguments = {parameter: mode}
            break
    reading = read_function(library, function, script, choice, arguments)
    sentence = RECIPE_IS_FOUND.format(name=function.node.name, module=function.module.name)
    return reading.with_first_note(sentence)


def _collect_option_overrides(tokens: Sequence[ShellWord]) -> list[HydraOverride]:
    """Return the options that set a field, as overrides of the field.

    The value of an option is after its `=`, or is the next word.
    """
    fields = load_framework_table(TABLE_NAME).fields
    overrides: list[HydraOverride] = []
    field_of_value = ""
    for word in tokens:
        name, sign, value = word.partition("=")
        option = name.lstrip("-").replace("-", "_")
        is_field_option = name.startswith("-") and option in fields
        if field_of_value:
            overrides += parse_hydra_overrides([ShellWord(f"{field_of_value}={word}")])
            field_of_value = ""
        elif is_field_option and sign:
            overrides += parse_hydra_overrides([ShellWord(f"{fields[option][0]}={value}")])
        elif is_field_option:
            field_of_value = fields[option][0]
        elif word == DETERMINISTIC_OPTION:
            overrides += parse_hydra_overrides([ShellWord(DETERMINISTIC_OVERRIDE)])
    return overrides


def _describe_program_options(arguments: CommandArguments) -> list[str]:
    """Return sentences about options of the program that set no field."""
    sentences: list[str] = []
    for row in load_framework_table(TABLE_NAME).own:
        for name, value in arguments.options.items():
            if row.names.fullmatch(name):
                sentences.append(row.sentence.format(option=f"--{name}", value=value))
    return sentences


def apply_overrides(
    reading: FileReading, overrides: Sequence[HydraOverride], location: str
) -> FileReading:
    """Return a reading with the overrides of a command line written over it.

    An override whose value is decided when the run starts leaves its setting open. An override with a
    known value closes the setting, and those below it.

    Args:
        overrides: The overrides, of which a later one counts over an earlier one.
        location: The place of the command line, for the origins of the settings.
    """
    sections = deepcopy(dict(reading.sections))
    origins = dict(reading.origins)
    open_values = dict(reading.uncertainty.open_values)
    states_mode = False
    for override in overrides:
        key = reading.translate_key(override.key)
        section = key.partition(".")[0]
        if override.is_open:
            if section in REPORTED_SECTIONS:
                open_values[key] = str(override.value)
            continue
        _write_override(sections, override, key)
        _close_settings(open_values, key)
        origins[key] = f"{location}, {override.key}"
        if section == PRECISION_KEY and _states_mode(key, override.value):
            states_mode = True
    mode_decider = reading.uncertainty.mode_decider
    if states_mode:
        mode_decider = None
    open_recipe = open_values.get(PRECISION_KEY)
    if open_recipe is not None:
        sections.pop(PRECISION_KEY, None)
        mode_decider = f"mixed_precision={open_recipe}"
    uncertainty = replace(reading.uncertainty, open_values=open_values, mode_decider=mode_decider)
    return replace(reading, sections=sections, origins=origins, uncertainty=uncertainty)


def _write_override(sections: dict[str, object], override: HydraOverride, key: str) -> None:
    """Write an override over the sections, under our key.

    The name of a recipe is replaced by its fields before an override sets one of them.
    """
    recipe_name = sections.get(PRECISION_KEY)
    if key.startswith(f"{PRECISION_KEY}.") and isinstance(recipe_name, str):
        sections[PRECISION_KEY] = REGISTRY.get(recipe_name).to_dict()
    apply_hydra_overrides(sections, [replace(override, key=key)], is_complete=False)


def _close_settings(open_values: dict[str, str], key: str) -> None:
    """Remove a setting, and the settings below it, from the open values."""
    for open_key in list(open_values):
        if f"{open_key}.".startswith(f"{key}."):
            del open_values[open_key]


def _states_mode(key: str, value: object) -> bool:
    """Return whether an override states the mode of the run: a recipe, or a switch of a mode that is on."""
    if key == PRECISION_KEY:
        return isinstance(value, str) and value in REGISTRY
    return key.rpartition(".")[2] in PRECISION_MODES and value is True


def _apply_dataset_preset(reading: FileReading, program: str) -> FileReading:
    """Return a reading with the sequence length of the data that `--dataset` names.

    Each of these datasets gets the length of the recipe's model, before the overrides.

    Source: NVIDIA-NeMo/Megatron-Bridge 067f987d recipes/utils/dataset_utils.py: _resolve_seq_length.
    """
    model, data = reading.sections.get("model"), reading.sections.get("data")
    if not isinstance(model, dict) or not isinstance(model.get("seq_length"), int):
        return reading
    length = model["seq_length"]
    if not isinstance(data, dict):
        reading = replace(reading, sections={**reading.sections, "data": {}})
    elif data.get("seq_length") == length:
        return reading
    return _replace_field(
        reading, "data", "seq_length", length, PRESET_ORIGIN.format(program=program)
    )


def _sync_pipeline_layout(
    reading: FileReading, program: str, library: Library, overrides: Sequence[HydraOverride]
) -> FileReading:
    """Return a reading whose layout of the pipeline is that of the overridden sizes.

    A layout that a function of the recipe builds is not known for other sizes. Numbers of layers of
    the first and the last stage that leave no even split of the others are dropped.

    Source: NVIDIA-NeMo/Megatron-Bridge 067f987d scripts/training/recipe_runner.py:
    sync_model_pipeline_layout.
    """
    keys = {override.key for override in overrides}
    model = reading.sections.get("model")
    if keys.isdisjoint(PIPELINE_SIZES) or f"model.{LAYOUT}" in keys or not isinstance(model, dict):
        return reading
    if library.sets_attribute(LAYOUT_BUILDER):
        return _open_settings(reading, (LAYOUT,), LAYOUT_BUILDER_SOURCE)
    stated = [name for name in STAGE_SIZES if model.get(name) is not None]
    dropped = [name for name in stated if f"model.{name}" not in keys]
    stages, layers = model.get(PIPELINE_SIZES[0].partition(".")[2]), model.get("num_layers")
    if not dropped or PIPELINE_SIZES[0] not in keys or model.get(LAYOUT) is not None:
        return reading
    if not isinstance(stages, int) or not isinstance(layers, int):
        return _open_settings(reading, dropped, SIZES_FOR_OTHER_STAGES.format(program=program))
    other_stages = stages - len(stated)
    other_layers = layers - sum(model[name] for name in stated)
    if other_stages == 0 or other_layers == 0:
        is_even = other_stages == other_layers
    else:
        is_even = min(other_stages, other_layers) > 0 and other_layers % other_stages == 0
    if not is_even:
        origin = SIZES_FOR_OTHER_STAGES.format(program=program)
        for name in dropped:
            reading = _replace_field(reading, "model", name, None, origin)
    return reading


def _open_settings(reading: FileReading, names: Sequence[str], decider: str) -> FileReading:
    """Return a reading in which fields of the model are not known, with the source that decides them."""
    model = {**reading.sections["model"]}
    unread_sources = dict(reading.uncertainty.unread_sources)
    for name in names:
        model.pop(name, None)
        unread_sources[f"model.{name}"] = decider
    uncertainty = replace(reading.uncertainty, unread_sources=unread_sources)
    return replace(reading, sections={**reading.sections, "model": model}, uncertainty=uncertainty)


def _apply_dataset_length(reading: FileReading, program: str) -> FileReading:
    """Return a reading whose model has the sequence length of the dataset, as `run_recipe.py` sets it."""
    data = reading.sections.get("data")
    model = reading.sections.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict):
        return reading
    length = data.get("seq_length") or data.get("sequence_length")
    if not isinstance(length, int) or length == model.get("seq_length"):
        return reading
    return _replace_field(
        reading, "model", "seq_length", length, LENGTH_ORIGIN.format(program=program)
    )


def _uses_precision_aware_optimizer(
    function: Function, reading: FileReading, overrides: Sequence[HydraOverride]
) -> bool:
    """Return whether `run_recipe.py` turns the precision-aware optimizer on.

    It does so for a benchmark in BF16 with Adam, unless an override sets the optimizer.
    """
    benchmark = BENCHMARK_NAME.search(function.node.name)
    if benchmark is None or not function.module.name.startswith(BENCHMARKS_PACKAGE):
        return False
    for override in overrides:
        if override.key in ("optimizer", "optimizer.use_precision_aware_optimizer"):
            return False
    optimizer = reading.sections.get("optimizer")
    is_adam = isinstance(optimizer, dict) and optimizer.get("optimizer") == "adam"
    return is_adam and benchmark["precision"] == "bf16"


def _replace_field(
    reading: FileReading, section: str, name: str, value: object, origin: str
) -> FileReading:
    """Return a reading with one field of a section set, and with its origin."""
    fields = {**reading.sections[section], name: value}
    sections = {**reading.sections, section: fields}
    origins = {**reading.origins, f"{section}.{name}": origin}
    return replace(reading, sections=sections, origins=origins)

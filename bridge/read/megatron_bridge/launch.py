"""`read_launch`: a start of Megatron Bridge's `run_recipe.py`, whose recipe is named on its command line.

The recipe's function is looked up by its name in the source of Megatron Bridge and is the lower layer; the options and
overrides of the command line are the upper one. Where the function is not at hand, the recipe decides what the command
line does not state.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987d scripts/training/run_recipe.py, recipe_runner.py and recipe_metadata.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading, RunChoice
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.run_keys import OWNER_SECTIONS, PRECISION_KEY
from bridge.read.launch.launch import Launch
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_bridge.program_container import BEARING_SECTIONS, refuse_checkpoint
from bridge.read.megatron_bridge.source_library import (
    BENCHMARK_NAME,
    BENCHMARKS_PACKAGE,
    Library,
    find_library,
)
from bridge.read.megatron_bridge.recipe_process import read_container_from_process
from bridge.read.megatron_bridge.program_file import read_function
from bridge.read.megatron_bridge.values import Function, Value
from bridge.read.text.command_arguments import CommandArguments
from bridge.read.text.hydra_overrides import (
    HydraOverride,
    parse_hydra_overrides,
    apply_hydra_overrides,
)
from bridge.registry.registry import REGISTRY

TABLE_NAME = "megatron_bridge"
TASK_OF_MODE = {"lora": "peft", "dora": "peft"}
"""Value of `--mode` -> the task in a recipe's name, where it has another word."""
SECTION_NAMES = {"dataset": "data"}
"""Its name of a section -> ours."""
ADAPTER_PARAMETERS = ("peft_scheme", "peft")
"""Parameters of a recipe that take the mode of a training with adapters."""
RECIPE_NOT_AT_HAND = "the recipe {name}, which is not at hand,"
RECIPE_NOT_FOUND = (
    "The recipe {name} is looked up in a checkout of Megatron Bridge above the file, then in the installed package, "
    "and found in neither."
)
DETERMINISTIC_OPTION = "--deterministic"
OVERRIDES_NOT_READ = "{word}: may hold further overrides, which are not read."
LENGTH_ORIGIN = "{program} sets model.seq_length to that of the dataset"
NUMBER_OF_GPUS = "The number of GPUs: "
"""Beginning of the sentence about the GPUs in a recipe's name."""
OTHER_SIZES = f"{NUMBER_OF_GPUS}the command line states parallel sizes over those of the recipe, and not the GPUs."
BENCHMARK_ORIGIN = "{program}, for a recipe of its benchmarks in BF16"
RECIPE_IS_FOUND = "The recipe is {name} of {module}."
PRECISION_MODES = ("fp32", "fp16", "bf16")


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: its recipe's function, with its command line over it.

    Megatron Bridge itself calls the function where the choice asks for that.
    """
    words = CommandArguments(launch.arguments)
    library = find_library(script)
    function = library.recipe(_find_recipe_name(words))
    if function is None:
        refuse_checkpoint(choice, script)
        reading = _build_reading_without_recipe(_find_recipe_name(words) or "of the run")
    elif choice.asks_megatron_bridge:
        refuse_checkpoint(choice, script)
        reading = read_container_from_process(library, function, script)
    else:
        reading = _read_recipe(library, function, words, script, choice)
    reading = replace(reading, names={**SECTION_NAMES, **reading.names})
    overrides = [
        *_collect_option_overrides(launch.arguments),
        *parse_hydra_overrides(launch.arguments),
    ]
    reading = apply_overrides(reading, overrides, f"{script.name}:{launch.line}")
    if function is not None:
        reading = _apply_dataset_length(reading, launch.name)
        if _uses_precision_aware_optimizer(function, reading, overrides):
            origin = BENCHMARK_ORIGIN.format(program=launch.name)
            reading = _replace_field(
                reading, "optimizer", "use_precision_aware_optimizer", True, origin
            )
    if any(word.key.endswith("_parallel_size") for word in overrides):
        reading = replace(reading, unknown=_of_other_sizes(reading.unknown))
    late = [str(word) for word in launch.arguments if word.startswith("$")]
    sources = _describe_program_options(words)
    sources += [OVERRIDES_NOT_READ.format(word=word) for word in late]
    sources += [f"{note}: is not read." for note in launch.notes]
    exported = {
        key: str(value) for key, value in launch.environment.items() if not value.is_unknown
    }
    return replace(
        reading,
        environment={**reading.environment, **exported},
        unknown=(*reading.unknown, *dict.fromkeys(sources)),
        uncounted=(*reading.uncounted, *late),
    )


def _of_other_sizes(unknown: Sequence[str]) -> tuple[str, ...]:
    """Return sentences without that about the GPUs in the name of a recipe, whose parallel sizes do not count."""
    sentences = [sentence for sentence in unknown if not sentence.startswith(NUMBER_OF_GPUS)]
    return (*sentences, OTHER_SIZES)


def _build_reading_without_recipe(name: str) -> FileReading:
    """Return what is known of a run whose recipe is not at hand: nothing."""
    decider = RECIPE_NOT_AT_HAND.format(name=name)
    return FileReading(
        framework=MEGATRON_BRIDGE,
        sections={owner: {} for owner in OWNER_SECTIONS},
        unknown=(RECIPE_NOT_FOUND.format(name=name),),
        mode_decided_by=decider,
        unstated_by=decider,
    )


def _find_recipe_name(words: CommandArguments) -> str:
    """Return the name of the function that a command line asks for, as far as it is known."""
    for option in ("recipe", "model"):
        name = words.options.get(option) or words.undecided.get(option)
        if not isinstance(name, str):
            continue
        if option == "recipe":
            return name
        mode = str(words.options.get("mode", "pretrain"))
        return f"{name}_{TASK_OF_MODE.get(mode, mode)}_config"
    return ""


def _read_recipe(
    library: Library, function: Function, words: CommandArguments, script: Path, choice: RunChoice
) -> FileReading:
    """Return what a recipe's function says of a run."""
    arguments: dict[str, Value] = {}
    mode = words.options.get("mode")
    parameters = [
        parameter.arg for parameter in (*function.node.args.args, *function.node.args.kwonlyargs)
    ]
    for parameter in ADAPTER_PARAMETERS:
        if mode in TASK_OF_MODE and parameter in parameters:
            arguments = {parameter: mode}
            break
    reading = read_function(library, function, script, choice, arguments)
    where = RECIPE_IS_FOUND.format(name=function.node.name, module=function.module.name)
    return replace(reading, read_too=(where, *reading.read_too))


def _collect_option_overrides(tokens: Sequence[ShellWord]) -> list[HydraOverride]:
    """Return the options that set a field, as overrides."""
    fields = load_framework_table(TABLE_NAME).fields
    overrides: list[HydraOverride] = []
    waiting: Sequence[str] = ()
    for word in tokens:
        name, sign, value = word.partition("=")
        option = name.lstrip("-").replace("-", "_")
        if waiting:
            overrides += parse_hydra_overrides([ShellWord(f"{waiting[0]}={word}")])
            waiting = ()
        elif name.startswith("-") and option in fields and sign:
            overrides += parse_hydra_overrides([ShellWord(f"{fields[option][0]}={value}")])
        elif name.startswith("-") and option in fields:
            waiting = fields[option]
        elif word == DETERMINISTIC_OPTION:
            overrides += parse_hydra_overrides([ShellWord("model.deterministic_mode=true")])
    return overrides


def _describe_program_options(words: CommandArguments) -> list[str]:
    """Return what the program's other options leave open, as sentences."""
    sentences: list[str] = []
    for row in load_framework_table(TABLE_NAME).own:
        for name, value in words.options.items():
            if row.names.fullmatch(name):
                sentences.append(row.sentence.format(option=f"--{name}", value=value))
    return sentences


def apply_overrides(
    reading: FileReading, overrides: Sequence[HydraOverride], location: str
) -> FileReading:
    """Return a reading with the overrides of a command line written over it; `location` is where they stand."""
    sections = deepcopy(dict(reading.sections))
    origins = dict(reading.origins)
    open_values = dict(reading.open_values)
    is_known_mode = False
    for written in overrides:
        key = reading.translate_key(written.key)
        section = key.partition(".")[0]
        if written.is_late:
            if section in BEARING_SECTIONS:
                open_values[key] = str(written.value)
            continue
        if key.startswith(f"{PRECISION_KEY}.") and isinstance(sections.get(PRECISION_KEY), str):
            sections[PRECISION_KEY] = REGISTRY.get(sections[PRECISION_KEY]).to_dict()
        apply_hydra_overrides(sections, [replace(written, key=key)], is_complete=False)
        for known in [path for path in open_values if f"{path}.".startswith(f"{key}.")]:
            del open_values[known]
        origins[key] = f"{location}, {written.key}"
        if section == PRECISION_KEY:
            is_known_mode = is_known_mode or _states_mode(key, written.value)
    mode_decided_by = reading.mode_decided_by
    if is_known_mode:
        mode_decided_by = None
    late = open_values.get(PRECISION_KEY)
    if late is not None:
        sections.pop(PRECISION_KEY, None)
        mode_decided_by = f"mixed_precision={late}"
    return replace(
        reading,
        sections=sections,
        origins=origins,
        open_values=open_values,
        mode_decided_by=mode_decided_by,
    )


def _states_mode(key: str, value: object) -> bool:
    """Return whether an override states the mode of the run."""
    if key == PRECISION_KEY:
        return isinstance(value, str) and value in REGISTRY
    return key.rpartition(".")[2] in PRECISION_MODES and value is True


def _apply_dataset_length(reading: FileReading, program: str) -> FileReading:
    """Return a reading whose model has the length of the dataset's samples, as `run_recipe.py` sets it."""
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
    """Return whether `run_recipe.py` takes the precision-aware optimizer for a recipe of its benchmarks."""
    benchmark = BENCHMARK_NAME.search(function.node.name)
    if benchmark is None or not function.module.name.startswith(BENCHMARKS_PACKAGE):
        return False
    for word in overrides:
        if word.key in ("optimizer", "optimizer.use_precision_aware_optimizer"):
            return False
    optimizer = reading.sections.get("optimizer")
    is_adam = isinstance(optimizer, dict) and optimizer.get("optimizer") == "adam"
    return is_adam and benchmark["precision"] == "bf16"


def _replace_field(
    reading: FileReading, section: str, name: str, value: object, origin: str
) -> FileReading:
    """Return a reading with one setting, and where it is from."""
    fields = {**reading.sections[section], name: value}
    sections = {**reading.sections, section: fields}
    origins = {**reading.origins, f"{section}.{name}": origin}
    return replace(reading, sections=sections, origins=origins)

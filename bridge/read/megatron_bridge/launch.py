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
from bridge.read.framework.table import framework_table
from bridge.read.keys import OWNERS, PRECISION
from bridge.read.launch.launches import Launch
from bridge.read.launch.word import Word
from bridge.read.megatron_bridge.container import BEARING, refuse_checkpoint
from bridge.read.megatron_bridge.library import BENCHMARK, BENCHMARKS, Library, library_of
from bridge.read.megatron_bridge.recipe_process import reading_of_process
from bridge.read.megatron_bridge.recipes import read_function
from bridge.read.megatron_bridge.values import Function, Value
from bridge.read.text.command_words import CommandWords
from bridge.read.text.hydra_words import HydraWord, hydra_words, write_over
from bridge.registry.registry import REGISTRY

TABLE = "megatron_bridge"
TASKS = {"lora": "peft", "dora": "peft"}
"""Value of `--mode` -> the task in a recipe's name, where it has another word."""
DATASET = {"dataset": "data"}
"""Its name of a section -> ours."""
ADAPTERS = ("peft_scheme", "peft")
"""Parameters of a recipe that take the mode of a training with adapters."""
NOT_AT_HAND = "the recipe {name}, which is not at hand,"
NOT_FOUND = (
    "The recipe {name} is looked up in a checkout of Megatron Bridge above the file, then in the installed package, "
    "and found in neither."
)
DETERMINISTIC = "--deterministic"
LATE = "{word}: may hold further overrides, which are not read."
OF_DATA = "{program} sets model.seq_length to that of the dataset"
NUMBER_OF_GPUS = "The number of GPUs: "
"""Beginning of the sentence about the GPUs in a recipe's name."""
OTHER_SIZES = f"{NUMBER_OF_GPUS}the command line states parallel sizes over those of the recipe, and not the GPUs."
OF_BENCHMARK = "{program}, for a recipe of its benchmarks in BF16"
AT_HAND = "The recipe is {name} of {module}."
PRECISION_MODES = ("fp32", "fp16", "bf16")


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: its recipe's function, with its command line over it.

    Megatron Bridge itself calls the function where the choice asks for that.
    """
    words = CommandWords(launch.arguments)
    library = library_of(script)
    function = library.recipe(_recipe_of(words))
    if function is None:
        refuse_checkpoint(choice, script)
        reading = _without_recipe(_recipe_of(words) or "of the run")
    elif choice.asks_megatron_bridge:
        refuse_checkpoint(choice, script)
        reading = reading_of_process(library, function, script)
    else:
        reading = _of_recipe(library, function, words, script, choice)
    reading = replace(reading, names={**DATASET, **reading.names})
    overrides = [*_of_options(launch.arguments), *hydra_words(launch.arguments)]
    reading = written_over(reading, overrides, f"{script.name}:{launch.line}")
    if function is not None:
        reading = _with_length(reading, launch.name)
        if _is_aware(function, reading, overrides):
            origin = OF_BENCHMARK.format(program=launch.name)
            reading = _with(reading, "optimizer", "use_precision_aware_optimizer", True, origin)
    if any(word.key.endswith("_parallel_size") for word in overrides):
        reading = replace(reading, unknown=_of_other_sizes(reading.unknown))
    late = [str(word) for word in launch.arguments if word.startswith("$")]
    sources = _program_options(words)
    sources += [LATE.format(word=word) for word in late]
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


def _without_recipe(name: str) -> FileReading:
    """Return what is known of a run whose recipe is not at hand: nothing."""
    decider = NOT_AT_HAND.format(name=name)
    return FileReading(
        framework=MEGATRON_BRIDGE,
        sections={owner: {} for owner in OWNERS},
        unknown=(NOT_FOUND.format(name=name),),
        mode_decided_by=decider,
        unstated_by=decider,
    )


def _recipe_of(words: CommandWords) -> str:
    """Return the name of the function that a command line asks for, as far as it is known."""
    for option in ("recipe", "model"):
        name = words.options.get(option) or words.undecided.get(option)
        if not isinstance(name, str):
            continue
        if option == "recipe":
            return name
        mode = str(words.options.get("mode", "pretrain"))
        return f"{name}_{TASKS.get(mode, mode)}_config"
    return ""


def _of_recipe(
    library: Library, function: Function, words: CommandWords, script: Path, choice: RunChoice
) -> FileReading:
    """Return what a recipe's function says of a run."""
    arguments: dict[str, Value] = {}
    mode = words.options.get("mode")
    parameters = [
        parameter.arg for parameter in (*function.node.args.args, *function.node.args.kwonlyargs)
    ]
    for parameter in ADAPTERS:
        if mode in TASKS and parameter in parameters:
            arguments = {parameter: mode}
            break
    reading = read_function(library, function, script, choice, arguments)
    where = AT_HAND.format(name=function.node.name, module=function.module.name)
    return replace(reading, read_too=(where, *reading.read_too))


def _of_options(words: Sequence[Word]) -> list[HydraWord]:
    """Return the options that set a field, as overrides."""
    fields = framework_table(TABLE).fields
    found: list[HydraWord] = []
    waiting: Sequence[str] = ()
    for word in words:
        name, sign, value = word.partition("=")
        option = name.lstrip("-").replace("-", "_")
        if waiting:
            found += hydra_words([Word(f"{waiting[0]}={word}")])
            waiting = ()
        elif name.startswith("-") and option in fields and sign:
            found += hydra_words([Word(f"{fields[option][0]}={value}")])
        elif name.startswith("-") and option in fields:
            waiting = fields[option]
        elif word == DETERMINISTIC:
            found += hydra_words([Word("model.deterministic_mode=true")])
    return found


def _program_options(words: CommandWords) -> list[str]:
    """Return what the program's other options leave open, as sentences."""
    sentences: list[str] = []
    for row in framework_table(TABLE).own:
        for name, value in words.options.items():
            if row.names.fullmatch(name):
                sentences.append(row.says.format(option=f"--{name}", value=value))
    return sentences


def written_over(reading: FileReading, overrides: Sequence[HydraWord], place: str) -> FileReading:
    """Return a reading with the overrides of a command line written over it; `place` is where they stand."""
    sections = deepcopy(dict(reading.sections))
    origins = dict(reading.origins)
    open_values = dict(reading.open_values)
    is_known_mode = False
    for written in overrides:
        key = reading.own_name(written.key)
        section = key.partition(".")[0]
        if written.is_late:
            if section in BEARING:
                open_values[key] = str(written.value)
            continue
        if key.startswith(f"{PRECISION}.") and isinstance(sections.get(PRECISION), str):
            sections[PRECISION] = REGISTRY.get(sections[PRECISION]).to_dict()
        write_over(sections, [replace(written, key=key)], is_whole=False)
        for known in [path for path in open_values if f"{path}.".startswith(f"{key}.")]:
            del open_values[known]
        origins[key] = f"{place}, {written.key}"
        if section == PRECISION:
            is_known_mode = is_known_mode or _states_the_mode(key, written.value)
    mode_decided_by = reading.mode_decided_by
    if is_known_mode:
        mode_decided_by = None
    late = open_values.get(PRECISION)
    if late is not None:
        sections.pop(PRECISION, None)
        mode_decided_by = f"mixed_precision={late}"
    return replace(
        reading,
        sections=sections,
        origins=origins,
        open_values=open_values,
        mode_decided_by=mode_decided_by,
    )


def _states_the_mode(key: str, value: object) -> bool:
    """Return whether an override states the mode of the run."""
    if key == PRECISION:
        return isinstance(value, str) and value in REGISTRY
    return key.rpartition(".")[2] in PRECISION_MODES and value is True


def _with_length(reading: FileReading, program: str) -> FileReading:
    """Return a reading whose model has the length of the dataset's samples, as `run_recipe.py` sets it."""
    data = reading.sections.get("data")
    model = reading.sections.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict):
        return reading
    length = data.get("seq_length") or data.get("sequence_length")
    if not isinstance(length, int) or length == model.get("seq_length"):
        return reading
    return _with(reading, "model", "seq_length", length, OF_DATA.format(program=program))


def _is_aware(function: Function, reading: FileReading, overrides: Sequence[HydraWord]) -> bool:
    """Return whether `run_recipe.py` takes the precision-aware optimizer for a recipe of its benchmarks."""
    benchmark = BENCHMARK.search(function.node.name)
    if benchmark is None or not function.module.name.startswith(BENCHMARKS):
        return False
    for word in overrides:
        if word.key in ("optimizer", "optimizer.use_precision_aware_optimizer"):
            return False
    optimizer = reading.sections.get("optimizer")
    is_adam = isinstance(optimizer, dict) and optimizer.get("optimizer") == "adam"
    return is_adam and benchmark["precision"] == "bf16"


def _with(reading: FileReading, section: str, name: str, value: object, origin: str) -> FileReading:
    """Return a reading with one setting, and where it is from."""
    fields = {**reading.sections[section], name: value}
    sections = {**reading.sections, section: fields}
    origins = {**reading.origins, f"{section}.{name}": origin}
    return replace(reading, sections=sections, origins=origins)

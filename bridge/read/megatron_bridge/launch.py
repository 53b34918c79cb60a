"""`read_launch`: a start of Megatron Bridge's `run_recipe.py`, whose recipe is named on its command line.

The recipe's function is looked up by its name in the source of Megatron Bridge and is the lower layer; the options and
overrides of the command line are the upper one. Where the function is not at hand, the recipe decides what the command
line does not state.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987d scripts/training/run_recipe.py, recipe_runner.py and recipe_metadata.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading, RunChoice
from bridge.read.keys import OWNERS, PRECISION
from bridge.read.launch.launches import Launch
from bridge.read.launch.word import Word
from bridge.read.megatron_bridge.library import BENCHMARK, BENCHMARKS, Library, library_of
from bridge.read.megatron_bridge.recipes import read_function
from bridge.read.megatron_bridge.values import Function, Value
from bridge.read.text.command_words import CommandWords
from bridge.read.text.hydra_words import HydraWord, hydra_words, write_over
from bridge.registry.registry import REGISTRY

OPTIONS = {
    "max_steps": "train.train_iters",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "seq_length": "dataset.seq_length",
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size": "model.expert_model_parallel_size",
    "expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
}
"""Option of `run_recipe.py` -> the field that it sets."""
SHORT = {
    "ms": "max_steps",
    "gb": "global_batch_size",
    "mb": "micro_batch_size",
    "sl": "seq_length",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Option with one dash -> the option that it stands for."""
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
LATE = "{word}: may hold further overrides, which are not read."
DATA = "--dataset {name}: Megatron Bridge replaces the section data."
OF_DATA = "{program} sets model.seq_length to that of the dataset"
OF_BENCHMARK = "{program}, for a recipe of its benchmarks in BF16"
AT_HAND = "The recipe is {name} of {module}."
PRECISION_MODES = ("fp32", "fp16", "bf16")


def read_launch(launch: Launch, script: Path, _choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: its recipe's function, with its command line over it."""
    words = CommandWords(launch.arguments)
    name = _recipe_of(words)
    library = library_of(script)
    function = library.recipe(name)
    if function is None:
        decider = NOT_AT_HAND.format(name=name or "of the run")
        reading = FileReading(
            framework=MEGATRON_BRIDGE,
            sections={owner: {} for owner in OWNERS},
            names=DATASET,
            unknown=(NOT_FOUND.format(name=name or "of the run"),),
            mode_decided_by=decider,
            unstated_by=decider,
        )
    else:
        reading = _of_recipe(library, function, words, script)
        reading = replace(reading, names={**DATASET, **reading.names})
    overrides = [*_of_options(launch.arguments), *hydra_words(launch.arguments)]
    reading = written_over(reading, overrides, f"{script.name}:{launch.line}")
    if function is not None:
        reading = _at_start(reading, function, launch.name)
    sources = [LATE.format(word=word) for word in launch.arguments if word.startswith("$")]
    sources += [f"{note}: is not read." for note in launch.notes]
    exported = {
        key: str(value) for key, value in launch.environment.items() if not value.is_unknown
    }
    return replace(
        reading,
        environment={**reading.environment, **exported},
        unknown=(*reading.unknown, *dict.fromkeys(sources)),
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
    library: Library, function: Function, words: CommandWords, script: Path
) -> FileReading:
    """Return what a recipe's function says of a run."""
    given: dict[str, Value] = {}
    mode = words.options.get("mode")
    parameters = [
        parameter.arg for parameter in (*function.node.args.args, *function.node.args.kwonlyargs)
    ]
    for parameter in ADAPTERS:
        if mode in TASKS and parameter in parameters:
            given = {parameter: mode}
            break
    reading = read_function(library, function, script, given)
    where = AT_HAND.format(name=function.node.name, module=function.module.name)
    dataset = words.options.get("dataset")
    unknown = reading.unknown
    if isinstance(dataset, str):
        unknown = (*unknown, DATA.format(name=dataset))
    return replace(reading, read_too=(where, *reading.read_too), unknown=unknown)


def _of_options(words: Sequence[Word]) -> list[HydraWord]:
    """Return the options that set a field, as overrides."""
    found: list[HydraWord] = []
    waiting = ""
    for word in words:
        name, sign, value = word.partition("=")
        option = name.lstrip("-").replace("-", "_")
        if name.startswith("-") and not name.startswith("--"):
            option = SHORT.get(option, "")
        if waiting:
            found += hydra_words([Word(f"{waiting}={word}")])
            waiting = ""
        elif name.startswith("-") and option in OPTIONS and sign:
            found += hydra_words([Word(f"{OPTIONS[option]}={value}")])
        elif name.startswith("-") and option in OPTIONS:
            waiting = OPTIONS[option]
        elif word == "--deterministic":
            found += hydra_words([Word("model.deterministic_mode=true")])
    return found


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


def _at_start(reading: FileReading, function: Function, program: str) -> FileReading:
    """Return a reading with what `run_recipe.py` sets behind the overrides."""
    sections = deepcopy(dict(reading.sections))
    origins = dict(reading.origins)
    data = sections.get("data")
    model = sections.get("model")
    if isinstance(data, dict) and isinstance(model, dict):
        length = data.get("seq_length") or data.get("sequence_length")
        if isinstance(length, int) and length != model.get("seq_length"):
            model["seq_length"] = length
            origins["model.seq_length"] = OF_DATA.format(program=program)
    optimizer = sections.get("optimizer")
    if isinstance(optimizer, dict) and _is_aware(function, optimizer, reading):
        optimizer["use_precision_aware_optimizer"] = True
        origins["optimizer.use_precision_aware_optimizer"] = OF_BENCHMARK.format(program=program)
    return replace(reading, sections=sections, origins=origins)


def _is_aware(function: Function, optimizer: dict[str, object], reading: FileReading) -> bool:
    """Return whether `run_recipe.py` takes the precision-aware optimizer."""
    benchmark = BENCHMARK.search(function.node.name)
    if benchmark is None or not function.module.name.startswith(BENCHMARKS):
        return False
    origin = reading.origins.get("optimizer.use_precision_aware_optimizer", "")
    is_overridden = re.search(r"\.sh:\d+, ", origin) is not None
    return (
        benchmark["precision"] == "bf16"
        and optimizer.get("optimizer") == "adam"
        and not is_overridden
    )

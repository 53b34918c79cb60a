"""FlagScale: the YAML of a training, whose `system`, `model` and `data` become arguments of Megatron-LM.

    system: {tensor_model_parallel_size: 2, precision: {bf16: true}}
    model: {num_layers: 24, hidden_size: 2048, optimizer: {clip_grad: 1.0}}

A mapping within them only groups arguments: its own name does not count. A list is several values, `true` is a switch,
and what is `false` is not given. The experiment's file names such a file in its `defaults`, and the program that is
started, the GPUs and the variables of the run. It lies in the folder above, and is read too.

Source: flagos-ai/FlagScale 16a2dd5b flagscale/runner/runner_train.py _get_args_megatron; flagscale/runner/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from bridge.errors import Finding, PayloadError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.reading_from_arguments import build_reading_from_arguments
from bridge.read.megatron_lm.start_rows import WORLD_SIZE_KEY
from bridge.read.megatron_lm.written_arguments import parse_runs
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.target.fields import TE_ADAPTER, parse_integer

ARGUMENT_BLOCKS = ("system", "model", "data")
"""Blocks of arguments, of which a later one goes over an earlier one."""
WIDTH_IS_ROUNDED = (
    "ffn_hidden_size is {width}: the width of SwiGLU, rounded up to multiple_of={multiple}."
)
ENTRYPOINT_KEY = "experiment.task.entrypoint"
"""Key of an experiment's file with the program that is started."""
TASK_KEYS = ("experiment.task.type", "experiment.task.backend", "action")
TRAINING_TASK = ["train", "megatron", "run"]
"""Values of these keys in an experiment that trains. Another action tries sizes, or stops a run."""
HOSTS_KEY, RANKS_KEY = "experiment.runner.hostfile", "experiment.runner.nproc_per_node"
VARIABLES_KEY = "experiment.envs"
ARGUMENTS_GROUP = "train"
"""Folder next to an experiment's file with the files of arguments, and their name in `defaults`."""
TOWER_ENTRYPOINT_KEY = "task.entrypoint"
"""That key of a program with a vision tower, in the place of `ENTRYPOINT_KEY`."""
GPT_PROGRAMS = ("train_gpt.py", "train_aquila_sft.py")
"""Programs whose model is Megatron Core's GPT."""
TOWER_PROGRAM = re.compile(r"train_(?:llava\w*|qwen2_5_vl|robobrain_x0)\.py")
"""A program with a vision tower in front of a language model of Megatron Core."""
MAX_EXPERIMENTS = 50
"""Most experiments' files that are read in the folder above."""
OTHER_MODEL_KIND = "none of Megatron Core's ({program})"
ADAPTER_KEY = "peft_type"
"""Argument that freezes the model and trains adapters."""
ADAPTER_KIND = "lora"
DEFAULT_RANK = 8
DEFAULT_DROPOUT_POSITION = "pre"
"""Place of the dropout in front of an adapter; the other place is behind it."""
ADAPTER_NOT_COUNTED = (
    "peft_type={value}: the model is frozen and adapters train; all weights are counted as trained."
)
NO_ADAPTER_OF_EXPERTS = "FlagScale asserts at the start that a model with adapters has no experts"
NO_ADAPTER_WITH_RECOMPUTATION = (
    "FlagScale asserts at the start that a run with adapters recomputes nothing"
)
REFUSED_WITH_ADAPTER = {
    "num_experts": NO_ADAPTER_OF_EXPERTS,
    "recompute_granularity": NO_ADAPTER_WITH_RECOMPUTATION,
    "recompute_method": NO_ADAPTER_WITH_RECOMPUTATION,
}
"""Argument -> the rule against it in a run with adapters.

Source: FlagOpen/FlagScale da4935ec of 2025-11-13
flagscale/backends/Megatron-LM/megatron/training/arguments.py.patch validate_args.
"""
TRAIN_WITHOUT_ADAPTERS = "Drop peft_type; or drop {name}"
ARGUMENTS_WERE_READ = "{group}: {name}: read from {file}."
NO_ARGUMENTS_FILE = (
    "{path}: names {group}/{name}.yaml, which is not found from here. Give that file itself."
)
EXPERIMENT_FILE_NOT_READ = (
    "An experiment's file with this one in its defaults may set further arguments."
)
PROGRAM_OF_ANOTHER_FILE = (
    "{key}: read from {experiment}, whose defaults name another file of this folder."
)


class ExperimentProgram(NamedTuple):
    """The program that an experiment starts."""

    name: str
    """Its path, as the experiment's file has it."""
    experiment: Path
    """The experiment's file."""
    names_file: bool
    """Whether the experiment's `defaults` name the file of arguments."""


def is_of(config: Mapping[str, Any]) -> bool:
    """Return whether a file of these contents has, or names, the arguments of a training."""
    model = config.get("model")
    is_sized = isinstance(model, Mapping) and "num_layers" in model
    has_arguments = is_sized and isinstance(config.get("system"), Mapping)
    return has_arguments or _get_arguments_name(config) is not None


def read(config: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading:
    """Return what a file says of its run.

    Raises:
        RunConfigError: The caller chooses something that such a file does not have.
        UnreadFileError: The file of an experiment's arguments is not found.
    """
    choice.refuse_for(path)
    choice.refuse_checkpoint(path)
    name = _get_arguments_name(config)
    if name is None:
        return _read_arguments(config, path, _find_other_program(path), [EXPERIMENT_FILE_NOT_READ])
    return _read_experiment(config, path, name)


def _read_experiment(config: Mapping[str, Any], path: Path, name: str) -> FileReading:
    """Return what an experiment's file says of its run, with the file of arguments that it names."""
    file = path.parent / ARGUMENTS_GROUP / f"{name}.yaml"
    try:
        content = Document.load(file).mapping
    except PayloadError:
        sentence = NO_ARGUMENTS_FILE.format(path=path, group=ARGUMENTS_GROUP, name=name)
        raise UnreadFileError(sentence, kind="its file is not found") from None
    program = None
    entrypoint = get_dotted_value(config, ENTRYPOINT_KEY)
    if entrypoint is not None and PurePosixPath(str(entrypoint)).name not in GPT_PROGRAMS:
        program = ExperimentProgram(name=str(entrypoint), experiment=path, names_file=True)
    reading = _read_arguments(content, file, program, [])
    own_fields = dict(reading.own_fields)
    ranks = _count_ranks(config)
    if ranks is not None:
        own_fields[WORLD_SIZE_KEY] = ranks
    environment: dict[str, str] = {}
    variables = get_dotted_value(config, VARIABLES_KEY)
    if isinstance(variables, Mapping):
        environment = {str(key): str(value) for key, value in variables.items()}
    reading = replace(reading, own_fields=own_fields, environment=environment)
    return reading.with_notes(
        ARGUMENTS_WERE_READ.format(group=ARGUMENTS_GROUP, name=name, file=file)
    )


def _count_ranks(config: Mapping[str, Any]) -> int | None:
    """Return the number of processes of an experiment; None if a file with the nodes decides it.

    Without such a file there is one node, whatever `nnodes` states.

    Source: flagscale/runner/runner_train.py SSHTrainRunner.run; utils.py get_nproc_per_node.
    """
    if get_dotted_value(config, HOSTS_KEY) is not None:
        return None
    counts: list[int] = []
    stated = parse_integer(get_dotted_value(config, RANKS_KEY))
    if stated is not None:
        counts.append(stated)
    devices = get_dotted_value(config, f"{VARIABLES_KEY}.CUDA_VISIBLE_DEVICES")
    if isinstance(devices, str):
        counts.append(len(devices.split(",")))
    return min(counts, default=1)


def _get_arguments_name(config: Mapping[str, Any]) -> str | None:
    """Return the name of the file of arguments that an experiment runs on Megatron-LM; None for others."""
    task = [get_dotted_value(config, key) for key in TASK_KEYS]
    if task != TRAINING_TASK:
        return None
    names = _list_default_files(config.get("defaults"), ARGUMENTS_GROUP)
    if len(names) != 1:
        return None
    return names[0]


def _read_arguments(
    config: Mapping[str, Any], path: Path, program: ExperimentProgram | None, unknown: list[str]
) -> FileReading:
    """Return what a file of arguments says of its run.

    Args:
        config: Its contents.
        path: The file.
        program: The program of its experiment, if it builds another model than GPT.
        unknown: Sentences about files that are not read.
    """
    arguments: dict[str, Any] = {}
    for block in ARGUMENT_BLOCKS:
        content = config.get(block)
        if isinstance(content, Mapping):
            arguments |= dict(_flatten_block(content))
    read_too = []
    if program is not None:
        key = ENTRYPOINT_KEY
        if TOWER_PROGRAM.fullmatch(PurePosixPath(program.name).name):
            key = TOWER_ENTRYPOINT_KEY
        arguments[key] = program.name
        if not program.names_file:
            experiment = program.experiment.name
            read_too.append(PROGRAM_OF_ANOTHER_FILE.format(key=key, experiment=experiment))
    width = _compute_rounded_width(arguments)
    if width is not None:
        arguments["ffn_hidden_size"] = width
        read_too.append(WIDTH_IS_ROUNDED.format(width=width, multiple=arguments["multiple_of"]))
    (run,) = parse_runs([*_format_command_line(arguments)])
    run.framework = load_framework_table("flagscale")
    reading = build_reading_from_arguments(
        run,
        run.framework,
        str(path),
        origins=dict.fromkeys(arguments, path.name),
        read_too=read_too,
        unknown=unknown,
    )
    if arguments.get(ADAPTER_KEY) is not None:
        reading = _read_adapter(reading, arguments)
    if ENTRYPOINT_KEY in arguments:
        kind = OTHER_MODEL_KIND.format(program=PurePosixPath(arguments[ENTRYPOINT_KEY]).name)
        uncertainty = replace(reading.uncertainty, other_model_kind=kind)
        reading = replace(reading, uncertainty=uncertainty)
    return reading


def _read_adapter(reading: FileReading, arguments: Mapping[str, Any]) -> FileReading:
    """Return a reading with the adapter that trains in the place of the model's weights.

    Source: FlagOpen/FlagScale da4935ec flagscale/train/peft/lora.py, utils.py.
    """
    value = arguments[ADAPTER_KEY]
    faults: list[Finding] = []
    for name, rule in REFUSED_WITH_ADAPTER.items():
        if arguments.get(name) is not None:
            remedy = TRAIN_WITHOUT_ADAPTERS.format(name=name)
            faults.append(
                Finding(path=ADAPTER_KEY, rule=rule, remedy=remedy, value=value, severity="warning")
            )
    misdirected = (*reading.option_faults.misdirected, *faults)
    reading = replace(
        reading, option_faults=replace(reading.option_faults, misdirected=misdirected)
    )
    rank = arguments.get("lora_dim", DEFAULT_RANK)
    if value != ADAPTER_KIND or not isinstance(rank, int) or "fp8_format" in arguments:
        uncertainty = replace(
            reading.uncertainty,
            open_points=(
                *reading.uncertainty.open_points,
                ADAPTER_NOT_COUNTED.format(value=value),
            ),
            unread_options=(*reading.uncertainty.unread_options, ADAPTER_KEY),
        )
        return replace(reading, uncertainty=uncertainty)
    adapter: dict[str, object] = {"type": TE_ADAPTER, "dim": rank}
    if "lora_target_modules" in arguments:
        adapter["target_modules"] = arguments["lora_target_modules"]
    position = arguments.get("lora_dropout_position", DEFAULT_DROPOUT_POSITION)
    if position == DEFAULT_DROPOUT_POSITION:
        adapter["dropout"] = arguments.get("lora_dropout", 0.0)
    return replace(reading, sections={**reading.sections, "peft": adapter})


def _find_other_program(path: Path) -> ExperimentProgram | None:
    """Return the program of the file's experiment that builds another model than GPT; None if none does.

    Experiments whose `defaults` name the file count first, then those of other files of its folder.
    One experiment with GPT is enough: the file can be planned.
    """
    programs = list(_iterate_programs(path))
    programs_of_file = [program for program in programs if program.names_file]
    candidates = programs_of_file or programs
    for program in candidates:
        if PurePosixPath(program.name).name in GPT_PROGRAMS:
            return None
    if candidates:
        return candidates[0]
    return None


def _iterate_programs(path: Path) -> Iterator[ExperimentProgram]:
    """Yield the programs of the experiments in the folder above a file of arguments."""
    for file in sorted(path.absolute().parent.parent.glob("*.yaml"))[:MAX_EXPERIMENTS]:
        try:
            experiment = Document.load(file).mapping
        except PayloadError:
            continue
        program = get_dotted_value(experiment, ENTRYPOINT_KEY)
        names = _list_default_files(experiment.get("defaults"), path.parent.name)
        if program is not None and names:
            names_file = path.stem in names
            yield ExperimentProgram(name=str(program), experiment=file, names_file=names_file)


def _list_default_files(defaults: object, group: str) -> list[str]:
    """Return the files of a group that `defaults` names."""
    names: list[str] = []
    if isinstance(defaults, list):
        for entry in defaults:
            if isinstance(entry, Mapping) and group in entry:
                names.append(str(entry[group]))
    return names


def _flatten_block(block: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each argument of a block with its value; those of a mapping within it too, without its name."""
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from _flatten_block(value)
        elif value is not None:
            yield str(name), value


def _format_command_line(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line with these arguments."""
    for name, value in arguments.items():
        if value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            yield from map(str, value)
        elif value is not True:
            yield str(value)


def _compute_rounded_width(arguments: Mapping[str, Any]) -> int | None:
    """Return the width of an MLP that `multiple_of` rounds up; None where it does not decide it.

    Source: flagscale/backends/Megatron-LM/megatron/training/arguments.py.patch validate_args.
    """
    multiple = parse_integer(arguments.get("multiple_of"))
    hidden = parse_integer(arguments.get("hidden_size"))
    if "ffn_hidden_size" in arguments or arguments.get("swiglu") is not True:
        return None
    if not multiple or hidden is None:
        return None
    width = int(4 * hidden * 2 / 3)
    factor = arguments.get("hidden_dim_multiplier")
    if isinstance(factor, int | float):
        width = int(width * factor)
    return multiple * ((width + multiple - 1) // multiple)

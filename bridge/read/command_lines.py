"""Command lines that are not Megatron-LM's: the system of each, and the payload for its `import_`.

    torchrun train.py --bf16 --output_dir out --per_device_train_batch_size 1    huggingface
    torchrun run_recipe.py --recipe NAME mixed_precision=bf16_mixed              megatron-bridge
    python megatron_gpt_pretraining.py trainer.precision=bf16 ...                nemo1
    deepspeed train.py --deepspeed_config ds.json                                another file decides

A launch script may start programs of several systems, so that each of its launches is recognised by
itself. A precision that stands in another file is named, and never guessed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.read import framework_signs
from bridge.read.foreign.reports import Unmapped
from bridge.read.framework_signs import Framework
from bridge.read.launch.command_line_rows import (
    ARGUMENTS_VARIABLE_PATTERN,
    COMMAND_LINE_ROWS,
    MEGATRON_ARGUMENTS,
)
from bridge.read.launch.launch import Launch
from bridge.read.launch_arguments import LaunchArguments, make_unmapped
from bridge.read.megatron_lm.flags import bears_on_precision
from bridge.read.text.command_arguments import nest_dotted_keys
from bridge.read.text.trainer_arguments import parse_trainer_arguments
from bridge.registry.registry import REGISTRY

NEMO_OVERRIDE_PATTERN = re.compile(COMMAND_LINE_ROWS["nemo1"])
"""Overrides that only NeMo 1 has."""
NEMO_TRAINER_OVERRIDES = tuple(COMMAND_LINE_ROWS["nemo1 trainer"].split())
OVERRIDES_SHARED_WITH_BRIDGE = tuple(COMMAND_LINE_ROWS["nemo1 shared"].split())
"""Overrides of Megatron Bridge that are NeMo 1's next to those of its trainer."""
FAIRSEQ_PROGRAM_PATTERN = re.compile(COMMAND_LINE_ROWS["fairseq"])
"""Programs of fairseq."""
TRAINING_ONLY_ARGUMENTS = frozenset(COMMAND_LINE_ROWS["training alone"].split())
"""Arguments of transformers' Trainer that only a program that trains has."""
TRAINER_ARGUMENTS = TRAINING_ONLY_ARGUMENTS.union(COMMAND_LINE_ROWS["trainer"].split())
TRAINING_ARGUMENTS = TRAINING_ONLY_ARGUMENTS.union(COMMAND_LINE_ROWS["training"].split())
"""Arguments of which a program with two of `TRAINER_ARGUMENTS` needs one to train."""
BATCH_SIZE_ARGUMENT = "per_device_train_batch_size"
MEGATRON_BRIDGE_TITLE = "Megatron Bridge"
PRECISION_SECTION = "mixed_precision"
"""Field of a run of Megatron Bridge."""
ACCELERATE_PRECISIONS = ("no", "fp16", "bf16", "fp8")
"""Values of `--mixed_precision` of Accelerate."""
LAUNCHER_SWITCHES = ("use_fsdp", "use_deepspeed")
"""Switches of Accelerate's launcher."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """One launch, in the words of the system that reads it."""

    system: str = ""
    evidence: str
    """Why it is taken for the system's, as a clause behind "it"."""
    payload: object = None
    context: Mapping[str, object] = field(default_factory=dict)
    """Facts on the line that no file of the system has."""
    unread: tuple[Unmapped, ...] = ()
    """Records of what the line leaves open."""
    elsewhere: str = ""
    """The file, or the system, that decides; there is no payload then."""
    framework: Framework | None = None
    """The framework that is started and not read; there is neither a system nor a payload then."""


def read_command_line(launch: Launch, system_name: str | None = None) -> CommandLine | None:
    """Return a launch in the words of a system.

    Args:
        launch: The launch.
        system_name: The system that --from names; None: the first that knows the launch.

    Returns:
        It is None for a launch of Megatron-LM, and for one that no system knows.
    """
    if system_name is not None:
        return _read_for_systems(LaunchArguments(launch), [system_name], is_forced=True)
    framework = framework_signs.recognise_launch(launch)
    unread = None
    if framework is not None and framework.table:
        return None
    if framework is not None and not framework.is_converted:
        unread = CommandLine(
            evidence=framework.evidence, framework=framework, elsewhere=framework.name
        )
        if not framework.is_fallback:
            return unread
    if MEGATRON_ARGUMENTS & launch.flags:
        return None
    if FAIRSEQ_PROGRAM_PATTERN.search(launch.program):
        return CommandLine(evidence="starts fairseq", elsewhere="options of fairseq")
    line = LaunchArguments(launch)
    return (
        _read_for_systems(line, SYSTEM_READERS, is_forced=False)
        or unread
        or _read_deepspeed_option(line)
    )


def _read_for_systems(
    line: LaunchArguments, systems: Iterable[str], *, is_forced: bool
) -> CommandLine | None:
    """Return a launch in the words of the first of several systems that knows it."""
    for name in systems:
        reader = SYSTEM_READERS.get(name)
        command = None
        if reader is not None:
            command = reader(line, is_forced)
        if command is not None:
            return replace(command, system=name)
    return None


def report_skipped_launch(launch: Launch, line: CommandLine | None) -> list[Unmapped]:
    """Return the records of a launch that is not read.

    Its precision stands in a file, or no system knows its words.
    """
    if line is not None and line.framework is not None:
        facts = {
            "framework": line.framework.name,
            "evidence": line.evidence,
            "runs": line.framework.runs,
        }
        return [
            make_unmapped("command_lines.framework", launch.label, line.framework.name, **facts)
        ]
    if line is not None:
        facts = {"evidence": line.evidence, "elsewhere": line.elsewhere}
        return [make_unmapped("command_lines.elsewhere", launch.label, line.elsewhere, **facts)]
    if not launch.line:
        records = [make_unmapped("command_lines.file", str(note), None) for note in launch.notes]
        if launch.decisions:
            records.insert(0, make_unmapped("command_lines.nothing-started", launch.label, None))
        return records
    words: list[str] = []
    for word in launch.arguments:
        may_be_arguments = word.is_unknown and ARGUMENTS_VARIABLE_PATTERN.search(word)
        if may_be_arguments or bears_on_precision(word.partition("=")[0]):
            words.append(word)
    if not words:
        return []
    return [make_unmapped("command_lines.unknown-program", launch.label, " ".join(words))]


def _read_megatron_bridge(line: LaunchArguments, is_forced: bool) -> CommandLine | None:
    """Return a launch with overrides of Megatron Bridge, or of its program; None for another."""
    overrides = line.words.overrides
    fields = {
        key: value for key, value in overrides.items() if key.split(".")[0] == PRECISION_SECTION
    }
    recipe = _describe_bridge_recipe(line)
    if not (fields or is_forced or recipe):
        return None
    evidence = _describe_evidence([*fields], "an override of Megatron Bridge's")
    if recipe:
        evidence = f"starts `{line.launch.name}` of Megatron Bridge"
    if recipe and "mixed_precision" in fields:
        evidence += f" with an override of `mixed_precision`, and {recipe} decides the rest"
    unread = line.unread(read=(*fields, "mixed_precision"))
    name = fields.pop("mixed_precision", None)
    payload = nest_dotted_keys(fields)
    if name is None:
        context = {"base": recipe or f"the recipe that {line.launch.name} loads"}
        return CommandLine(evidence=evidence, payload=payload, context=context, unread=unread)
    chosen: object = name
    if fields:
        chosen = {**REGISTRY.get(name).to_dict(), **payload["mixed_precision"]}
    return CommandLine(evidence=evidence, payload={"mixed_precision": chosen}, unread=unread)


def _describe_bridge_recipe(line: LaunchArguments) -> str:
    """Return the recipe that a launch of Megatron Bridge's program names, as a noun.

    It is empty for other programs.
    """
    framework = framework_signs.recognise_launch(line.launch)
    if framework is None or framework.name != MEGATRON_BRIDGE_TITLE:
        return ""
    for option, noun in (("recipe", "the recipe"), ("model", "the recipe of the model")):
        name = line.words.options.get(option) or line.words.undecided.get(option)
        if isinstance(name, str):
            return f"{noun} {name}"
    return f"the recipe that {line.launch.name} loads"


def _read_nemo1(line: LaunchArguments, is_forced: bool) -> CommandLine | None:
    """Return a launch with overrides of NeMo 1; None for another."""
    overrides = line.words.overrides
    of_nemo = [key for key in overrides if NEMO_OVERRIDE_PATTERN.match(key)]
    if not of_nemo and any(key.startswith(NEMO_TRAINER_OVERRIDES) for key in overrides):
        of_nemo = [key for key in overrides if key.startswith(OVERRIDES_SHARED_WITH_BRIDGE)]
    if not of_nemo and not is_forced:
        return None
    where = "the program's file"
    file = line.words.options.get("config_name")
    if isinstance(file, str):
        where = f"{file.removesuffix('.yaml')}.yaml"
    stated = [key for key in overrides if key.endswith("precision")]
    evidence = _describe_evidence([*stated, *of_nemo], "an override of NeMo's")
    return CommandLine(
        evidence=evidence, elsewhere=f"the configuration composed of {where} and the overrides"
    )


def _read_huggingface(line: LaunchArguments, is_forced: bool) -> CommandLine | None:
    """Return a launch with arguments of transformers' Trainer; None for another."""
    if not (is_forced or _has_trainer_arguments(line)):
        return None
    payload = parse_trainer_arguments(line.words)
    switch = _find_swift_switch(line, payload)
    if switch is not None:
        payload[switch] = True
    has_a_switch = "bf16" in payload or "fp16" in payload
    if (
        payload.get("mixed_precision") in ACCELERATE_PRECISIONS
        and not has_a_switch
        and not is_forced
    ):
        return None  # no argument of the Trainer's: the program hands it to its own Accelerator
    stated = line.launcher.options.get("mixed_precision")
    environment = stated.lower() if isinstance(stated, str) else None
    if _is_decided_by_accelerate(line, payload, environment):
        return None
    launched = [name for name in LAUNCHER_SWITCHES if line.launcher.options.get(name) is True]
    if launched:
        payload["accelerate_launch_args"] = dict.fromkeys(launched, True)
    unread = line.unread(files=("deepspeed_config", "config_file"))
    if switch is not None:
        dtype = payload["torch_dtype"]
        record = make_unmapped("command_lines.swift-switch", "--torch_dtype", dtype, switch=switch)
        unread = (record, *unread)
    return CommandLine(
        evidence=_describe_trainer_evidence(line, payload),
        payload=payload,
        context={"program": _get_trainer_program(line), "accelerate_mixed_precision": environment},
        unread=unread,
    )


def _is_decided_by_accelerate(
    line: LaunchArguments, payload: Mapping[str, Any], environment: str | None
) -> bool:
    """Return whether Accelerate's launcher decides the mode, by FP8 or by a file that is not read."""
    if payload.get("bf16") or payload.get("fp16"):
        return False
    has_file = isinstance(line.launcher.options.get("config_file"), str)
    return environment == "fp8" or (environment is None and has_file)


def _get_trainer_program(line: LaunchArguments) -> str | None:
    """Return the program that reads the arguments, as a noun; None where nothing is started."""
    if not line.launch.line:
        return None
    unknown = f"{line.launch.name}, which reads these arguments,"
    program: str = COMMAND_LINE_ROWS["trainers"].get(line.launch.name, unknown)
    return program


def _describe_trainer_evidence(line: LaunchArguments, payload: Mapping[str, Any]) -> str:
    """Return the clause about the argument of the Trainer that says most."""
    names = sorted(
        TRAINER_ARGUMENTS & payload.keys(), key=lambda name: (name != BATCH_SIZE_ARGUMENT, name)
    )
    written = [line.words.written.get(name, name) for name in names]
    return _describe_evidence(written, "an argument of transformers' Trainer")


def _has_trainer_arguments(line: LaunchArguments) -> bool:
    """Return whether options are those of transformers' Trainer."""
    options = line.words.options.keys()
    names = options | line.words.undecided.keys()
    if BATCH_SIZE_ARGUMENT in names or (
        len(TRAINER_ARGUMENTS & names) > 1 and TRAINING_ARGUMENTS & names
    ):
        return True
    if not line.is_accelerated:
        return False
    has_a_switch = "bf16" in options or "fp16" in options
    return has_a_switch and ("output_dir" in options or "model_name_or_path" in options)


def _find_swift_switch(line: LaunchArguments, payload: Mapping[str, Any]) -> str | None:
    """Return the switch that ms-swift turns on for its dtype where none is written."""
    is_swift = line.launch.name == "swift" or "swift/cli/" in line.launch.program
    if not is_swift or {"bf16", "fp16"} & (line.words.options.keys() | line.words.undecided.keys()):
        return None
    switches: dict[str, str] = COMMAND_LINE_ROWS["swift"]
    return switches.get(str(payload.get("torch_dtype")))


def _read_deepspeed_option(line: LaunchArguments) -> CommandLine | None:
    """Return a launch whose precision stands in a file of DeepSpeed; None for another."""
    options = line.words.options
    for name in ("deepspeed_config", "deepspeed"):
        if isinstance(options.get(name), str):
            evidence = f"has `{line.words.written[name]}`, an option of DeepSpeed's"
            return CommandLine(system="deepspeed", evidence=evidence, elsewhere=str(options[name]))
    return None


def _describe_evidence(names: list[str], description: str) -> str:
    """Return the clause about the first of several words on the line, which is `description`."""
    if names:
        return f"has `{names[0]}`, {description}"
    return f"was named with --from as {description.partition(' of ')[2]}"


SYSTEM_READERS: Mapping[str, Callable[[LaunchArguments, bool], CommandLine | None]] = {
    "megatron-bridge": _read_megatron_bridge,
    "nemo1": _read_nemo1,
    "huggingface": _read_huggingface,
}
"""System -> the function that reads its command lines, in the order in which they are asked."""

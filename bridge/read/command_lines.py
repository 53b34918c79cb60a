"""`read_command_line`: a launch of a program other than Megatron-LM's, for the system that reads it.

    torchrun train.py --bf16 --output_dir out --per_device_train_batch_size 1    huggingface
    torchrun run_recipe.py --recipe NAME mixed_precision=bf16_mixed              megatron-bridge
    python megatron_gpt_pretraining.py trainer.precision=bf16 ...                nemo1
    deepspeed train.py --deepspeed_config ds.json                                another file decides

A launch script may start programs of several systems, so each of its launches is recognised by
itself. If another file decides the precision, the file is named. Nothing is guessed.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from bridge.read.megatron_lm.flags import may_affect_precision
from bridge.read.text.command_arguments import nest_dotted_keys
from bridge.read.text.trainer_arguments import parse_trainer_arguments
from bridge.registry.registry import REGISTRY

NEMO_OVERRIDE_PATTERN = re.compile(COMMAND_LINE_ROWS["nemo1"])
"""Overrides that only NeMo 1 has."""
NEMO_TRAINER_OVERRIDES = tuple(COMMAND_LINE_ROWS["nemo1 trainer"].split())
NEMO_SHARED_OVERRIDES = tuple(COMMAND_LINE_ROWS["nemo1 shared"].split())
"""Overrides that both Megatron Bridge and NeMo 1 have. With an override of NeMo's trainer on the
same line they are NeMo 1's."""
FAIRSEQ_PROGRAM_PATTERN = re.compile(COMMAND_LINE_ROWS["fairseq"])
"""Programs of fairseq."""
TRAINING_ONLY_ARGUMENTS = frozenset(COMMAND_LINE_ROWS["training alone"].split())
"""Arguments of transformers' Trainer that only a program that trains has."""
TRAINER_ARGUMENTS = TRAINING_ONLY_ARGUMENTS.union(COMMAND_LINE_ROWS["trainer"].split())
"""Arguments of transformers' Trainer by which it is recognised. Two of them are needed."""
TRAINING_ARGUMENTS = TRAINING_ONLY_ARGUMENTS.union(COMMAND_LINE_ROWS["training"].split())
"""Arguments of which one is needed too: a program without them does not train."""
BATCH_SIZE_ARGUMENT = "per_device_train_batch_size"
"""The argument by which the Trainer is recognised without any other."""
MEGATRON_BRIDGE_TITLE = "Megatron Bridge"
PRECISION_SECTION = "mixed_precision"
"""Section of a run of Megatron Bridge with the precision."""
ACCELERATE_PRECISIONS = ("no", "fp16", "bf16", "fp8")
"""Values of Accelerate's `--mixed_precision`."""
LAUNCHER_SWITCHES = ("use_fsdp", "use_deepspeed")
"""Switches of Accelerate's launcher that shard the model."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """One launch, with the system that reads it.

    It has a payload, or another source that decides (`elsewhere`), or a framework that is not read.
    """

    system: str = ""
    """The name of the system; empty if the launch is not read."""
    evidence: str
    """The reason why the system is assumed, as a clause after "it"."""
    payload: object = None
    """The payload for `import_` of the system."""
    context: Mapping[str, object] = field(default_factory=dict)
    """Facts on the command line that no file of the system states, for `import_`."""
    unread: tuple[Unmapped, ...] = ()
    """Records of parts of the line that may affect precision and were not read."""
    elsewhere: str = ""
    """The file, or the system, that decides the precision."""
    framework: Framework | None = None
    """The framework that the launch starts, if its launches are not read."""


def read_command_line(launch: Launch, system_name: str | None = None) -> CommandLine | None:
    """Return a launch with the system that reads it.

    Args:
        system_name: The system that --from names; None: the first that recognises the launch.

    Returns:
        None for a launch of Megatron-LM, and for one that no system recognises.
    """
    if system_name is not None:
        return _read_for_systems(LaunchArguments(launch), [system_name], is_forced=True)
    framework = framework_signs.recognise_launch(launch)
    unread_framework = None
    if framework is not None and framework.table:
        return None  # its arguments are those of Megatron-LM
    if framework is not None and not framework.is_converted:
        unread_framework = CommandLine(
            evidence=framework.evidence, framework=framework, elsewhere=framework.name
        )
        if not framework.is_fallback:
            return unread_framework
    if MEGATRON_ARGUMENTS & launch.flags:
        return None
    if FAIRSEQ_PROGRAM_PATTERN.search(launch.program):
        return CommandLine(evidence="starts fairseq", elsewhere="options of fairseq")
    line = LaunchArguments(launch)
    return (
        _read_for_systems(line, SYSTEM_READERS, is_forced=False)
        or unread_framework
        or _read_deepspeed_option(line)
    )


def _read_for_systems(
    line: LaunchArguments, systems: Iterable[str], *, is_forced: bool
) -> CommandLine | None:
    """Return a launch with the first of several systems that recognises it.

    Args:
        systems: The names of the systems.
        is_forced: Whether --from names the system, so that no sign of it is needed.
    """
    for name in systems:
        read_line = SYSTEM_READERS.get(name)
        if read_line is None:
            continue
        command_line = read_line(line, is_forced)
        if command_line is not None:
            return replace(command_line, system=name)
    return None


def report_skipped_launch(launch: Launch, line: CommandLine | None) -> list[Unmapped]:
    """Return the records of a launch that is not read.

    Args:
        line: The launch as `read_command_line` returned it: another source decides its precision.
            None: no system recognises it.
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
        may_be_arguments = word.is_open and ARGUMENTS_VARIABLE_PATTERN.search(word)
        if may_be_arguments or may_affect_precision(word.partition("=")[0]):
            words.append(word)
    if not words:
        return []
    return [make_unmapped("command_lines.unknown-program", launch.label, " ".join(words))]


def _read_megatron_bridge(line: LaunchArguments, is_forced: bool) -> CommandLine | None:
    """Return a launch with overrides of Megatron Bridge, or of its program; None for another."""
    overrides = line.program.overrides
    keys = [key for key in overrides if key.split(".")[0] == PRECISION_SECTION]
    fields = {key: overrides[key] for key in keys}
    recipe = _describe_bridge_recipe(line)
    if not (fields or is_forced or recipe):
        return None
    evidence = _describe_bridge_evidence(line, fields, recipe)
    unread = line.list_unread(read=(*fields, PRECISION_SECTION))
    precision_name = fields.pop(PRECISION_SECTION, None)
    payload = nest_dotted_keys(fields)
    if precision_name is None:
        context = {"base": recipe or f"the recipe that {line.launch.name} loads"}
        return CommandLine(evidence=evidence, payload=payload, context=context, unread=unread)
    precision: object = precision_name
    if fields:  # overrides of single fields count over the named precision
        precision = {**REGISTRY.get(precision_name).to_dict(), **payload[PRECISION_SECTION]}
    return CommandLine(evidence=evidence, payload={PRECISION_SECTION: precision}, unread=unread)


def _describe_bridge_evidence(line: LaunchArguments, fields: Mapping[str, str], recipe: str) -> str:
    """Return the evidence for Megatron Bridge.

    Args:
        fields: Overrides of the precision.
        recipe: The recipe that the launch names; empty if the program is not Megatron Bridge's.
    """
    program = line.launch.name
    if recipe and PRECISION_SECTION in fields:
        return (
            f"starts `{program}` of Megatron Bridge with an override of `mixed_precision`, "
            f"and {recipe} decides the rest"
        )
    if recipe:
        return f"starts `{program}` of Megatron Bridge"
    return _describe_evidence([*fields], "an override", of="Megatron Bridge's")


def _describe_bridge_recipe(line: LaunchArguments) -> str:
    """Return the recipe that a launch of Megatron Bridge names: "the recipe NAME".

    It is empty for programs that are not Megatron Bridge's.
    """
    framework = framework_signs.recognise_launch(line.launch)
    if framework is None or framework.name != MEGATRON_BRIDGE_TITLE:
        return ""
    for option, noun in (("recipe", "the recipe"), ("model", "the recipe of the model")):
        name = line.program.options.get(option) or line.program.open_values.get(option)
        if isinstance(name, str):
            return f"{noun} {name}"
    return f"the recipe that {line.launch.name} loads"


def _read_nemo1(line: LaunchArguments, is_forced: bool) -> CommandLine | None:
    """Return a launch with overrides of NeMo 1; None for another."""
    overrides = line.program.overrides
    signs = [key for key in overrides if NEMO_OVERRIDE_PATTERN.match(key)]
    if not signs and any(key.startswith(NEMO_TRAINER_OVERRIDES) for key in overrides):
        signs = [key for key in overrides if key.startswith(NEMO_SHARED_OVERRIDES)]
    if not signs and not is_forced:
        return None
    file = "the program's file"
    config_name = line.program.options.get("config_name")
    if isinstance(config_name, str):
        file = f"{config_name.removesuffix('.yaml')}.yaml"
    precision_keys = [key for key in overrides if key.endswith("precision")]
    evidence = _describe_evidence([*precision_keys, *signs], "an override", of="NeMo's")
    return CommandLine(
        evidence=evidence, elsewhere=f"the configuration composed of {file} and the overrides"
    )


def _read_huggingface(line: LaunchArguments, is_forced: bool) -> CommandLine | None:
    """Return a launch with arguments of transformers' Trainer; None for another."""
    if not (is_forced or _has_trainer_arguments(line)):
        return None
    payload = parse_trainer_arguments(line.program.options)
    switch = _find_swift_switch(line, payload)
    if switch is not None:
        payload[switch] = True
    if not is_forced and _is_for_own_accelerator(payload):
        return None
    launcher_precision = line.launcher.options.get("mixed_precision")
    environment = None
    if isinstance(launcher_precision, str):
        environment = launcher_precision.lower()
    if _is_decided_by_accelerate(line, payload, environment):
        return None
    launched = [name for name in LAUNCHER_SWITCHES if line.launcher.options.get(name) is True]
    if launched:
        payload["accelerate_launch_args"] = dict.fromkeys(launched, True)
    unread = line.list_unread(files=("deepspeed_config", "config_file"))
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


def _is_for_own_accelerator(payload: Mapping[str, Any]) -> bool:
    """Return whether a program gives its `--mixed_precision` to an Accelerator that it makes itself.

    The Trainer has no such argument. A program that takes it is no Trainer, unless it also has a
    switch of the Trainer's.
    """
    has_switch = "bf16" in payload or "fp16" in payload
    return payload.get("mixed_precision") in ACCELERATE_PRECISIONS and not has_switch


def _is_decided_by_accelerate(
    line: LaunchArguments, payload: Mapping[str, Any], environment: str | None
) -> bool:
    """Return whether Accelerate's launcher decides the mode, by FP8 or by a file that is not read.

    Args:
        payload: The arguments of the Trainer. A switch that is on decides over the launcher.
        environment: The launcher's `--mixed_precision`; None: not stated.
    """
    if payload.get("bf16") or payload.get("fp16"):
        return False
    has_file = isinstance(line.launcher.options.get("config_file"), str)
    return environment == "fp8" or (environment is None and has_file)


def _get_trainer_program(line: LaunchArguments) -> str | None:
    """Return the program that reads the arguments, as a noun; None for a script that starts none."""
    if not line.launch.line:
        return None
    unknown = f"{line.launch.name}, which reads these arguments,"
    program: str = COMMAND_LINE_ROWS["trainers"].get(line.launch.name, unknown)
    return program


def _describe_trainer_evidence(line: LaunchArguments, payload: Mapping[str, Any]) -> str:
    """Return the evidence for the Trainer.

    It is the batch size, an argument that no other program has, or the first other argument.
    """
    names = sorted(TRAINER_ARGUMENTS & payload.keys())
    if BATCH_SIZE_ARGUMENT in names:
        names = [BATCH_SIZE_ARGUMENT]
    spellings = [line.program.spellings.get(name, name) for name in names]
    return _describe_evidence(spellings, "an argument", of="transformers' Trainer")


def _has_trainer_arguments(line: LaunchArguments) -> bool:
    """Return whether the options are those of transformers' Trainer."""
    options = line.program.options.keys()
    names = options | line.program.open_values.keys()
    has_two_arguments = len(TRAINER_ARGUMENTS & names) > 1
    if BATCH_SIZE_ARGUMENT in names or (has_two_arguments and TRAINING_ARGUMENTS & names):
        return True
    if not line.is_accelerated:
        return False
    has_switch = "bf16" in options or "fp16" in options
    return has_switch and ("output_dir" in options or "model_name_or_path" in options)


def _find_swift_switch(line: LaunchArguments, payload: Mapping[str, Any]) -> str | None:
    """Return the switch that ms-swift turns on for its `--torch_dtype`; None if one is stated."""
    is_swift = line.launch.name == "swift" or "swift/cli/" in line.launch.program
    stated = line.program.options.keys() | line.program.open_values.keys()
    if not is_swift or {"bf16", "fp16"} & stated:
        return None
    switches: dict[str, str] = COMMAND_LINE_ROWS["swift"]
    return switches.get(str(payload.get("torch_dtype")))


def _read_deepspeed_option(line: LaunchArguments) -> CommandLine | None:
    """Return a launch whose precision is in a file of DeepSpeed; None for another."""
    options = line.program.options
    for name in ("deepspeed_config", "deepspeed"):
        if isinstance(options.get(name), str):
            evidence = f"has `{line.program.spellings[name]}`, an option of DeepSpeed's"
            return CommandLine(system="deepspeed", evidence=evidence, elsewhere=str(options[name]))
    return None


def _describe_evidence(words: Sequence[str], kind: str, *, of: str) -> str:
    """Return the evidence for a system, as a clause after "it".

    Args:
        words: Words on the line that show the system; the first is named. None: --from names it.
        kind: The kind of these words: "an override".
        of: The system as the owner of the words: "NeMo's".
    """
    if words:
        return f"has `{words[0]}`, {kind} of {of}"
    return f"was named with --from as {of}"


SYSTEM_READERS: Mapping[str, Callable[[LaunchArguments, bool], CommandLine | None]] = {
    "megatron-bridge": _read_megatron_bridge,
    "nemo1": _read_nemo1,
    "huggingface": _read_huggingface,
}
"""Name of a system -> the function that reads its command lines.

The function takes the launch, and whether --from names the system. The systems are tried in this
order."""

"""Command lines that are not Megatron-LM's: which system each was written for, and what it says in that system's words.

A launch script holds programs of several systems, so that each of its launches is recognised by itself. What a line
says is handed to the system's own `import_`; what it leaves to another file is named, never guessed.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from bridge.read import frameworks
from bridge.read.contract import Unmapped
from bridge.read.frameworks import Framework
from bridge.read.launch.launches import (
    HOLDS_ARGUMENTS,
    MEGATRON_ARGUMENTS,
    ROWS,
    Launch,
    before_the_dashes,
)
from bridge.read.megatron_lm.flags import bears_on_precision
from bridge.read.table import record_named
from bridge.read.text.command_words import CommandWords, nested
from bridge.read.text.trainer_words import arguments_of
from bridge.registry.registry import REGISTRY

NEMO, FAIRSEQ = re.compile(ROWS["nemo1"]), re.compile(ROWS["fairseq"])
OF_TRAINING = frozenset(ROWS["of training"].split())
TRAINER, TRAINING = (OF_TRAINING.union(ROWS[row].split()) for row in ("of trainer", "with trainer"))
OF_NEMOS_TRAINER, SHARED_WITH_BRIDGE = (
    tuple(ROWS[row].split()) for row in ("nemo1 trainer", "nemo1 shared")
)
BRIDGE = "Megatron Bridge"
FILES = tuple(ROWS["files"].split())
BATCH = "per_device_train_batch_size"
PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What one launch says in the words of the system that reads it."""

    system: str = ""
    evidence: str
    """Why it is taken for that system's, as a clause."""
    payload: object = None
    context: Mapping[str, object] = field(default_factory=dict)
    """What the line says of the things that a file of the system cannot say."""
    unread: tuple[Unmapped, ...] = ()
    elsewhere: str = ""
    """The file, or the system, that decides; there is no payload then."""
    framework: Framework | None = None
    """The framework that is started and not read; there is neither a system nor a payload then."""


class Line:
    """A launch with its words sorted."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.words = CommandWords(before_the_dashes(launch.arguments))
        names = [
            word if word == "accelerate.commands.launch" else PurePosixPath(word).name
            for word in launch.runner
        ]
        places = [
            at
            for at, name in enumerate(names)
            if name in ("accelerate", "accelerate.commands.launch")
        ]
        self.is_accelerated = bool(places)
        self.launcher = CommandWords(launch.runner[places[0] + 1 :] if places else ())

    def unread(
        self, *, read: Collection[str] | None = None, files: tuple[str, ...] = FILES
    ) -> tuple[Unmapped, ...]:
        """Return the records of what the line leaves open.

        `read` are the program's options and overrides that were read (None: all); `files` are options that name
        a file which was not.
        """
        launch, found = self.launch, list[tuple[str, str, object]]()
        given = {**self.words.options, **self.words.overrides} if read is not None else {}
        for name, value in given.items():
            if (
                name not in (*(read or ()), *files)
                and bears_on_precision(name)
                and value not in (False, "False")
            ):
                found.append(("command_lines.option", self.words.written.get(name, name), value))
        for words in (self.words, self.launcher):
            named = {
                name: words.options[name]
                for name in files
                if isinstance(words.options.get(name), str)
            }
            found += [
                ("command_lines.file", words.written[name], file) for name, file in named.items()
            ]
            for name, late in words.undecided.items():
                if bears_on_precision(name) or name in (*FILES, *words.overrides):
                    found.append(
                        ("megatron_lm.only-the-run-decides", words.written.get(name, name), late)
                    )
            found += [
                ("command_lines.loose-word", text, None) for text in dict.fromkeys(words.loose)
            ]
        found += [
            ("megatron_lm.the-file-alone-does", decision, "taken") for decision in launch.decisions
        ]
        found += [("command_lines.file", note, None) for note in launch.notes]
        for name, default in launch.defaulted.items():
            found.append(("megatron_lm.the-environment-or-the-command", f"${name}", default))
        for name, variable in launch.environment.items():
            if bears_on_precision(name.lower()):
                row = (
                    "megatron_lm.only-the-run-decides"
                    if variable.is_unknown
                    else "command_lines.variable"
                )
                found.append((row, name, variable))
        return tuple(lost(*record) for record in found)


def lost(row: str, name: str, value: object, **facts: object) -> Unmapped:
    """Return the record of a row, "SYSTEM.SENTENCE"."""
    return Unmapped(name, value, *record_named(row, **facts))


def read(launch: Launch, chosen: str | None = None) -> CommandLine | None:
    """Return what a launch says to the system `chosen`, or to the first that knows it; None for Megatron-LM's."""
    line, is_forced = Line(launch), chosen is not None
    framework = None if is_forced else frameworks.of_launch(launch)
    unread = None
    if framework is not None and framework.table:
        return None
    if framework is not None and not framework.is_converted:
        unread = CommandLine(
            evidence=framework.evidence, framework=framework, elsewhere=framework.name
        )
        if not framework.yields:
            return unread
    if MEGATRON_ARGUMENTS & launch.flags and not is_forced:
        return None
    if FAIRSEQ.search(launch.program) and not is_forced:
        return CommandLine(evidence="starts fairseq", elsewhere="options of fairseq")
    for name, reader in READERS.items():
        found = reader(line, is_forced) if chosen in (None, name) else None
        if found is not None:
            return replace(found, system=name)
    if is_forced or unread is not None:
        return unread
    return _deepspeed_file(line)


def left_out(launch: Launch, line: CommandLine | None) -> list[Unmapped]:
    """Return the record of a launch that is not read: its precision lies in a file, or no system's words are in it."""
    if line is not None and line.framework is not None:
        facts = {
            "framework": line.framework.name,
            "evidence": line.evidence,
            "runs": line.framework.runs,
        }
        return [lost("command_lines.framework", launch.label, line.framework.name, **facts)]
    if line is not None:
        facts = {"evidence": line.evidence, "elsewhere": line.elsewhere}
        return [lost("command_lines.elsewhere", launch.label, line.elsewhere, **facts)]
    if not launch.line:
        started = (
            [lost("command_lines.nothing-started", launch.label, None)] if launch.decisions else []
        )
        return [*started, *(lost("command_lines.file", note, None) for note in launch.notes)]
    about = [
        word
        for word in launch.arguments
        if bears_on_precision(word.partition("=")[0])
        or (word.is_unknown and HOLDS_ARGUMENTS.search(word))
    ]
    return [lost("command_lines.unknown-program", launch.label, " ".join(about))] if about else []


def _megatron_bridge(line: Line, forced: bool) -> CommandLine | None:
    own = {
        key: value
        for key, value in line.words.overrides.items()
        if key.split(".")[0] == "mixed_precision"
    }
    recipe = _recipe_of_bridge(line)
    if not (own or forced or recipe):
        return None
    evidence = _evidence([*own], "an override of Megatron Bridge's")
    if recipe:
        evidence = f"starts `{line.launch.name}` of Megatron Bridge"
    if recipe and "mixed_precision" in own:
        evidence += f" with an override of `mixed_precision`, and {recipe} decides the rest"
    unread = line.unread(read=(*own, "mixed_precision"))
    name = own.pop("mixed_precision", None)
    payload = nested(own)
    context = {"base": recipe or f"the recipe that {line.launch.name} loads"}
    if name is not None:
        fields = {**REGISTRY.get(name).to_dict(), **payload["mixed_precision"]} if own else name
        payload, context = {"mixed_precision": fields}, {}
    return CommandLine(evidence=evidence, payload=payload, context=context, unread=unread)


def _recipe_of_bridge(line: Line) -> str:
    """Return the recipe that a launch of Megatron Bridge's own program names, as a noun; empty for other programs."""
    found = frameworks.of_launch(line.launch)
    if found is None or found.name != BRIDGE:
        return ""
    for option, noun in (("recipe", "the recipe"), ("model", "the recipe of the model")):
        name = line.words.options.get(option) or line.words.undecided.get(option)
        if isinstance(name, str):
            return f"{noun} {name}"
    return f"the recipe that {line.launch.name} loads"


def _nemo1(line: Line, forced: bool) -> CommandLine | None:
    overrides, file = line.words.overrides, line.words.options.get("config_name")
    own = [key for key in overrides if NEMO.match(key)]
    if not own and any(key.startswith(OF_NEMOS_TRAINER) for key in overrides):
        own = [key for key in overrides if key.startswith(SHARED_WITH_BRIDGE)]
    if not own and not forced:
        return None
    where = f"{file.removesuffix('.yaml')}.yaml" if isinstance(file, str) else "the program's file"
    stated = [key for key in overrides if key.endswith("precision")]
    evidence = _evidence([*stated, *own], "an override of NeMo's")
    return CommandLine(
        evidence=evidence, elsewhere=f"the configuration composed of {where} and the overrides"
    )


def _huggingface(line: Line, forced: bool) -> CommandLine | None:
    words, launcher = line.words, line.launcher.options
    if not (forced or _is_trainers(line)):
        return None
    payload = arguments_of(words)
    chosen = _swift_switch(line, payload)
    if chosen is not None:
        payload[chosen] = True
    if (
        payload.get("mixed_precision") in PRECISIONS
        and not {"bf16", "fp16"} & payload.keys()
        and not forced
    ):
        return None  # no argument of the Trainer's: the program hands it to its own Accelerator
    switched = any(payload.get(name) for name in ("bf16", "fp16"))
    said = launcher.get("mixed_precision")
    environment = said.lower() if isinstance(said, str) else None
    has_file = environment is None and isinstance(launcher.get("config_file"), str)
    if not switched and (environment == "fp8" or has_file):
        return None  # Accelerate decides
    launched = {name: True for name in ("use_fsdp", "use_deepspeed") if launcher.get(name) is True}
    payload |= {"accelerate_launch_args": launched} if launched else {}
    found = sorted(TRAINER & payload.keys(), key=lambda name: (name != BATCH, name))
    program = ROWS["trainers"].get(
        line.launch.name, f"{line.launch.name}, which reads these arguments,"
    )
    unread = line.unread(files=("deepspeed_config", "config_file"))
    if chosen is not None:
        unread = (
            lost(
                "command_lines.swift-switch", "--torch_dtype", payload["torch_dtype"], switch=chosen
            ),
            *unread,
        )
    return CommandLine(
        evidence=_evidence(
            [words.written.get(name, name) for name in found],
            "an argument of transformers' Trainer",
        ),
        payload=payload,
        context={
            "program": program if line.launch.line else None,
            "accelerate_mixed_precision": environment,
        },
        unread=unread,
    )


def _is_trainers(line: Line) -> bool:
    """Return whether options are those of transformers' Trainer."""
    options = line.words.options.keys()
    given = options | line.words.undecided.keys()
    if BATCH in given or (len(TRAINER & given) > 1 and TRAINING & given):
        return True
    names = ({"bf16", "fp16"}, {"output_dir", "model_name_or_path"})
    return line.is_accelerated and all(some & options for some in names)


def _swift_switch(line: Line, payload: Mapping[str, Any]) -> str | None:
    """Return the switch that ms-swift turns on for its dtype where none is written."""
    is_swift = line.launch.name == "swift" or "swift/cli/" in line.launch.program
    if not is_swift or {"bf16", "fp16"} & (line.words.options.keys() | line.words.undecided.keys()):
        return None
    switches: dict[str, str] = ROWS["swift"]
    return switches.get(str(payload.get("torch_dtype")))


def _deepspeed_file(line: Line) -> CommandLine | None:
    options = line.words.options
    for name in ("deepspeed_config", "deepspeed"):
        if isinstance(options.get(name), str):
            evidence = f"has `{line.words.written[name]}`, an option of DeepSpeed's"
            return CommandLine(system="deepspeed", evidence=evidence, elsewhere=str(options[name]))
    return None


def _evidence(names: list[str], what: str) -> str:
    return (
        f"has `{names[0]}`, {what}"
        if names
        else f"was named with --from as {what.partition(' of ')[2]}"
    )


READERS: Mapping[str, Callable[[Line, bool], CommandLine | None]] = {
    "megatron-bridge": _megatron_bridge,
    "nemo1": _nemo1,
    "huggingface": _huggingface,
}
"""System -> what reads its command lines, in the order they are asked."""

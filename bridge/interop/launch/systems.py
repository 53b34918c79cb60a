"""Command lines that are not Megatron-LM's: which system each was written for, and what it says in that system's words.

A launch script holds programs of several systems, so that each of its launches is recognised by itself. What a line
says is handed to the system's own `import_`; what it leaves to another file is named, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bridge.interop.contract import Unmapped
from bridge.interop.launch.files import settings_of
from bridge.interop.launch.launches import MEGATRON_ARGUMENTS, MODES, holds_arguments
from bridge.interop.launch.values import is_unknown
from bridge.interop.launch.words import CommandWords, nested, typed
from bridge.interop.megatron_deepspeed import is_read
from bridge.interop.megatron_lm.arguments import PROGRAMS
from bridge.interop.megatron_lm.effects import DEFAULT_TAKEN, LATE, SAY_IT
from bridge.interop.megatron_lm.flags import bears_on_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from bridge.interop.launch.launches import Launch

__all__ = ["READERS", "CommandLine", "helper", "is_megatron", "left_out", "may_be_a_helper", "read"]

NEMO = (
    "exp_manager.",
    "model.megatron_",
    "model.tensor_model_parallel_size",
    "model.micro_batch_size",
    "model.data.",
    "model.transformer_engine",
    "model.fp8",
    "model.encoder_seq_length",
    "model.peft.",
    "model.optim.",
)
OWNERS = ("model", "optimizer", "ddp")
COMPUTE_DTYPES = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""`--compute_dtype` of Megatron Bridge's performance scripts -> the recipe whose mode and scheme it means.

Source: Megatron Bridge scripts/performance/utils/precision.py.
"""
SCHEME = ("bf16", "params_dtype", "fp8", "fp8_recipe", "fp4", "fp4_recipe")
PRECISIONS = ("no", "fp16", "bf16", "fp8")
TORCHTITAN = ("training.mixed_precision_param", "training.mixed_precision_reduce", "training.dtype", "model.converters")
TORCHTITAN_BLOCKS = ("quantize.", "float8.", "mx.")
TOOLS = re.compile(r"(?:^|[/._])(?:convert|export|preprocess|prepare|download|merge|tokenize)(?:_\w+)*(?:\.py)?$")
"""Names of programs that make data or checkpoints for a training."""
FAIRSEQ = re.compile(r"(?:^|/)(?:fairseq[-_]\w[\w-]*)(?:$|[./])")
TAKES_A_FILE = frozenset({"axolotl", "llamafactory-cli", "llamafactory"})
TRAINER = {
    "per_device_train_batch_size": True,
    "per_device_eval_batch_size": False,
    "num_train_epochs": True,
    "gradient_accumulation_steps": True,
    "model_name_or_path": False,
    "output_dir": False,
    "do_train": True,
    "lr_scheduler_type": True,
    "gradient_checkpointing": True,
    "warmup_ratio": True,
    "save_strategy": False,
}
"""Options of scripts that parse transformers' `TrainingArguments`, and whether only a program that trains has one."""
TRAINERS = {"swift": "ms-swift, which chooses by torch_dtype,", "trl": "TRL, which turns bf16 on,"}
"""Programs whose own default is known -> what decides where no switch is written."""
TRAINING = {"max_steps", "learning_rate", "bf16", "fp16", *(name for name, trains in TRAINER.items() if trains)}
"""Options without which a program that takes two of the others need not train: one that converts a model, say."""
FILES = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "config_file", "job.config_file", "config")
"""Options that name a file which can set the precision."""
NOT_READ = "it is not read, and may set the precision too"
BY_ITSELF = "Convert it by itself."
BRANCH = "the file alone does not decide this branch; the precision read here is that of the way named"


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What one launch says in the words of the system that reads it."""

    system: str
    evidence: str
    """Why it is taken for that system's, as a clause."""
    payload: object = None
    context: Mapping[str, object] = field(default_factory=dict)
    """What the line says of the things that a file of the system cannot say."""
    unread: tuple[Unmapped, ...] = ()
    """What the line leaves open, and the files it names."""
    elsewhere: str = ""
    """The file, or the system, that decides; there is no payload then."""
    is_foreign: bool = False
    """No system here reads it at all, whatever file it names."""
    said_by: str = "flags"
    """What decides: "flags" of the program, those of the "launcher", or "variables" that the script exports."""


class Line:
    """A launch with its words sorted."""

    def __init__(self, launch: Launch, context: Mapping[str, object]) -> None:
        self.launch, self.context = launch, context
        shown = launch.unknowns.shown
        self.words = CommandWords(launch.arguments, shown)
        names = [word if word == "accelerate.commands.launch" else PurePosixPath(word).name for word in launch.runner]
        places = [at for at, name in enumerate(names) if name in ("accelerate", "accelerate.commands.launch")]
        self.accelerate = CommandWords(launch.runner[places[0] + 1 :], shown) if places else None
        self.fabric = CommandWords(launch.runner, shown) if "fabric" in launch.runner[:2] else None

    def is_trainer(self, *, forced: bool = False) -> bool:
        """Return whether the program takes transformers' arguments."""
        given = self.words.options.keys() | self.words.undecided.keys()
        return (
            forced
            or (len(TRAINER.keys() & given) > 1 and bool(TRAINING & given))
            or "per_device_train_batch_size" in given
        )

    def unread(
        self, used: Collection[str] = (), *, read: Collection[str] | None = None, files: tuple[str, ...] = FILES
    ) -> tuple[Unmapped, ...]:
        """Return the records of what the line leaves open.

        Args:
            used: Variables of the environment that were read.
            read: The program's options and overrides that were read; None: all of them.
            files: Options that name a file which was not read.
        """
        launch, found = self.launch, []
        for name, value in {**self.words.options, **self.words.overrides}.items() if read is not None else ():
            if name not in (*(read or ()), *files) and bears_on_precision(name) and value not in (False, "False"):
                detail = "an option of the program that this bridge does not read"
                where = self.words.written.get(name, name)
                found.append(lost(where, value, detail, "Look it up where the program is from."))
        for words in filter(None, (self.words, self.accelerate, self.fabric)):
            found += [
                lost(words.written[name], words.options[name], NOT_READ, BY_ITSELF)
                for name in files
                if isinstance(words.options.get(name), str)
            ]
            found += [
                lost(words.written.get(name, name), late, LATE, SAY_IT)
                for name, late in words.undecided.items()
                if bears_on_precision(name) or name in (*FILES, *words.overrides)
            ]
            loose = dict.fromkeys(words.loose)
            found += [lost(text, None, f"it may hold further options; {LATE}", SAY_IT) for text in loose]
        found += [lost(decision, "taken", BRANCH, SAY_IT) for decision in launch.decisions]
        found += [*launch.unmapped, *(lost(note, None, NOT_READ, BY_ITSELF) for note in launch.notes)]
        found += [
            lost(f"${name}", value, DEFAULT_TAKEN, SAY_IT, "implied default")
            for name, value in launch.defaulted.items()
        ]
        for name, value in launch.environment.items():
            if name == "CONFIG_FILE" and name not in used:
                found.append(lost(name, value, NOT_READ, BY_ITSELF))
            elif name in launch.late and bears_on_precision(name.lower()):
                found.append(lost(name, value, LATE, SAY_IT))
            elif name not in used and bears_on_precision(name.lower()):
                detail = "a variable of the environment, not part of a recipe"
                found.append(lost(name, value, detail, "Export it for the new run as well."))
        return tuple(found)


def lost(name: str, value: object, detail: str, remedy: str, reason: str = "unsupported") -> Unmapped:
    """Return a record."""
    return Unmapped(field=name, value=value, reason=reason, detail=detail, remedy=remedy)


def read(launch: Launch, context: Mapping[str, object], chosen: str | None = None) -> CommandLine | None:
    """Return what a launch says, None where no system but Megatron-LM could be meant.

    Args:
        launch: The launch.
        context: What no file can say; the systems' own keys.
        chosen: The system that was asked for.
    """
    line = Line(launch, context)
    if chosen is not None:
        return READERS[chosen](line, True) if chosen in READERS else None
    if MEGATRON_ARGUMENTS & launch.flags:
        return None
    found = _foreign(line) or _trainer_file(line)
    for reader in READERS.values():
        found = found or reader(line, False)
    return found or _deepspeed_file(line)


def is_megatron(launch: Launch) -> bool:
    """Return whether a launch has flags that Megatron-LM's parser knows, or starts one of its programs.

    One flag that others have too says nothing; `--bf16` and `--fp16` without a value are as Megatron-LM takes them.
    """
    if PROGRAMS.search(launch.program) or "Megatron-LM" in launch.program:
        return True
    own = len(MEGATRON_ARGUMENTS & launch.flags)
    return own > 1 or _has_switch(launch) or (not launch.line and own > 0)


def may_be_a_helper(launch: Launch) -> bool:
    """Return whether nothing but a mode makes a launch Megatron-LM's: one that checks or converts, say."""
    is_known = PROGRAMS.search(launch.program) or "Megatron-LM" in launch.program or MEGATRON_ARGUMENTS & launch.flags
    return is_megatron(launch) and not is_known


def _has_switch(launch: Launch) -> bool:
    """Return whether a launch has a mode without the value that other programs take."""
    words = zip(launch.arguments, (*launch.arguments[1:], ""), strict=False)
    return any(word in MODES and value.lower() not in ("true", "false") for word, value in words)


def helper(launch: Launch) -> Unmapped:
    """Return the record of a launch that is no training next to a trainer that takes its precision from elsewhere."""
    detail = "nothing but its precision is known of it, and another launch of the script starts a known trainer"
    return lost(launch.label, None, detail, "Check it by hand.")


def left_out(launch: Launch, line: CommandLine | None) -> list[Unmapped]:
    """Return the record of a launch that is not read: its precision lies in a file, or no system's words are in it."""
    if line is not None and line.is_foreign:
        return [lost(launch.label, line.elsewhere, f"it {line.evidence}", "Check it by hand.")]
    if line is not None:
        detail = f"it {line.evidence}, and takes its precision from {line.elsewhere}, which is not read"
        return [lost(launch.label, line.elsewhere, detail, BY_ITSELF)]
    if not launch.line:
        detail = "on this way nothing is started, and none of the variables holds arguments that are read here"
        return [lost(launch.label, None, detail, SAY_IT)] if launch.decisions else []
    shown = [(word, launch.unknowns.shown(word)) for word in launch.arguments]
    about = [
        text
        for word, text in shown
        if bears_on_precision(word.partition("=")[0]) or (is_unknown(word) and holds_arguments(text))
    ]
    detail = "no system here knows the program's arguments"
    return [lost(launch.label, " ".join(about), detail, "Check it by hand.")] if about else []


def _megatron_bridge(line: Line, forced: bool) -> CommandLine | None:
    from bridge.registry.registry import REGISTRY

    own = {key: value for key, value in line.words.overrides.items() if key.split(".")[0] == "mixed_precision"}
    recipe = line.words.options.get("recipe", line.words.undecided.get("recipe"))
    named = isinstance(recipe, str)
    if named and not own and not forced and recipe not in REGISTRY:
        evidence = f"has `--recipe {recipe}`, as Megatron Bridge's scripts take it"
        return CommandLine(system="megatron-bridge", evidence=evidence, elsewhere=f"the recipe {recipe}")
    unread = {key: typed(value) for key, value in line.words.overrides.items() if key.split(".")[0] in OWNERS}
    if not (own or named) and not (forced and unread):
        return None
    evidence = "has the override `mixed_precision`, which Megatron Bridge's scripts and ours take"
    if named and not own:
        evidence = f"has `--recipe {recipe}`, as Megatron Bridge's scripts take it"
    name = own.pop("mixed_precision", recipe if named and recipe in REGISTRY else None)
    fields = nested({key: typed(value) for key, value in own.items()}).get("mixed_precision", {})
    context: dict[str, Any] = {}
    if name is not None and fields:
        fields = {**REGISTRY.get(str(name)).to_dict(), **fields}
    elif name is None:
        context["base"] = f"the recipe {recipe}" if named else f"the recipe that {line.launch.name} loads"
        compute = COMPUTE_DTYPES.get(str(line.words.options.get("compute_dtype")))
        scheme = REGISTRY.get(compute).to_dict() if compute is not None else {}
        fields = {key: value for key, value in scheme.items() if key in SCHEME} | fields
    payload: dict[str, Any] = {"mixed_precision": fields or name} if fields or name else {}
    payload |= nested(unread)
    read = (*own, "mixed_precision", "compute_dtype", *unread)
    return CommandLine(
        system="megatron-bridge", evidence=evidence, payload=payload, context=context, unread=line.unread(read=read)
    )


def _nemo1(line: Line, forced: bool) -> CommandLine | None:
    overrides = line.words.overrides
    own = [key for key in overrides if key.startswith(NEMO)]
    if not own and not forced:
        return None
    file = line.words.options.get("config_name")
    shown = f"{re.sub(r'[.]ya?ml$', '', file)}.yaml" if isinstance(file, str) else None
    where = shown or "the configuration file of the program"
    if not any(key.endswith("precision") for key in overrides) and "nemo_version" not in line.context:
        return CommandLine(system="nemo1", evidence=_evidence(own, "an override of NeMo's"), elsewhere=where)
    payload = nested({key: typed(value) for key, value in overrides.items()})
    unread = line.unread(read=overrides)
    detail = "the overrides go over this file, and what it says beyond them is not read"
    remedy = "Convert the composed configuration, or pass nemo_version for the defaults that NeMo ships."
    base = lost("--config-name" if shown else where, shown, detail, remedy)
    return CommandLine(
        system="nemo1",
        evidence=_evidence(own, "an override of NeMo's"),
        payload=payload,
        context={"base": where},
        unread=(base, *unread),
    )


def _lightning(line: Line, forced: bool) -> CommandLine | None:
    said: dict[str, Any] = {}
    own = []
    for group, start in ((line.words.overrides, "trainer."), (line.words.options, "trainer.")):
        for key, value in group.items():
            if key.startswith(start):
                said[key.removeprefix(start)] = typed(value)
                own.append(key)
    if line.fabric is not None:
        said |= {key: typed(value) for key, value in line.fabric.options.items() if key in ("precision", "strategy")}
        own += ["fabric run"]
    late = [name for name in ("trainer.precision",) if name in line.words.undecided]
    if not (forced or late or "precision" in said or "plugins" in said):
        return None
    evidence = _evidence([key for key in own if "precision" in key] or own or late, "an argument of Lightning's")
    return CommandLine(system="lightning", evidence=evidence, payload=nested(said), unread=line.unread(read=own))


def _torchtitan(line: Line, forced: bool) -> CommandLine | None:
    options = line.words.options
    own = [key for key in options if key in TORCHTITAN or key.startswith(TORCHTITAN_BLOCKS)]
    program = "torchtitan" in line.launch.program.lower() or PurePosixPath(line.launch.program).name == "run_train.sh"
    if not own and not program and not forced:
        return None
    evidence = _evidence(own, "an option of torchtitan's") if own else "starts torchtitan"
    file = next((str(options[name]) for name in ("job.config_file", "config_file") if name in options), "")
    file = file or line.launch.environment.get("CONFIG_FILE", "")
    if not own:
        return CommandLine(system="torchtitan", evidence=evidence, elsewhere=file or "its configuration")
    said = nested({key: typed(options[key]) for key in own})
    converters = said.get("model", {}).get("converters")
    if isinstance(converters, str):
        said["model"]["converters"] = [name for name in re.split(r"[,\s]+", converters) if name]
    return CommandLine(system="torchtitan", evidence=evidence, payload=said, unread=line.unread(read=own))


def _huggingface(line: Line, forced: bool) -> CommandLine | None:
    if not (line.is_trainer(forced=forced) or _is_switched(line)):
        return None
    from bridge.interop.huggingface import arguments

    payload = arguments(line.words.known)
    if payload.get("mixed_precision") in PRECISIONS and not {"bf16", "fp16"} & payload.keys() and not forced:
        return None  # no argument of the Trainer's: the program hands it to its own Accelerator
    found = sorted(TRAINER.keys() & payload.keys(), key=lambda name: (name != "per_device_train_batch_size", name))
    evidence = _evidence([line.words.written.get(name, name) for name in found], "an argument of transformers' Trainer")
    switched = any(payload.get(name) for name in ("bf16", "fp16"))
    environment, used = _environment(line)
    if environment == "fp8" and not switched:
        return None
    if not switched and environment is None and line.accelerate is not None:
        file = line.accelerate.options.get("config_file")
        if isinstance(file, str):
            return CommandLine(system="accelerate", evidence="starts with `accelerate launch`", elsewhere=file)
    program = TRAINERS.get(line.launch.name, f"{line.launch.name}, which reads these arguments,")
    context = {"program": program if line.launch.line else None, "accelerate_mixed_precision": environment}
    sharding = () if line.accelerate is None else ("use_fsdp", "use_deepspeed")
    launched = {name: True for name in sharding if line.accelerate and line.accelerate.options.get(name) is True}
    if launched:
        payload["accelerate_launch_args"] = launched
    unread = line.unread(used, files=("deepspeed_config", "config_file"))
    said_by = "flags" if switched or environment is None else "variables" if used else "launcher"
    return CommandLine(
        system="huggingface", evidence=evidence, payload=payload, context=context, unread=unread, said_by=said_by
    )


def _is_switched(line: Line) -> bool:
    """Return whether a program under `accelerate launch` has a switch of the Trainer's, and another argument of it."""
    given = line.words.options
    switched = "bf16" in given or "fp16" in given
    return line.accelerate is not None and switched and ("output_dir" in given or "model_name_or_path" in given)


def _environment(line: Line) -> tuple[str | None, set[str]]:
    """Return what accelerate's launcher or the script's variables say, and the variables that say it."""
    if line.accelerate is not None:
        said = line.accelerate.options.get("mixed_precision")
        if isinstance(said, str):
            return said.lower(), set()
    name = "ACCELERATE_MIXED_PRECISION"
    value = line.launch.environment.get(name)
    return (value, {name}) if value in PRECISIONS else (None, set())


def _accelerate(line: Line, forced: bool) -> CommandLine | None:
    launcher = line.accelerate
    options = {} if launcher is None else dict(launcher.options)
    evidence, said_by = "starts with `accelerate launch`", "launcher"
    late = launcher is not None and "mixed_precision" in launcher.undecided
    if "mixed_precision" not in options:
        own = line.words.options.get("mixed_precision")
        if own in PRECISIONS:
            options["mixed_precision"] = own
            evidence, said_by = f"has `--mixed_precision {own}`, which the Accelerator takes", "flags"
    given = line.launch.environment.items()
    variables = {key: value for key, value in given if key.startswith("ACCELERATE_") and key not in line.launch.late}
    if "ACCELERATE_MIXED_PRECISION" in line.launch.late and launcher is None and not options:
        where = line.launch.environment["ACCELERATE_MIXED_PRECISION"]
        return CommandLine(system="accelerate", evidence="exports `ACCELERATE_MIXED_PRECISION`", elsewhere=where)
    if "ACCELERATE_MIXED_PRECISION" in variables and launcher is None and "mixed_precision" not in options:
        evidence, said_by = "exports `ACCELERATE_MIXED_PRECISION`", "variables"
    elif "mixed_precision" not in options and not late:
        if launcher is None and not forced:
            return None
        file = options.get("config_file")
        where = file if isinstance(file, str) else "the file that `accelerate config` wrote"
        return CommandLine(system="accelerate", evidence=evidence, elsewhere=where)
    payload: dict[str, Any] = dict(variables)
    payload |= {
        name: options[name] for name in ("mixed_precision", "dynamo_backend", "downcast_bf16") if name in options
    }
    block = {key.removeprefix("fp8_"): typed(value) for key, value in options.items() if key.startswith("fp8_")}
    if block:
        if "format" in block:
            block["fp8_format"] = block.pop("format")
        payload["fp8_config"] = block
    if options.get("use_fsdp"):
        payload["distributed_type"] = "FSDP"
    if options.get("use_deepspeed"):
        payload["distributed_type"] = "DEEPSPEED"
        if "deepspeed_config_file" in options:
            payload["deepspeed_config"] = {"deepspeed_config_file": options["deepspeed_config_file"]}
    if options.get("use_megatron_lm"):
        payload["distributed_type"] = "MEGATRON_LM"
    unread = line.unread(variables, read=("mixed_precision",))
    return CommandLine(system="accelerate", evidence=evidence, payload=payload, unread=unread, said_by=said_by)


def _trainer_file(line: Line) -> CommandLine | None:
    """Return the line of a trainer that reads everything from the file it is given."""
    program = PurePosixPath(line.launch.program).name
    name = program.split(".")[0]
    named = [word for word in line.words.rest if re.search(r"\.(ya?ml|json)$", word)]
    if name not in TAKES_A_FILE or not named or (program == name and "train" not in line.words.rest):
        return None
    system = "axolotl" if name == "axolotl" else "huggingface"
    return CommandLine(system=system, evidence=f"starts `{name}`", elsewhere=named[0])


def _deepspeed_file(line: Line) -> CommandLine | None:
    """Return the line whose precision lies in the file for DeepSpeed that it names."""
    for option in ("deepspeed_config", "deepspeed"):
        file = line.words.options.get(option)
        if isinstance(file, str):
            evidence = f"has `{line.words.written[option]}`, an option of DeepSpeed's"
            return _written_by_the_script(line, file, evidence) or CommandLine(
                system="deepspeed", evidence=evidence, elsewhere=file
            )
    return None


def _written_by_the_script(line: Line, name: str, evidence: str) -> CommandLine | None:
    """Return the line whose file for DeepSpeed the script itself writes, None where it leaves some of it to the run."""
    file = line.launch.files.get(str(PurePosixPath(name)))
    found = settings_of(file, name) if file is not None else None
    if found is None or file is None or any(map(is_read, found[1])):
        return None
    unread = [loss for loss in line.unread(files=()) if loss.field != file.note]
    evidence = f"{evidence}, and the script writes that file on line {file.line}"
    return CommandLine(system="deepspeed", evidence=evidence, payload=found[0], unread=tuple(unread))


def _foreign(line: Line) -> CommandLine | None:
    """Return a line that no system here reads although its options look like those of one."""
    if FAIRSEQ.search(line.launch.program):
        evidence = "starts fairseq, whose options no system here reads"
        return CommandLine(system="pytorch", evidence=evidence, elsewhere="fairseq", is_foreign=True)
    if TOOLS.search(line.launch.program) and not any(bears_on_precision(word) for word in line.launch.arguments):
        evidence = "starts a tool by its name, and no training"
        return CommandLine(system="pytorch", evidence=evidence, elsewhere=line.launch.program, is_foreign=True)
    return None


def _evidence(names: list[str], what: str) -> str:
    return f"has `{names[0]}`, {what}" if names else f"was named with --from as {what.partition(' of ')[2]}"


READERS: Mapping[str, Callable[[Line, bool], CommandLine | None]] = MappingProxyType(
    {
        "megatron-bridge": _megatron_bridge,
        "nemo1": _nemo1,
        "huggingface": _huggingface,
        "accelerate": _accelerate,
        "torchtitan": _torchtitan,
        "lightning": _lightning,
    }
)
"""System -> what reads its command lines, in the order they are asked."""

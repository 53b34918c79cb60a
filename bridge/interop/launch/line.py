"""`Line`: one launch with its words sorted, and `CommandLine`: what it says in the words of its own system."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.interop.contract import Unmapped
from bridge.interop.launch.words import CommandWords
from bridge.interop.megatron_lm.effects import DEFAULT_TAKEN, LATE, SAY_IT
from bridge.interop.megatron_lm.flags import bears_on_precision

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from bridge.interop.launch.launches import Launch

__all__ = ["BY_ITSELF", "NOT_READ", "TRAINER", "CommandLine", "Line", "lost"]

TRAINER = frozenset(
    {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "num_train_epochs",
        "gradient_accumulation_steps",
        "model_name_or_path",
        "output_dir",
        "do_train",
        "lr_scheduler_type",
        "gradient_checkpointing",
        "warmup_ratio",
        "save_strategy",
        "dataset_name",
    }
)
"""Options of scripts that parse transformers' `TrainingArguments`; two of them give such a script away."""
TRAINING = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "do_train",
        "learning_rate",
        "lr_scheduler_type",
        "gradient_checkpointing",
        "warmup_ratio",
        "bf16",
        "fp16",
    }
)
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
    beside: tuple[Unmapped, ...] = ()
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
        self.module = launch.program
        place = next((at for at, word in enumerate(launch.runner) if PurePosixPath(word).name == "accelerate"), None)
        if place is None:
            modules = [at for at, word in enumerate(launch.runner) if word == "accelerate.commands.launch"]
            place = modules[0] if modules else None
        self.accelerate = None if place is None else CommandWords(launch.runner[place + 1 :], shown)
        self.fabric = CommandWords(launch.runner, shown) if "fabric" in launch.runner[:2] else None

    def is_trainer(self, *, forced: bool = False) -> bool:
        """Return whether the program takes transformers' arguments."""
        given = self.words.options.keys() | self.words.undecided.keys()
        return forced or (len(TRAINER & given) > 1 and bool(TRAINING & given)) or "per_device_train_batch_size" in given

    def beside(
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

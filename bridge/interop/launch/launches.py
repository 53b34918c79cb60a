"""`Launch`: one start of a Python program, and how a command line is recognised as one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.interop.launch.relevance import bears, is_variable, known, loose
from bridge.interop.launch.values import Unknowns, is_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bridge.interop.contract import Unmapped
    from bridge.interop.launch.files import WrittenFile

__all__ = [
    "COMMAND_WORDS",
    "MEGATRON_ARGUMENTS",
    "MODES",
    "QUIET",
    "SHELLS",
    "UNREADABLE",
    "Launch",
    "found_launch",
    "holds_arguments",
    "nested_script",
    "trainings",
]

COMMAND_WORDS = re.compile(r"\.py\b|\s-m\s|torchrun|deepspeed|torch\.distributed|--[a-z]|eval\s|python")
"""What a string must hold to be followed as a script of its own."""

QUIET = frozenset(
    re.findall(
        r"\S+",
        """
        echo printf cat rm cp mv mkdir rmdir ls cd ln chmod chown touch tee sed awk grep egrep find
        tar wget curl git pip pip3 conda apt apt-get yum module ml export set shift exit return test
        [ true false : sleep wait kill pkill trap ulimit date which type logger rsync scp aws gsutil
        pytest make cmake ninja docker-compose head tail sort wc diff pushd popd source alias
        unalias nvidia-smi ray squeue scancel sinfo hostname jq yq bc expr seq basename dirname
        realpath readlink getopts getopt let local declare typeset readonly unset
        envsubst tr cut uniq paste nl base64 gzip patch dd install less more column fold
        """,
    )
)
"""Programs that start no training, whatever their arguments look like."""
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
RAY = ["ray", "job", "submit"]
"""The command behind its `--` is started."""
RUNNERS = re.compile(r"(^|/)(python[\d.]*|torchrun|deepspeed|accelerate|bpython|pypy\d?|nsys|ncu|mpirun|mpiexec|srun)$")
UNREADABLE = "cannot be read here"
"""What the note of a line that the grammar does not know says of it."""
PYTHON = re.compile(r"(^|/)(python[\d.]*|pypy\d?)$")
STARTERS = re.compile(r"(^|/)(python[\d.]*|torchrun|deepspeed)$|^torch\.distributed\.(run|launch)$")
"""What starts the program that follows it, under any name."""
HOLDS_ARGUMENTS = re.compile(r"[$@*]@?\*?$|ARG|OPT|FLAG|PARAM|EXTRA|CONFIG|SETTING|[$]{?[@*]", re.IGNORECASE)
TRAINERS = frozenset({"axolotl", "llamafactory-cli", "fairseq-train", "fairseq-hydra-train"})
"""Programs that train and are started by a name of their own."""
SWIFT = frozenset({"sft", "pt", "rlhf"})
"""Commands of ms-swift's that train."""
VALUED = re.compile(r"--[^=]+")
PATH = re.compile(r"DIR|PATH|FILE|DATA|ROOT|HOME|URL|INPUT|OUTPUT|CKPT|CHECKPOINT|^\$\{?\d|^[^-]*/", re.IGNORECASE)
SCRIPT = re.compile(r"\.(?:sh|bash|slurm|sbatch|sub)$")
TORCHTITAN = re.compile(
    r"--(?:model|training|job|float8|mx|quantize|parallelism|compile|activation_checkpoint|checkpoint|optimizer)\..+"
)
MEGATRON_ARGUMENTS = frozenset(
    {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--micro-batch-size",
        "--global-batch-size",
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--seq-length",
        "--train-iters",
        "--train-samples",
        "--fp8-format",
        "--fp4-format",
        "--transformer-impl",
    }
)
"""Arguments by which a command line of Megatron-LM is known."""
MODES = frozenset({"--bf16", "--fp16"})
"""Switches in Megatron-LM, and followed by a value elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a training program."""

    line: int
    """Where in the script; 0 where the file only sets arguments."""
    program: str
    """The program, or the variables that hold the arguments."""
    arguments: tuple[str, ...]
    """What the program is given; unknown pieces are marked."""
    runner: tuple[str, ...] = ()
    """The words before the program: `accelerate launch --mixed_precision fp8`, `torchrun --nproc_per_node 8`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables the script sets for it."""
    late: frozenset[str] = frozenset()
    """Those of them whose values only the run decides."""
    decisions: tuple[str, ...] = ()
    """Branches that the file does not decide, and the way taken."""
    notes: tuple[str, ...] = ()
    """What was not read: a sourced file, a heredoc that is a configuration."""
    unread: str = ""
    """Where text that was not executed states a precision, as a noun."""
    unmapped: tuple[Unmapped, ...] = ()
    """What the shell itself drops or adds: flags behind a broken continuation, arguments from a pipe."""
    defaulted: Mapping[str, str] = field(default_factory=dict)
    """Variables that the environment may set, and whose default in the script decides about the precision."""
    files: Mapping[str, WrittenFile] = field(default_factory=dict)
    """Files that the script has written before."""
    names: tuple[str, ...] = ()
    """Programs that are started so, each on a way of its own; empty: this one alone."""
    place: int = 0
    """Which start it is among those on its line."""
    unknowns: Unknowns = field(default_factory=Unknowns, repr=False, compare=False)

    @property
    def at(self) -> tuple[int, int]:
        """Its line, and which start it is among those on that line."""
        return self.line, self.place

    @property
    def label(self) -> str:
        """Which run it is: "line 41, pretrain_gpt.py"."""
        if not self.line:
            where = f"arguments in {self.program}" if self.program else ""
            return "; ".join(filter(None, (where, *self.decisions)))
        name = " or ".join(self.names or (self.name,))
        return "; ".join((f"line {self.line}, {name}", *self.decisions))

    @cached_property
    def flags(self) -> frozenset[str]:
        """The arguments without values behind `=`."""
        return frozenset(word.partition("=")[0] for word in self.arguments)

    @cached_property
    def known(self) -> tuple[object, ...]:
        """All that bears on precision without words that only the run knows.

        That is words of the runner and the arguments, variables, and files of the script's own that arguments name.
        """
        variables = tuple(sorted((name, value) for name, value in self.environment.items() if is_variable(name)))
        named = {str(PurePosixPath(self.unknowns.shown(word.rpartition("=")[2]))) for word in self.arguments}
        files = tuple((name, file.precise) for name, file in self.files.items() if name in named)
        return known(self.runner), known(self.arguments), variables, files

    @cached_property
    def name(self) -> str:
        """The program without its folder where it is a Python file."""
        return PurePosixPath(self.program).name if self.program.endswith(".py") else self.program


def holds_arguments(text: str) -> bool:
    """Return whether an unknown word, as written, is named as if it held arguments: `$EXTRA_ARGS`, `$@`."""
    return HOLDS_ARGUMENTS.search(text) is not None


def trainings(found: Sequence[Launch], *, strict: bool = False) -> tuple[Launch, ...]:
    """Return the launches that may train something, first those of which it is certain.

    Where some have Megatron-LM's flags, those and launches that may set a precision are certain.

    Args:
        found: Launches in their order.
        strict: Leave out all others.
    """
    if not any(_has_flags(launch) for launch in found):
        return tuple(found)
    certain = [launch for launch in found if _has_flags(launch) or _may_set_precision(launch)]
    return (*certain, *(launch for launch in found if launch not in certain and not strict))


def _has_flags(launch: Launch) -> bool:
    lost = {word for loss in launch.unmapped for word in str(loss.value).split()}
    return bool((MEGATRON_ARGUMENTS | MODES) & (launch.flags | lost))


def _may_set_precision(launch: Launch) -> bool:
    """Return whether a launch has words that bear on precision, or unknown ones that may hold such."""
    shown = launch.unknowns.shown
    words = [
        word
        for word in (*known(launch.arguments), *loose(launch.arguments))
        if word.startswith(("--", "@")) or holds_arguments(shown(word)) or not PATH.search(shown(word))
    ]
    return bool(words) or any(map(bears, launch.runner))


def found_launch(words: list[str], environment: Mapping[str, str]) -> tuple[list[str], str, list[str]] | None:
    """Return runner, program and arguments where a command starts a training program, else None."""
    if not words or (words[0] in QUIET and words[:3] != RAY) or words[0].startswith("-"):
        return None
    if words[:3] == RAY and "--" in words:
        return found_launch(words[words.index("--") + 1 :], environment)
    is_run = any(RUNNERS.search(word) for word in words[:40])
    for place, word in enumerate(words):
        if word.startswith("-") and word != "-m":
            continue
        name = PurePosixPath(word).name
        own = name in TRAINERS or (name == "run_train.sh" and _is_torchtitan(words[place + 1 :], environment))
        own = own or (name == "swift" and bool(SWIFT & {*words[place + 1 : place + 2]}))
        is_value = not is_run and place > 1 and VALUED.fullmatch(words[place - 1]) and not is_unknown(words[0])
        if is_value and word.endswith(".py") and any(map(bears, words[1:])):
            return [], words[0], words[1:]
        if own or word.endswith(".py") or (word.endswith(".py'") and is_run):
            return words[:place], word, words[place + 1 :]
        if word == "-m" and is_run and place + 1 < len(words):
            module = words[place + 1]
            if not module.startswith(("torch.distributed", "accelerate.commands", "pip", "deepspeed.launcher")):
                return words[:place], module, words[place + 2 :]
    if (MEGATRON_ARGUMENTS | MODES) & set(words):
        first = next(place for place, word in enumerate(words) if word.startswith("--"))
        return [], next((word for word in words if SCRIPT.search(word)), words[0]), words[first:]
    return _unnamed(words)


def _is_torchtitan(arguments: list[str], environment: Mapping[str, str]) -> bool:
    """Return whether a script is torchtitan's own."""
    return environment.get("CONFIG_FILE", "").endswith(".toml") or any(map(TORCHTITAN.fullmatch, arguments))


def _unnamed(words: list[str]) -> tuple[list[str], str, list[str]] | None:
    """Return the parts of a command that starts a program whose name only the run knows, else None.

    Where nothing follows the unknown word, it may be program and arguments in one and counts as both.
    """
    start = max((place for place, word in enumerate(words) if STARTERS.search(word)), default=len(words))
    python = start < len(words) and PYTHON.search(words[start]) is not None
    for place in range(start + 1, len(words)):
        word, before = words[place], words[place - 1]
        if python and word in ("-c", "-m", "-"):
            return None
        if not word.startswith("-") and (python or place - 1 == start or not before.startswith("-")):
            return (words[:place], word, words[place + 1 :] or words[place:]) if is_unknown(word) else None
    return None


def nested_script(words: list[str]) -> str | None:
    """Return the script that a command hands to a shell as one word: `bash -c "..."`, `srun ... "..."`."""
    if not words or words[0] in QUIET:
        return None
    shell = next((place for place, word in enumerate(words) if PurePosixPath(word).name in SHELLS), len(words))
    for place in range(shell + 1, len(words) - 1):
        if re.fullmatch(r"-\w*c", words[place]):
            return words[place + 1]
        if not words[place].startswith("-"):
            break
    if any(word.endswith(".py") or PYTHON.search(word) for word in words):
        return None
    strings = [word for word in words if re.search(r"\s", word.strip()) and re.search(r"\.py\b|\s-m\s|--[a-z]", word)]
    return strings[0] if len(strings) == 1 and len(strings[0]) > 20 else None

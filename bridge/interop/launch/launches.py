"""`Launch`: one start of a Python program, and how a command line is recognised as one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.interop.launch.relevance import bearing, known, relevant
from bridge.interop.launch.values import Unknowns, is_unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.interop.contract import Unmapped
    from bridge.interop.launch.files import WrittenFile

__all__ = [
    "COMMAND_WORDS",
    "MEGATRON_FLAGS",
    "PYTHON",
    "QUIET",
    "RUNNERS",
    "SHELLS",
    "Launch",
    "found_launch",
    "holds_arguments",
    "nested_script",
    "started_script",
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
RUNNERS = re.compile(r"(^|/)(python[\d.]*|torchrun|deepspeed|accelerate|bpython|pypy\d?|nsys|ncu|mpirun|mpiexec|srun)$")
PYTHON = re.compile(r"(^|/)(python[\d.]*|pypy\d?)$")
STARTERS = re.compile(r"(^|/)(python[\d.]*|torchrun|deepspeed)$|^torch\.distributed\.(run|launch)$")
"""What starts the program that follows it, under any name."""
HOLDS_ARGUMENTS = re.compile(r"[$@*]@?\*?$|ARG|OPT|FLAG|PARAM|EXTRA|CONFIG|SETTING|[$]{?[@*]", re.IGNORECASE)
TRAINERS = frozenset({"axolotl", "llamafactory-cli", "fairseq-train", "fairseq-hydra-train"})
"""Programs that train and are started by a name of their own."""
SCRIPT = re.compile(r"\.(?:sh|bash|slurm|sbatch|sub)$")
TORCHTITAN = re.compile(
    r"--(?:model|training|job|float8|mx|quantize|parallelism|compile|activation_checkpoint|checkpoint|optimizer)\..+"
)
MEGATRON_FLAGS = frozenset(
    {
        "--num-layers",
        "--hidden-size",
        "--micro-batch-size",
        "--global-batch-size",
        "--seq-length",
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--num-attention-heads",
        "--bf16",
        "--fp16",
        "--fp8-format",
        "--fp4-format",
        "--train-iters",
        "--train-samples",
    }
)


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
    unmapped: tuple[Unmapped, ...] = ()
    """What the shell itself drops or adds: flags behind a broken continuation, arguments from a pipe."""
    defaulted: Mapping[str, str] = field(default_factory=dict)
    """Variables that the environment may set, and whose default in the script decides about the precision."""
    files: Mapping[str, WrittenFile] = field(default_factory=dict)
    """Files that the script has written before."""
    lines: tuple[int, ...] = ()
    """Lines that start the same, each on a way of its own; empty: this one alone."""
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
        where = f"line {' or '.join(map(str, self.lines or (self.line,)))}, {name}"
        return "; ".join((where, *self.decisions))

    @cached_property
    def relevant(self) -> tuple[object, ...]:
        """What of runner, arguments, environment and files bears on precision, or may once the run is known."""
        return relevant(self.runner), relevant(self.arguments), *self._beside

    @cached_property
    def known(self) -> tuple[object, ...]:
        """The same without words that only the run knows."""
        return known(self.runner), known(self.arguments), *self._beside

    @cached_property
    def _beside(self) -> tuple[object, ...]:
        """Variables that bear on precision, and the files of the script's own that the arguments name."""
        variables = tuple(sorted(bearing(self.environment.items()).items()))
        if not self.files:
            return variables, ()
        named = {str(PurePosixPath(self.unknowns.shown(word.rpartition("=")[2]))) for word in self.arguments}
        return variables, tuple((name, file.precise) for name, file in self.files.items() if name in named)

    @property
    def starts_script(self) -> bool:
        """Whether the program is another shell script."""
        return SCRIPT.search(self.program) is not None

    @cached_property
    def name(self) -> str:
        """The program without its folder where it is a Python file."""
        return PurePosixPath(self.program).name if self.program.endswith(".py") else self.program


def holds_arguments(text: str) -> bool:
    """Return whether an unknown word, as written, is named as if it held arguments: `$EXTRA_ARGS`, `$@`."""
    return HOLDS_ARGUMENTS.search(text) is not None


def found_launch(words: list[str]) -> tuple[list[str], str, list[str]] | None:
    """Return runner, program and arguments where a command starts a Python program, else None."""
    if not words or words[0] in QUIET or words[0].startswith("-"):
        return None
    known = any(RUNNERS.search(word) for word in words[:40])
    for place, word in enumerate(words):
        if _is_code(words, place):
            break
        if word.startswith("-") and word != "-m":
            continue
        if PurePosixPath(word).name in TRAINERS:
            return words[:place], word, words[place + 1 :]
        if word.endswith(".py") or (word.endswith(".py'") and known):
            return words[:place], word, words[place + 1 :]
        if word == "-m" and known and place + 1 < len(words):
            module = words[place + 1]
            if not module.startswith(("torch.distributed", "accelerate.commands", "pip", "deepspeed.launcher")):
                return words[:place], module, words[place + 2 :]
    if MEGATRON_FLAGS & set(words):
        first = next((place for place, word in enumerate(words) if word.startswith("--")), 0)
        return [], words[0], words[first:]
    return _unnamed(words)


def _unnamed(words: list[str]) -> tuple[list[str], str, list[str]] | None:
    """Return the parts of a command that starts a program whose name only the run knows, else None.

    Where nothing follows the unknown word, it may be program and arguments in one and counts as both.
    """
    start = next((place for place in range(len(words) - 1, -1, -1) if STARTERS.search(words[place])), len(words))
    for place in range(start + 1, len(words)):
        word, before = words[place], words[place - 1]
        if PYTHON.search(words[start]) and word in ("-c", "-m", "-"):
            return None
        is_value = before.startswith("-") and place - 1 > start and not PYTHON.search(words[start])
        if not word.startswith("-") and not is_value:
            rest = words[place + 1 :] or words[place:]
            return (words[:place], word, rest) if is_unknown(word) else None
    return None


def _is_code(words: list[str], place: int) -> bool:
    """Return whether the word is the program that `python -c` is given."""
    if place < 2 or words[place - 1] != "-c":
        return False
    before = next((word for word in reversed(words[: place - 1]) if not word.startswith("-")), "")
    return PYTHON.search(before) is not None


def started_script(words: list[str], environment: Mapping[str, str]) -> tuple[list[str], str, list[str], bool] | None:
    """Return runner, program and arguments where a command starts another shell script, else None.

    The last item says whether that is known to train something: torchtitan's own `run_train.sh`.
    """
    if not words or words[0] in QUIET or words[0].startswith("-"):
        return None
    place = next((at for at, word in enumerate(words) if SCRIPT.search(word) and not word.startswith("-")), None)
    if place is None:
        return None
    program, arguments = words[place], words[place + 1 :]
    file = environment.get("CONFIG_FILE", "")
    own = file.endswith(".toml") or any(TORCHTITAN.fullmatch(word) for word in arguments)
    return words[:place], program, arguments, own and PurePosixPath(program).name == "run_train.sh"


def nested_script(words: list[str]) -> str | None:
    """Return the script that a command hands to a shell as one word: `bash -c "..."`, `srun ... "..."`."""
    if not words or words[0] in QUIET:
        return None
    for place, word in enumerate(words):
        if PurePosixPath(word).name in SHELLS and place + 1 < len(words):
            for rest, option in enumerate(words[place + 1 : place + 4], place + 1):
                if re.fullmatch(r"-\w*c", option) and rest + 1 < len(words):
                    return words[rest + 1]
                if not option.startswith("-"):
                    break
    if any(word.endswith(".py") or _is_code(words, place) for place, word in enumerate(words)):
        return None
    strings = [word for word in words if re.search(r"\s", word.strip()) and re.search(r"\.py\b|\s-m\s|--[a-z]", word)]
    return strings[0] if len(strings) == 1 and len(strings[0]) > 20 else None

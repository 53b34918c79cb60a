"""Arguments of Megatron-LM as settings: a list of words, a namespace, or the argument files its users write."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from bridge.errors import PayloadError
from bridge.precision.values import NO, YES
from bridge.read import frameworks
from bridge.read.framework.table import FrameworkTable, framework_table
from bridge.read.launch.launches import (
    HOLDS_ARGUMENTS,
    MEGATRON_ARGUMENTS,
    STRAY,
    UNREADABLE,
    Launch,
    before_the_dashes,
)
from bridge.read.launch.script import MODES
from bridge.read.launch.word import UNKNOWN, Word, joined, variable_of
from bridge.read.megatron_lm import flags

PROGRAMS = re.compile(
    r"(?:^|/)(?:pretrain_(?:gpt\d?|bert|t5|mamba|vlm|ict|retro|hybrid|multimodal|vision_\w+)|train_rl)(?:\.py)?$"
)
"""Megatron-LM's own programs, whose default is FP32. Source: Megatron-LM 0.1 to 0.20."""
GROUP = re.compile(r"(?:[A-Z0-9]+_)*ARGS")
RUN = re.compile(r"MODEL_ARGS(?:_\d+)?")
"""Groups that Megatron-LM's own tests start, one run each; other groups of such a file are none."""
TRUTH = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
"""Meaning of a word directly behind a switch; Megatron-LM's parser takes none there."""
FLAGSCALE = ("system", "model", "data")
"""Blocks of FlagScale's files: each key within one is an argument. Source: its runner_train.py, 2026-08."""
TAKES_A_LIST = re.compile(r"data_path|paths|_blend|split")
NUMBERS = re.compile(r"\$\(seq [^()]*\)")
"""The output of a command that prints numbers alone."""
POSITIONAL = re.compile(r"\$\{?(?:\d+|[@*].*)\}?")


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it is written."""

    name: str
    """With its dashes on a command line; empty for what stands there before the first option."""
    value: Any = None
    """Behind `=`, or in a mapping."""
    following: Sequence[Word] = ()
    """The words up to the next option."""
    is_key: bool = False
    """It is a key of a mapping, whose value stands in it."""


def options_of(words: Sequence[Word]) -> Iterator[Option]:
    """Yield the options of a command line."""
    words = before_the_dashes(words)
    places = [place for place, word in enumerate(words) if word.startswith("--") and len(word) > 2]
    if words and places[:1] != [0]:
        yield Option("", following=words[: places[0] if places else len(words)])
    for place, end in zip(places, (*places[1:], len(words)), strict=False):
        yield Option(*words[place].option(), words[place + 1 : end])


@dataclass(slots=True)
class Written:
    """One setting as it was written."""

    name: str
    value: Any
    """True for a flag without a value, None where only the run decides it."""
    text: str = ""
    """The value as it is written, where only the run decides it."""
    refused: str | None = None
    """The word behind a switch, which takes no value."""

    @property
    def shown(self) -> object:
        """The value, or its text."""
        return self.text if self.value is None else self.value


@dataclass
class Arguments:
    """The arguments of one run."""

    options: list[Option] = field(default_factory=list)
    """All options as they are written, also those that bear on no precision."""
    settings: dict[str, Written] = field(default_factory=dict)
    """By destination; the last one written wins, as in argparse."""
    undecided: list[str] = field(default_factory=list)
    """Words that only the run decides and that may hold further flags."""
    launch: Launch = field(default_factory=lambda: Launch(line=1, program="", arguments=()))
    """The command that they belong to; at line 0 where a file only sets arguments, for others to use."""
    label: str = ""
    path: str = ""
    """Path of the script that starts them; empty for other arguments."""
    read_too: tuple[str, ...] = ()
    """Other files that were read for them, as sentences."""
    has_end: bool | None = None
    """Of arguments that a run printed, every one with its default: whether the block is whole; None: of others."""
    used_by: str = ""
    """Another source of arguments."""
    framework: FrameworkTable | None = None
    """The framework whose program takes them, next to its own; None: Megatron-LM's program, or an unknown one."""
    decided_by: str = ""
    """The source of the mode where the arguments state none, as a noun; empty: the program's own default."""

    def add(self, written: Written) -> None:
        """Add a setting, over an earlier one."""
        key = flags.dest(written.name)
        self.settings[flags.dest(flags.BY_NAME[key].option) if key in flags.BY_NAME else key] = (
            written
        )

    @property
    def is_known(self) -> bool:
        """Whether the program that takes them is known: Megatron-LM's own, or a framework's with a table."""
        return self.framework is not None or PROGRAMS.search(self.launch.program) is not None

    @property
    def elsewhere(self) -> list[str]:
        """Other sources that may set the precision and are not read."""
        files = [
            f"{one.name} {one.shown}" for key, one in self.settings.items() if key in flags.FILES
        ]
        return list(dict.fromkeys((*self.undecided, *files, *filter(None, [self.used_by]))))

    def __contains__(self, key: str) -> bool:
        return key in self.settings and self.settings[key].value not in (False, None)


def runs_of(payload: object) -> list[Arguments]:
    """Return the runs of a payload: a list of arguments, a mapping of any of Megatron-LM's argument files, launches."""
    if isinstance(payload, Mapping):
        return _of_mapping(payload)
    if (
        isinstance(payload, Sequence)
        and all(isinstance(item, Launch) for item in payload)
        and payload
    ):
        own = [item for item in payload if item.flags & (MEGATRON_ARGUMENTS | MODES)]
        return [_of_launch(item) for item in own or payload]
    if isinstance(payload, Sequence) and all(
        isinstance(item, str | int | float) for item in payload
    ):
        return [_of_words([Word(str(item)) for item in payload])]
    rule = "must be arguments, a mapping of them, or a launch script"
    raise PayloadError(
        f"megatron-lm: {rule}, got a {type(payload).__name__}. Give the contents of the file."
    )


def _of_launch(launch: Launch) -> Arguments:
    found = _of_words(launch.arguments)
    found.launch, found.label = launch, launch.label
    framework = frameworks.of_launch(launch)
    if framework is not None and framework.table:
        found.framework = framework_table(framework.table)
    if launch.line:
        found.decided_by = _decider(found)
    else:
        found.used_by = found.decided_by = "the script that uses these arguments"
    return found


def _decider(run: Arguments) -> str:
    """Return what decides the mode of a started run without `--bf16` and `--fp16`, as a noun.

    Empty where this is the whole command of one of Megatron-LM's own programs, so that its default decides.
    """
    notes, program = run.launch.notes, run.launch.program
    own = ""
    if not run.is_known:
        own = f"{program.rpartition('/')[2]}, a program whose defaults are not known here,"
    sourced = (note.removeprefix("source ") for note in notes if note.startswith("source "))
    deciders = [
        run.launch.unread,
        *(note for note in notes if note.endswith(STRAY)),
        own,
        *(f"{file}, which the script sources," for file in sourced),
        *(f"{word}, which only the run knows," for word in run.undecided),
        *run.elsewhere,
        *(note for note in notes if not note.endswith(UNREADABLE)),
        *(
            f"{one.name}, which is no flag of Megatron-LM's,"
            for key, one in run.settings.items()
            if not _is_known(key)
        ),
    ]
    return next(filter(None, deciders), "")


def _of_words(words: Sequence[Word]) -> Arguments:
    found = Arguments(options=[*options_of(words)])
    for option in found.options:
        taken = _take(found, option) if option.name else 0
        for place, word in enumerate(option.following[taken:], taken):
            if word.is_unknown and _may_be_options(word, option.name, is_first=not place):
                found.undecided.append(str(word))
    return found


def _may_be_options(word: Word, option: str, *, is_first: bool) -> bool:
    """Return whether a word behind an option that only the run decides may hold options, and is not its value."""
    name = flags.dest(option)
    if NUMBERS.fullmatch(word):
        return False
    if option and variable_of(word).lower() == name:  # --extra-vocab-size ${EXTRA_VOCAB_SIZE}
        return False
    is_list = TAKES_A_LIST.search(name) and not POSITIONAL.fullmatch(word)
    is_value = is_list or (is_first and option and not flags.is_switch(option))
    is_named = HOLDS_ARGUMENTS.search(word) or flags.bears_on_precision(word.lower())
    rest = UNKNOWN.sub("", word)
    is_path_or_part = bool(rest.strip()) and ("/" in rest or UNKNOWN.match(word) is None)
    return not is_path_or_part and bool(is_named or not is_value)


def _take(found: Arguments, option: Option) -> int:
    """Add an option that bears on precision to the arguments; return how many of the words behind it are its values."""
    name, value, following = option.name, option.value, option.following
    if isinstance(name, Word) and name.is_unknown:
        found.undecided.append(str(name) if value is None else f"{name}={value}")
        return 0
    if not (_is_known(name) or flags.bears_on_precision(name)) or (option.is_key and value is None):
        return 0
    taken, refused = 0, None
    if flags.is_switch(name) and not option.is_key:
        if (
            value is None and following and following[0].lower() in TRUTH
        ):  # the parser refuses what was meant
            value, taken = following[0], 1
        refused = None if value is None else str(value)
        value = True if value is None else value
    elif value is None:
        values = [*following[:1]]
        if flags.dest(name) in flags.FILES:
            values += takewhile(lambda one: not one.is_unknown, following[1:])
        value, taken = joined(values) if values else True, len(values)
    if is_late(value) or isinstance(value, Mapping | list):
        text = str(value) if isinstance(value, str) else f"a {type(value).__name__}"
        found.add(Written(name, None, text, refused))
    elif isinstance(value, str) and flags.is_switch(name):
        found.add(
            Written(
                name, TRUTH.get(value.lower(), value if option.is_key else True), refused=refused
            )
        )
    else:
        found.add(Written(name, str(value) if isinstance(value, Word) else value))
    return taken


def is_late(value: object) -> bool:
    """Return whether only the run decides a value: a word with an unknown piece, or a variable in a file."""
    return value.is_unknown if isinstance(value, Word) else isinstance(value, str) and "$" in value


def _is_known(name: str) -> bool:
    return any(
        flags.dest(name) in known
        for known in (flags.BY_NAME, flags.OTHER_SETTINGS, flags.PARALLELISM)
    )


def argument_groups(payload: Mapping[Any, Any]) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return the mappings of arguments in a mapping: those named in capitals, MODEL_ARGS say, and those of flags."""
    found = [
        (str(key), value)
        for key, value in payload.items()
        if isinstance(value, Mapping)
        and (
            GROUP.fullmatch(str(key)) or all(str(name).startswith("--") for name in value or ("",))
        )
    ]
    return [group for group in found if RUN.fullmatch(group[0])] or found


def _of_mapping(payload: Mapping[Any, Any]) -> list[Arguments]:
    given = payload.get("ENV_VARS")
    environment = (
        {str(key): Word(str(value)) for key, value in given.items()}
        if isinstance(given, Mapping)
        else {}
    )
    groups = argument_groups(payload)
    if not groups and isinstance(payload.get(FLAGSCALE[0]), Mapping):
        groups = [("", dict(_leaves([payload.get(key) for key in FLAGSCALE])))]
    if not groups:
        blocks = [
            key
            for key in ("language_model", "model_parallel")
            if isinstance(payload.get(key), Mapping)
        ]
        written = [value if key in blocks else {key: value} for key, value in payload.items()]
        groups = [("", {key: value for one in written for key, value in one.items()})]
    runs = []
    for name, values in groups:
        found = Arguments(
            launch=Launch(line=1, program="", arguments=(), environment=environment), label=name
        )
        found.decided_by = "the program that is started with these arguments"
        if not name:
            found.used_by = found.decided_by = "the command line that names this file"
        found.options = [Option(str(key), value, is_key=True) for key, value in values.items()]
        for option in found.options:
            _take(found, option)
        runs.append(found)
    return runs


def _leaves(values: object) -> Iterator[tuple[str, Any]]:
    """Yield the keys within mappings that have a plain value."""
    if isinstance(values, list):
        for value in values:
            yield from _leaves(value)
    elif isinstance(values, Mapping):
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from _leaves(value)
            else:
                yield str(key), value


def runs_printed(blocks: Sequence[tuple[Mapping[str, Any], bool]]) -> list[Arguments]:
    """Return the runs of printed arguments: every argument has its value in a block with its end, defaults too."""
    found = []
    for place, (block, has_end) in enumerate(blocks, 1):
        run = Arguments(
            label=f"printed arguments {place}" if len(blocks) > 1 else "printed arguments",
            has_end=has_end,
        )
        run.options = [
            Option(key, value, is_key=True) for key, value in block.items() if value is not None
        ]
        modes = {block.get("bf16"), block.get("fp16")}
        is_open = None in modes if not has_end else modes == {None}
        if is_open and True not in modes:
            run.decided_by = "the rest of the log, since the block of arguments is incomplete,"
        for option in run.options:
            is_mode = option.name in ("bf16", "fp16")
            if not (run.decided_by and is_mode) and (
                _is_known(option.name) or option.value is not False
            ):
                _take(run, option)
        found.append(run)
    return found

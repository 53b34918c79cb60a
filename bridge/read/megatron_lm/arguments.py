"""Arguments of Megatron-LM as settings, of a list of words, a namespace or an argument file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from bridge.errors import PayloadError
from bridge.precision.values import NO, YES
from bridge.read import framework_signs
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
    r"(?:^|/)"
    r"(?:pretrain_(?:gpt\d?|bert|t5|mamba|vlm|ict|retro|hybrid|multimodal|vision_\w+)|train_rl)"
    r"(?:\.py)?$"
)
"""Megatron-LM's own programs, whose default is FP32. Source: Megatron-LM 0.1 to 0.20."""
GROUP = re.compile(r"(?:[A-Z0-9]+_)*ARGS")
RUN = re.compile(r"MODEL_ARGS(?:_\d+)?")
"""Groups that Megatron-LM's own tests start, one run each; other groups of such a file are none."""
TRUTH = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
"""Meaning of a word directly behind a switch; Megatron-LM's parser takes none there."""
FLAGSCALE = ("system", "model", "data")
"""Blocks of FlagScale's files: each key within one is an argument. Source: its runner_train.py,
2026-08."""
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
    bounds = [*places, len(words)]
    if words and bounds[0] != 0:
        yield Option("", following=words[: bounds[0]])
    for place, end in pairwise(bounds):
        name, value = words[place].option()
        yield Option(name, value, words[place + 1 : end])


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
        if self.value is None:
            return self.text
        return self.value


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
    """The command that they belong to; at line 0 where a file only sets arguments, for others to
    use."""
    label: str = ""
    path: str = ""
    """Path of the script that starts them; empty for other arguments."""
    read_too: tuple[str, ...] = ()
    """Other files that were read for them, as sentences."""
    has_end: bool | None = None
    """Of arguments that a run printed, every one with its default: whether the block is whole;
    None: of others."""
    used_by: str = ""
    """Another source of arguments."""
    framework: FrameworkTable | None = None
    """The framework whose program takes them, next to its own; None: Megatron-LM's program, or an
    unknown one."""
    decided_by: str = ""
    """The source of the mode where the arguments state none, as a noun; empty: the program's own
    default."""

    def add(self, written: Written) -> None:
        """Add a setting, over an earlier one."""
        key = flags.dest(written.name)
        if key in flags.BY_NAME:
            key = flags.dest(flags.BY_NAME[key].option)
        self.settings[key] = written

    @property
    def is_known(self) -> bool:
        """Whether the program is known: Megatron-LM's own, or that of a framework with a table."""
        return self.framework is not None or PROGRAMS.search(self.launch.program) is not None

    @property
    def elsewhere(self) -> list[str]:
        """Other sources that may set the precision and are not read."""
        sources = dict.fromkeys(self.undecided)
        for key, written in self.settings.items():
            if key in flags.FILES:
                sources[f"{written.name} {written.shown}"] = None
        if self.used_by:
            sources[self.used_by] = None
        return list(sources)

    def __contains__(self, key: str) -> bool:
        return key in self.settings and self.settings[key].value not in (False, None)


def runs_of(payload: object) -> list[Arguments]:
    """Return the runs of a payload: arguments, a mapping of an argument file, or launches."""
    if isinstance(payload, Mapping):
        return _of_mapping(payload)
    if isinstance(payload, Sequence):
        if payload and all(isinstance(item, Launch) for item in payload):
            return _of_launches(payload)
        if all(isinstance(item, str | int | float) for item in payload):
            words = [Word(str(item)) for item in payload]
            return [_of_words(words)]
    rule = "must be arguments, a mapping of them, or a launch script"
    raise PayloadError(
        f"megatron-lm: {rule}, got a {type(payload).__name__}. Give the contents of the file."
    )


def _of_launches(launches: Sequence[Launch]) -> list[Arguments]:
    """Return the runs of launches: those with arguments of Megatron-LM, or all without any."""
    of_megatron: list[Launch] = []
    for launch in launches:
        if launch.flags & (MEGATRON_ARGUMENTS | MODES):
            of_megatron.append(launch)
    return [_of_launch(launch) for launch in of_megatron or launches]


def _of_launch(launch: Launch) -> Arguments:
    run = _of_words(launch.arguments)
    run.launch = launch
    run.label = launch.label
    framework = framework_signs.recognise_launch(launch)
    if framework is not None and framework.table:
        run.framework = framework_table(framework.table)
    if launch.line:
        run.decided_by = _decider(run)
    else:
        run.used_by = "the script that uses these arguments"
        run.decided_by = run.used_by
    return run


def _decider(run: Arguments) -> str:
    """Return what decides the mode of a started run without `--bf16` and `--fp16`, as a noun.

    Empty where this is the whole command of one of Megatron-LM's own programs, so that its default
    decides.
    """
    for decider in _deciders(run):
        if decider:
            return decider
    return ""


def _deciders(run: Arguments) -> Iterator[str]:
    """Yield what may decide the mode, the surest first; empty texts among it."""
    notes = run.launch.notes
    yield run.launch.unread
    for note in notes:
        if note.endswith(STRAY):
            yield note
    if not run.is_known:
        name = run.launch.program.rpartition("/")[2]
        yield f"{name}, a program whose defaults are not known here,"
    for note in notes:
        if note.startswith("source "):
            yield f"{note.removeprefix('source ')}, which the script sources,"
    for word in run.undecided:
        yield f"{word}, which only the run knows,"
    yield from run.elsewhere
    for note in notes:
        if not note.endswith(UNREADABLE):
            yield note
    for key, written in run.settings.items():
        if not _is_known(key):
            yield f"{written.name}, which is no flag of Megatron-LM's,"


def _of_words(words: Sequence[Word]) -> Arguments:
    run = Arguments(options=[*options_of(words)])
    for option in run.options:
        taken = 0
        if option.name:
            taken = _take(run, option)
        for place, word in enumerate(option.following[taken:], taken):
            if word.is_unknown and _may_be_options(word, option.name, is_first=not place):
                run.undecided.append(str(word))
    return run


def _may_be_options(word: Word, option: str, *, is_first: bool) -> bool:
    """Return whether a word that only the run decides may hold options.

    Otherwise it is the value of the option before it.
    """
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


def _take(run: Arguments, option: Option) -> int:
    """Add an option that bears on precision to the arguments.

    Return how many of the words behind it are its values.
    """
    name = option.name
    value = option.value
    if isinstance(name, Word) and name.is_unknown:
        run.undecided.append(str(name) if value is None else f"{name}={value}")
        return 0
    if not (_is_known(name) or flags.bears_on_precision(name)):
        return 0
    if option.is_key and value is None:
        return 0
    if flags.is_switch(name) and not option.is_key:
        return _take_switch(run, option)
    taken = 0
    if value is None:
        values = _values_behind(option)
        value = joined(values) if values else True
        taken = len(values)
    run.add(_written(option, value))
    return taken


def _take_switch(run: Arguments, option: Option) -> int:
    """Add a switch; the parser refuses a value of it, whose meaning is kept."""
    value = option.value
    taken = 0
    if value is None and option.following and option.following[0].lower() in TRUTH:
        value = option.following[0]
        taken = 1
    if value is None:
        run.add(Written(option.name, True))
    else:
        run.add(_written(option, value, refused=str(value)))
    return taken


def _values_behind(option: Option) -> list[Word]:
    """Return the words behind an option that are its values; several where it names files."""
    values = [*option.following[:1]]
    if flags.dest(option.name) in flags.FILES:
        values += takewhile(lambda word: not word.is_unknown, option.following[1:])
    return values


def _written(option: Option, value: Any, *, refused: str | None = None) -> Written:
    """Return an option as a setting."""
    name = option.name
    if is_late(value) or isinstance(value, Mapping | list):
        text = str(value) if isinstance(value, str) else f"a {type(value).__name__}"
        return Written(name, None, text, refused)
    if isinstance(value, str) and flags.is_switch(name):
        otherwise = value if option.is_key else True
        return Written(name, TRUTH.get(value.lower(), otherwise), refused=refused)
    if isinstance(value, Word):
        return Written(name, str(value))
    return Written(name, value)


def is_late(value: object) -> bool:
    """Return whether only the run decides a value.

    It is a word with an unknown piece, or a text of a file with a variable in it.
    """
    if isinstance(value, Word):
        return value.is_unknown
    return isinstance(value, str) and "$" in value


def _is_known(name: str) -> bool:
    key = flags.dest(name)
    return key in flags.BY_NAME or key in flags.OTHER_SETTINGS or key in flags.PARALLELISM


class _Group(NamedTuple):
    """A mapping of arguments in a file."""

    name: str
    """Empty where the whole file is one."""
    values: Mapping[Any, Any]


def argument_groups(payload: Mapping[Any, Any]) -> list[_Group]:
    """Return the mappings of arguments in a mapping.

    Their names are in capitals, such as MODEL_ARGS, or all of their keys are flags.
    """
    groups: list[_Group] = []
    for key, value in payload.items():
        if not isinstance(value, Mapping):
            continue
        has_flags = bool(value) and all(str(name).startswith("--") for name in value)
        if has_flags or GROUP.fullmatch(str(key)):
            groups.append(_Group(str(key), value))
    runs = [group for group in groups if RUN.fullmatch(group.name)]
    return runs or groups


def _of_mapping(payload: Mapping[Any, Any]) -> list[Arguments]:
    environment: dict[str, Word] = {}
    variables = payload.get("ENV_VARS")
    if isinstance(variables, Mapping):
        environment = {str(key): Word(str(value)) for key, value in variables.items()}
    groups = argument_groups(payload)
    if not groups and isinstance(payload.get(FLAGSCALE[0]), Mapping):
        blocks = [payload.get(key) for key in FLAGSCALE]
        groups = [_Group("", dict(_leaves(blocks)))]
    if not groups:
        groups = [_Group("", _without_blocks(payload))]
    runs: list[Arguments] = []
    for group in groups:
        launch = Launch(line=1, program="", arguments=(), environment=environment)
        run = Arguments(launch=launch, label=group.name)
        run.decided_by = "the program that is started with these arguments"
        if not group.name:
            run.used_by = "the command line that names this file"
            run.decided_by = run.used_by
        for key, value in group.values.items():
            option = Option(str(key), value, is_key=True)
            run.options.append(option)
            _take(run, option)
        runs.append(run)
    return runs


def _without_blocks(payload: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the arguments of a file for `--yaml-cfg`, those of its two blocks too."""
    arguments: dict[Any, Any] = {}
    for key, value in payload.items():
        if key in ("language_model", "model_parallel") and isinstance(value, Mapping):
            arguments.update(value)
        else:
            arguments[key] = value
    return arguments


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
    """Return the runs of printed arguments.

    Every argument has its value in a block with its end, a default too.
    """
    runs: list[Arguments] = []
    for place, (block, has_end) in enumerate(blocks, 1):
        run = Arguments(label="printed arguments", has_end=has_end)
        if len(blocks) > 1:
            run.label = f"printed arguments {place}"
        modes = {block.get("bf16"), block.get("fp16")}
        is_open = modes == {None} if has_end else None in modes
        if is_open and True not in modes:
            run.decided_by = "the rest of the log, since the block of arguments is incomplete,"
        for name, value in block.items():
            if value is None:
                continue
            option = Option(name, value, is_key=True)
            run.options.append(option)
            is_of_the_mode = name in ("bf16", "fp16")
            if run.decided_by and is_of_the_mode:
                continue
            if value is not False or _is_known(name):
                _take(run, option)
        runs.append(run)
    return runs

"""`WrittenArguments`: the arguments of a run of Megatron-LM as they are written, with their place.

    runs_of(["--bf16", "--fp8-format", "hybrid"])[0].settings["fp8_format"].value    # "hybrid"

`parse_runs` reads launches, lists of words and argument files, `parse_printed_runs` the blocks of a log.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from bridge.errors import PayloadError
from bridge.precision.coercion import FALSE_WORDS, TRUE_WORDS
from bridge.read import framework_signs
from bridge.read.framework.framework_table import FrameworkTable, load_framework_table
from bridge.read.launch.command_line_rows import ARGUMENTS_VARIABLE_PATTERN, MEGATRON_ARGUMENTS
from bridge.read.launch.launch import Launch, get_arguments_before_dashes
from bridge.read.launch.notes import NoteKind
from bridge.read.launch.shell_word import UNKNOWN_PATTERN, ShellWord, get_variable_name, join_words
from bridge.read.launch.syntax_tree import MODE_OPTIONS
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.printed_arguments import PrintedBlock

MEGATRON_PROGRAMS = re.compile(
    r"(?:^|/)"
    r"(?:pretrain_(?:gpt\d?|bert|t5|mamba|vlm|ict|retro|hybrid|multimodal|vision_\w+)|train_rl)"
    r"(?:\.py)?$"
)
"""Megatron-LM's own programs, whose default is FP32. Source: Megatron-LM 0.1 to 0.20."""
INFERENCE_PROGRAMS = re.compile(r"inference|text_generation|generate_samples")
"""Programs of Megatron-LM that train nothing."""
GROUP_NAME = re.compile(r"(?:[A-Z0-9]+_)*ARGS")
"""Name of a group of arguments in a file, MODEL_ARGS for example."""
RUN_GROUP_NAME = re.compile(r"MODEL_ARGS(?:_\d+)?")
"""Groups that Megatron-LM's own tests start, one run each; other groups of such a file start no run."""
SWITCH_VALUES = {**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(FALSE_WORDS, False)}
"""Meaning of a word directly behind a switch; Megatron-LM's parser takes none there."""
FLAGSCALE_BLOCKS = ("system", "model", "data")
"""Blocks of FlagScale's files: each key within one is an argument. Source: its runner_train.py,
2026-08."""
LIST_OPTIONS = re.compile(r"data_path|paths|_blend|split")
"""Options whose values may be several words."""
SEQ_COMMAND = re.compile(r"\$\(seq [^()]*\)")
"""The output of a command that prints numbers alone."""
POSITIONAL_PARAMETER = re.compile(r"\$\{?(?:\d+|[@*].*)\}?")
"""A parameter of a script: $1, $@."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option as it is written."""

    name: str
    """The name, with its dashes on a command line; empty for words before the first option."""
    value: Any = None
    """The value behind `=`, or in a mapping."""
    following: Sequence[ShellWord] = ()
    """The words up to the next option."""
    is_key: bool = False
    """Whether the option is a key of a mapping."""


def parse_options(tokens: Sequence[ShellWord]) -> Iterator[Option]:
    """Yield the options of a command line."""
    tokens = get_arguments_before_dashes(tokens)
    indices = [
        index for index, word in enumerate(tokens) if word.startswith("--") and len(word) > 2
    ]
    bounds = [*indices, len(tokens)]
    if tokens and bounds[0] != 0:
        yield Option("", following=tokens[: bounds[0]])
    for index, end in pairwise(bounds):
        name, value = tokens[index].option()
        yield Option(name, value, tokens[index + 1 : end])


@dataclass(slots=True)
class WrittenSetting:
    """A setting as it is written."""

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


@dataclass(kw_only=True, slots=True)
class WrittenArguments:
    """The arguments of a run."""

    options: list[Option] = field(default_factory=list)
    """All options as they are written, also those that bear on no precision."""
    settings: dict[str, WrittenSetting] = field(default_factory=dict)
    """Name of an argument that bears on precision -> the last setting of it, as in argparse."""
    undecided: list[str] = field(default_factory=list)
    """Words that only the run decides and that may hold further flags."""
    launch: Launch = field(default_factory=lambda: Launch(line=1, program="", arguments=()))
    """The command that they belong to; at line 0 where a script sets them for other scripts."""
    label: str = ""
    """The run's place in its file: "line 41, pretrain_gpt.py"."""
    path: str = ""
    """Path of the script that starts them; empty for other arguments."""
    read_too: tuple[str, ...] = ()
    """Other files that were read for them, as sentences."""
    printed: PrintedBlock | None = None
    """The block in which a run printed them; None: they are written in a file, or on a command line."""
    used_by: str = ""
    """The source that uses these arguments and may add others."""
    framework: FrameworkTable | None = None
    """The framework whose program takes them with arguments of its own; None: another program."""
    decided_by: str = ""
    """The source of the mode where the arguments state none, as a noun; empty: the program's own
    default."""

    def add(self, written: WrittenSetting) -> None:
        """Add a setting, over an earlier one."""
        key = flags.get_dest(written.name)
        if key in flags.FLAG_OF_NAME:
            key = flags.get_dest(flags.FLAG_OF_NAME[key].option)
        self.settings[key] = written

    @property
    def has_every_default(self) -> bool:
        """Whether a run printed all arguments, so that each default is among them."""
        return self.printed is not None and self.printed.has_end

    @property
    def is_truncated(self) -> bool:
        """Whether a run printed the arguments, and the end of them is missing."""
        return self.printed is not None and not self.printed.has_end

    @property
    def is_known(self) -> bool:
        """Whether the program is known: Megatron-LM's own, or that of a framework with a table."""
        return (
            self.framework is not None or MEGATRON_PROGRAMS.search(self.launch.program) is not None
        )

    @property
    def elsewhere(self) -> list[str]:
        """Other sources that may set the precision and are not read."""
        sources = dict.fromkeys(self.undecided)
        for key, written in self.settings.items():
            if key in flags.FILE_SETTINGS:
                sources[f"{written.name} {written.shown}"] = None
        if self.used_by:
            sources[self.used_by] = None
        return list(sources)

    def __contains__(self, key: str) -> bool:
        return key in self.settings and self.settings[key].value not in (False, None)


def parse_runs(payload: object) -> list[WrittenArguments]:
    """Return the runs of a payload: arguments, a mapping of an argument file, or launches."""
    if isinstance(payload, Mapping):
        return _parse_mapping(payload)
    if isinstance(payload, Sequence):
        if payload and all(isinstance(item, Launch) for item in payload):
            return _parse_launches(payload)
        if all(isinstance(item, str | int | float) for item in payload):
            tokens = [ShellWord(str(item)) for item in payload]
            return [_parse_words(tokens)]
    rule = "must be arguments, a mapping of them, or a launch script"
    raise PayloadError(
        f"megatron-lm: {rule}, got a {type(payload).__name__}. Give the contents of the file."
    )


def _parse_launches(launches: Sequence[Launch]) -> list[WrittenArguments]:
    """Return the runs of launches with arguments of Megatron-LM; of all launches where none has any."""
    megatron_launches: list[Launch] = []
    for launch in launches:
        if launch.flags & (MEGATRON_ARGUMENTS | MODE_OPTIONS):
            megatron_launches.append(launch)
    return [_parse_launch(launch) for launch in megatron_launches or launches]


def _parse_launch(launch: Launch) -> WrittenArguments:
    run = _parse_words(launch.arguments)
    run.launch = launch
    run.label = launch.label
    framework = framework_signs.recognise_launch(launch)
    if framework is not None and framework.table:
        run.framework = load_framework_table(framework.table)
    if launch.line:
        run.decided_by = _find_mode_decider(run)
    else:
        run.used_by = "the script that uses these arguments"
        run.decided_by = run.used_by
    return run


def _find_mode_decider(run: WrittenArguments) -> str:
    """Return what decides the mode of a started run without `--bf16` and `--fp16`, as a noun.

    It is empty for the whole command of a program of Megatron-LM, whose default decides.
    """
    for decider in _iterate_mode_deciders(run):
        if decider:
            return decider
    return ""


def _iterate_mode_deciders(run: WrittenArguments) -> Iterator[str]:
    """Yield what may decide the mode, the surest first, and empty texts."""
    notes = run.launch.notes
    yield run.launch.unread
    for note in notes:
        if note.kind is NoteKind.STRAY_OPTIONS:
            yield str(note)
    if not run.is_known:
        name = run.launch.program.rpartition("/")[2]
        yield f"{name}, a program whose defaults are not known here,"
    for source in run.launch.unread_sources:
        yield f"{source.noun}, which the script sources,"
    for word in run.undecided:
        yield f"{word}, which only the run knows,"
    yield from run.elsewhere
    for note in notes:
        if note.kind is not NoteKind.BROKEN_LINE:
            yield str(note)
    for key, written in run.settings.items():
        if not _is_precision_argument(key):
            yield f"{written.name}, which is no flag of Megatron-LM's,"


def _parse_words(tokens: Sequence[ShellWord]) -> WrittenArguments:
    run = WrittenArguments(options=list(parse_options(tokens)))
    for option in run.options:
        count = 0
        if option.name:
            count = _add_option(run, option)
        for index, word in enumerate(option.following[count:], count):
            if word.is_unknown and _may_be_options(word, option.name, is_first=index == 0):
                run.undecided.append(str(word))
    return run


def _may_be_options(word: ShellWord, option: str, *, is_first: bool) -> bool:
    """Return whether a word that only the run decides may hold options.

    Otherwise it is the value of the option before it.
    """
    name = flags.get_dest(option)
    if SEQ_COMMAND.fullmatch(word):
        return False
    if option and get_variable_name(word).lower() == name:  # --extra-vocab-size ${EXTRA_VOCAB_SIZE}
        return False
    is_list = LIST_OPTIONS.search(name) and not POSITIONAL_PARAMETER.fullmatch(word)
    is_value = is_list or (is_first and option and not flags.is_switch(option))
    is_named = ARGUMENTS_VARIABLE_PATTERN.search(word) or flags.bears_on_precision(word.lower())
    rest = UNKNOWN_PATTERN.sub("", word)
    is_path_or_part = bool(rest.strip()) and ("/" in rest or UNKNOWN_PATTERN.match(word) is None)
    return not is_path_or_part and bool(is_named or not is_value)


def _add_option(run: WrittenArguments, option: Option) -> int:
    """Add an option that bears on precision to the settings; return the number of its values behind it."""
    name = option.name
    value = option.value
    if isinstance(name, ShellWord) and name.is_unknown:
        text = str(name)
        if value is not None:
            text = f"{name}={value}"
        run.undecided.append(text)
        return 0
    if not (_is_precision_argument(name) or flags.bears_on_precision(name)):
        return 0
    if option.is_key and value is None:
        return 0
    if flags.is_switch(name) and not option.is_key:
        return _add_switch(run, option)
    if value is not None:
        run.add(_make_setting(option, value))
        return 0
    values = _get_following_values(option)
    value = True
    if values:
        value = join_words(values)
    run.add(_make_setting(option, value))
    return len(values)


def _add_switch(run: WrittenArguments, option: Option) -> int:
    """Add a switch; return the number of words behind it that mean on or off.

    Megatron-LM's parser refuses a value of a switch. Its meaning is kept.
    """
    value = option.value
    count = 0
    if value is None and option.following and option.following[0].lower() in SWITCH_VALUES:
        value = option.following[0]
        count = 1
    if value is None:
        run.add(WrittenSetting(option.name, True))
    else:
        run.add(_make_setting(option, value, refused=str(value)))
    return count


def _get_following_values(option: Option) -> list[ShellWord]:
    """Return the words behind an option that are its values; several where it names files."""
    values = [*option.following[:1]]
    if flags.get_dest(option.name) in flags.FILE_SETTINGS:
        values += takewhile(lambda word: not word.is_unknown, option.following[1:])
    return values


def _make_setting(option: Option, value: Any, *, refused: str | None = None) -> WrittenSetting:
    """Return an option as a setting."""
    name = option.name
    if is_late(value) or isinstance(value, Mapping | list):
        text = f"a {type(value).__name__}"
        if isinstance(value, str):
            text = str(value)
        return WrittenSetting(name, None, text, refused)
    if isinstance(value, str) and flags.is_switch(name):
        otherwise: Any = True
        if option.is_key:
            otherwise = value
        return WrittenSetting(name, SWITCH_VALUES.get(value.lower(), otherwise), refused=refused)
    if isinstance(value, ShellWord):
        return WrittenSetting(name, str(value))
    return WrittenSetting(name, value)


def is_late(value: object) -> bool:
    """Return whether only the run decides a value.

    It is a word with an unknown piece, or a text of a file with a variable in it.
    """
    if isinstance(value, ShellWord):
        return value.is_unknown
    return isinstance(value, str) and "$" in value


def _is_precision_argument(name: str) -> bool:
    key = flags.get_dest(name)
    return (
        key in flags.FLAG_OF_NAME
        or key in flags.OTHER_SETTINGS
        or key in flags.PARALLELISM_SWITCHES
    )


class _Group(NamedTuple):
    """A mapping of arguments in a file."""

    name: str
    """Empty where the whole file is one."""
    values: Mapping[Any, Any]


def find_argument_groups(payload: Mapping[Any, Any]) -> list[_Group]:
    """Return the mappings of arguments in a mapping.

    Their names are in capitals, such as MODEL_ARGS, or all of their keys are flags.
    """
    groups: list[_Group] = []
    for key, value in payload.items():
        if not isinstance(value, Mapping):
            continue
        has_flags = bool(value) and all(str(name).startswith("--") for name in value)
        if has_flags or GROUP_NAME.fullmatch(str(key)):
            groups.append(_Group(str(key), value))
    runs = [group for group in groups if RUN_GROUP_NAME.fullmatch(group.name)]
    return runs or groups


def _parse_mapping(payload: Mapping[Any, Any]) -> list[WrittenArguments]:
    """Return the runs of an argument file, one for each of its groups."""
    environment: dict[str, ShellWord] = {}
    variables = payload.get("ENV_VARS")
    if isinstance(variables, Mapping):
        environment = {str(key): ShellWord(str(value)) for key, value in variables.items()}
    runs: list[WrittenArguments] = []
    for group in _list_groups(payload):
        launch = Launch(line=1, program="", arguments=(), environment=environment)
        run = WrittenArguments(launch=launch, label=group.name)
        run.decided_by = "the program that is started with these arguments"
        if not group.name:
            run.used_by = "the command line that names this file"
            run.decided_by = run.used_by
        for key, value in group.values.items():
            option = Option(str(key), value, is_key=True)
            run.options.append(option)
            _add_option(run, option)
        runs.append(run)
    return runs


def _list_groups(payload: Mapping[Any, Any]) -> list[_Group]:
    """Return the groups of a file; the whole file is a group without a name where it has none."""
    groups = find_argument_groups(payload)
    if groups:
        return groups
    if isinstance(payload.get(FLAGSCALE_BLOCKS[0]), Mapping):
        blocks = [payload.get(key) for key in FLAGSCALE_BLOCKS]
        return [_Group("", dict(_iterate_leaves(blocks)))]
    return [_Group("", _flatten_blocks(payload))]


def _flatten_blocks(payload: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the arguments of a file for `--yaml-cfg`, those of its two blocks too."""
    arguments: dict[Any, Any] = {}
    for key, value in payload.items():
        if key in ("language_model", "model_parallel") and isinstance(value, Mapping):
            arguments.update(value)
        else:
            arguments[key] = value
    return arguments


def _iterate_leaves(values: object) -> Iterator[tuple[str, Any]]:
    """Yield the keys within mappings that have a plain value."""
    if isinstance(values, list):
        for value in values:
            yield from _iterate_leaves(value)
    elif isinstance(values, Mapping):
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from _iterate_leaves(value)
            else:
                yield str(key), value


def parse_printed_runs(blocks: Sequence[PrintedBlock]) -> list[WrittenArguments]:
    """Return the runs of printed arguments.

    Every argument has its value in a block with its end, a default too.
    """
    runs: list[WrittenArguments] = []
    for number, block in enumerate(blocks, 1):
        run = WrittenArguments(label="printed arguments", printed=block)
        if len(blocks) > 1:
            run.label = f"printed arguments {number}"
        if _has_open_mode(block):
            run.decided_by = "the rest of the log, since the block of arguments is incomplete,"
        for name, value in block.arguments.items():
            if value is None:
                continue
            option = Option(name, value, is_key=True)
            run.options.append(option)
            is_open_mode = bool(run.decided_by) and name in ("bf16", "fp16")
            if not is_open_mode and (value is not False or _is_precision_argument(name)):
                _add_option(run, option)
        runs.append(run)
    return runs


def _has_open_mode(block: PrintedBlock) -> bool:
    """Return whether a block does not show the mode; a block without its end may lack a switch."""
    modes = {block.arguments.get("bf16"), block.arguments.get("fp16")}
    if True in modes:
        return False
    if block.has_end:
        return modes == {None}
    return None in modes

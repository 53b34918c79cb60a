"""`WrittenArguments`: the arguments of a run of Megatron-LM as they are written, with their place.

    parse_runs(["--bf16", "--fp8-format", "hybrid"])[0].settings["fp8_format"].value    # "hybrid"

`parse_runs` reads launches, lists of words and argument files. `parse_printed_runs` reads the blocks
of a log.
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
from bridge.read.launch.shell_word import (
    OPEN_PIECE_PATTERN,
    ShellWord,
    get_variable_name,
    join_words,
)
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
"""Groups of the files of Megatron-LM's own tests that start a run each. Other groups of such a file
start none."""
SWITCH_VALUES = {**dict.fromkeys(TRUE_WORDS, True), **dict.fromkeys(FALSE_WORDS, False)}
"""Word directly after a switch -> its meaning. Megatron-LM's parser takes no word there."""
FLAGSCALE_BLOCKS = ("system", "model", "data")
"""Blocks of FlagScale's files. Each key in them is an argument. Source: its runner_train.py, 2026-08."""
YAML_CFG_BLOCKS = ("language_model", "model_parallel")
"""Blocks of files for `--yaml-cfg`. Each key in them is an argument."""
LIST_OPTIONS = re.compile(r"data_path|paths|_blend|split")
"""Options whose values may be several words."""
SEQ_COMMAND = re.compile(r"\$\(seq [^()]*\)")
"""The output of a command that prints only numbers."""
POSITIONAL_PARAMETER = re.compile(r"\$\{?(?:\d+|[@*].*)\}?")
"""A parameter of a script: $1, $@."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option as it is written."""

    name: str
    """The name, with its dashes on a command line; empty for words before the first option."""
    value: object = None
    """The value after `=`, or of a key; None for an option without a value."""
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
        name, value = tokens[index].split_option()
        yield Option(name, value, tokens[index + 1 : end])


@dataclass(slots=True)
class WrittenSetting:
    """A setting as it is written."""

    name: str
    value: object
    """True for a flag without a value; None for a value that is decided when the run starts."""
    text: str = ""
    """The value as it is written, if it is decided when the run starts."""
    refused: str | None = None
    """The word after a switch, which the parser refuses; None without such a word."""

    @property
    def shown(self) -> object:
        """The value, or its text."""
        if self.value is None:
            return self.text
        return self.value


class ArgumentSource(NamedTuple):
    """A source that may hold further arguments."""

    noun: str
    """Its name in messages: "$ARGS", "--deepspeed_config ds.json"."""
    file_argument: str = ""
    """The argument that names a file; empty for another source."""


@dataclass(kw_only=True, slots=True)
class WrittenArguments:
    """The arguments of a run."""

    options: list[Option] = field(default_factory=list)
    """All options as they are written, also those that do not affect the precision."""
    settings: dict[str, WrittenSetting] = field(default_factory=dict)
    """Name of an argument that may affect the precision -> its last setting, which counts in argparse."""
    open_words: list[str] = field(default_factory=list)
    """Words that are decided when the run starts, and that may hold further options."""
    launch: Launch = field(default_factory=lambda: Launch(line=1, program="", arguments=()))
    """The command of the arguments. Its line is 0 if a script sets them for other scripts."""
    label: str = ""
    """The run's place in its file: "line 41, pretrain_gpt.py"."""
    path: str = ""
    """Path of the script that starts the run; empty for other arguments."""
    notes: tuple[str, ...] = ()
    """Sentences about other files that were read for the arguments."""
    printed: PrintedBlock | None = None
    """The block in which a run printed the arguments; None for those of a file or a command line."""
    used_by: str = ""
    """The source that uses these arguments and may add others; empty if there is none."""
    framework: FrameworkTable | None = None
    """The framework whose program has arguments of its own; None for another program."""
    mode_decider: str = ""
    """The source of a mode that the arguments do not state, for messages: "$ARGS, which only the run knows,".

    It is empty if the program's own default decides."""

    def add(self, setting: WrittenSetting) -> None:
        """Add a setting. An earlier setting of the same argument is dropped."""
        key = flags.get_dest(setting.name)
        if key in flags.FLAG_OF_NAME:
            key = flags.get_dest(flags.FLAG_OF_NAME[key].option)
        self.settings[key] = setting

    @property
    def has_every_default(self) -> bool:
        """Whether a run printed all arguments, and so every default."""
        return self.printed is not None and self.printed.has_end

    @property
    def is_truncated(self) -> bool:
        """Whether a run printed the arguments, and the end of the block is missing."""
        return self.printed is not None and not self.printed.has_end

    @property
    def is_known(self) -> bool:
        """Whether the program is known: Megatron-LM's own, or that of a framework with a table."""
        return (
            self.framework is not None or MEGATRON_PROGRAMS.search(self.launch.program) is not None
        )

    @property
    def sources(self) -> list[ArgumentSource]:
        """Other sources that may set the precision and are not read, each once."""
        sources = [ArgumentSource(word) for word in self.open_words]
        for key, setting in self.settings.items():
            if key in flags.FILE_SETTINGS:
                sources.append(ArgumentSource(f"{setting.name} {setting.shown}", key))
        if self.used_by:
            sources.append(ArgumentSource(self.used_by))
        return list(dict.fromkeys(sources))

    @property
    def possible_sources(self) -> list[str]:
        """The nouns of `sources`."""
        return [source.noun for source in self.sources]

    def __contains__(self, key: str) -> bool:
        """Return whether an argument is set to a known value other than False."""
        return key in self.settings and self.settings[key].value not in (False, None)


def parse_runs(payload: object) -> list[WrittenArguments]:
    """Return the runs of a payload.

    Args:
        payload: Launches, a list of arguments, or the mapping of an argument file.

    Raises:
        PayloadError: The payload is none of them.
    """
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
    """Return the runs of the launches with arguments of Megatron-LM.

    If no launch has any, every launch is a run.
    """
    megatron_launches: list[Launch] = []
    for launch in launches:
        if launch.flags & (MEGATRON_ARGUMENTS | MODE_OPTIONS):
            megatron_launches.append(launch)
    return [_parse_launch(launch) for launch in megatron_launches or launches]


def _parse_launch(launch: Launch) -> WrittenArguments:
    """Return the arguments of a launch."""
    written = _parse_words(launch.arguments)
    written.launch = launch
    written.label = launch.label
    framework = framework_signs.recognise_launch(launch)
    if framework is not None and framework.table:
        written.framework = load_framework_table(framework.table)
    if launch.line:
        written.mode_decider = _find_mode_decider(written)
    else:
        written.used_by = "the script that uses these arguments"
        written.mode_decider = written.used_by
    return written


def _find_mode_decider(written: WrittenArguments) -> str:
    """Return the source that decides the mode of a started run without `--bf16` and `--fp16`, for messages.

    It is empty for the whole command of a program of Megatron-LM, whose default decides.
    """
    for decider in _iterate_mode_deciders(written):
        if decider:
            return decider
    return ""


def _iterate_mode_deciders(written: WrittenArguments) -> Iterator[str]:
    """Yield the sources that may decide the mode, the most probable first; some texts are empty."""
    notes = written.launch.notes
    yield written.launch.unread
    for note in notes:
        if note.kind is NoteKind.STRAY_OPTIONS:
            yield str(note)
    if not written.is_known:
        name = written.launch.program.rpartition("/")[2]
        yield f"{name}, a program whose defaults are not known here,"
    for source in written.launch.unread_sources:
        yield f"{source.noun}, which the script sources,"
    for word in written.open_words:
        yield f"{word}, which only the run knows,"
    yield from written.possible_sources
    for note in notes:
        if note.kind is not NoteKind.BROKEN_LINE:
            yield str(note)
    for key, setting in written.settings.items():
        if not _is_precision_argument(key):
            yield f"{setting.name}, which is no flag of Megatron-LM's,"


def _parse_words(tokens: Sequence[ShellWord]) -> WrittenArguments:
    """Return the arguments of a command line."""
    written = WrittenArguments(options=list(parse_options(tokens)))
    for option in written.options:
        value_count = 0
        if option.name:
            value_count = _add_option(written, option)
        for index, word in enumerate(option.following[value_count:], value_count):
            if word.is_open and _may_be_options(word, option.name, is_first=index == 0):
                written.open_words.append(str(word))
    return written


def _may_be_options(word: ShellWord, option: str, *, is_first: bool) -> bool:
    """Return whether a word that is decided when the run starts may hold options.

    Otherwise it is the value of the option before it.

    Args:
        option: The option before it; empty before the first option.
        is_first: Whether the word is the first one after the option.
    """
    name = flags.get_dest(option)
    if SEQ_COMMAND.fullmatch(word):
        return False
    if option and get_variable_name(word).lower() == name:  # --extra-vocab-size ${EXTRA_VOCAB_SIZE}
        return False
    rest = OPEN_PIECE_PATTERN.sub("", word)
    if rest.strip() and ("/" in rest or OPEN_PIECE_PATTERN.match(word) is None):
        return False  # a path, or a word with a known beginning: data-$N
    if ARGUMENTS_VARIABLE_PATTERN.search(word) or flags.may_affect_precision(word.lower()):
        return True
    is_of_list = LIST_OPTIONS.search(name) and not POSITIONAL_PARAMETER.fullmatch(word)
    is_value = is_first and option and not flags.is_switch(option)
    return not (is_of_list or is_value)


def _add_option(written: WrittenArguments, option: Option) -> int:
    """Add an option to the settings if it may affect the precision.

    Returns:
        The number of words after the option that are its values; 0 for an option that is not added.
    """
    name = option.name
    value = option.value
    if isinstance(name, ShellWord) and name.is_open:
        written.open_words.append(_format_open_option(name, value))
        return 0
    if not (_is_precision_argument(name) or flags.may_affect_precision(name)):
        return 0
    if option.is_key and value is None:
        return 0
    words = list_value_words(option)
    is_switch = flags.is_switch(name) and not option.is_key
    if value is None and words:
        value = join_words(words)
    if value is None:
        written.add(WrittenSetting(name, True))
    elif is_switch:
        # Megatron-LM's parser refuses a value of a switch. Its meaning is kept for the report.
        written.add(_make_setting(option, value, refused=str(value)))
    else:
        written.add(_make_setting(option, value))
    return len(words)


def _format_open_option(name: ShellWord, value: object) -> str:
    """Return the text of an option whose name is decided when the run starts."""
    if value is None:
        return str(name)
    return f"{name}={value}"


def list_value_words(option: Option) -> list[ShellWord]:
    """Return the words after an option that are its values; none after `--name=value` and after a key.

    They are a word that means on or off for a switch, all words for a list, the words up to an open
    word for an option that names files, and the first word for another option.
    """
    if option.value is not None or option.is_key:
        return []
    name = flags.get_dest(option.name)
    first = list(option.following[:1])
    if flags.is_switch(option.name):
        return [word for word in first if word.lower() in SWITCH_VALUES]
    if name in flags.LIST_TYPES:
        return list(option.following)
    if name in flags.FILE_SETTINGS:
        return first + list(takewhile(lambda word: not word.is_open, option.following[1:]))
    return first


def _make_setting(option: Option, value: object, *, refused: str | None = None) -> WrittenSetting:
    """Return an option as a setting.

    Args:
        refused: The value of a switch on a command line.
    """
    name = option.name
    if is_open_value(value) or isinstance(value, Mapping | list):
        text = f"a {type(value).__name__}"
        if isinstance(value, str):
            text = str(value)
        return WrittenSetting(name, None, text, refused)
    if isinstance(value, str) and flags.is_switch(name):
        # A word without a meaning leaves a switch on. A key of a file keeps it for the report.
        other_value: object = True
        if option.is_key:
            other_value = value
        return WrittenSetting(name, SWITCH_VALUES.get(value.lower(), other_value), refused=refused)
    if isinstance(value, ShellWord):
        return WrittenSetting(name, str(value))
    return WrittenSetting(name, value)


def is_open_value(value: object) -> bool:
    """Return whether a value is decided when the run starts.

    Such a value is a word with an unknown piece, or a text of a file with a variable in it.
    """
    if isinstance(value, ShellWord):
        return value.is_open
    return isinstance(value, str) and "$" in value


def _is_precision_argument(name: str) -> bool:
    """Return whether an option is an argument of Megatron-LM that affects the precision."""
    key = flags.get_dest(name)
    return (
        key in flags.FLAG_OF_NAME
        or key in flags.OTHER_SETTINGS
        or key in flags.PARALLELISM_SWITCHES
    )


class ArgumentGroup(NamedTuple):
    """A mapping of arguments in a file."""

    name: str
    """The key of the mapping; empty if the whole file is the group."""
    values: Mapping[Any, object]


def find_argument_groups(payload: Mapping[Any, object]) -> list[ArgumentGroup]:
    """Return the groups of arguments in the mapping of a file.

    The name of a group is in capitals, such as MODEL_ARGS, or all of its keys are flags. If the file
    has groups that Megatron-LM's own tests start, only those are returned.
    """
    groups: list[ArgumentGroup] = []
    for key, value in payload.items():
        if not isinstance(value, Mapping):
            continue
        has_flags = bool(value) and all(str(name).startswith("--") for name in value)
        if has_flags or GROUP_NAME.fullmatch(str(key)):
            groups.append(ArgumentGroup(str(key), value))
    runs = [group for group in groups if RUN_GROUP_NAME.fullmatch(group.name)]
    return runs or groups


def _parse_mapping(payload: Mapping[Any, object]) -> list[WrittenArguments]:
    """Return the runs of an argument file, one for each of its groups."""
    environment: dict[str, ShellWord] = {}
    variables = payload.get("ENV_VARS")
    if isinstance(variables, Mapping):
        environment = {str(key): ShellWord(str(value)) for key, value in variables.items()}
    return [_parse_group(group, environment) for group in _list_groups(payload)]


def _parse_group(group: ArgumentGroup, environment: Mapping[str, ShellWord]) -> WrittenArguments:
    """Return the arguments of a group as a run."""
    launch = Launch(line=1, program="", arguments=(), environment=environment)
    written = WrittenArguments(launch=launch, label=group.name)
    written.mode_decider = "the program that is started with these arguments"
    if not group.name:
        written.used_by = "the command line that names this file"
        written.mode_decider = written.used_by
    for key, value in group.values.items():
        option = Option(str(key), value, is_key=True)
        written.options.append(option)
        _add_option(written, option)
    return written


def _list_groups(payload: Mapping[Any, object]) -> list[ArgumentGroup]:
    """Return the groups of a file. A file without groups is one group without a name."""
    groups = find_argument_groups(payload)
    if groups:
        return groups
    if isinstance(payload.get(FLAGSCALE_BLOCKS[0]), Mapping):
        blocks = [payload.get(key) for key in FLAGSCALE_BLOCKS]
        return [ArgumentGroup("", dict(_iterate_leaves(blocks)))]
    return [ArgumentGroup("", _flatten_blocks(payload))]


def _flatten_blocks(payload: Mapping[Any, object]) -> dict[Any, object]:
    """Return the arguments of a file for `--yaml-cfg`, with those of its two blocks."""
    arguments: dict[Any, object] = {}
    for key, value in payload.items():
        if key in YAML_CFG_BLOCKS and isinstance(value, Mapping):
            arguments.update(value)
        else:
            arguments[key] = value
    return arguments


def _iterate_leaves(values: object) -> Iterator[tuple[str, object]]:
    """Yield the keys at any depth that have a plain value, with the value."""
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
    """Return the runs of printed arguments. A block with its end has a value for every argument."""
    runs: list[WrittenArguments] = []
    for number, block in enumerate(blocks, 1):
        label = "printed arguments"
        if len(blocks) > 1:
            label = f"printed arguments {number}"
        runs.append(_parse_printed_block(block, label))
    return runs


def _parse_printed_block(block: PrintedBlock, label: str) -> WrittenArguments:
    """Return the arguments of a printed block.

    A printed None states nothing. A printed False is a setting only for an argument that affects the
    precision.
    """
    written = WrittenArguments(label=label, printed=block)
    has_open_mode = _has_open_mode(block)
    if has_open_mode:
        written.mode_decider = "the rest of the log, since the block of arguments is incomplete,"
    for name, value in block.arguments.items():
        if value is None:
            continue
        option = Option(name, value, is_key=True)
        written.options.append(option)
        is_open_mode = has_open_mode and name in ("bf16", "fp16")
        if not is_open_mode and (value is not False or _is_precision_argument(name)):
            _add_option(written, option)
    return written


def _has_open_mode(block: PrintedBlock) -> bool:
    """Return whether a block does not show the mode. A block without its end may lack a switch of a mode."""
    modes = {block.arguments.get("bf16"), block.arguments.get("fp16")}
    if True in modes:
        return False
    if block.has_end:
        return modes == {None}
    return None in modes

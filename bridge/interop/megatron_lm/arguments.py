"""Arguments of Megatron-LM as settings: a list of words, a namespace, or the argument files its users write."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.contract import Unmapped
from bridge.interop.launch.launches import HOLDS_ARGUMENTS, UNREADABLE, Launch, may_hold_options, trainings
from bridge.interop.launch.word import Word, joined
from bridge.interop.megatron_lm.flags import (
    BY_NAME,
    FILES,
    OTHER_SETTINGS,
    PARALLELISM,
    TABLE,
    bears_on_precision,
    dest,
    is_switch,
)
from bridge.precision.fields import NO, YES

PROGRAMS = re.compile(
    r"(?:^|/)(?:pretrain_(?:gpt\d?|bert|t5|mamba|vlm|ict|retro|hybrid|multimodal|vision_\w+)|train_rl)(?:\.py)?$"
)
"""Megatron-LM's own programs, whose default is FP32. Source: Megatron-LM 0.1 to 0.20."""
GROUP = re.compile(r"(?:[A-Z0-9]+_)*ARGS")
RUN = re.compile(r"MODEL_ARGS(?:_\d+)?")
"""Groups that Megatron-LM's own tests start, one run each; other groups of such a file are none."""
TRUTH = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
"""Meaning of a word directly behind a switch; Megatron-LM's parser takes none there."""
TAKES_A_LIST = re.compile(r"data_path|paths|_blend|split")
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
    shown: str = ""
    refused: str | None = None
    """The word behind a switch, which takes no value."""


@dataclass
class Arguments:
    """The arguments of one run."""

    options: list[Option] = field(default_factory=list)
    """All options as they are written, also those that bear on no precision."""
    settings: dict[str, Written] = field(default_factory=dict)
    """By destination; the last one written wins, as in argparse."""
    overridden: list[Written] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """Words that only the run decides and that may hold further flags."""
    launch: Launch = field(default_factory=lambda: Launch(line=1, program="", arguments=()))
    """The command that they belong to; at line 0 where a file only sets arguments, for others to use."""
    unmapped: list[Unmapped] = field(default_factory=list)
    """Records of the words themselves: words that the shell drops, and files that hold further arguments."""
    label: str = ""
    is_printed: bool = False
    """The run printed them: every argument stands there, with its default."""
    used_by: str = ""
    """Another source of arguments."""
    decided_by: str = ""
    """The source of the mode where the arguments state none, as a noun; empty: the program's own default."""

    def add(self, written: Written) -> None:
        """Add a setting; an earlier one of another value is remembered as overridden."""
        key = dest(written.name)
        key = dest(BY_NAME[key].option) if key in BY_NAME else key
        old = self.settings.get(key)
        if old is not None and old.value != written.value:
            self.overridden.append(old)
        self.settings[key] = written

    @property
    def elsewhere(self) -> list[str]:
        """Other sources that may set the precision and are not read."""
        files = [
            f"{written.name} {written.value or written.shown}"
            for key, written in self.settings.items()
            if _names_files(key)
        ]
        words = [loss.field for loss in self.unmapped if loss.reason == "unsupported"]
        others = [self.used_by] if self.used_by else []
        return list(dict.fromkeys((*self.undecided, *files, *words, *others)))

    def __contains__(self, key: str) -> bool:
        return key in self.settings and self.settings[key].value not in (False, None)


def runs_of(payload: object) -> list[Arguments]:
    """Return the runs of a payload: a list of arguments, a mapping of any of Megatron-LM's argument files, launches."""
    if isinstance(payload, Launch):
        return [_of_launch(payload)]
    if isinstance(payload, str):
        return [_of_words([Word(word) for word in payload.split()])]
    if isinstance(payload, Mapping):
        return _of_mapping(payload)
    if isinstance(payload, Sequence) and all(isinstance(item, Launch) for item in payload) and payload:
        return [_of_launch(item) for item in trainings(payload, strict=True)]
    if isinstance(payload, Sequence) and all(isinstance(item, str | int | float) for item in payload):
        return [_of_words([Word(str(item)) for item in payload])]
    rule = "must be arguments, a mapping of them, or a launch script"
    raise PayloadError(f"megatron-lm: {rule}, got a {type(payload).__name__}. Give the contents of the file.")


def _of_launch(launch: Launch) -> Arguments:
    found = _of_words(launch.arguments)
    found.launch, found.label = launch, launch.label
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
    sourced = [note.removeprefix("source ") for note in notes if note.startswith("source ")]
    if sourced:
        return f"{sourced[0]}, which the script sources,"
    if run.launch.unread:
        return run.launch.unread
    if run.undecided:
        return f"{run.undecided[0]}, which only the run knows,"
    if run.elsewhere:
        return run.elsewhere[0]
    others = [note for note in notes if not note.endswith(UNREADABLE)]
    if others:
        return others[0]
    unknown = next((one.name for key, one in run.settings.items() if not _is_known(key)), "")
    if unknown:
        return f"{unknown}, which is no flag of Megatron-LM's,"
    if not PROGRAMS.search(program):
        return f"{program.rpartition('/')[2]}, a program whose defaults are not known here,"
    return ""


def _of_words(words: Sequence[Word]) -> Arguments:
    found = Arguments(options=[*options_of(words)])
    for option in found.options:
        taken = _option(found, option) if option.name else 0
        for place, word in enumerate(option.following[taken:], taken):
            if word.startswith("@") and len(word) > 1:
                found.unmapped.append(Unmapped(str(word), word[1:], *TABLE.sentences["argument-file"]))
            elif word.is_unknown and _may_be_options(word, option.name, is_first=not place):
                found.undecided.append(str(word))
    return found


def _may_be_options(word: Word, option: str, *, is_first: bool) -> bool:
    """Return whether a word behind an option that only the run decides may hold options, and is not its value."""
    is_list = TAKES_A_LIST.search(dest(option)) and not POSITIONAL.fullmatch(word)
    is_value = is_list or (is_first and option and not is_switch(option))
    is_named = HOLDS_ARGUMENTS.search(word) or bears_on_precision(word.lower())
    return may_hold_options(word) and bool(is_named or not is_value)


def _option(found: Arguments, option: Option) -> int:
    """Add an option to the arguments; return how many of the words behind it are its values."""
    name, value, following = option.name, option.value, option.following
    if isinstance(name, Word) and name.is_unknown:
        found.undecided.append(str(name) if value is None else f"{name}={value}")
        return 0
    if not _is_known(name) and not bears_on_precision(name):
        return 0
    if is_switch(name):
        written = _switched(name, value, following[0] if following else None)
        found.add(written)
        return int(value is None and written.refused is not None)
    if value is not None:
        found.add(_written(name, value))
        return 0
    if not following:
        found.add(Written(name, True))
        return 0
    values = [following[0]]
    if _names_files(name):
        values += takewhile(lambda one: not one.startswith("@") and not one.is_unknown, following[1:])
    found.add(_written(name, joined(values)))
    return len(values)


def _switched(name: str, value: Word | None, following: Word | None) -> Written:
    """Return a switch; a word behind it that says on or off is what was meant, though the parser refuses it."""
    if value is None and following is not None and following.lower() in TRUTH:
        return Written(name, TRUTH[following.lower()], refused=following)
    if value is None:
        return Written(name, True)
    if value.is_unknown:
        return Written(name, None, str(value), refused=str(value))
    return Written(name, TRUTH.get(value.lower(), True), refused=str(value))


def _written(name: str, value: Word) -> Written:
    return Written(name, None, str(value)) if value.is_unknown else Written(name, str(value))


def _is_known(name: str) -> bool:
    return any(dest(name) in known for known in (BY_NAME, OTHER_SETTINGS, PARALLELISM))


def _names_files(name: str) -> bool:
    return dest(name) in FILES


def argument_groups(payload: Mapping[Any, Any]) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return the mappings of arguments in a mapping: those named in capitals, MODEL_ARGS say, and those of flags."""
    found = [
        (str(key), value)
        for key, value in payload.items()
        if isinstance(value, Mapping)
        and (GROUP.fullmatch(str(key)) or all(str(name).startswith("--") for name in value or ("",)))
    ]
    return [group for group in found if RUN.fullmatch(group[0])] or found


def _of_mapping(payload: Mapping[Any, Any]) -> list[Arguments]:
    given = payload.get("ENV_VARS")
    environment = {str(key): Word(str(value)) for key, value in given.items()} if isinstance(given, Mapping) else {}
    groups = argument_groups(payload)
    if not groups:
        flat: dict[Any, Any] = {}
        for key, value in payload.items():
            is_block = isinstance(value, Mapping) and key in ("language_model", "model_parallel")
            flat.update(value if is_block else {key: value})
        groups = [("", flat)]
    runs = []
    for name, values in groups:
        found = Arguments(launch=Launch(line=1, program="", arguments=(), environment=environment), label=name)
        found.decided_by = "the program that is started with these arguments"
        if not name:
            found.used_by = found.decided_by = "the command line that names this file"
        found.options = [Option(str(key), value, is_key=True) for key, value in values.items()]
        for option in found.options:
            _add_key(found, option.name, option.value)
        runs.append(found)
    return runs


INCOMPLETE = Unmapped("arguments", None, *TABLE.sentences["incomplete"])


def runs_printed(blocks: Sequence[tuple[Mapping[str, Any], bool]]) -> list[Arguments]:
    """Return the runs of printed arguments: every argument has its value in a block with its end, defaults too."""
    found = []
    for place, (block, has_end) in enumerate(blocks, 1):
        run = Arguments(label=f"printed arguments {place}" if len(blocks) > 1 else "printed arguments", is_printed=True)
        run.options = [
            Option(key, value, is_key=True)
            for key, value in block.items()
            if value is not None and key != "grad_reduce_in_bf16"
        ]
        said = {block.get("bf16"), block.get("fp16")}
        is_open = None in said if not has_end else said == {None}
        if is_open and True not in said:
            run.decided_by = "the rest of the log, since the block of arguments is incomplete,"
        elif not has_end:
            run.unmapped.append(INCOMPLETE)
        for key, value in block.items():
            if run.decided_by and key in ("bf16", "fp16"):
                continue
            if value is not None and (_is_known(key) or value is not False):
                _add_key(run, key, value)
        found.append(run)
    return found


def _add_key(found: Arguments, key: str, value: Any) -> None:
    if value is None or not (_is_known(key) or bears_on_precision(key)):
        return
    if isinstance(value, str) and "$" in value:
        found.add(Written(key, None, value))
    elif isinstance(value, Mapping | list):
        found.add(Written(key, None, f"a {type(value).__name__}"))
    elif isinstance(value, str) and is_switch(key):
        found.add(Written(key, TRUTH.get(value.lower(), value)))
    else:
        found.add(Written(key, value))

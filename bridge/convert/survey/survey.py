"""Every source of precision in a project: what each says, whether they agree, and which one wins.

The files are read by the readers of `convert`; the order in which sources win, first to last, is the table `ORDER`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.convert.conversion import runs_of
from bridge.convert.survey.files import COMMENTS, files_in, looks_relevant
from bridge.convert.survey.source import ORDER, ROWS, VARIABLES, Source, of_matchers, of_program, of_variables
from bridge.errors import BridgeError, MissingExtraError, PayloadError
from bridge.read import frameworks
from bridge.read.launch.alternatives import launches
from bridge.read.launch.launches import PRECISION_WORDS
from bridge.read.megatron_lm.recognition import is_per_module
from bridge.read.systems import candidates
from bridge.read.text.document import Document

STATING = re.compile(ROWS["stating keys"])
LISTED = re.compile(rf"\b(?:{VARIABLES.pattern})=\S*")
"""Assignments that are listed as variables in any case."""
JSON_NAME = re.compile(r"(?<![\w.-])[\w.-]+\.json\b")
CERTAIN = 0.5
"""The least certainty of a system that is read."""
STARTING = ("started program", "launch script", "program")
"""Kinds of sources that start a run."""
PROJECT = ("project", "build-system", "tool")
"""Tables of a Python project's own file."""
NAMED = {("program", True): "started program", ("deepspeed", False): "unnamed deepspeed"}
"""Kind, and whether another file names it -> kind of source."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The sources of a project."""

    sources: tuple[Source, ...]
    unread: dict[str, str] = field(default_factory=dict)
    """File, or file and line -> why it could not be read, or is not clear."""
    limits: tuple[str, ...] = ()

    @property
    def ranked(self) -> tuple[Source, ...]:
        """The sources that say what a run trains in, the winner first."""
        stating = [source for source in self.sources if source.precision is not None]
        return tuple(source for kind in ORDER for source in stating if source.kind == kind)

    @property
    def partial(self) -> tuple[Source, ...]:
        """The sources that do not: switches, regions, single modules, and what is left to others."""
        ranked = self.ranked
        return tuple(source for source in self.sources if source not in ranked)

    @property
    def undecided(self) -> tuple[Source, ...]:
        """The scripts and programs that do not say what they train in.

        A file that leaves it to the trainer above is none: those that the trainer reads stand in the list too.
        """
        return tuple(source for source in self.partial if source.kind in STARTING)

    @property
    def agree(self) -> bool | None:
        """Whether all of them say the same; None: those that say it do, and others were not judged."""
        if len({source.precision for source in self.ranked}) > 1:
            return False
        return None if self.undecided or self.unread else True

    @property
    def top(self) -> list[Source]:
        """The sources of the kind that wins."""
        ranked = self.ranked
        return [source for source in ranked if source.kind == ranked[0].kind]

    @property
    def winner(self) -> Source | None:
        """The source that wins.

        None where nothing was found, where the first place is shared by two that differ, and where one that stands as
        high or higher leaves it to another.
        """
        if len({source.precision for source in self.top}) != 1 or self.above:
            return None
        return self.top[0]

    @property
    def above(self) -> tuple[Source, ...]:
        """The undecided sources that stand as high as those that win, or higher."""
        if not self.ranked:
            return ()
        kinds = list(ORDER)
        place = kinds.index(self.ranked[0].kind)
        return tuple(source for source in self.undecided if kinds.index(source.kind) <= place)


def survey(folder: str | Path, environment: Mapping[str, str] | None = None) -> Survey:
    """Look through a project's folder and the environment.

    Hidden folders, installed packages, outputs and Python tests are passed over.
    """
    if not os.path.isdir(folder):  # noqa: PTH112  Path.is_dir raises for a name that is too long
        raise PayloadError(f"{folder!s:.200}: must be a folder. Give the project's.")
    reader = _Reader()
    limits: list[str] = []
    for file, name in files_in(Path(folder), ROWS["skipped"], limits):
        try:
            reader.read(Document.load(file), name)
        except BridgeError as error:
            if not looks_relevant(file):
                continue
            if isinstance(error, MissingExtraError):  # a script may go over everything that was read
                raise
            reader.unread[name] = str(error)
        except Exception as error:  # noqa: BLE001  one file must not take the others with it
            reader.unread[name] = f"{file}: reading it ended in an unexpected {type(error).__name__}"
    variables = (os.environ if environment is None else environment).items()
    found = [*reader.placed(), *of_variables(variables, "environment", "process")]
    return Survey(sources=tuple(found), unread=reader.unread, limits=tuple(limits))


class _Reader:
    """Reads file after file."""

    def __init__(self) -> None:
        self.found, self.unread = list[Source](), dict[str, str]()
        self.named: set[str] = set()
        """File names of the programs that scripts start, and of the JSON that other files name."""

    def read(self, document: Document, name: str) -> None:
        if document.kind != "json":
            self.named.update(JSON_NAME.findall(COMMENTS.sub("", document.text)))
        if document.kind == "env":
            self.found += of_variables(document.variables.items(), name, ".env file")
        elif document.kind == "python":
            self.found += of_program(document, name, self.unread)
        elif document.kind == "shell":
            self.script(document, name)
        else:
            self.found += [source for part in document.parts for source in _of_configuration(part, name)]

    def script(self, document: Document, name: str) -> None:
        """Read a launch script: the runs that it starts, and every variable that it exports on any branch."""
        started = launches(document.text, document.path)
        files = [launch.program.rpartition("/")[2] for launch in started]
        self.named.update(file if file.endswith(".py") else f"{file.rpartition('.')[2]}.py" for file in files)
        exported = [(key, str(value)) for launch in started for key, value in launch.environment.items()]
        try:
            self.found += [Source.of(run, name, ROWS["launches"][run.said_by]) for run in runs_of(document)]
        except BridgeError as error:
            if PRECISION_WORDS.search(LISTED.sub("", COMMENTS.sub("", document.text))):
                self.unread[name] = str(error)
        self.found += of_variables(exported, name, "script variable")

    def placed(self) -> list[Source]:
        """Return the sources with their kinds, once every file is read that may name their own."""
        pairs = [(source, source.path.rpartition("/")[2] in self.named) for source in self.found]
        return [replace(source, kind=NAMED.get((source.kind, named), source.kind)) for source, named in pairs]


def _of_configuration(document: Document, name: str) -> list[Source]:
    """Return the sources in a configuration of a system that is certain enough: a project is full of other YAML."""
    if is_per_module(document.mapping):
        return [of_matchers(document, name)]
    framework = frameworks.recognise(document)
    if framework is not None and not framework.is_converted:
        raise PayloadError(framework.refusal(document.path))
    likely = [system for system, found in candidates(document)[:1] if found.certainty >= CERTAIN]
    is_other = bool(likely) or (document.kind == "toml" and any(key in document.mapping for key in PROJECT))
    stating = None if is_other else next(_stating_keys(document.mapping), None)
    if stating is not None:
        rule = "no system is recognised in it, and a key states a precision"
        raise PayloadError(f"{document.path}: {rule}. Look at {stating}.")
    kinds = [ROWS["configurations"].get(system.name, "training file") for system in likely]
    return [Source.of(run, name, kind) for kind in kinds for run in runs_of(document)]


def _stating_keys(settings: Mapping[str, Any], where: str = "", depth: int = 8) -> Iterator[str]:
    """Yield the dotted keys whose value states a precision; a null and a switch that is off state none."""
    for key, value in settings.items():
        name = f"{where}.{key}".lstrip(".")
        if isinstance(value, Mapping) and depth:
            yield from _stating_keys(value, name, depth - 1)
        elif value not in (None, False) and STATING.fullmatch(str(key)):
            yield name

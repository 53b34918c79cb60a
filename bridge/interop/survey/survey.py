"""Every source of precision in a project: what each says, whether they agree, and which one wins.

The files are read by the readers of `convert`; the order in which sources win, first to last, is the table `ORDER`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge.errors import BridgeError, PayloadError
from bridge.interop.conversion import runs_of
from bridge.interop.launch.alternatives import launches
from bridge.interop.launch.launches import PRECISION_WORDS
from bridge.interop.megatron_lm.recognition import is_per_module
from bridge.interop.reading.document import Document
from bridge.interop.survey.files import COMMENTS, files_in, looks_relevant
from bridge.interop.survey.source import ORDER, ROWS, VARIABLES, Source, of_matchers, of_program, of_variables
from bridge.interop.systems import candidates

LISTED = re.compile(rf"\b(?:{VARIABLES.pattern})=\S*")
"""Assignments that are listed as variables in any case."""
JSON_NAME = re.compile(r"(?<![\w.-])[\w.-]+\.json\b")
CERTAIN = 0.5
"""The least certainty of a system that is read."""
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
    def agree(self) -> bool:
        """Whether all of them say the same."""
        return len({source.precision for source in self.ranked}) <= 1

    @property
    def top(self) -> list[Source]:
        """The sources of the kind that wins."""
        ranked = self.ranked
        return [source for source in ranked if source.kind == ranked[0].kind]

    @property
    def winner(self) -> Source | None:
        """The source that wins, None where nothing was found or the first place is shared by two that differ."""
        return self.top[0] if len({source.precision for source in self.top}) == 1 else None


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
            if looks_relevant(file):
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
    likely = [system for system, found in candidates(document)[:1] if found.certainty >= CERTAIN]
    kinds = [ROWS["configurations"].get(system.name, "training file") for system in likely]
    return [Source.of(run, name, kind) for kind in kinds for run in runs_of(document)]

"""Every source of precision in a project: what each says, whether they agree, and which one wins.

The order in which sources win, first to last, is the table `ORDER`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge.errors import BridgeError, PayloadError
from bridge.interop.conversion import Run, runs_of
from bridge.interop.launch.launches import PRECISION_WORDS
from bridge.interop.reading.document import Document
from bridge.interop.survey.files import COMMENTS, Files, looks_relevant
from bridge.interop.survey.programs import sources_of_program
from bridge.interop.survey.source import ORDER, VARIABLES, Source, assigned, exported, of_variables, source_of
from bridge.interop.systems import candidates

__all__ = ["ORDER", "Source", "Survey", "survey"]

CLOSE = 0.05
LISTED = re.compile(rf"\b(?:{VARIABLES.pattern})=\S*")
"""Assignments that are listed as variables in any case."""
JSON_NAME = re.compile(r"(?<![\w.-])[\w.-]+\.json\b")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found."""

    sources: tuple[Source, ...]
    unread: dict[str, str] = field(default_factory=dict)
    """File, or file and line -> why it could not be read, or is not clear."""
    limits: tuple[str, ...] = ()

    @property
    def ranked(self) -> tuple[Source, ...]:
        """The sources that say what a run trains in, the winner first."""
        kinds = list(ORDER)
        said = [source for source in self.sources if source.precision is not None and source.kind in kinds]
        return tuple(sorted(said, key=lambda source: kinds.index(source.kind)))

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
    def semantics(self) -> tuple[str, ...]:
        """The semantics of the sources that state the precision of a run, each once."""
        return tuple(dict.fromkeys(source.semantics for source in self.ranked if source.semantics is not None))

    @property
    def winner(self) -> Source | None:
        """The source that wins, None where nothing was found or the first place is shared by two that differ."""
        ranked = self.ranked
        top = [source for source in ranked if source.kind == ranked[0].kind] if ranked else []
        return top[0] if len({source.precision for source in top}) == 1 else None


def survey(folder: str | Path, environment: Mapping[str, str] | None = None) -> Survey:
    """Look through a project's folder and the environment.

    Hidden folders, installed packages, outputs and Python tests are passed over.
    """
    root = Path(folder)
    try:
        is_folder = root.is_dir()
    except OSError:  # longer than any path
        is_folder = False
    if not is_folder:
        raise PayloadError(f"{folder!s:.200}: must be a folder. Give the project's.")
    reader = _Reader()
    files = Files(root=root)
    for file, name in files:
        try:
            reader.read(Document.load(file), name)
        except BridgeError as error:
            if looks_relevant(file, name):
                reader.refuse(name, error, str(file))
        except Exception as error:  # noqa: BLE001  one file must not take the others with it
            reader.unread[name] = f"reading it ended in an unexpected {type(error).__name__}"
    variables = of_variables(os.environ if environment is None else environment, "environment", "process")
    return Survey(sources=(*reader.placed(), *variables), unread=reader.unread, limits=tuple(files.limits))


class _Reader:
    """Reads file after file."""

    def __init__(self) -> None:
        self.found: list[Source] = []
        self.unread: dict[str, str] = {}
        self.started: set[str] = set()
        self.named: set[str] = set()
        """File names of the JSON that other files name."""

    def refuse(self, name: str, error: BridgeError, path: str) -> None:
        """Note a file that is not read."""
        told = str(error).replace(path, name).splitlines()[0]
        self.unread[name] = told.removeprefix(f"{name}: ").removeprefix(f"{name}, ")

    def read(self, document: Document, name: str) -> None:
        """Read one file; raises BridgeError where it is broken."""
        if document.kind != "json" and ".json" in document.text:
            self.named.update(JSON_NAME.findall(COMMENTS.sub("", document.text)))
        if document.kind == "env":
            self.found += of_variables(assigned(document.text), name, ".env file")
        elif document.kind == "python":
            self.program(document, name)
        elif document.kind == "shell":
            self.script(document, name)
        else:
            for part in document.parts:
                self.configuration(part, name)

    def program(self, document: Document, name: str) -> None:
        try:
            self.found += sources_of_program(document, name, self.unread)
        except PayloadError as error:
            self.refuse(name, error, document.path)

    def script(self, document: Document, name: str) -> None:
        variables, started = exported(document.text, document.path)
        self.started |= started
        try:
            runs = runs_of(document)
        except BridgeError as error:
            runs = []
            if PRECISION_WORDS.search(LISTED.sub("", COMMENTS.sub("", document.text))):
                self.refuse(name, error, document.path)
        self.found += [_of_run(run, name, LAUNCHES[run.said_by]) for run in runs]
        self.found += of_variables(variables, name, "script variable")

    def configuration(self, document: Document, name: str) -> None:
        per_module = _te_precision_file(document, name)
        if per_module is not None:
            self.found.append(per_module)
            return
        sure = [pair for pair in candidates(document) if pair[1].certainty >= 0.5]  # a project is full of other YAML
        if len(sure) > 1 and sure[0][1].certainty - sure[1][1].certainty < CLOSE:
            self.unread[name] = f"could be {sure[0][0].name} or {sure[1][0].name}; convert it with --from"
        elif sure:
            system, why = sure[0]
            kind = {"deepspeed": "deepspeed", "accelerate": "accelerate file"}.get(system.name, "training file")
            found = [_of_run(run, name, kind) for run in runs_of(document, system.name)]
            self.found += [replace(source, evidence=why.evidence) for source in found]

    def placed(self) -> list[Source]:
        """Return the sources, with programs that a script starts and JSON that nothing names in their places."""
        kinds = []
        for source in self.found:
            file = source.path.rpartition("/")[2]
            kind = source.kind
            if kind == "program" and file in self.started:
                kind = "started program"
            elif kind == "deepspeed" and file.endswith(".json") and file not in self.named:
                kind = "unnamed deepspeed"
            kinds.append(replace(source, kind=kind))
        return kinds


def _of_run(run: Run, name: str, kind: str) -> Source:
    return source_of(
        run.imported, path=name, system=run.system.name, kind=kind, evidence=run.evidence, run=str(run.source["run"])
    )


LAUNCHES = {"flags": "launch script", "launcher": "accelerate flag"}


def _te_precision_file(document: Document, name: str) -> Source | None:
    """Return a file for Megatron-LM's --te-precision-config-file, which overrides the precision module by module."""
    configs, matchers = document.mapping.get("configs"), document.mapping.get("matchers")
    if not isinstance(configs, Mapping) or not isinstance(matchers, Mapping):
        return None
    told = [
        f"{matcher.get('pattern', '*')} -> {_training(configs.get(str(matcher.get('config'))))}"
        for matcher in matchers.values()
        if isinstance(matcher, Mapping) and matcher.get("enabled", False)
    ]
    return Source(
        path=name,
        system="te-precision-file",
        kind="per module",
        says="; ".join(told) or "no matcher is enabled",
        precision=None,
        evidence="has `configs` and `matchers`, as files for --te-precision-config-file do",
    )


def _training(config: object) -> str:
    recipe = config.get("training_recipe") if isinstance(config, Mapping) else None
    if not isinstance(recipe, Mapping):
        return "unknown"
    named = [str(recipe[key]) for key in ("fp8_quantization_recipe", "fp4_quantization_recipe") if recipe.get(key)]
    return " and ".join(named) or "high precision"

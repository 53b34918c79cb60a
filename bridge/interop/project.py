"""Every source of precision in a project: what each says, whether they agree, and which one wins.

The order in which sources win, first to last, is the table `ORDER`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import BridgeError, PayloadError
from bridge.interop.conversion import runs_of
from bridge.interop.detect import candidates
from bridge.interop.document import MAX_BYTES, Document
from bridge.interop.shell_values import is_unknown

if TYPE_CHECKING:
    from bridge.precision.config import MixedPrecisionConfig

__all__ = ["ORDER", "Source", "Survey", "survey"]

ORDER = (
    ("launch script", "flags on the command line are read last"),
    ("deepspeed", "its engine casts the module, and transformers refuses arguments that differ"),
    ("program", "what a program constructs by itself goes over its environment"),
    ("training file", "the trainer that reads it hands it on as arguments, which go over the environment"),
    ("accelerate file", "`accelerate launch` writes it into the environment, over what is there"),
    ("process", "an exported variable goes over a .env file"),
    (".env file", "it only fills what nobody else set"),
)
"""Kind of source -> why it stands above the ones below it."""

SKIPPED = frozenset(
    {
        "node_modules",
        "__pycache__",
        "site-packages",
        "outputs",
        "wandb",
        "build",
        "dist",
        "checkpoints",
        "data",
        "venv",
        "env",
    }
)
SUFFIXES = frozenset({".yaml", ".yml", ".json", ".sh", ".bash", ".slurm", ".sbatch", ".sub", ".py", ".env", ".toml"})
MAX_FILES = 2000
MAX_LEVELS = 8
SURE = 0.5
"""Below it a file is not taken for a source: a project is full of YAML that has nothing to do with precision."""

VARIABLES = re.compile(
    r"ACCELERATE_(MIXED_PRECISION|FP8_\w+|DYNAMO_\w+)|FSDP_MIXED_PRECISION\w*|NVIDIA_TF32_OVERRIDE"
    r"|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|NVTE_(FP8|MXFP8|NVFP4|APPLY_QK|BF16|FP16)\w*|XLA_USE_BF16|XLA_DOWNCAST_BF16"
    r"|DEEPSPEED_\w*(FP16|BF16)\w*"
)
ACCELERATE = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source."""

    path: str
    """File, or "environment"."""
    system: str
    """Name of the system it belongs to."""
    kind: str
    """One of the first words of `ORDER`, or "per module"."""
    says: str
    """In a few words."""
    precision: str | None
    """What decides agreement: "bf16", "bf16 + fp8 delayed"; None where it says nothing about it."""
    run: str = ""
    semantics: str | None = None
    recipe: str | None = None
    evidence: str = ""
    losses: int = 0


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found."""

    sources: tuple[Source, ...]
    unread: dict[str, str] = field(default_factory=dict)
    """File -> why it could not be read, or is not clear."""

    @property
    def ranked(self) -> tuple[Source, ...]:
        """The sources that say what a run trains in, the winner first."""
        kinds = [kind for kind, _ in ORDER]
        said = [source for source in self.sources if source.precision is not None and source.kind in kinds]
        return tuple(sorted(said, key=lambda source: kinds.index(source.kind)))

    @property
    def agree(self) -> bool:
        """Whether all of them say the same."""
        return len({source.precision for source in self.ranked}) <= 1

    @property
    def winner(self) -> Source | None:
        """The source that wins, None where nothing was found or the first place is shared by two that differ."""
        ranked = self.ranked
        top = [source for source in ranked if source.kind == ranked[0].kind] if ranked else []
        return top[0] if len({source.precision for source in top}) == 1 else None


def survey(folder: str | Path, environment: Mapping[str, str] | None = None) -> Survey:
    """Look through a project's folder and the environment.

    Args:
        folder: Where to look; hidden folders, installed packages and outputs are passed over.
        environment: The process's variables; None: those of this process.

    Raises:
        PayloadError: There is no such folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise PayloadError(f"{folder}: must be a folder. Give the project's.")
    found: list[Source] = []
    unread: dict[str, str] = {}
    for file in _files(root):
        name = file.relative_to(root).as_posix()
        try:
            found += _of_file(file, name, unread)
        except BridgeError as error:
            if not _is_program(file):
                unread[name] = str(error).replace(str(file), name).splitlines()[0]
    found += _of_variables(os.environ if environment is None else environment, "environment", "process")
    return Survey(sources=tuple(found), unread=unread)


def _files(root: Path) -> Iterator[Path]:
    count = 0
    for path, folders, names in os.walk(root):
        here = Path(path)
        level = len(here.relative_to(root).parts)
        folders[:] = sorted(
            name for name in folders if level < MAX_LEVELS and not name.startswith(".") and name not in SKIPPED
        )
        for name in sorted(names):
            file = here / name
            if file.suffix in SUFFIXES or name == ".env" or name.startswith(".env."):
                count += 1
                if count > MAX_FILES:
                    return
                if file.is_file() and file.stat().st_size <= MAX_BYTES:
                    yield file


def _is_program(file: Path) -> bool:
    return file.suffix == ".py"


def _of_file(file: Path, name: str, unread: dict[str, str]) -> list[Source]:
    document = Document.load(file)
    if document.kind == "env":
        return _of_variables(_pairs(document.text), name, ".env file")
    per_module = _te_precision_file(document, name)
    if per_module is not None:
        return [per_module]
    known = candidates(document)
    sure = [pair for pair in known if pair[1].certainty >= SURE]
    if not sure:
        return []
    if len(sure) > 1 and sure[0][1].certainty - sure[1][1].certainty < 0.05:
        unread[name] = f"could be {sure[0][0].name} or {sure[1][0].name}; convert it with --from"
        return []
    found = []
    for run in runs_of(document, sure[0][0].name):
        imported = run.imported
        found.append(
            Source(
                path=name,
                system=run.system.name,
                kind=_kind(run.system.name, document.kind),
                says=imported.config.label,
                precision=_precision(imported.config),
                run=str(run.source["run"]),
                semantics=imported.semantics,
                recipe=imported.recipe,
                evidence=sure[0][1].evidence,
                losses=len(imported.losses),
            )
        )
    if document.kind == "shell":
        found += _of_variables(_exports(document), name, "launch script")
    return found


def _kind(system: str, kind: str) -> str:
    if kind == "shell":
        return "launch script"
    if system == "deepspeed":
        return "deepspeed"
    if kind == "python":
        return "program"
    return "accelerate file" if system == "accelerate" else "training file"


def _precision(config: MixedPrecisionConfig) -> str:
    """Return dtype and scheme, the part of a precision that two sources can disagree about."""
    dtype = str(config.to_dict().get("autocast_dtype") or config.mode) if config.autocast_enabled else config.mode
    if config.fp8:
        return f"{dtype} + fp8 {config.fp8_recipe}"
    return f"{dtype} + {config.fp4_recipe}" if config.fp4 else dtype


def _of_variables(variables: Mapping[str, str], path: str, kind: str) -> list[Source]:
    found = []
    for name, value in sorted(variables.items()):
        if not VARIABLES.fullmatch(name):
            continue
        precision = None
        if name == "ACCELERATE_MIXED_PRECISION" and value in ACCELERATE:
            precision = ACCELERATE[value] + (" + fp8" if value == "fp8" else "")
        system = (
            "accelerate" if name.startswith(("ACCELERATE", "FSDP")) else "te" if name.startswith("NVTE") else "torch"
        )
        says = f"{name}={value}"
        found.append(
            Source(path=path, system=system, kind=kind, says=says, precision=precision, evidence=f"sets {name}")
        )
    return found


def _pairs(text: str) -> dict[str, str]:
    """Return what a .env file sets; later lines win."""
    pairs = re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return {name: value.strip("'\"") for name, value in pairs}


def _exports(document: Document) -> dict[str, str]:
    from bridge.interop.shell import launches

    found: dict[str, str] = {}
    for launch in launches(document.text, document.path):
        found |= {name: value for name, value in launch.environment.items() if not is_unknown(value)}
    return found


def _te_precision_file(document: Document, name: str) -> Source | None:
    """Return a file for Megatron-LM's --te-precision-config-file, which overrides the precision module by module."""
    configs, matchers = document.mapping.get("configs"), document.mapping.get("matchers")
    if not isinstance(configs, Mapping) or not isinstance(matchers, Mapping):
        return None
    told = [
        f"{matcher.get('pattern', '*')} -> {_training(configs.get(str(matcher.get('config'))))}"
        for matcher in matchers.values()
        if isinstance(matcher, Mapping) and matcher.get("enabled", True)
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

"""Primus: the YAML of an experiment, with the module and model files of its clone, as arguments of Megatron-LM.

    modules:
      pre_trainer: {framework: megatron, config: pre_trainer.yaml, model: llama3.1_8B.yaml, overrides: {fp8: hybrid}}

Its keys are the names that Megatron-LM's parsed arguments have. The module file comes first, then what the model file
has that it has not, then `overrides`. `extends` names files over which a file is laid. `${NAME:default}` is a variable.

Source: AMD-AGI/Primus fd1eeabb of 2026-08-22, primus/core/config/yaml_loader.py, preset_loader.py and
primus/core/launcher/parser.py parse_trainer_module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml
from bridge.preflight.file_reading import FileReading, RunChoice
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.reading_from_arguments import build_reading_from_arguments
from bridge.read.megatron_lm.written_arguments import parse_runs

TRAINER_MODULES = ("pre_trainer", "post_trainer")
"""Modules that train, in the order in which Primus looks for them."""
MEGATRON_FRAMEWORK = "megatron"
TRAINER_KEYS = ("framework", "config", "model", "overrides", "name")
"""Keys of a trainer that are no arguments."""
CONFIGS_FOLDER = Path("primus", "configs")
"""The folder of the module and model files in a clone of Primus."""
VARIABLE_PATTERN = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
INTEGER_PATTERN = re.compile(r"-?\d+")
REAL_PATTERN = re.compile(r"-?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)")
FP32_REDUCTION_KEY = "accumulate_allreduce_grads_in_fp32"
MAX_EXTENDED_FILES = 12
"""Files that extend each other."""
FILE_NOT_THERE = (
    "{name}: not there; it lies in {folder} of a clone of Primus, and what it states is not read."
)
FILE_READ = "{name}: read from {folder}."


def is_of(config: Mapping[str, Any]) -> bool:
    """Return whether a file of these contents is an experiment of Primus that trains on Megatron-LM."""
    return _find_trainer(config) is not None


def read(config: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading:
    """Return what an experiment says of its run; RunConfigError for one that cannot be read."""
    files = _PresetFiles(path, choice.variables)
    trainer: Mapping[str, Any] = files.resolve_variables(_find_trainer(config))
    module = files.load_preset("modules", str(trainer.get("config")))
    model = files.load_preset("models", str(trainer.get("model")))
    arguments = {**model, **module}
    written_directly = {key: value for key, value in trainer.items() if key not in TRAINER_KEYS}
    overrides = {**written_directly, **(trainer.get("overrides") or {})}
    origins = dict.fromkeys(model, _add_suffix(trainer.get("model")))
    origins |= dict.fromkeys(module, _add_suffix(trainer.get("config")))
    origins |= dict.fromkeys(overrides, path.name)
    arguments = dict(_flatten(_merge(arguments, overrides)))
    written = {}
    for name, value in arguments.items():
        is_default = (
            name == FP32_REDUCTION_KEY and value is False
        )  # Megatron-LM's checks turn it on under bf16
        if value is not None and not is_default:
            written[name] = value
    written["moe_layer_freq"] = str(written.get("moe_layer_freq", 1)).strip("()")
    (run,) = parse_runs(written)
    table = load_framework_table("primus")
    run.framework, run.label = table, ""
    run.decided_by = run.used_by = ""
    if files.absent:
        run.decided_by = f"{', '.join(files.absent)} of Primus"
    return build_reading_from_arguments(
        run,
        table,
        str(path),
        origins={name: origins.get(name.partition(".")[0], path.name) for name in written},
        read_too=tuple(files.read_too),
        unknown=tuple(files.unknown),
        variables=tuple(files.variables),
    )


def _find_trainer(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the module that trains on Megatron-LM; None where none does."""
    modules = config.get("modules")
    for name in TRAINER_MODULES:
        trainer = modules.get(name) if isinstance(modules, Mapping) else None
        if isinstance(trainer, Mapping) and trainer.get("framework") == MEGATRON_FRAMEWORK:
            return trainer
    return None


class _PresetFiles:
    """The module and model files of a clone of Primus, while an experiment of it is read."""

    def __init__(self, path: Path, stated: Mapping[str, str]) -> None:
        self.path, self.stated = path, stated
        self.folder = _find_configs_folder(path)
        self.absent: list[str] = []
        """Files that are not there."""
        self.read_too: list[str] = []
        self.unknown: list[str] = []
        self.variables: dict[str, None] = {}

    def load_preset(self, kind: str, name: str) -> dict[str, Any]:
        """Return what a module or model file and those that it extends state; none of one that is not there."""
        name = _add_suffix(name)
        folder_in_clone = Path(CONFIGS_FOLDER, kind, MEGATRON_FRAMEWORK)
        file = None
        if self.folder is not None:
            file = self.folder / kind / MEGATRON_FRAMEWORK / name
        if file is None or not file.is_file():
            self.absent.append(name)
            self.unknown.append(FILE_NOT_THERE.format(name=name, folder=folder_in_clone))
            return {}
        self.read_too.append(FILE_READ.format(name=name, folder=folder_in_clone))
        return self._load_extended(file, MAX_EXTENDED_FILES)

    def _load_extended(self, file: Path, depth: int) -> dict[str, Any]:
        if not depth:
            raise RunConfigError.of(
                str(file),
                f"extends more than {MAX_EXTENDED_FILES} files within each other",
                file.name,
            )
        content = self.resolve_variables(_load_mapping(file))
        extended = content.pop("extends", None) or ()
        if isinstance(extended, str):
            extended = (extended,)
        merged: dict[str, Any] = {}
        for name in extended:
            other = file.parent / str(name)
            if other.is_file():
                merged = _merge(merged, self._load_extended(other, depth - 1))
            else:
                self.absent.append(str(name))
        return _merge(merged, content)

    def resolve_variables(self, value: Any) -> Any:
        """Return a value with its variables as Primus takes them; one that nothing sets stays as it is written."""
        if isinstance(value, Mapping):
            return {str(key): self.resolve_variables(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.resolve_variables(inner) for inner in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        return _parse_scalar(VARIABLE_PATTERN.sub(self._substitute_variable, value))

    def _substitute_variable(self, match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        self.variables[name] = None
        if name in self.stated:
            return self.stated[name]
        if default is None:
            return match[0]
        return default


def _find_configs_folder(path: Path) -> Path | None:
    """Return the folder of the module and model files in the clone that a file lies in; None outside of one."""
    for folder in path.resolve().parents:
        if (folder / CONFIGS_FOLDER / "modules").is_dir():
            return folder / CONFIGS_FOLDER
    return None


def _add_suffix(reference: object) -> str:
    name = str(reference)
    if name.endswith((".yaml", ".yml")):
        return name
    return f"{name}.yaml"


def _load_mapping(file: Path) -> dict[str, Any]:
    text = strict_yaml.decode_text(
        strict_yaml.read_bytes(file, error=RunConfigError), str(file), error=RunConfigError
    )
    (content, *_) = strict_yaml.load_documents(text, str(file), error=RunConfigError) or (None,)
    if not isinstance(content, dict):
        raise RunConfigError.of(str(file), "must hold a mapping", content, "Correct it there.")
    return content


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings with the values of the one above, mappings in them laid over each other too."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(lower, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(lower, value)
        else:
            merged[key] = value
    return merged


def _flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key with a plain value or a list, a key within a mapping with the keys before it."""
    for key, value in values.items():
        name = str(key)
        if above:
            name = f"{above}.{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, name)
        else:
            yield name, value


def _parse_scalar(text: str) -> Any:
    """Return a text with its variables in place as the truth value or the number that it shows."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if INTEGER_PATTERN.fullmatch(text):
        return int(text)
    if REAL_PATTERN.fullmatch(text):
        return float(text)
    return text

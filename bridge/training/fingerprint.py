"""`compute_fingerprint`: every setting that must be equal on all ranks of a run, as text.

Ranks compare their fingerprints before they train. A checkpoint's manifest keeps the fingerprint,
and a resumed run compares its precision with it.
"""

import dataclasses
import enum
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import distributions
from operator import attrgetter
from typing import Any

import torch

from bridge.precision.matchers import parse_quant_recipes
from bridge.registry.schedule import PrecisionSchedule
from bridge.training.config import ConfigContainer

UNCOMPARED_KEYS = (
    "data.num_workers",
    "logging.mlflow",
    "logging.progress",
    "logging.run_dir",
    "logging.tensorboard",
    "logging.wandb",
    "precision_choice",
    "set_by",
    "silence",
)
"""Prefixes of keys that may differ between ranks: output and data loading of a machine, and texts
that no computation reads."""
FINGERPRINT_PACKAGES = ("precision-bridge", "megatron-core", "torch", "transformer-engine", "numpy")
FINGERPRINT_VARIABLES = (
    "BRIDGE_NUMERICS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that change results, in addition to those with `VARIABLE_PREFIX`."""
VARIABLE_PREFIX = "NVTE_"
"""Prefix of the environment variables of Transformer Engine."""
BACKEND_FLAGS = (
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cudnn.allow_tf32",
)
"""Flags of `torch.backends` that change results."""


def compute_fingerprint(
    config: ConfigContainer, environment: Mapping[str, str], *, model: Any = None
) -> dict[str, str]:
    """Return setting -> value as text.

    The settings are the fields of the resolved config, the versions of packages, environment
    variables, flags of torch, and the GPU.

    Args:
        config: The run.
        environment: Environment variables.
        model: Model config that replaces `config.model`. None keeps it.
    """
    if model is not None:
        config = dataclasses.replace(config, model=model)
    sections = {}
    for field in dataclasses.fields(config):
        sections[field.name] = getattr(config, field.name)
    return compute_sections_fingerprint(sections, environment)


def compute_sections_fingerprint(
    sections: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return setting -> value as text, as `compute_fingerprint` does.

    Args:
        sections: Section -> its config.
        environment: Environment variables.
    """
    settings: dict[str, str] = {}
    for section, config in sections.items():
        leaves = _iterate_leaves(config, section)
        settings |= {path: text for path, text in leaves if not path.startswith(UNCOMPARED_KEYS)}
    for name in FINGERPRINT_PACKAGES:
        settings[f"package {name}"] = _get_version(name)
    settings["package python"] = platform.python_version()
    for name, value in environment.items():
        if name in FINGERPRINT_VARIABLES or name.startswith(VARIABLE_PREFIX):
            settings[f"environment {name}"] = value
    return settings | _collect_torch_settings()


def _collect_torch_settings() -> dict[str, str]:
    """Return the flags of torch and the device -> value as text."""
    settings = {}
    settings["torch float32 matmul precision"] = torch.get_float32_matmul_precision()
    settings["torch deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    for path in BACKEND_FLAGS:
        settings[f"torch {path}"] = str(attrgetter(path)(torch.backends))
    settings["device"] = "cpu"
    if torch.cuda.is_available():
        settings["device"] = torch.cuda.get_device_name()
    return settings


def _get_version(package: str) -> str:
    """Return the installed version of a package."""
    for distribution in distributions(name=package):
        return distribution.version
    return "not installed"


def _iterate_leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the text of each leaf of a value.

    No text has a memory address, which would differ between ranks.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield from _iterate_leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key in value:
            yield from _iterate_leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        yield path, str(_format_items(value))
    elif isinstance(value, PrecisionSchedule):
        yield from _iterate_leaves(value.rows, path)
    elif isinstance(value, enum.Enum):
        yield path, value.name
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
        yield path, str(value)
    else:
        yield path, _format_object(value)


def _format_items(values: Iterable[Any]) -> list[str]:
    """Return the text of each leaf of a list. A leaf inside of an item has its path too."""
    items = []
    for value in values:
        for path, text in _iterate_leaves(value, ""):
            item = text
            if path:
                item = f"{path.lstrip('.')}={text}"
            items.append(item)
    return items


def _format_object(value: Any) -> str:
    """Return quantisation recipes as the content of their files, and any other object by its name.

    The name is the name of a class or function, or else of the object's class.
    """
    recipes = parse_quant_recipes(value)
    if recipes:
        return str([recipe.to_file() for recipe in recipes])
    return getattr(value, "__qualname__", None) or type(value).__qualname__

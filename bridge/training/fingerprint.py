"""`fingerprint`: every setting of a run that has to be the same on all its ranks, as text by name."""

import dataclasses
import enum
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from operator import attrgetter
from typing import Any

import torch

from bridge.precision.matchers import quant_recipes
from bridge.registry.schedule import PrecisionSchedule
from bridge.training.config import ConfigContainer

OF_ONE_MACHINE = (
    *(
        "data.num_workers",
        "logging.mlflow",
        "logging.progress",
        "logging.run_dir",
        "logging.tensorboard",
    ),
    *("logging.wandb", "precision_choice", "set_by", "silence"),
)
"""Keys that may differ: what one machine shows and how it reads, and texts that no computation reads."""
PACKAGES = ("precision-bridge", "megatron-core", "torch", "transformer-engine", "numpy")
VARIABLES = (
    *(
        "BRIDGE_NUMERICS",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NVIDIA_TF32_OVERRIDE",
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that change what is computed; those of `PREFIX` too."""
PREFIX = "NVTE_"
BACKENDS = (
    *(f"cuda.matmul.allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16")),
    "cudnn.allow_tf32",
)
"""Flags of `torch.backends`."""


def fingerprint(
    config: ConfigContainer, environment: Mapping[str, str], *, model: Any = None
) -> dict[str, str]:
    """Return setting -> value as text: the resolved config, packages, environment, torch's flags and the GPU."""
    if model is not None:
        config = dataclasses.replace(config, model=model)
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    leaves = (leaf for name, section in sections.items() for leaf in _leaves(section, name))
    found = {path: text for path, text in leaves if not path.startswith(OF_ONE_MACHINE)}
    for name in PACKAGES:
        found[f"package {name}"] = next(
            (one.version for one in distributions(name=name)), "not installed"
        )
    found["package python"] = platform.python_version()
    for name, value in environment.items():
        if name in VARIABLES or name.startswith(PREFIX):
            found[f"environment {name}"] = value
    found["torch float32 matmul precision"] = torch.get_float32_matmul_precision()
    found["torch deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    found |= {f"torch {path}": str(attrgetter(path)(torch.backends)) for path in BACKENDS}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of everything in a value that has a text without an address in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        leaves = (leaf for one in value for leaf in _leaves(one, ""))
        yield (
            path,
            str([f"{where.lstrip('.')}={text}" if where else text for where, text in leaves]),
        )
    elif isinstance(value, PrecisionSchedule):
        yield from _leaves(value.rows, path)
    elif isinstance(value, enum.Enum):
        yield path, value.name
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
        yield path, str(value)
    elif recipes := quant_recipes(value):
        yield path, str([recipe.to_file() for recipe in recipes])
    else:
        yield path, getattr(value, "__qualname__", None) or type(value).__qualname__

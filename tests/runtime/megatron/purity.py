"""As a script, in a fresh process: what importing every module of `bridge` changes outside of it, as JSON.

With the word ``megatron-first``, torch and Megatron Core are imported first, as a user's program does. Their modules,
classes and flags, the loggers, the environment and the state of torch are then compared before and after. With
``ours-first``, the flags alone are printed, which Megatron sets at its import.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

OTHERS = ("torch", "megatron", "transformer_engine", "logging", "numpy", "mamba_ssm", "fla", "fast_hadamard_transform")
NOT_OF_TRAINING = ("inference.", "post_training", ".quantization", "resharding", ".rl", "__main__", "export")
OF_US = ("matplotlib", "rich", "hydra", "tensorboard", "scipy", "torch.utils.tensorboard")
"""Packages that ours import, and that may have loggers of torch's in their own imports."""
NEMO_RUN_PLUGIN = "bridge.front.nemo_run"
"""Imported by programs of nemo-run alone."""
OWN_STATE = (
    "_dynamo",  # counters of torch's compiler
    "torch._logging",  # it notes each logger that torch makes
)


def names_below(package: str) -> Iterator[str]:
    """Every module of a package, without importing them."""
    found = importlib.import_module(package)
    for info in pkgutil.walk_packages(found.__path__, f"{package}.", onerror=lambda _name: None):
        yield info.name


def state() -> dict[str, object]:
    """Identity of every attribute of the other packages' modules and classes, and plain values elsewhere."""
    import torch

    seen: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] in OTHERS:
            seen[name] = id(module)
            for attribute, value in list(vars(module).items()):
                if any(part in f"{name}.{attribute}" for part in OWN_STATE) or isinstance(value, (dict, list, set)):
                    continue
                seen[f"{name}.{attribute}"] = repr(value) if isinstance(value, (int, str, float)) else id(value)
                if isinstance(value, type) and value.__module__.partition(".")[0] in OTHERS:
                    for part, held in list(vars(value).items()):
                        if not part.startswith("_abc_") and part not in ("__doc__", "__annotations__"):
                            seen[f"{name}.{attribute}.{part}"] = id(held)
    loggers = {"root": logging.getLogger(), **logging.Logger.manager.loggerDict}
    for name, logger in loggers.items():
        if isinstance(logger, logging.Logger) and not name.startswith("bridge"):
            seen[f"logger {name}"] = (logger.level, tuple(map(id, logger.handlers)), logger.propagate, logger.disabled)
    seen["logging.disable"] = logging.root.manager.disable
    seen["warnings"] = tuple(map(str, warnings.filters))
    seen["environment"] = dict(os.environ)
    seen["path"] = (list(sys.path), tuple(map(id, sys.meta_path)))
    seen["torch"] = (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed())
    seen["matmul"] = (torch.get_float32_matmul_precision(), torch.compiler.is_compiling())
    return seen


def import_megatron() -> None:
    """Import torch, and the modules of Megatron Core that this machine can import."""
    importlib.import_module("torch._dynamo")
    for name in ("megatron.core.models.gpt", "megatron.core.optimizer", *names_below("megatron.core")):
        if any(part in name for part in NOT_OF_TRAINING):
            continue
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001, S112 what this machine lacks
            continue


def import_ours() -> int:
    """Import every module of `bridge` but plugins of absent packages, and return their number."""
    number = 0
    for name in names_below("bridge"):
        if ".plugins." in name or (name == NEMO_RUN_PLUGIN and find_spec("nemo_run") is None):
            continue
        importlib.import_module(name)
        number += 1
    return number


def flags() -> dict[str, object]:
    """What Megatron found at its import: packages, and whether its functions are compiled."""
    found: dict[str, object] = {
        f"{name}.{flag}": value
        for name, module in sys.modules.items()
        if name.startswith("megatron.")
        for flag, value in vars(module).items()
        if flag.startswith("HAVE_") and isinstance(value, bool)
    }
    from megatron.core import jit
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.transformer.experimental_attention_variant import dsa

    found["jit"] = getattr(jit.jit_fuser, "__name__", None)
    found["compiled"] = hasattr(fused_bias_geglu.geglu, "_torchdynamo_orig_callable")
    found["hadamard"] = getattr(dsa.hadamard_transform, "__module__", None)
    return found


def main(order: str) -> None:
    """Import Megatron and ours in an order, and print what ours changed."""
    warnings.simplefilter("ignore")
    before: dict[str, object] = {}
    if order == "megatron-first":
        for name in OF_US:
            importlib.import_module(name)
        import_megatron()
        before = state()
    number = import_ours()
    after = state()
    if order != "megatron-first":
        import_megatron()
    changed = [name for name, value in before.items() if after.get(name, "gone") != value]
    new = [name for name in after.keys() - before.keys() if name in sys.modules] if before else []
    print(json.dumps({"imported": number, "changed": changed, "new": sorted(new), "flags": flags()}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])

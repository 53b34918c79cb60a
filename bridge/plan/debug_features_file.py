"""`build_features`: the features file of Transformer Engine's debugger for the layers of a plan.

    measure   statistics of the operands of each layer in FP8 or FP4, under its scheme
    disable   the layers that the plan keeps in high precision, for a run that does not keep them
    fake      the operands of the plan rounded to FP8, for a run in BF16

Each layer is in a single entry: the debugger refuses a layer that two entries name.

Source: nvdlfw-inspect 0.2.2 config_manager.py; Transformer Engine 2.20.2 debug/features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from bridge.errors import RunConfigError
from bridge.plan.plan_layers import PlanModule
from bridge.plan.precision_plan import PrecisionPlan, format_ranges
from bridge.precision.debug_features import DEBUGGER_TENSOR_NAMES, NAMESPACE
from bridge.precision.schemes import GEMMS

PURPOSES = ("measure", "disable", "fake")
DEFAULT_INTERVAL = 100
"""Steps from one measurement to the next. Each measurement costs a further cast."""
STATS_OF_VALUES = ("cur_amax", "mean", "std")
"""Statistics of a tensor before it is quantised.

The signal-to-noise ratio needs the last two statistics.
"""
STATS_OF_FP8 = ("underflows%", "scale_inv_min", "scale_inv_max", "mse")
STATS_OF_STORED_FP8 = ("scale_inv_min", "scale_inv_max")
"""Statistics of a weight that is stored in FP8. No high-precision weight exists for comparison."""
STATS_OF_NVFP4 = ("underflows%", "mse")
PER_TENSOR_SCHEMES = ("tensorwise", "delayed")
"""Schemes that FakeQuant can imitate: they have a single scale for the tensor."""
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


def build_features(
    plan: PrecisionPlan, purpose: str, *, every: int = DEFAULT_INTERVAL
) -> dict[str, Any]:
    """Return the content of a features file.

    Args:
        plan: The plan of the run.
        purpose: One of `PURPOSES`.
        every: Steps from one measurement to the next.

    Raises:
        RunConfigError: The plan has no layer for the purpose, or a layer that FakeQuant cannot
            round.
    """
    content: dict[str, Any] = {}
    for module, names in _group_linears(plan, purpose):
        entry = _make_entry(module, purpose, every)
        numbers = []
        for name in names:
            number = _LAYER_NUMBER.search(name)
            if number is not None and number[1] not in numbers:
                numbers.append(number[1])
        scheme = module.scheme or "high"
        label = f"{scheme} {_get_last_part(names[0])} {format_ranges(numbers)}".strip()
        content[_make_unique_label(content, label)] = {
            "enabled": True,
            "layers": {"layer_name_regex_pattern": _build_pattern(names)},
            NAMESPACE: entry,
        }
    if not content:
        kept = "in FP8 or FP4"
        if purpose == "disable":
            kept = "in high precision"
        rule = f"the plan of {plan.label} has no linear layer {kept}"
        raise RunConfigError(f"debug features ({purpose}): {rule}.")
    return content


def _group_linears(plan: PrecisionPlan, purpose: str) -> Iterator[tuple[PlanModule, list[str]]]:
    """Yield a module for each entry of the file, and the names of the entry's linear layers."""
    names_of: dict[tuple[str, str | None, str], list[str]] = {}
    first: dict[tuple[str, str | None, str], PlanModule] = {}
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind != "linear" or module.module.is_high_precision:
                continue
            if (module.scheme is None) != (purpose == "disable"):
                continue
            weight = module.row("weight")
            stored = ""
            if weight is not None:
                stored = weight.storage
            key = (module.name, module.scheme, stored)
            first.setdefault(key, module)
            name = plan.paths.get_debug_name(layer.label, module.name)
            names_of.setdefault(key, []).append(name)
    for key, names in names_of.items():
        yield first[key], names


def _make_entry(module: PlanModule, purpose: str, every: int) -> dict[str, Any]:
    if purpose == "disable":
        return {"DisableQuantizationLayer": {"enabled": True}}
    if purpose == "fake":
        return {
            "FakeQuant": {"enabled": True, "gemms_struct": list(_list_rounded_operands(module))}
        }
    feature = "LogFp8TensorStats"
    if module.scheme == "nvfp4":
        feature = "LogNvfp4TensorStats"
    of_codes, of_values = [], []
    for operand, tensor in DEBUGGER_TENSOR_NAMES.items():
        stats = _choose_statistics(module, operand)
        of_codes.append({"tensor": tensor, "stats": list(stats), "freq": every})
        if stats != STATS_OF_STORED_FP8:
            of_values.append({"tensor": tensor, "stats": list(STATS_OF_VALUES), "freq": every})
    return {
        feature: {"enabled": True, "tensors_struct": of_codes},
        "LogTensorStats": {"enabled": True, "tensors_struct": of_values},
    }


def _choose_statistics(module: PlanModule, operand: str) -> tuple[str, ...]:
    if module.scheme == "nvfp4":
        return STATS_OF_NVFP4
    weight = module.row("weight")
    is_stored = weight is not None and weight.storage in ("e4m3", "e5m2")
    if operand == "weight" and is_stored:
        return STATS_OF_STORED_FP8
    if module.scheme == "delayed":
        return (*STATS_OF_FP8, "overflows%")
    return STATS_OF_FP8


def _list_rounded_operands(module: PlanModule) -> Iterator[dict[str, Any]]:
    """Yield the operands of each GEMM with the formats that they are rounded to."""
    if module.copies is None or module.scheme not in PER_TENSOR_SCHEMES:
        rule = f"FakeQuant of Transformer Engine 2.20 rounds with a scale of the tensor, and not {module.scheme}"
        raise RunConfigError(f"debug features (fake): {rule}. Take a recipe with such a scale.")
    for gemm in GEMMS.values():
        left, right = module.copies.get_gemm_operands(gemm.name)
        tensors = []
        for operand, copy in ((gemm.left, left), (gemm.right, right)):
            if copy.format:
                chosen = f"FP8{copy.format.upper()}"
                tensors.append({"tensor": DEBUGGER_TENSOR_NAMES[operand], "quant_format": chosen})
        if tensors:
            yield {"gemm": gemm.name, "tensors_struct": tensors}


def _get_last_part(name: str) -> str:
    """Return the name of a linear layer within its parent."""
    return name.removesuffix(".gemm_0").rpartition(".")[2]


def _build_pattern(names: list[str]) -> str:
    """Return a regular expression that matches some layers, in a model with any wrappers.

    It matches all experts of a grouped layer.
    """
    numbers_of: dict[str, list[str]] = {}
    for name in names:
        path = name.removeprefix("model.module.module.")
        path = re.escape(path.removesuffix(".gemm_0"))
        if name.endswith(".gemm_0"):
            path += r"\.gemm_\d+"
        number = _LAYER_NUMBER.search(name)
        if number is None:
            numbers_of.setdefault(path, [])
            continue
        shared = path.replace(rf"\.layers\.{number[1]}\.", r"\.layers\.NUMBER\.", 1)
        numbers_of.setdefault(shared, []).append(number[1])
    paths = []
    for path, numbers in numbers_of.items():
        paths.append(path.replace("NUMBER", f"({'|'.join(numbers)})"))
    if len(paths) == 1:
        return rf"\.{paths[0]}$"
    return rf"\.({'|'.join(paths)})$"


def _make_unique_label(content: dict[str, Any], label: str) -> str:
    name, number = label, 2
    while name in content:
        name = f"{label} ({number})"
        number += 1
    return name

"""Megatron's per-module recipe, derived from the rows of `modules` for each model chunk of a pipeline layout.

Rows number layers over the whole model; Megatron matches names within one chunk of one stage. Layer 5 of the model may
be ``decoder.layers.1`` of the third stage, so that its matcher stands in that stage's recipe alone, under that name.

A payload says `override_nonquantized_autocast` where its modules lie in layers that do not run in FP8 or FP4: in a run
without either, and where the row names its layers, which `first_last_layers_bf16` may keep in BF16.
"""

import re
from collections.abc import Sequence
from typing import Any

from bridge.precision.config import PrecisionConfig
from bridge.precision.modules import HIGH, ModulePrecision, ModuleRow, module_rows
from bridge.precision.quant_recipe import CONFIG_TYPE, EVALUATION, TRAINING

_OF_A_LAYER = re.compile(r"decoder\.layers\.(-?\d+)(?=\.|$)")


def needs_layers(rows: Sequence[ModuleRow]) -> bool:
    """Return whether the recipe depends on which layers a chunk holds."""
    return any(row.names_layers for row in rows)


def chunk_recipes(
    rows: Sequence[ModuleRow], chunks: Sequence[Sequence[int]], *, is_low: bool, fp8_format: str | None = None
) -> list[dict[str, Any]]:
    """Return the content of Megatron's file for each model chunk, whose layers count from 0 over the whole model."""
    num_layers = sum(map(len, chunks))
    configs: dict[str, Any] = {}
    keys = [_add(configs, row, is_low=is_low, fp8_format=fp8_format) for row in rows]
    return [
        {
            "configs": configs,
            "matchers": _matchers(rows, keys, {number: at for at, number in enumerate(chunk)}, num_layers),
        }
        for chunk in chunks
    ]


def file_of(config: PrecisionConfig) -> dict[str, Any]:
    """Return the content of Megatron's file for rows that name no layers, which every chunk shares."""
    is_low = config.fp8 is not None or config.fp4 is not None
    return chunk_recipes(module_rows(config.reading("modules")), [()], is_low=is_low, fp8_format=config.fp8)[0]


def stage_recipes(files: Sequence[dict[str, Any]], stages: int) -> list[dict[str, Any] | None]:
    """Return one file per pipeline stage; None for a stage whose chunks need different ones.

    Megatron gives all chunks of a stage the same config, hence the same recipe.
    """
    by_stage = [files[stage::stages] for stage in range(stages)]
    return [held[0] if all(one["matchers"] == held[0]["matchers"] for one in held) else None for held in by_stage]


def _matchers(
    rows: Sequence[ModuleRow], keys: Sequence[str], local: dict[int, int], num_layers: int
) -> dict[str, dict[str, Any]]:
    """Return the matchers of a chunk: `local` is number in the model -> number in the chunk."""
    found: dict[str, dict[str, Any]] = {}
    for number, (row, key) in enumerate(zip(rows, keys, strict=True)):
        patterns = [own for one in row.patterns(num_layers) if (own := _within(one, local)) is not None]
        for part, pattern in enumerate(patterns):
            name = f"row_{number}" if len(patterns) == 1 else f"row_{number}_{part}"
            found[name] = {"config": key, "type": "glob", "pattern": pattern, "enabled": True}
    return found


def _within(pattern: str, local: dict[int, int]) -> str | None:
    """Return a glob over names in the model as one over names in a chunk, None where its layer is not there."""
    match = _OF_A_LAYER.match(pattern)
    if match is None:
        return pattern
    at = local.get(int(match[1]))
    return None if at is None else f"decoder.layers.{at}{pattern[match.end() :]}"


def _add(configs: dict[str, Any], row: ModuleRow, *, is_low: bool, fp8_format: str | None) -> str:
    acts_in_high = not is_low or row.names_layers
    payload: dict[str, Any] = {
        **CONFIG_TYPE,
        TRAINING: _recipe(row.precision, acts_in_high=acts_in_high, fp8_format=fp8_format),
    }
    if row.evaluation is not None:
        payload[EVALUATION] = _recipe(row.evaluation, acts_in_high=acts_in_high, fp8_format=fp8_format)
    known = next((name for name, held in configs.items() if held == payload), None)
    if known is not None:
        return known
    name = base = row.precision.scheme or HIGH
    while name in configs:
        name = f"{base}_{sum(one.startswith(base) for one in configs) + 1}"
    configs[name] = payload
    return name


def _recipe(precision: ModulePrecision, *, acts_in_high: bool, fp8_format: str | None) -> dict[str, Any]:
    family = precision.family
    if family is None:
        return {}
    recipe: dict[str, Any] = {f"{family}_quantization_recipe": precision.scheme}
    if family == "fp8":
        recipe["fp8_format"] = precision.format_in(fp8_format)
    if acts_in_high:
        recipe["override_nonquantized_autocast"] = True
    if precision.factory is not None:
        recipe["custom_recipe_factory"] = precision.factory
    if precision.tp_only_amax_red is not None:
        recipe["tp_only_amax_red"] = precision.tp_only_amax_red
    if precision.stored:  # False is Megatron's default, and releases before 0.18 know no such key
        recipe[f"{family}_param"] = True
    return recipe

"""Rows of `modules` as matchers: the scheme of each linear layer, and Megatron's recipe for each model chunk.

    schemes = ModuleSchemes.of(config, num_layers=32)
    schemes.chosen(0, "mlp.linear_fc2")        # Chosen("mxfp8", "e4m3"); None: the dtype of the run

Rows number layers over the whole model; Megatron matches names within one chunk of one stage. Layer
5 of the model may be ``decoder.layers.1`` of the third stage, so that its matcher stands in that
stage's recipe alone, under that name.

A row acts in layers that do not run in FP8 or FP4 too where the run has neither, and where it names
its layers, which `first_last_layers_bf16` may keep in BF16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import WrongValueError
from bridge.precision.config import PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.matchers import (
    CONFIG_TYPE,
    EVALUATION,
    TRAINING,
    Chosen,
    Effect,
    Matcher,
    Matchers,
)
from bridge.precision.mode import low_format_of, scheme_of
from bridge.precision.modules import ModuleRow, layers_beyond, module_rows
from bridge.precision.statements import field_value, is_stated

_OF_A_LAYER = re.compile(r"decoder\.layers\.(-?\d+)(?=\.|$)")


def row_matchers(rows: Sequence[ModuleRow], num_layers: int, *, run: str | None) -> Matchers:
    """Return rows as matchers of names in the whole model; `run` is the format of the run, None for no FP8 and FP4."""
    configs: dict[str, Any] = {}
    found = []
    for number, row in enumerate(rows):
        in_high = run is None or bool(row.layer_numbers)
        training = row.precision.in_run(run, in_high=in_high)
        evaluation = (
            row.evaluation.in_run(run, in_high=in_high) if row.evaluation is not None else None
        )
        matcher = Matcher(
            name=str(number),
            patterns=row.patterns(num_layers),
            training=training,
            evaluation=evaluation,
            config=_add(configs, training, evaluation),
            select=str(row),
            layers=row.layer_numbers,
        )
        found.append(matcher)
    return Matchers(matchers=tuple(found), configs=configs)


def _add(configs: dict[str, Any], training: Effect, evaluation: Effect | None) -> str:
    payload: dict[str, Any] = {**CONFIG_TYPE, TRAINING: training.to_recipe()}
    if evaluation is not None:
        payload[EVALUATION] = evaluation.to_recipe()
    for known, held in configs.items():
        if held == payload:
            return known
    name = base = training.label
    while name in configs:
        name = f"{base}_{sum(one.startswith(base) for one in configs) + 1}"
    configs[name] = payload
    return name


def chunk_recipes(
    rows: Sequence[ModuleRow], chunks: Sequence[Sequence[int]], *, run: str | None
) -> list[dict[str, Any]]:
    """Return the content of Megatron's file for each model chunk, whose layers count from 0 over the whole model."""
    whole = row_matchers(rows, sum(map(len, chunks)), run=run)
    files = []
    for chunk in chunks:
        local = {number: at for at, number in enumerate(chunk)}
        own = [
            replace(one, name=f"row_{one.name}", patterns=_within(one.patterns, local))
            for one in whole.matchers
        ]
        files.append(replace(whole, matchers=tuple(own)).to_file())
    return files


def _within(patterns: Sequence[str], local: dict[int, int]) -> tuple[str, ...]:
    """Return globs over names in the model as those over names in a chunk, without those of layers that it lacks."""
    found = []
    for pattern in patterns:
        match = _OF_A_LAYER.match(pattern)
        at = local.get(int(match[1])) if match is not None else None
        if match is None:
            found.append(pattern)
        elif at is not None:
            found.append(f"decoder.layers.{at}{pattern[match.end() :]}")
    return tuple(found)


def file_of(config: PrecisionConfig) -> dict[str, Any]:
    """Return the content of Megatron's file for rows that name no layers, which every chunk shares."""
    return chunk_recipes(
        module_rows(field_value(config, "modules")), [()], run=low_format_of(config)
    )[0]


def stage_recipes(files: Sequence[dict[str, Any]], stages: int) -> list[dict[str, Any] | None]:
    """Return one file per pipeline stage; None for a stage whose chunks need different ones.

    Megatron gives all chunks of a stage the same config, hence the same recipe.
    """
    by_stage = [files[stage::stages] for stage in range(stages)]
    return [
        held[0] if all(one["matchers"] == held[0]["matchers"] for one in held) else None
        for held in by_stage
    ]


@dataclass(frozen=True, kw_only=True)
class ModuleSchemes:
    """The rows of a precision, its scheme, and the layers that it keeps in the dtype of the run."""

    matchers: Matchers
    """The rows, over names in the whole model."""
    run: Chosen | None
    """The scheme of the run; None: neither FP8 nor FP4."""
    num_layers: int | None
    kept: tuple[int, int]
    """Layers at either end that `first_last_layers_bf16` keeps."""

    @classmethod
    def of(cls, config: PrecisionConfig, num_layers: int | None = None) -> ModuleSchemes:
        """Return the schemes of a precision; WrongValueError where layers are not known, or not there."""
        rows = module_rows(field_value(config, "modules"))
        named = [number for row in rows for number in row.layer_numbers]
        kept = (0, 0)
        if scheme_of(config) is not None and field_value(config, "first_last_layers_bf16"):
            start, end = (
                field_value(config, name) if is_stated(config, name) else 1 for name in LAYER_COUNTS
            )
            kept = (start, end)
        if num_layers is None and (any(kept) or named):
            rule = "the precision chooses single layers, so the number of layers must be known"
            raise WrongValueError(rule, None, "Give the number of the model's layers.")
        if num_layers is not None and (type(num_layers) is not int or num_layers < 1):
            raise WrongValueError(
                "the number of layers must be a whole number from 1", num_layers, "Correct it."
            )
        beyond = layers_beyond(named, num_layers) if num_layers is not None else []
        if beyond:
            raise WrongValueError(
                f"rows name layer {beyond[0]}", num_layers, "Correct the rows or the number."
            )
        matchers = row_matchers(rows, num_layers or 0, run=low_format_of(config))
        return cls(matchers=matchers, run=cls.of_run(config), num_layers=num_layers, kept=kept)

    @staticmethod
    def of_run(config: PrecisionConfig) -> Chosen | None:
        """Return the scheme of the run; None: neither FP8 nor FP4."""
        scheme = scheme_of(config)
        if scheme is None:
            return None
        return Chosen(scheme, str(low_format_of(config)))

    @property
    def chooses(self) -> bool:
        """Whether some linear layer may differ from others."""
        return bool(self.matchers.matchers) or any(self.kept)

    def chosen(self, layer: int, name: str) -> Chosen | None:
        """Return the scheme of a linear layer by its number from 0 and Megatron's name; None: the dtype of the run."""
        is_kept = (
            self.num_layers is not None
            and not self.kept[0] <= layer < self.num_layers - self.kept[1]
        )
        run, effect = (
            None if is_kept else self.run,
            self.matchers.effect(f"decoder.layers.{layer}.{name}"),
        )
        return effect.computes(run) if effect is not None else run

    def empty(self, modules: Iterable[tuple[int, str]]) -> tuple[Matcher, ...]:
        """Return the rows that select none of some linear layers, each by layer and name."""
        paths = [f"decoder.layers.{layer}.{name}" for layer, name in modules]
        return tuple(row for row in self.matchers.matchers if not any(map(row.takes, paths)))

"""Rows of `modules` as matchers: the scheme of each linear layer, and Megatron's recipe per chunk.

    schemes = ModuleSchemes.from_precision(config, num_layers=32)
    schemes.chosen(0, "mlp.linear_fc2")   # SchemeChoice("mxfp8", "e4m3"); None: the dtype of the run

Rows number layers in the whole model. Megatron matches names within one chunk of one stage. Layer 5
of the model may be ``decoder.layers.1`` of the third stage. Then its matcher is only in the recipe
of that stage, with that name.

A row also acts in layers that do not run in FP8 or FP4, in two cases: the run has neither, or the
row names its layers. `first_last_layers_bf16` may keep such layers in BF16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import WrongValueError
from bridge.precision.matchers import (
    EVALUATION,
    TE_CONFIG_TYPE,
    TRAINING,
    Matcher,
    ModulePrecision,
    QuantRecipe,
    SchemeChoice,
)
from bridge.precision.mode import get_low_precision_format, get_scheme
from bridge.precision.module_row import ModuleRow, find_absent_layers, parse_module_rows
from bridge.precision.precision_config import PrecisionConfig
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import get_field_value, is_stated

_DECODER_LAYER = re.compile(r"decoder\.layers\.(-?\d+)(?=\.|$)")


def make_row_matchers(
    rows: Sequence[ModuleRow], num_layers: int, *, run: str | None
) -> QuantRecipe:
    """Return rows as matchers of names in the whole model.

    Args:
        num_layers: The number of layers of the model. 0: it is not known.
        run: The format of the run. None: the run has no FP8 and FP4.
    """
    configs: dict[str, Any] = {}
    matchers = []
    for number, row in enumerate(rows):
        in_high = run is None or bool(row.layer_numbers)
        training = row.precision.resolve_in_run(run, in_high=in_high)
        evaluation = None
        if row.evaluation is not None:
            evaluation = row.evaluation.resolve_in_run(run, in_high=in_high)
        matcher = Matcher(
            name=str(number),
            patterns=row.patterns(num_layers),
            training=training,
            evaluation=evaluation,
            config=_add_payload(configs, training, evaluation),
            select=str(row),
            layers=row.layer_numbers,
        )
        matchers.append(matcher)
    return QuantRecipe(matchers=tuple(matchers), configs=configs)


def _add_payload(
    configs: dict[str, Any], training: ModulePrecision, evaluation: ModulePrecision | None
) -> str:
    """Return the name of the payload in `configs`. A new payload is added to it."""
    payload: dict[str, Any] = {**TE_CONFIG_TYPE, TRAINING: training.to_recipe()}
    if evaluation is not None:
        payload[EVALUATION] = evaluation.to_recipe()
    for name, known_payload in configs.items():
        if known_payload == payload:
            return name
    name = training.label
    while name in configs:
        alike = sum(known_name.startswith(training.label) for known_name in configs)
        name = f"{training.label}_{alike + 1}"
    configs[name] = payload
    return name


def make_chunk_recipes(
    rows: Sequence[ModuleRow], chunks: Sequence[Sequence[int]], *, run: str | None
) -> list[dict[str, Any]]:
    """Return the content of Megatron's file for each model chunk.

    Args:
        chunks: The numbers of the layers of each chunk, counted from 0 in the whole model.
        run: The format of the run. None: the run has no FP8 and FP4.
    """
    model_recipe = make_row_matchers(rows, sum(map(len, chunks)), run=run)
    files = []
    for chunk in chunks:
        number_in_chunk = {number: index for index, number in enumerate(chunk)}
        matchers = []
        for matcher in model_recipe.matchers:
            patterns = _renumber_patterns(matcher.patterns, number_in_chunk)
            matchers.append(replace(matcher, name=f"row_{matcher.name}", patterns=patterns))
        files.append(replace(model_recipe, matchers=tuple(matchers)).to_file())
    return files


def _renumber_patterns(patterns: Sequence[str], number_in_chunk: dict[int, int]) -> tuple[str, ...]:
    """Return globs over names in the model as globs over names in a chunk.

    Globs of layers that are not in the chunk are left out.
    """
    chunk_patterns = []
    for pattern in patterns:
        match = _DECODER_LAYER.match(pattern)
        if match is None:
            chunk_patterns.append(pattern)
            continue
        number = number_in_chunk.get(int(match[1]))
        if number is not None:
            chunk_patterns.append(f"decoder.layers.{number}{pattern[match.end() :]}")
    return tuple(chunk_patterns)


def make_shared_recipe(config: PrecisionConfig) -> dict[str, Any]:
    """Return the content of Megatron's file for rows without layers, which every chunk shares."""
    rows = parse_module_rows(get_field_value(config, "modules"))
    files = make_chunk_recipes(rows, [()], run=get_low_precision_format(config))
    return files[0]


def make_stage_recipes(files: Sequence[dict[str, Any]], stages: int) -> list[dict[str, Any] | None]:
    """Return the file of each pipeline stage, or None for a stage whose chunks need different files.

    Megatron gives all chunks of a stage the same config, and so the same recipe.
    """
    recipes: list[dict[str, Any] | None] = []
    for stage in range(stages):
        first, *others = files[stage::stages]
        if all(file["matchers"] == first["matchers"] for file in others):
            recipes.append(first)
        else:
            recipes.append(None)
    return recipes


@dataclass(frozen=True, kw_only=True)
class ModuleSchemes:
    """The rows of a precision, its scheme, and the layers that it keeps in the dtype of the run."""

    matchers: QuantRecipe
    """The rows as matchers of names in the whole model."""
    run: SchemeChoice | None
    """The scheme of the run. None: the run has no FP8 and FP4."""
    num_layers: int | None
    kept: tuple[int, int]
    """The numbers of layers at the start and at the end that `first_last_layers_bf16` keeps."""

    @classmethod
    def from_precision(
        cls, config: PrecisionConfig, num_layers: int | None = None
    ) -> ModuleSchemes:
        """Return the schemes of a precision.

        Raises:
            WrongValueError: The precision names single layers, and the number of layers is not known
                or too small.
        """
        rows = parse_module_rows(get_field_value(config, "modules"))
        named: list[int] = []
        for row in rows:
            named += row.layer_numbers
        kept = _count_kept_layers(config)
        if num_layers is None and (any(kept) or named):
            rule = "the precision chooses single layers, so the number of layers must be known"
            raise WrongValueError(rule, None, "Give the number of the model's layers.")
        if num_layers is not None:
            if type(num_layers) is not int or num_layers < 1:
                rule = "the number of layers must be a whole number from 1"
                raise WrongValueError(rule, num_layers, "Correct it.")
            beyond = find_absent_layers(named, num_layers)
            if beyond:
                rule = f"rows name layer {beyond[0]}"
                raise WrongValueError(rule, num_layers, "Correct the rows or the number.")
        matchers = make_row_matchers(rows, num_layers or 0, run=get_low_precision_format(config))
        return cls(
            matchers=matchers, run=cls.get_run_scheme(config), num_layers=num_layers, kept=kept
        )

    @staticmethod
    def get_run_scheme(config: PrecisionConfig) -> SchemeChoice | None:
        """Return the scheme of the run, or None without FP8 and FP4."""
        scheme = get_scheme(config)
        if scheme is None:
            return None
        return SchemeChoice(scheme, str(get_low_precision_format(config)))

    @property
    def has_choices(self) -> bool:
        """Whether linear layers may have different schemes."""
        return bool(self.matchers.matchers) or any(self.kept)

    def chosen(self, layer: int, name: str) -> SchemeChoice | None:
        """Return the scheme of a linear layer. None: it computes in the dtype of the run.

        Args:
            layer: The number of the layer, from 0.
            name: Megatron's name of the linear layer within the layer.
        """
        run = self.run
        if self.num_layers is not None:
            start, end = self.kept
            if not start <= layer < self.num_layers - end:
                run = None
        effect = self.matchers.effect(f"decoder.layers.{layer}.{name}")
        if effect is None:
            return run
        return effect.computes(run)

    def find_empty_rows(self, modules: Iterable[tuple[int, str]]) -> tuple[Matcher, ...]:
        """Return the rows that select none of the linear layers.

        Args:
            modules: (layer number, name) of each linear layer.
        """
        paths = [f"decoder.layers.{layer}.{name}" for layer, name in modules]
        empty = []
        for matcher in self.matchers.matchers:
            if not any(map(matcher.matches, paths)):
                empty.append(matcher)
        return tuple(empty)


def _count_kept_layers(config: PrecisionConfig) -> tuple[int, int]:
    """Return how many layers at the start and the end `first_last_layers_bf16` keeps in BF16."""
    if get_scheme(config) is None or not get_field_value(config, "first_last_layers_bf16"):
        return 0, 0
    counts = []
    for name in LAYER_COUNTS:
        count = 1  # Megatron's default
        if is_stated(config, name):
            count = get_field_value(config, name)
        counts.append(count)
    start, end = counts
    return start, end

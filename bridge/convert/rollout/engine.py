"""`Rollout`: the precision of the engine that generates the samples of a run.

An engine quantises by a config that its framework passes to it, or that is in the checkpoint.
`ServingConfig` reads the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.convert.serving.formats import MODELOPT
from bridge.convert.serving.serving_config import ServingConfig
from bridge.read.foreign.row_files import load_rows

ROLLOUT_ROWS = load_rows("rollout")
"""Frameworks and dtypes of the cache. The file describes its columns."""
MODEL_DTYPE = "auto"
"""The engines' value for a cache in the dtype of the model."""
CACHE_DTYPES: Mapping[str, bool] = ROLLOUT_ROWS["cache"]
"""An engine's name of a dtype of keys and values -> whether it has fewer bits than the model's."""
POWERS_OF_TWO = "powers of two"
FP32 = "FP32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """The possible values of the scales of blocks of 128: `FP32` or `POWERS_OF_TWO`."""

    weights: str | None = None
    """The scales of weights; None: not known."""
    inputs: str | None = None
    """The scales of inputs; None: not known."""
    decided_by: str = ""
    """The source that decides scales that are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The precision of the engine that generates the samples of a run."""

    engine: str
    """vllm, sglang, or another engine's name; empty: not known."""
    framework: str = ""
    """The framework that starts the engine; empty: only a serving config is known."""
    quantization: Mapping[str, Any] | None = None
    """The quantization config of the engine. Empty: nothing is quantised. None: not known."""
    quantization_decided_by: str = ""
    """The source that decides a quantization config that is not known."""
    first: int = 0
    """First layers in high precision."""
    last: int = 0
    """Last layers in high precision."""
    kept_parts: tuple[str, ...] = ()
    """A module stays in high precision if its name has one of these parts."""
    kept_ends: tuple[str, ...] = ()
    """A module stays in high precision if its name has one of these ends."""
    dtype: str | None = None
    """Dtype of modules that are not quantised: bf16, fp16, fp32; None: not known."""
    cache: str | None = MODEL_DTYPE
    """The engine's name of the dtype of keys and values, as in `CACHE_DTYPES`. None: not known."""
    scales: Scales = Scales()
    quantised_by_name: frozenset[str] = frozenset()
    """Megatron's names of modules whose weights training quantises before it sends them.

    Training does so for a config of the fp8 dialect, even for modules that the config's list keeps.
    """
    sent: str = ""
    """The form in which training sends the weights, as a sentence."""
    notes: tuple[str, ...] = ()
    """Further facts, as sentences."""

    def make_config(self, names: Mapping[str, tuple[int, int]]) -> ServingConfig | None:
        """Return the config with its list of modules; None if it is not known.

        Args:
            names: Name of a module in the checkpoint -> its layer from 1, and the number of layers.
        """
        if self.quantization is None:
            return None
        if not self.quantization:
            return ServingConfig(path=self.framework or "rollout")
        block = dict(self.quantization)
        kept: list[str] = []
        for name, (layer, num_layers) in names.items():
            if self._is_kept(name, layer, num_layers):
                kept.append(name)
        if kept:
            list_key = "ignored_layers"
            if block.get("quant_method") == MODELOPT:
                list_key = "ignore"
            block[list_key] = [*block.get(list_key, ()), *kept]
        return ServingConfig.from_mapping(
            {"quantization_config": block}, self.framework or "rollout"
        )

    def _is_kept(self, name: str, layer: int, num_layers: int) -> bool:
        """Return whether a module stays in high precision: by its layer, or by its name."""
        if layer and (layer <= self.first or layer > num_layers - self.last):
            return True
        if any(part in name for part in self.kept_parts):
            return True
        return name.endswith(self.kept_ends)


def get_module_schemes(config: ServingConfig, name: str, engine: str) -> set[str | None]:
    """Return the schemes that a module of the checkpoint may have.

    There are several schemes if the engine is not known and systems read the config differently.
    The scheme None means that the module is not quantised.

    Args:
        config: The quantization config.
        name: The module's name in the checkpoint.
        engine: The engine. If it is empty, or does not read the dialect, every system that reads
            the dialect counts.
    """
    readers = config.readers
    if engine in readers:
        readers = [engine]
    return {config.scheme_of(name, reader) for reader in readers}

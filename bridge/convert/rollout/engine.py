"""`Rollout`: the precision of the engine that generates samples, and the scheme that it gives to a module.

An engine quantises by a config that its framework hands over, or that stands in the checkpoint.
`ServingConfig` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.convert.serving.formats import MODELOPT
from bridge.convert.serving.serving_config import ServingConfig
from bridge.read.foreign.row_files import load_rows

ROLLOUT_ROWS = load_rows("rollout")
"""Frameworks and dtypes of the cache; the file describes its columns."""
MODEL_DTYPE = "auto"
"""The engines' word for a cache in the dtype of the model."""
CACHE_DTYPES: Mapping[str, bool] = ROLLOUT_ROWS["cache"]
"""Dtype of keys and values in an engine's word -> whether it has fewer bits than the model's dtype."""
POWERS_OF_TWO = "powers of two"
FP32 = "FP32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """The numbers that scales of blocks of 128 are: `FP32` or `POWERS_OF_TWO`."""

    weights: str | None = None
    """The scales of weights; None: not known."""
    inputs: str | None = None
    """The scales of inputs; None: not known."""
    decided_by: str = ""
    """What decides a number that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The precision of the engine that generates the samples of a run."""

    engine: str
    """vllm, sglang, or another engine's name; empty: not known."""
    framework: str = ""
    """The framework that starts the engine; empty: a serving config alone is known."""
    quantization: Mapping[str, Any] | None = None
    """The quantization config that the engine is handed; empty: nothing is quantised; None: not known."""
    quantization_decided_by: str = ""
    """What decides the quantization config where it is not known."""
    first: int = 0
    """First layers in high precision."""
    last: int = 0
    """Last layers in high precision."""
    kept_parts: tuple[str, ...] = ()
    """Parts of names that stay in high precision."""
    kept_ends: tuple[str, ...] = ()
    """Ends of names that stay in high precision."""
    dtype: str | None = None
    """Dtype of what is not quantised: bf16, fp16, fp32; None: not known."""
    cache: str | None = MODEL_DTYPE
    """Dtype of keys and values in the engine's word, a key of `CACHE`; None: not known."""
    scales: Scales = Scales()
    quantised_by_name: frozenset[str] = frozenset()
    """Megatron's names of modules whose weights training quantises before it sends them.

    It does so for a config of the fp8 dialect, whatever the config's list of modules keeps.
    """
    sent: str = ""
    """The form that weights are sent in, as a sentence."""
    notes: tuple[str, ...] = ()

    def make_config(self, names: Mapping[str, tuple[int, int]]) -> ServingConfig | None:
        """Return the config with its list of modules; None where it is not known.

        Args:
            names: Name of a module in the checkpoint -> its layer from 1, and the number of layers.
        """
        if self.quantization is None:
            return None
        if not self.quantization:
            return ServingConfig(path=self.framework or "rollout")
        block = dict(self.quantization)
        kept = [name for name, place in names.items() if self._is_kept(name, *place)]
        if kept:
            key = "ignored_layers"
            if block.get("quant_method") == MODELOPT:
                key = "ignore"
            block[key] = [*block.get(key, ()), *kept]
        return ServingConfig.from_mapping(
            {"quantization_config": block}, self.framework or "rollout"
        )

    def _is_kept(self, name: str, layer: int, num_layers: int) -> bool:
        """Return whether a module stays in high precision: by its layer, or by a part of its name."""
        if layer and (layer <= self.first or layer > num_layers - self.last):
            return True
        for part in self.kept_parts:
            if part in name:
                return True
        return name.endswith(self.kept_ends)


def get_module_schemes(config: ServingConfig, name: str, engine: str) -> set[str | None]:
    """Return the scheme of a module of the checkpoint; several where the systems read the config differently.

    The scheme None means that the module is not quantised. An empty engine, or one that does not
    read the dialect, may be any system that does.
    """
    readers = config.readers
    if engine in readers:
        readers = [engine]
    return {config.scheme_of(name, reader) for reader in readers}

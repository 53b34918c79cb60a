"""The sections of a run as open nodes, for a primary config to begin with.

Hydra closes the composed config, so that ``mixed_precision.fp8_margin=2`` would be refused unless the recipe states
that field already. In an open section any key can be set; whether there is such a field is judged against the real
class when the config is decoded, with every wrong key named at once.
"""

from __future__ import annotations

import dataclasses

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from bridge.training.config import CheckpointConfig, DataConfig, LoggingConfig, TrainConfig

__all__ = ["KEYS", "OWNERS", "RUN_KEYS", "SECTIONS", "store_sections"]

SECTIONS = {"data": DataConfig, "train": TrainConfig, "checkpoint": CheckpointConfig, "logging": LoggingConfig}
"""Sections with classes of our own; they are listed with their defaults."""
OWNERS = ("model", "optimizer", "ddp")
"""Sections with classes of Megatron Core, which are imported only when a run needs them."""
RUN_KEYS = ("precision_backend", "target", "silence")
"""Keys of a run that are no sections."""
KEYS = ("mixed_precision", *RUN_KEYS, *OWNERS, *SECTIONS, "recipes_from")
"""Every top-level key of a run's config."""


def store_sections() -> None:
    """Offer the sections to Hydra as the config ``sections``."""
    ConfigStore.instance().store(name="sections", node=_open_sections(), provider="bridge.front")


def _open_sections() -> DictConfig:
    config = OmegaConf.create(
        {
            "recipes_from": None,
            "precision_backend": "auto",
            "target": None,
            "silence": {},
            "mixed_precision": {},
            **{name: {} for name in OWNERS},
            **{name: dataclasses.asdict(section()) for name, section in SECTIONS.items()},
        }
    )
    for name in KEYS:
        if isinstance(config[name], DictConfig):
            OmegaConf.set_struct(config[name], False)
    return config

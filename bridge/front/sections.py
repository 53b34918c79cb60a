"""The sections of a run's config, and every other key of it."""

from __future__ import annotations

from bridge.training.config import CheckpointConfig, DataConfig, LoggingConfig, TrainConfig

__all__ = ["KEYS", "OWNERS", "PRECISION", "RECIPES", "RUN_KEYS", "SECTIONS"]

PRECISION = "mixed_precision"
RECIPES = "recipes_from"
SECTIONS = {"data": DataConfig, "train": TrainConfig, "checkpoint": CheckpointConfig, "logging": LoggingConfig}
"""Sections with classes of our own; they are listed with their defaults."""
OWNERS = ("model", "optimizer", "ddp")
"""Sections with classes of Megatron Core, which are imported only when a run needs them."""
RUN_KEYS = ("precision_backend", "target", "silence")
"""Keys of a run that are no sections."""
KEYS = (PRECISION, *RUN_KEYS, *OWNERS, *SECTIONS, RECIPES)
"""Every top-level key of a run's config."""

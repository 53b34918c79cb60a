"""Hydra scans the namespace package `hydra_plugins`: here it finds the source of recipes, in every application.

The folder has no ``__init__.py`` on purpose: with one it would hide the plugins of other packages.
"""

from bridge.registry.hydra_group import RecipeSource

__all__ = ["RecipeSource"]

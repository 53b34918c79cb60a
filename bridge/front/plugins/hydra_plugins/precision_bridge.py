"""The recipes for every Hydra application, found in the namespace package `hydra_plugins`.

The folder has no ``__init__.py`` on purpose: with one it would hide the plugins of other packages.
"""

from bridge.registry.hydra_group import RecipeSearchPath, RecipeSource

__all__ = ["RecipeSearchPath", "RecipeSource"]

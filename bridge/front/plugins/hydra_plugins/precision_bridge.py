"""The source of recipes for every Hydra application, found in `hydra_plugins`, a namespace package.

The folder has no ``__init__.py`` on purpose: with one it would hide the plugins of other packages.
"""

from bridge.registry.hydra_group import RecipeSource

__all__ = ["RecipeSource"]

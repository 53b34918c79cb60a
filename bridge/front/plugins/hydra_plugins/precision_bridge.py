"""The source of recipes for every Hydra application, found in `hydra_plugins`, a namespace package.

The folder must not have an ``__init__.py``, which would hide the plugins of other packages.
"""

from bridge.registry.hydra_group import RecipeSource

__all__ = ["RecipeSource"]

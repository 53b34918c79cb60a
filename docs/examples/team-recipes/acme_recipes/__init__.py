"""The recipes of the team. The entry point in pyproject.toml imports this package wherever it is installed."""

from acme_recipes.fp8 import acme_fp8, acme_fp8_long

__all__ = ["acme_fp8", "acme_fp8_long"]

"""The command line of a run: Hydra over the registry of recipes, decoded into a `ConfigContainer`.

Configs are data. Nothing in them is instantiated; every key is checked against the real field of the class it is for.
"""

from bridge.front.compose import compose
from bridge.front.container import container
from bridge.front.main import main

__all__ = ["compose", "container", "main"]

"""From a recipe's name to the object that another trainer takes.

A recipe whose format or autocast the trainer cannot run is refused. A warning is logged for every other stated field
that the trainer has no exact setting for. The trainer itself is imported when a function needs its classes.
"""

from bridge.trainers.arguments import accelerate_arguments, lightning_arguments, nemo_plugin, transformers_arguments
from bridge.trainers.megatron_bridge import register_with_megatron_bridge
from bridge.trainers.megatron_lm import add_recipe_argument

__all__ = [
    "accelerate_arguments",
    "add_recipe_argument",
    "lightning_arguments",
    "nemo_plugin",
    "register_with_megatron_bridge",
    "transformers_arguments",
]

"""Recipes in other trainers, for a team's training scripts. Nothing in this project calls them.

    arguments.py         `exported`: a recipe for a trainer, refused if the trainer would compute in
                         another format; arguments of transformers and of NeMo 2
    megatron_bridge.py   `register_with_megatron_bridge`: registered recipes by name in Megatron
                         Bridge's table
    megatron_lm.py       `add_recipe_argument`: ``--mixed-precision-recipe NAME`` in Megatron-LM's
                         parser, with a `SyncReport` of the arguments that it set
    audit/               the audit of steps in the loops of Megatron Bridge, Megatron-LM and slime

A trainer's package is imported only when a function needs its classes. `bridge.trainers.audit`
must be imported explicitly, since it needs torch and Megatron Core.
"""

from bridge.trainers.arguments import nemo_plugin, transformers_arguments
from bridge.trainers.megatron_bridge import register_with_megatron_bridge
from bridge.trainers.megatron_lm import add_recipe_argument

__all__ = [
    "add_recipe_argument",
    "nemo_plugin",
    "register_with_megatron_bridge",
    "transformers_arguments",
]

"""From a recipe's name to the object that another trainer takes.

    arguments.py         `exported(system, recipe)`: the `ExportReport` of an exporter, with
                         everything refused that would compute in another format; its payload as
                         arguments of transformers and NeMo 2
    megatron_bridge.py   registered recipes by name in Megatron Bridge's table
    megatron_lm.py       `--mixed-precision-recipe NAME` in Megatron-LM's parser, with a
                         `SyncReport` of what it set
    audit/               the audit of steps in the loops of Megatron Bridge, Megatron-LM and slime

The last is imported by its own name, since it needs torch and Megatron Core.

A trainer's package is imported when a function needs its classes. A team's training script calls
these; nothing in this project does.
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

"""Megatron-LM's own parser with ``--mixed-precision-recipe NAME``: the one line that pretrain_gpt.py changes.

torchrun pretrain_gpt.py --mixed-precision-recipe bf16_with_fp8_current_scaling_mixed --num-layers 8 ...
"""

from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import parse_and_validate_args

from bridge.trainers import add_recipe_argument

args = parse_and_validate_args(extra_args_provider=add_recipe_argument)

config = core_transformer_config_from_args(args)
print(config.params_dtype, config.fp8, config.fp8_recipe, args.accumulate_allreduce_grads_in_fp32)

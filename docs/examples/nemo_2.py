"""NeMo 2's precision plugin from a recipe's name."""

from bridge.trainers import nemo_plugin

plugin = nemo_plugin("bf16_with_fp8_current_scaling_mixed")  # nl.Trainer(plugins=plugin, ...)
print(plugin.precision, plugin.dtype_config.fp8_recipe)

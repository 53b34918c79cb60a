"""Recipes by name in Megatron Bridge's `ConfigContainer`, on its command line and in its recipes."""

from megatron.bridge.training import mixed_precision

from bridge.trainers import register_with_megatron_bridge

added = register_with_megatron_bridge()

# ConfigContainer(mixed_precision="fp32", ...) makes this call when the run begins:
precision = mixed_precision.get_mixed_precision_config("fp32")
print(added, precision)

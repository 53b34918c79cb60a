"""The table of each framework that runs on Megatron Core and whose files are read."""

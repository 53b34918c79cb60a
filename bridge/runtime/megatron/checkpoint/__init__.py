"""Checkpoints in Megatron's own format: ``dist_checkpointing`` (torch_dist), with a manifest over its files."""

"""Checkpoints in Megatron's format: ``dist_checkpointing`` (torch_dist), with a manifest."""

"""Checkpoints: Megatron's distributed format, the manifest over its files, the lock of the folder."""

"""Megatron Bridge: its recipes, run configs and overrides."""

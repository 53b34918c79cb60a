"""Transformer Engine: what it needs of a machine, the recipe it gets for a config, its environment variables."""

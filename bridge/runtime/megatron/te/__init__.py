"""Transformer Engine: requirements on a machine, recipe of a config, environment variables."""

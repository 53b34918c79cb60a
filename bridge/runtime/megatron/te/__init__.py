"""Transformer Engine: its requirements on a machine, its recipe for a config, its environment variables."""

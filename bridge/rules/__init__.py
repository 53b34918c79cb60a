"""The rulebook: one row per law."""

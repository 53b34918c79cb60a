"""Comparison of finished runs: which are twins, and what the gap between their losses says. Imports no torch."""

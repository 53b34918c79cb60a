"""The record of a live model: its GEMMs, whoever runs them, each with its module."""

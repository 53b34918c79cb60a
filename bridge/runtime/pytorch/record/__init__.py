"""The record of a live model: its GEMMs, whoever runs them, each with the module that it belongs to."""

"""Precisions of systems that do not run Megatron Core, and configs of serving systems."""

"""Precisions of systems that do not run Megatron Core, and configs of the systems that serve a trained model."""

"""Hugging Face Accelerate."""

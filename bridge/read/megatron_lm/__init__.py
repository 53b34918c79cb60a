"""Megatron-LM: its arguments, from launch scripts and files."""

"""The run: its configuration, and the face that is compatible with Megatron Bridge."""

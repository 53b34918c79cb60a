"""NeMo 1: its model configs."""

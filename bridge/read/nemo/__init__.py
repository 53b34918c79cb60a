"""NeMo's files: the YAML of NeMo 1, and the plugin of NeMo 2 in Python."""

"""A file of another system, read as data: YAML, JSON, Python and typed settings."""

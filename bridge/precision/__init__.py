"""What a precision *is*: the config, the registry of recipes, dtypes, formats and schemes. No torch on import."""

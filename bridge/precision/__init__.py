"""What a precision *is*: its fields and statements, dtypes, formats and schemes. No torch on import."""

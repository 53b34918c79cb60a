"""The parts of a precision: its fields and statements, dtypes, formats and schemes. No torch on import."""

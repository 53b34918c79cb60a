"""Rules about a precision: mode, loss scale, formats and schemes, layers, modules, storage."""

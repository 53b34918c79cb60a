"""Rules about a precision: mode, loss scale, formats and schemes, and the layers and modules they reach."""

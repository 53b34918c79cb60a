"""The checks before a GPU is held: the rules over a whole run and a declared target, `auto`, the support matrix."""

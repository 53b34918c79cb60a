"""`precision-bridge recipes`: the list, one recipe, the difference of two, and their GPUs."""

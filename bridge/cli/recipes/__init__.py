"""`precision-bridge recipes`: the list, one recipe, the difference of two, and the GPUs that each runs on."""

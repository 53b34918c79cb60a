"""The plan of a run, layer by tensor to format, and what follows from it: memory, alignment, module selection."""

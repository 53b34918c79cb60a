"""The plan of a run, layer by tensor to format, and its consequences: memory, alignment, module selection."""

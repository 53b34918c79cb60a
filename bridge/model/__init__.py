"""What a model is, from the values of its config: its shape, layer kinds, parallel layout and modules."""

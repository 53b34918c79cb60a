"""A model, from the values of its config: shape, layer kinds, parallel layout and modules."""

"""Rules about training in a precision: optimizer, gradients, layout, recomputation, checkpoints."""

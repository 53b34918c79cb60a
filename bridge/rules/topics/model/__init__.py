"""Rules about a model in a precision: attention, experts, residual stream, aligned sizes."""

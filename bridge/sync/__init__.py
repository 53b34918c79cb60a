"""Writing a precision into Megatron's configs: the routes, the plan, the trial, the writing."""

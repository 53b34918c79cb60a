"""Writing a precision into Megatron's configs: the routes, the plan, the check on copies, the application."""

"""`sources`: every place in a project that states its precision, and the one that wins."""

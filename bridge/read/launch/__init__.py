"""Launch scripts: parse, one environment in source order, and the launches with the system that each belongs to."""

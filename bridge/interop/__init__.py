"""Bridges to other systems: bring a precision in from, and take it out to, what its users already run."""

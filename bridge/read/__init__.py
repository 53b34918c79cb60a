"""Files that describe a run, and files that describe a precision: whatever wrote them, each read by its own table."""

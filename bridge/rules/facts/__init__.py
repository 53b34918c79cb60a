"""Facts about a run that rules of several topics read."""

"""`precision-bridge compare`: losses of a sweep, the gradients of one batch, and the twin of a run."""

"""`precision-bridge compare`: losses of a sweep, gradients of one batch, and the twin of a run."""

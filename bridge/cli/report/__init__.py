"""`precision-bridge report`: the page about some runs, and the view of a run in progress."""

"""The data of a run: its corpus, and the batches of a rank."""

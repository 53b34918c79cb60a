"""Where a run will run: GPU, CUDA, and the releases of its packages with the fields that each of them has."""

"""Where a run will run: GPU, CUDA, the releases of its packages and the fields of each."""

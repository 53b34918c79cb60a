"""Rules about what is stated: values and keys as they are written, and a recipe against configs."""

"""Rules about statements: values and keys as they are written, and a recipe against configs."""

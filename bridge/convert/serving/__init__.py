"""A trained model for the system that serves it: names, manifest, configs, comparison."""

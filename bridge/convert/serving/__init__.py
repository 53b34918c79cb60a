"""A trained model handed over to a system that serves it: names, manifest, quantisation configs, comparison."""

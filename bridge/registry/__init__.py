"""`MixedPrecisionConfig`, the registry of recipes and where recipes come from."""

"""`precision-bridge plan`: formats per layer, the dimensions of GEMMs, and the modules that rows take."""

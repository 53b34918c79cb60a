"""`precision-bridge plan`: formats per layer, dimensions of GEMMs, and modules that rows take."""

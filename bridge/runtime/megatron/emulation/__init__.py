"""Low-precision GEMMs in Megatron's layers without Transformer Engine, on any device."""

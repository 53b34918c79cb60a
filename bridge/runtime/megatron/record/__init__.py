"""The record of a run of Megatron: its GEMMs, its tensors and the errors of its quantisers."""

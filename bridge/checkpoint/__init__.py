"""The files of a checkpoint, without Megatron Core and torch: folder, lock, manifest, pickles, precision."""

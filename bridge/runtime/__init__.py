"""What needs torch or Megatron Core, or what a run left: numerics, models, records, checkpoints, comparisons."""

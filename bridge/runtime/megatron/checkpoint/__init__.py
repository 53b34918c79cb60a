"""Checkpoints in Megatron's format, ``dist_checkpointing`` (torch_dist), with a manifest.

    state.py     the state of a run as a checkpoint has it; `Position`: how far a run has come
    saving.py    `save_checkpoint`: the state, the pointer and the manifest
    loading.py   `find_newest_sound` and `load_checkpoint`: the newest checkpoint without a fault

`runtime/checkpoint/` has the files of a checkpoint, without Megatron.
"""

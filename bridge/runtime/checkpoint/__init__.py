"""The files of a checkpoint, without Megatron Core.

    folder.py             `iter_0000100/` of each step, Megatron's pointer to the newest step
    manifest.py           `Manifest`: the run that wrote it, bytes and checksum of each file
    pickles.py            `Listing` of `.metadata`: tensors and objects; no code of a file runs
    contents.py           `Contents`: manifest and listing for people; `Difference` of two
    precision_change.py   `PrecisionChange`: a precision that differs from the run that resumes
    linear_weights.py     the tensors of linear layers, as matrices
    lock.py               `lock_folder`: a single run writes into a folder

torch is imported only to read the values of tensors and the objects between them.
`runtime/megatron/checkpoint/` writes and loads the tensors, and first calls this room to find out
whether it may. `cli/checkpoint.py` shows contents, differences and damage. `training/run.py` shows
the changes of precision.
"""

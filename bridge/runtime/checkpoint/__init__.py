"""The files of a checkpoint, without Megatron Core and torch.

    folder.py        `iter_0000100/` of each step, Megatron's pointer; which may be resumed from
    Manifest         what wrote it, and bytes and checksum of each file; written last, read first
    Listing          the tensors and objects that `.metadata` lists, read by an allow list: no code
                     of a file runs
      Tensor, Stored   dtype and shape of a tensor; place of an object in a file
    Contents         manifest and listing for people; `Part`: tensors of a part in the same dtype
    Difference       of two `Contents`; `Change`: one difference of precision and what it means to
                     resume with it
    folder_lock      a single run writes into a folder
    linear_weights   the tensors of linear layers, whose values alone need torch (weights.py)

`megatron.checkpoint` writes and loads the tensors and asks this room whether it
may. `cli.checkpoint` shows contents, differences and damage. `training.run`
asks for the changes of precision.
"""

"""The record of a run of Megatron: its GEMMs, its tensors and the errors of its quantisers.

    step_recording.py   `StepRecording`: one step, recorded and compared with a plan
    census.py           dtype and size of each kind of tensor
    weight_copies.py    whether the copies of a weight are equal on data-parallel ranks
    telemetry.py        `Telemetry`: quantisation errors of operands
    not_finite.py       the first gradient of a backward pass that is not finite

`runtime/pytorch/record/` records the GEMMs.
"""

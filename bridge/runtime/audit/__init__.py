"""The record of a run and its audit: the formats that each GEMM and tensor really had.

`compare(plan, record)` compares a record with the plan, and `differences(one, other)` two records.

    Record            one step: rows of GEMMs, tensors and health; `record.json` of a run
      GemmRow           one GEMM of one linear layer, made by pytorch.record.watch
      CensusRow         one kind of tensor in one dtype, made by megatron.record.census
      HealthRow         error and age of one low-precision module, made by pytorch.record.health
    Mismatch          a row of plan and record that differ, equal ones folded
    QuantisationRow   the error of one operand at one step, made by megatron.record.telemetry
    Signs             the values that early warnings look at
    RunFolder         the files of a run, read while it goes on or after its end: their one reader
    RunLog            the metrics of a run of another trainer, made by read.logs
    Setting           one key of a run's config: default, who replaced it, its trace

Rows hold text and numbers alone, so that they are compared, saved and sent between ranks. Makers
are rooms that import torch; readers are `cli` (audit, watch, explain, report), `training`,
`rehearse`, `compare` and `report`. This room imports no torch.
"""

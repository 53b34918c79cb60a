"""The record of a run and its audit: the formats that each GEMM and tensor really had, compared with the plan.

    Record            one step: rows of GEMMs, tensors and health; `record.json` of a run
      GemmRow           one GEMM of one linear layer: formats, tiles, scheme     pytorch.record.watch makes them
      CensusRow         one kind of tensor in one dtype                          megatron.record.census
      HealthRow         error and age of one low-precision module                pytorch.record.health
    Mismatch          a row of plan and record that differ, equal ones folded; `compare(plan, record)`,
                      `differences(one, other)` of two records
    QuantisationRow   the error of one operand at one step; `quantisation.csv`   megatron.record.telemetry
    Signs             what early warnings look at -> (name, sentence) of those that stand
    RunFolder         the files of a run, read while it goes on or after its end: the one reader of them
    Setting           one key of a run's config: default, who replaced it, its trace

Rows hold text and numbers alone, so that they are compared, saved and sent between ranks. Makers are rooms that import
torch; readers are `cli` (audit, watch, explain, report), `training`, `rehearse`, `compare` and `report`. This room
imports no torch.
"""

"""The record of a run and its audit: the formats that each GEMM and tensor really had.

    record.py               `Record` of one step, `record.json` of a run; its rows are
                              `GemmRow`     one GEMM of one linear layer
                              `CensusRow`   one kind of tensor in one dtype
                              `HealthRow`   error and age of the weight of one low-precision module
    plan_comparison.py      `compare_with_plan`: the audit of a record
    record_comparison.py    `compare_records`: two records
    mismatch.py             `Mismatch`: one row of such a difference
    gemm_formats.py         the formats of recorded GEMMs as text
    quantisation.py         `QuantisationRow`: the error of one operand at one step, kept as CSV
    early_warnings.py       signs of trouble, found in `WarningInputs`
    run_folder.py           `RunFolder`: the only reader of the files of a run
    run_log.py              `RunLog`: the metrics of a run of another trainer
    log_warning_inputs.py   `WarningInputs` of a `RunLog`
    setting.py              `Setting`: one key of a run's config, its source, and its trace

Rows have only text and numbers, so that they can be compared, saved and sent between ranks. The
rooms `runtime/pytorch/record/` and `runtime/megatron/record/` make them. This room imports no
torch.
"""

"""The run: its configuration, and the face that is compatible with Megatron Bridge.

    ConfigContainer   the configuration of a run: Megatron's sections (model, optimizer, ddp) and
                      ours; made by `front`, or by a script
    Run               a built run: splits of the data, a `Trainer`, telemetry, its progress
      PhaseRecord       a phase of a precision schedule as it ran
    TrainRecord, ValidationRecord
                      a logged step, a validation; `Metrics` writes them to files and sinks
    Audit             the record of single steps against the plan; ends the run where they differ
    RunSummary        the figures at the end, `summary.json`
    early_faults      faults that show before data and model are built:
      value_checks.py      numbers and names that no run can begin with
      supported_fields.py  fields that have no effect here, or cannot run
    fingerprint       every setting as text: equal on all ranks, and kept in a checkpoint's manifest

`runtime_config_update` writes the precision into the sections, then `pretrain` builds and runs:
loop.py takes the steps, console.py shows them. `check_gradients` and `measure_quantisation` build
the same `Run` for a few passes. mixed_precision.py is the face of Megatron Bridge, and loads
nothing of the others.
"""

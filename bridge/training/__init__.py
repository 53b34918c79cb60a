"""Runs on this machine: their configuration, the training loop, and Megatron Bridge's interface.

    config.py            `ConfigContainer`: the configuration of a run, with Megatron's sections
                         (model, optimizer, ddp) and ours; `front` makes it, or a script;
                         `runtime_config_update` writes the precision into its sections
    mixed_precision.py   the interface of Megatron Bridge's module of the same name; it loads no
                         other module of this folder
    early_faults.py      faults that are known before data and model are built:
      value_checks.py      values that no run can begin with
      unsupported_settings.py
                           settings that have no effect here, or cannot run
    run.py               `TrainingRun`: a built run with its data splits, `Trainer`, telemetry and
                         progress; `PhaseRecord`: a phase of a precision schedule as it ran
    loop.py              `pretrain`: builds a run and takes its steps
    audit.py             `Audit`: compares the records of single steps with the plan
    metrics.py           `TrainRecord` and `ValidationRecord`: a logged step and a validation;
                         `Metrics` writes them to files and sinks
    console.py           `Display`: a run in progress; `RunSummary`: its metrics at the end
    fingerprint.py       every setting as text: ranks must agree on it, and a checkpoint's manifest
                         has it
    measurements.py      `check_gradients` and `measure_quantisation`: passes of a built run

The folder imports Megatron only through `bridge.runtime.megatron`.
"""

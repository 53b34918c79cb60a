"""Reads the logs of other trainers as `RunLog`, for reports and comparisons. A format is a module.

    files.py          `read_logs`: the runs of a log of any format
    megatron.py       the log that Megatron-LM or Megatron Bridge prints
    nemo_rl.py        the log that NeMo-RL prints
    tensorboard.py    TensorBoard's event files
    history.py        histories of W&B and MLflow that were exported as CSV or JSON
    mlflow.py         a run in MLflow's file store
    golden_values.py  the golden values of Megatron-LM's functional tests
    series.py         makes a `RunLog` of the values by step that each module reads
    metrics.yaml      the names of metrics in logs: loss, gradient norm, throughput, ...

To add a format, add a module that reads series, and call it in `files.py`. To add a name of a
metric, add a row to `metrics.yaml`.
"""

"""Logs of runs that another trainer made, each format read by its own module.

    megatron.py       the log that Megatron-LM or Megatron Bridge prints
    nemo_rl.py        the log that NeMo-RL prints
    tensorboard.py    TensorBoard's event files
    rows.py           histories of W&B and MLflow that were exported as CSV or JSON
    mlflow.py         a run in MLflow's file store
    golden_values.py  the golden values of Megatron-LM's functional tests
    series.py         the values by step that each of them gives, as a `RunLog`
    metrics.yaml      the names of the figures: loss, gradient norm, throughput, ...

To add a format, add a module that makes series, and ask it in `files.py`. To add a name, add a row
to `metrics.yaml`.
"""

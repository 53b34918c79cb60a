"""A trained model for the system that serves it.

    formats.py         the scaling schemes in the dialects of serving systems, and the systems
    names.py           names of modules in Hugging Face checkpoints, by family of models
    manifest.py        each linear layer of a trained model, with its format and its name there
    exporter.py        a manifest as the quantization config of a system
    reader.py          the quantization config of a served model, with the scheme of each module
    kept_modules.py    which modules an entry of a list keeps, by each system's rule
    comparison.py      a manifest against a quantization config
    table.py           both for people

Schemes, families of models and systems are rows of `bridge/read/rows/serving.yaml`.
"""

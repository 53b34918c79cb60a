"""The precision of a trained model for the system that serves it.

    manifest.py        `Manifest`: each linear layer of a trained model, with its format
    module_names.py    the names of modules in Hugging Face checkpoints, by family of models
    exporter.py        writes a manifest as the quantization config of a system
    serving_config.py  `ServingConfig`: reads a quantization config
    kept_modules.py    the modules that a list keeps in high precision, by each system's rule
    formats.py         the scaling schemes in the dialects of serving systems
    comparison.py      compares a manifest with a quantization config
    table.py           both as tables

Schemes, families of models and systems are rows of `bridge/read/foreign/tables/serving.yaml`.
"""

"""Precisions of systems that do not run Megatron Core, and configs of serving systems.

    conversion.py     the work of `convert`: a file into a recipe, and on into another system's words
    huggingface.py    the TrainingArguments of transformers, and of trainers on top of it
    axolotl.py        Axolotl's YAML
    serving/          a trained model for the system that serves it
    rollout/          training against the engine that generates its samples

To add a system: a file here with `import_`, `export` and a row `SYSTEM`, its table in
`bridge/read/rows/`, and a row in `bridge/read/systems.py` (`docs/howto/add-a-system.md`).
"""

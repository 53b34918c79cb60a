"""Precisions of systems that do not run Megatron Core, and configs of serving systems.

    systems.py        the table of the systems
    conversion.py     the work of `convert`: a file into a recipe, and on into another system's words
    huggingface.py    the TrainingArguments of transformers, and of trainers on top of it
    axolotl.py        Axolotl's YAML
    serving/          a trained model for the system that serves it
    rollout/          training against the engine that generates its samples

To add a system: a file here with `import_`, `export` and a row `SYSTEM`, its table in
`bridge/read/rows/`, its signs in `KINDS` of `bridge/read/system_signs.py`, and its module in
`MODULES` of `bridge/convert/systems.py` (`docs/howto/add-a-system.md`).
"""

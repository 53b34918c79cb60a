"""Conversion between the precisions of training systems, and to configs of serving systems.

    systems.py        the systems by name; detects the system of a file
    conversion.py     reads a file as recipes, and writes a recipe for another system
    huggingface.py    the TrainingArguments of transformers, and of trainers on top of it
    axolotl.py        Axolotl's YAML
    serving/          the precision of a trained model for the system that serves it
    rollout/          compares training with the engine that generates its samples

The systems that run Megatron Core, and DeepSpeed, are in `bridge/read/`, since `check` reads them
too.

To add a system (`docs/howto/add-a-foreign-system.md`): a module here with `import_`, `export` and `SYSTEM`;
its table in `bridge/read/foreign/tables/`; its kinds of document in `DOCUMENT_KINDS` of
`bridge/read/foreign_system_signs.py`; and its module in `SYSTEM_MODULES` of systems.py.
"""

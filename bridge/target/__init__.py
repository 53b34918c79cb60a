"""The target of a run: its GPU, the releases of its packages, and the fields of Megatron's configs.

    gpus.py          `GPUS`: compute capability, memory and formats of each GPU; a new GPU is a row
    target.py        `Target`: the GPUs and the releases of a run
    declaration.py   `parse_target`: a target as a user writes it, "h100x8,te2.8"
    machine.py       `detect_target`: this machine as a target
    versions.py      versions of products, the installed versions, and version ranges
    fields.py        the fields of Megatron's configs, with their defaults and the releases that
                     have them
    megatron_fields.json
                     the table of these fields; scripts/write_megatron_fields.py writes it from the
                     classes of new releases

Nothing here imports Megatron. Only machine.py imports torch.
"""

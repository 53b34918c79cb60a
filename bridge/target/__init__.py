"""Where a run will run: GPU, CUDA, the releases of its packages and the fields of each.

gpus.py          `GPUS`: capability, memory and formats of each GPU. To add a GPU, add a row
target.py        `Target`: the GPUs and the releases of a run
declaration.py   `parse_target`: a target in words, "h100x8,te2.8"
machine.py       `detect_target`: this machine
versions.py      releases, installed ones, and ranges of them
fields.py        the fields of Megatron's configs with their defaults and the releases that
have them, from megatron_fields.json; scripts/write_megatron_fields.py
writes that file from a new release
"""

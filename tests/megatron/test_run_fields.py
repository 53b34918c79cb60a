"""Every field of Megatron's configs: honoured, refused by name, or listed as without effect."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from bridge.megatron.gpt import GPTConfig
from bridge.megatron.run_fields import HONOURED, KNOWN, REFUSED, REFUSED_WITHOUT_TE, WITHOUT_EFFECT

CLASSES = {"model": GPTConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
ELSEWHERE = {"model": set(), "optimizer": set(), "ddp": {"fp4_param_gather", "use_torch_fsdp2"}}
"""Fields of other releases, and of other classes of this role."""


def test_each_field_of_each_class_is_in_one_table():
    for section, cls in CLASSES.items():
        rows = [HONOURED[section], *REFUSED[section].values(), *REFUSED_WITHOUT_TE[section].values()]
        placed = [name for names in (*rows, *WITHOUT_EFFECT[section].values()) for name in names.split()]
        declared = {field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")}
        assert len(placed) == len(set(placed)), section
        assert declared - set(placed) == set(), section
        assert set(placed) - declared <= ELSEWHERE[section], section
        assert set(placed) == KNOWN[section]

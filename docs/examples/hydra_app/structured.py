"""The same with structured configs: the group is an entry of the defaults list."""

from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from bridge import to_config
from bridge.registry.hydra_group import register_group

register_group()


@dataclass
class HouseBF16:
    """A recipe of the application's own. Every field counts as stated."""

    bf16: bool = True
    grad_reduce_in_fp32: bool = False


@dataclass
class Run:
    """The primary config."""

    defaults: list[Any] = field(default_factory=lambda: [{"mixed_precision": "bf16_mixed"}, "_self_"])
    mixed_precision: Any = MISSING
    steps: int = 10


store = ConfigStore.instance()
store.store(name="run", node=Run)
store.store(group="mixed_precision", name="house_bf16", node=HouseBF16)


@hydra.main(version_base=None, config_name="run")
def main(cfg: Run) -> None:
    print(to_config(cfg.mixed_precision))


if __name__ == "__main__":
    main()

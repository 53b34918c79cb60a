"""A training script with Hydra that knows nothing of this package but three functions.

python app.py mixed_precision=fp8_current mixed_precision.num_layers_at_end_in_bf16=2
"""

import hydra
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from omegaconf import DictConfig

from bridge import synchronize, to_config
from bridge.registry.hydra_group import register_group

register_group()


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    model = TransformerConfig(**cfg.model)
    optimizer = OptimizerConfig(**cfg.optimizer)
    ddp = DistributedDataParallelConfig(**cfg.ddp)
    print(synchronize(to_config(cfg.mixed_precision), model=model, optimizer=optimizer, ddp=ddp, strict=True))


if __name__ == "__main__":
    main()

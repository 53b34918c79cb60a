"""Lightning's Trainer in the precision of a recipe."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer

from bridge.trainers import lightning_arguments


class Regression(LightningModule):
    """One linear layer, which notes the dtype that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        output = self.layer(batch)
        self.computed = output.dtype
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        return torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=8)  # type: ignore[arg-type]


model = Regression()
arguments = lightning_arguments(sys.argv[1] if sys.argv[1:] else "bf16_mixed")
trainer = Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, **arguments)
trainer.fit(model)
print(model.layer.weight.dtype, model.computed)

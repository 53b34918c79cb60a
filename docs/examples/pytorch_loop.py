"""A plain PyTorch loop in the precision of a recipe."""

import sys

import torch

from bridge import get_mixed_precision_config
from bridge.runtime.pytorch import autocast_for, check_precision, grad_scaler_for

config = get_mixed_precision_config(sys.argv[1] if sys.argv[1:] else "bf16_mixed")
scaler = grad_scaler_for(config, "cpu")
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step() -> None:
    """Train one step."""
    optimizer.zero_grad()
    with autocast_for(config, "cpu"):
        loss = model(torch.randn(8, 16)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


report = check_precision(model, optimizer, step)
print(report)
print(report.disagreements(config))

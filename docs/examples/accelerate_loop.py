"""Accelerate in the precision of a recipe."""

import sys

import torch
from accelerate import Accelerator

from bridge.trainers import accelerate_arguments

arguments = accelerate_arguments(sys.argv[1] if sys.argv[1:] else "bf16_mixed")
accelerator = Accelerator(cpu=True, **arguments)
model = torch.nn.Linear(16, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
with accelerator.autocast():
    output = model(torch.randn(8, 16))
    computed = torch.nn.functional.linear(torch.randn(8, 16), model.weight).dtype
accelerator.backward(output.square().mean())
optimizer.step()
print(accelerator.mixed_precision, model.weight.dtype, computed)

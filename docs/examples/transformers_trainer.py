"""The Hugging Face Trainer in the precision of a recipe."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from bridge.trainers import transformers_arguments

arguments = transformers_arguments(sys.argv[1] if sys.argv[1:] else "bf16_mixed")
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
)
computed = []
model.lm_head.register_forward_hook(lambda _layer, _inputs, output: computed.append(output.dtype))
tokens = torch.randint(0, 64, (8, 16))
samples = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(folder, max_steps=2, report_to=[], save_strategy="no", use_cpu=True, **arguments)
    Trainer(model=model, args=settings, train_dataset=samples).train()
print(model.lm_head.weight.dtype, computed[0])

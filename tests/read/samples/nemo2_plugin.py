import os

import torch
from nemo import lightning as nl
from nemo.collections import llm

os.system("echo this must never run")
SCALE = 2**16


def trainer(config):
    plugin = nl.MegatronMixedPrecision(
        precision="bf16-mixed",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        fp8="hybrid",
        grad_reduce_in_fp32=config.reduce,
    )
    return nl.Trainer(plugins=plugin)


half = run.Config(nl.MegatronMixedPrecision, "16-mixed", params_dtype=torch.float16, fp16_initial_loss_scale=SCALE)
recipe.trainer.plugins = bf16_with_mxfp8_mixed()
# ruff: noqa: F401, S605, F821

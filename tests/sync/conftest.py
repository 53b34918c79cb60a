"""Owners whose own values contradict every recipe."""

import pytest
import torch

CONFLICTS = {
    "model": {
        "fp16": True,
        "bf16": True,
        "params_dtype": torch.float16,
        "pipeline_dtype": torch.float16,
        "autocast_dtype": torch.float16,
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param": True,
        "fp8_margin": 7,
        "fp8_amax_history_len": 77,
        "fp8_amax_compute_algo": "max",
        "fp4": "e2m1",
        "fp4_param": True,
        "num_layers_at_start_in_bf16": 3,
        "num_layers_at_end_in_bf16": 3,
    },
    "optimizer": {
        "fp16": True,
        "bf16": True,
        "params_dtype": torch.float16,
        "fp8_recipe": "mxfp8",
        "initial_loss_scale": 2.0,
        "loss_scale_window": 3,
        "hysteresis": 7,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "ddp": {
        "grad_reduce_in_fp32": True,
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
        "check_for_nan_in_grad": True,
    },
}


@pytest.fixture
def conflicting(megatron_owners):
    def make():
        owners = megatron_owners()
        for role, values in CONFLICTS.items():
            for name, value in values.items():
                setattr(owners[role], name, value)
        return owners

    return make

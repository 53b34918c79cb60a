"""The module names of real Megatron models, one pipeline stage after the other, as JSON: a script without arguments.

A process group without communication stands for the ranks of a pipeline, so that each stage's model is built here.
"""

import json
import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from bridge.runtime.megatron.cuda_shim import cpu_as_cuda
from bridge.runtime.megatron.patching import apply_patches, keep_compatible
from bridge.runtime.megatron.without_te import CHANGES_FOR_LAYERS

LAYOUTS = [(1, None), (2, None), (2, 2), (4, None), (4, 2)]
SHAPE = {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True}
MODELS = {
    "dense": {"mtp_num_layers": 1},
    "experts": {"num_moe_experts": 2, "moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1], "add_bias_linear": False},
}
VOCABULARY = 128


def main() -> None:
    found = {
        f"{model} {pipeline} {virtual or 1}": _names(MODELS[model], pipeline, virtual)
        for model in MODELS
        for pipeline, virtual in LAYOUTS
    }
    sys.stdout.write(json.dumps(found))


def _names(model: dict, pipeline: int, virtual: int | None) -> list[dict]:
    """Return the chunks of every stage: stage, chunk, layer numbers from 0, and the names of linear layers."""
    found = []
    for rank in range(pipeline):
        torch.distributed.init_process_group("fake", rank=rank, world_size=pipeline, store=FakeStore())
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            **SHAPE,
            **model,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.bfloat16,
            bf16=True,
            params_dtype=torch.bfloat16,
        )
        stages = [None] if virtual is None else list(range(virtual))
        found.extend(_chunk(config, rank, vp_stage) for vp_stage in stages)
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return found


def _chunk(config: TransformerConfig, stage: int, vp_stage: int | None) -> dict:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    built = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        vocab_size=VOCABULARY,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    linears = (ColumnParallelLinear, RowParallelLinear)
    names = [name for name, module in built.named_modules() if isinstance(module, linears)]
    layers = [layer.layer_number - 1 for layer in built.decoder.layers]
    return {"stage": stage, "chunk": vp_stage or 0, "layers": layers, "names": names}


if __name__ == "__main__":
    with cpu_as_cuda(), apply_patches(keep_compatible(CHANGES_FOR_LAYERS)):
        main()

"""Megatron's step against the same model in plain PyTorch, from the same weights on the same data."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from bridge.runtime.megatron.data.batches import build_splits, iterate_batches
from bridge.runtime.megatron.data.corpus import open_corpus
from bridge.runtime.megatron.gpt import GPTConfig, adapt_config, build_gpt, count_parameters, unwrap_model
from bridge.runtime.megatron.optimizer import build_optimizer, build_scheduler
from bridge.runtime.megatron.process import training_process
from bridge.runtime.megatron.trainer import Trainer

STEPS = 4
SHAPE = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "seq_length": 64}


@pytest.fixture(scope="module")
def plain_gpt():
    """The module `scripts/plain_gpt.py`."""
    path = Path(__file__).resolve().parents[3] / "scripts" / "plain_gpt.py"
    spec = importlib.util.spec_from_file_location("plain_gpt", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_gpt"] = module
    spec.loader.exec_module(module)
    return module


def megatron_model(dtype):
    return GPTConfig(
        **SHAPE,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )


def copy_weights(source, target):
    """Copy Megatron's weights into the plain model; Megatron keeps query, key and value of a head together."""
    weights = {name: tensor.detach() for name, tensor in source.named_parameters()}
    heads, hidden = SHAPE["num_attention_heads"], SHAPE["hidden_size"]

    def put(parameter, name):
        parameter.data.copy_(weights.pop(name))

    put(target.embedding.weight, "embedding.word_embeddings.weight")
    for number, block in enumerate(target.blocks):
        layer = f"decoder.layers.{number}"
        qkv = weights.pop(f"{layer}.self_attention.linear_qkv.weight")
        grouped = qkv.view(heads, 3, hidden // heads, hidden).transpose(0, 1).reshape(3 * hidden, hidden)
        block.attention.qkv.weight.data.copy_(grouped)
        put(block.attention.proj.weight, f"{layer}.self_attention.linear_proj.weight")
        put(block.norm1.weight, f"{layer}.input_layernorm.weight")
        put(block.norm2.weight, f"{layer}.pre_mlp_layernorm.weight")
        put(block.fc1.weight, f"{layer}.mlp.linear_fc1.weight")
        put(block.fc2.weight, f"{layer}.mlp.linear_fc2.weight")
    put(target.norm.weight, "decoder.final_layernorm.weight")
    put(target.head.weight, "output_layer.weight")
    assert not weights


def first_losses(plain_gpt, dtype, cache_dir, attention):
    """Return the losses of the first steps of both, and their parameter counts."""
    model = megatron_model(dtype)
    half = {"bf16": model.bf16, "params_dtype": dtype}
    optimizer_config = OptimizerConfig(lr=2e-3, min_lr=0.0, weight_decay=0.1, adam_beta2=0.95, **half)
    with training_process(model, seed=1) as process:
        corpus = open_corpus(None, vocab_size=None, cache_dir=str(cache_dir))
        data = build_splits(
            corpus, seq_length=64, split="90,5,5", seed=1, train_samples=4 * STEPS, validation_samples=0
        )
        config, _ = adapt_config(model, vocab_size=256)
        chunks = build_gpt(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), process.device, seed=1)
        twin = plain_gpt.PlainStep(
            plain_gpt.PlainConfig(**SHAPE, attention=attention, sdpa_dtype=torch.float32),
            dtype=dtype,
            learning_rate=2e-3,
        )
        copy_weights(unwrap_model(chunks[0]), twin.model)
        twin.reset_masters()
        optimizer = build_optimizer(optimizer_config, chunks)
        scheduler = build_scheduler(
            optimizer_config, optimizer, warmup_iters=0, decay_iters=10, decay_style="constant", global_batch_size=4
        )
        trainer = Trainer(
            config=config,
            model=chunks,
            optimizer=optimizer,
            scheduler=scheduler,
            process=process,
            micro_batch_size=4,
            global_batch_size=4,
        )

        def source():
            return iterate_batches(
                data.train, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1, device=process.device
            )

        ours, theirs = source(), source()
        losses = [trainer.step(ours).loss for _ in range(STEPS)]
        twin_losses = [twin.step(batch["tokens"], batch["labels"]) for batch, _ in zip(theirs, losses, strict=False)]
        assert count_parameters(chunks) == sum(weight.numel() for weight in twin.weights)
    return losses, twin_losses


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_fp32_steps_equal_plain_pytorch(plain_gpt, attention, tmp_path):
    ours, theirs = first_losses(plain_gpt, torch.float32, tmp_path, attention)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0] - 0.2


def test_bf16_steps_equal_plain_pytorch(plain_gpt, tmp_path):
    ours, theirs = first_losses(plain_gpt, torch.bfloat16, tmp_path, "sdpa")
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize(("schedule", "copies"), [(None, 0), ([print, print], 1)])
def test_gathered_weights_are_filled_in_again_where_the_schedule_gathers_them_once_more(schedule, copies):
    copied = []
    ddp = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=True, overlap_param_gather=True)
    optimizer = SimpleNamespace(config=ddp, _copy_main_params_to_param_buffer=lambda: copied.append(1))
    groups = [SimpleNamespace(param_gather_dispatched=True)]
    trainer = object.__new__(Trainer)
    trainer.model = [SimpleNamespace(bucket_groups=groups, expert_parallel_bucket_groups=[])]
    trainer.optimizer, trainer.config = optimizer, SimpleNamespace(param_sync_func=schedule)
    trainer._fill_shared_buffers()
    assert len(copied) == copies

"""The model's config on this machine."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation

from bridge.errors import RunConfigError
from bridge.runtime.megatron import cuda_shim
from bridge.runtime.megatron.gpt import GPTConfig, adapt_config, compute_padded_vocab_size
from bridge.runtime.megatron.process import apply_tf32, training_process

SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
needs_cpu = pytest.mark.skipif(cuda_shim.has_cuda(), reason="settings for machines without CUDA")


def test_activation_is_named_in_data():
    assert GPTConfig(**SHAPE, activation_func="silu", gated_linear_unit=True).activation_func is F.silu


def test_unknown_activation_is_refused():
    with pytest.raises(RunConfigError) as raised:
        GPTConfig(**SHAPE, activation_func="swish")
    assert str(raised.value) == (
        "model.activation_func: must be one of gelu, relu, silu, squared_relu, quick_gelu or a function, got 'swish'. "
        "Choose one of them."
    )


@pytest.mark.parametrize(("vocab_size", "ranks", "rows"), [(256, 1, 256), (257, 1, 384), (256, 4, 512), (1, 1, 128)])
def test_vocabulary_is_padded(vocab_size, ranks, rows):
    config = GPTConfig(**SHAPE, vocab_size=vocab_size, tensor_model_parallel_size=ranks)
    assert compute_padded_vocab_size(config) == rows


def test_vocabulary_comes_from_the_data():
    assert adapt_config(GPTConfig(**SHAPE), vocab_size=300)[0].vocab_size == 300


def test_vocabulary_smaller_than_the_data_is_refused():
    with pytest.raises(RunConfigError) as raised:
        adapt_config(GPTConfig(**SHAPE, vocab_size=100), vocab_size=256)
    assert str(raised.value) == (
        "model.vocab_size: must be at least the data's vocabulary of 256, got 100. Leave it at None to take the data's."
    )


@needs_cpu
def test_settings_that_the_cpu_needs_are_one_sentence():
    config = GPTConfig(**SHAPE, gradient_accumulation_fusion=True, persist_layer_norm=True)
    settled, notes = adapt_config(config, vocab_size=256)
    assert config.gradient_accumulation_fusion
    assert not settled.gradient_accumulation_fusion
    assert notes == [
        "Changed for this machine: model.gradient_accumulation_fusion=False (its kernel needs "
        "fused_weight_gradient_mlp_cuda, which is not installed here); model.persist_layer_norm=False (its kernel "
        "needs apex, which is not installed here)."
    ]


@needs_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_precision_field_is_touched(dtype):
    config = GPTConfig(**SHAPE, bf16=dtype is torch.bfloat16, params_dtype=dtype, attention_softmax_in_fp32=True)
    settled, _ = adapt_config(config, vocab_size=256)
    for name in ("fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype", "attention_softmax_in_fp32"):
        assert getattr(settled, name) == getattr(config, name)


def test_tf32_is_said():
    before = torch.get_float32_matmul_precision()
    try:
        effect = "" if cuda_shim.has_cuda() else "; without a CUDA device it has no effect"
        assert apply_tf32(True) == f"TF32 is allowed (float32 matmul precision 'high'){effect}."
        assert apply_tf32(False) == f"TF32 is forbidden (float32 matmul precision 'highest'){effect}."
    finally:
        torch.set_float32_matmul_precision(before)


def test_process_ends_cleanly_after_an_error():
    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="inside"), training_process(GPTConfig(**SHAPE), seed=1):
        raise ValueError("inside")
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    with training_process(GPTConfig(**SHAPE), seed=1) as process:
        assert (process.rank, process.world_size) == (0, 1)

"""The emulated layers by themselves: what they compute, keep and share."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from bridge.runtime.megatron.backend import Backend, use_backend
from bridge.runtime.megatron.emulation.parallel_linear import list_emulated_linears, make_gemm_precision
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.model.gpt import GPTConfig, adapt_config, build_gpt
from bridge.runtime.megatron.process.training_process import training_process
from bridge.runtime.numerics import GemmPrecision, LinearCall, quantise, scaled_linear

SHAPE = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 64,
    "vocab_size": 256,
    "add_bias_linear": False,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "fp8": "hybrid",
}


@pytest.fixture
def built():
    """Builds the model chunks of a config; the process lives as long as the test."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def build(**fields):
            config, _ = adapt_config(GPTConfig(**{**SHAPE, **fields}), vocab_size=256)
            process = stack.enter_context(training_process(config, seed=1))
            stack.enter_context(use_backend(Backend(name="emulated")))
            return build_gpt(
                config, DistributedDataParallelConfig(), process.device, seed=1, backend=Backend(name="emulated")
            )

        yield build


def first_linear(model, name="mlp.linear_fc1"):
    paths = {module: path for chunk in model for path, module in chunk.named_modules()}
    return next(module for module in list_emulated_linears(model) if paths[module].endswith(name))


def test_layer_computes_what_scaled_linear_does(built):
    layer = first_linear(built(fp8_recipe="tensorwise"))
    x = torch.randn(16, 2, 128).bfloat16().requires_grad_()
    y, _ = layer(x)
    y.backward(torch.ones_like(y))
    alone = x.detach().clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    expected = scaled_linear(alone, weight, call=LinearCall(precision=GemmPrecision(scheme="tensorwise")))
    expected.backward(torch.ones_like(expected))
    assert torch.equal(y, expected)
    assert torch.equal(x.grad, alone.grad)
    assert torch.equal(layer.weight.main_grad, weight.grad.to(layer.weight.main_grad.dtype))


@pytest.mark.parametrize("scheme", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_nothing_is_kept_in_float32(scheme, built):
    layer = first_linear(built(fp8_recipe=scheme))
    x = torch.randn(64, 2, 128).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y, _ = layer(x)
    assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in saved) <= x.numel() + layer.weight.numel()
    kept = [
        operand.values for operand in (layer.weight_cache.rowwise, layer.weight_cache.columnwise) if operand is not None
    ]
    assert {tensor.dtype for tensor in kept} == {torch.bfloat16}
    assert {buffer.numel() <= 3 * 1024 for buffer in layer.buffers()} <= {True}
    assert y.dtype == torch.bfloat16


def test_weight_is_quantised_once_for_all_micro_batches(built):
    model = built(fp8_recipe="tensorwise")
    layer = first_linear(model)
    x = torch.randn(8, 1, 128).bfloat16()
    layer.is_first_microbatch = True
    first, _ = layer(x)
    with torch.no_grad():
        layer.weight.add_(1.0)
    again, _ = layer(x)
    assert torch.equal(first, again)
    model[0].module.module.set_is_first_microbatch()
    renewed, _ = layer(x)
    assert not torch.equal(first, renewed)


def test_stored_weight_is_decoded_once_for_both_directions_of_a_step(built):
    model = built(fp8_recipe="tensorwise", fp8_param=True)
    layer, x = first_linear(model), torch.randn(8, 1, 128).bfloat16()
    layer.is_first_microbatch = True
    first, _ = layer(x)
    assert layer.weight_cache.rowwise is layer.weight_cache.columnwise is not None
    layer.weight.quantize_(torch.randn(layer.weight.shape))
    assert torch.equal(layer(x)[0], first)
    model[0].module.module.set_is_first_microbatch()
    assert not torch.equal(layer(x)[0], first)


def test_stored_weight_is_what_quantise_returns(built):
    layer = first_linear(built(fp8_recipe="tensorwise", fp8_param=True))
    weight = layer.weight
    assert isinstance(weight, StoredWeight)
    assert weight.dtype == torch.bfloat16
    assert weight.tensor_model_parallel
    initial = weight.get_high_precision_init_val()
    expected = quantise(initial, GemmPrecision(scheme="tensorwise").spec("weight"), columnwise=False)
    assert torch.equal(weight.stored.codes, expected.codes)
    assert torch.equal(weight.stored.scale_inv, expected.scale_inv)
    assert torch.equal(weight + 0, expected.dequantise())
    with torch.no_grad():
        weight.copy_(torch.full_like(initial, 3.0))
    assert torch.equal(weight.dequantize(), torch.full_like(initial, 3.0))
    assert weight.detach().stored.codes.data_ptr() == weight.stored.codes.data_ptr()


def test_config_of_a_layer_is_megatrons():
    config = GPTConfig(**SHAPE, fp8_recipe="delayed", fp8_margin=2, fp8_amax_history_len=7, fp8_amax_compute_algo="max")
    assert make_gemm_precision(config) == GemmPrecision(
        scheme="delayed", format="hybrid", margin=2, amax_history_len=7, amax_compute_algo="max"
    )
    assert make_gemm_precision(GPTConfig(**{**SHAPE, "fp8": None})) is None
    four = GPTConfig(**{**SHAPE, "fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4"})
    assert make_gemm_precision(four) == GemmPrecision(scheme="nvfp4", format="e2m1")

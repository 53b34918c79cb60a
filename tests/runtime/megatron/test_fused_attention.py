"""Fused attention against Megatron's own."""

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from bridge.runtime.megatron.fused_attention import FusedDotProductAttention
from bridge.runtime.megatron.gpt import GPTConfig
from bridge.runtime.megatron.process import training_process

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0}


def both(dtype=torch.float32, groups=None, **config):
    """Return output and query gradient of the fused and of Megatron's attention."""
    model = GPTConfig(
        **{
            **SHAPE,
            "num_query_groups": groups,
            "bf16": dtype is torch.bfloat16,
            "masked_softmax_fusion": False,
            **config,
        }
    )
    torch.manual_seed(0)
    query = torch.randn(16, 2, 4, 8).to(dtype)
    key, value = (torch.randn(16, 2, groups or 4, 8).to(dtype) for _ in range(2))
    results = []
    with training_process(model, seed=1):
        for attention in (FusedDotProductAttention, DotProductAttention):
            module = attention(model, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
            leaf = query.clone().requires_grad_()
            out = module(leaf, key, value, None)
            out.backward(torch.ones_like(out))
            results.append((out.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("groups", [None, 2, 1])
def test_equals_megatron_in_fp32(groups):
    (ours, our_grad), (theirs, their_grad) = both(groups=groups)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-5, atol=1e-6)


def test_agrees_with_megatron_in_bf16():
    (ours, _), (theirs, _) = both(torch.bfloat16)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "config",
    [{"window_size": (4, 0)}, {"apply_query_key_layer_scaling": True}, {"softmax_type": "off-by-one"}],
    ids=lambda config: next(iter(config)),
)
def test_other_cases_are_megatrons_own(config):
    (ours, our_grad), (theirs, their_grad) = both(**config)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_grad, their_grad)


def test_16_bit_softmax_is_megatrons_own():
    (ours, _), (theirs, _) = both(torch.bfloat16, attention_softmax_in_fp32=False)
    assert torch.equal(ours, theirs)

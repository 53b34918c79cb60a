"""Attention variants: their kernels in plain torch against slow references in FP64, and runs in every scheme."""

import math

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import dsa

from bridge.errors import RunConfigError
from bridge.runtime.megatron.hybrid.kernels import (
    apply_causal_conv1d,
    apply_delta_rule,
    hadamard_transform,
    l2norm,
)
from bridge.training.loop import pretrain
from tests.runtime.megatron.test_model_kinds import LATENT, SCHEMES, mismatches, parameters, run_of
from tests.training.grid import slow
from tests.training.loop_tiny import tiny, trace

DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 0],
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 12,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 8,
    "activation_func": "silu",
}
SPARSE = {
    **LATENT,
    "experimental_attention_variant": "dsa",
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_layernorm": True,
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 8,
    "dsa_indexer_loss_coeff": 0.1,
}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 8, 12, 128])
def test_the_hadamard_transform_is_a_product_with_sylvesters_matrix(width):
    x, size = normal(3, width), 1 << (width - 1).bit_length()
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    expected = x.double() @ torch.tensor(signs, dtype=torch.float64)[:width, :width] * 0.5
    torch.testing.assert_close(hadamard_transform(x, scale=0.5).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_vector_is_divided_by_its_length():
    x = normal(2, 5, 8)
    torch.testing.assert_close(l2norm(x), torch.nn.functional.normalize(x, dim=-1), rtol=1e-5, atol=1e-5)


def test_a_causal_convolution_sees_a_token_and_those_before_it():
    x, taps, bias = normal(2, 6, 3), normal(3, 4), normal(3)
    y, state = apply_causal_conv1d(x, taps, bias, activation="silu", initial_state=None, cu_seqlens=None)
    assert state is None
    for token in range(6):
        past = x[:, max(0, token - 3) : token + 1].double()
        sums = (past * taps.T[-past.shape[1] :].double()).sum(1) + bias.double()
        torch.testing.assert_close(y[:, token].double(), sums * sums.sigmoid(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [5, 70])
def test_the_gated_delta_rule_is_its_recurrence(tokens):
    q, k = l2norm(normal(2, tokens, 3, 8)), l2norm(normal(2, tokens, 3, 8) - 0.5)
    v, beta, g = normal(2, tokens, 3, 4), normal(2, tokens, 3).sigmoid(), -normal(2, tokens, 3).exp()
    out, _ = apply_delta_rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False)
    state, expected = torch.zeros(2, 3, 8, 4, dtype=torch.float64), []
    for q_t, k_t, v_t, beta_t, g_t in zip(*(part.double().unbind(1) for part in (q, k, v, beta, g)), strict=True):
        state = state * g_t.exp()[..., None, None]
        error = v_t - torch.einsum("bhk,bhkv->bhv", k_t, state)
        state = state + torch.einsum("bhk,bhv->bhkv", k_t, beta_t[..., None] * error)
        expected.append(torch.einsum("bhk,bhkv->bhv", q_t, state) / math.sqrt(8))
    torch.testing.assert_close(out.double(), torch.stack(expected, 1), rtol=1e-4, atol=1e-5)


def test_the_indexers_scores_and_sparse_attention_are_those_of_one_query_after_the_other():
    q, k, weights = normal(9, 2, 4, 16), normal(9, 2, 16), normal(9, 2, 4)
    rotated = (hadamard_transform(part, scale=0.25) for part in (q, k))
    if hasattr(dsa, "_compute_index_scores"):  # a function from megatron-core 0.19 on
        scores = dsa._compute_index_scores(next(rotated), weights, next(rotated))
    else:
        scores = dsa.DSAIndexer._compute_index_scores(None, next(rotated), weights, next(rotated))
    query, key, value = normal(9, 2, 3, 8), normal(9, 2, 3, 8) * 2, normal(9, 2, 3, 5)
    causal = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    out = dsa.unfused_dsa_fn(query, key, value, causal.topk(4, dim=-1)[1], 0.5).unflatten(-1, (3, 5))
    for batch in range(2):
        for token in range(9):
            dots = q[token, batch].double() @ k[:, batch].double().T
            own = (weights[token, batch].double()[:, None] * dots.relu()).sum(0)
            torch.testing.assert_close(scores[batch, token].double(), own, rtol=1e-4, atol=1e-4)
            chosen = own[: token + 1].topk(min(4, token + 1))[1]
            for head in range(3):
                logits = key[chosen, batch, head].double() @ query[token, batch, head].double() * 0.5
                expected = logits.softmax(0) @ value[chosen, batch, head].double()
                torch.testing.assert_close(out[token, batch, head].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [DELTA, SPARSE], ids=["delta net", "sparse"])
@pytest.mark.parametrize("scheme", [one if one == "tensorwise" else slow(one) for one in SCHEMES])
def test_a_variant_has_the_modules_and_the_formats_of_its_plan(kind, scheme, tmp_path):
    summary, plan = run_of(tmp_path, kind, scheme)
    assert mismatches(summary, plan) == []
    assert summary.parameters == parameters(plan)
    assert dsa.DSAIndexerLossLoggingHelper.tracker == {}  # has a place for each layer of this model


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DELTA, SPARSE], ids=["delta net", "sparse"])
def test_a_variant_continues_where_it_stopped(kind, tmp_path):
    schedule = {"lr_decay_iters": 4, "eval_iters": 0}
    saved = str(tmp_path / "checkpoints")
    for folder, steps, files in (("whole", 4, {}), ("parts", 2, {"save": saved}), ("parts", 4, {"load": saved})):
        config = tiny(model=kind, low="tensorwise", sharded=True, train={**schedule, "train_iters": steps}, **files)
        pretrain(config, run_dir=tmp_path / folder)
    assert trace(tmp_path / "parts") == trace(tmp_path / "whole")


def test_sparse_attention_outside_of_bf16_is_refused(tmp_path):
    with pytest.raises(RunConfigError) as raised:
        pretrain(tiny("fp32", model=SPARSE), run_dir=tmp_path)
    assert str(raised.value) == (
        "model.bf16: must be on for sparse attention, whose indexer rotates BF16 alone, got False. "
        "Choose a recipe in BF16."
    )

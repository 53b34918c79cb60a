"""The plan of DeepSeek-V4's hybrid attention and of hyper-connections, and the parameters of real models."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

from bridge.plan.memory_parameters import list_chunk_parameters
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from tests import releases, warm
from tests.releases import ROOT
from tests.runtime.megatron.test_te_cpu import needs_te

HYBRID = "megatron.core.transformer.experimental_attention_variant.deepseek_v4_hybrid_attention"
needs_hybrid = pytest.mark.skipif(
    importlib.util.find_spec(HYBRID) is None,
    reason=releases.LATER_PARTS,
)
needs_connections = pytest.mark.skipif(
    "enable_mhc_connections" not in TransformerConfig.__dataclass_fields__,
    reason=releases.LATER_PARTS,
)
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "kv_channels": 64,
    "ffn_hidden_size": 64,
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "v_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "qk_layernorm": True,
    "o_groups": 2,
    "o_lora_rank": 32,
    "rope_type": "rope",
    "gated_linear_unit": True,
    "experimental_attention_variant": "dsv4_hybrid",
    "csa_compress_ratios": [0, 4, 128],
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 8,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_shared_expert_intermediate_size": 64,
}
STREAMS = {"enable_hyper_connections": True, "num_residual_streams": 2}
MODELS = {
    "dense": SIZES,
    "without an indexer": {**SIZES, "csa_dense_mode": True, "qk_layernorm": False},
    "published": {**SIZES, **EXPERTS, **STREAMS, "mtp_num_layers": 1, "csa_compress_ratios": [0, 4, 128, 4]},
}
DTYPES = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}


def planned(plan: PrecisionPlan) -> dict[str, list[tuple[int, str]]]:
    """Return the parameters of the plan by layer: elements and dtype."""
    (places,) = plan.stages
    found = defaultdict(list)
    for place in places:
        for one in list_chunk_parameters(plan, place):
            found[one.layer].append((one.numel, one.storage))
    return {layer: sorted(parameters) for layer, parameters in found.items()}


def layer_of(name: str) -> str:
    """Return the label of the plan's layer that has a parameter."""
    parts = name.split(".")
    if parts[0] == "embedding":
        return "embedding"
    if parts[1:2] == ["layers"]:
        number = int(parts[2]) + 1
        return f"mtp {number}" if parts[0] == "mtp" else str(number)
    return "output"


@needs_te
@needs_hybrid
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_has_each_parameter_of_the_real_hybrid_attention(name: str, tmp_path: Path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODELS[name]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.runtime.megatron.compressed_live", str(path)],
        cwd=ROOT,
        env=dict(os.environ),
        check=False,
        capture_output=True,
        text=True,
        timeout=warm.LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    live = defaultdict(list)
    for parameter, (shape, dtype) in json.loads((tmp_path / "parameters.json").read_text()).items():
        elements = 1
        for size in shape:
            elements *= size
        live[layer_of(parameter)].append((elements, DTYPES[dtype]))
    model = {**MODELS[name], "bf16": True, "vocab_size": 256, "make_vocab_size_divisible_by": 1}
    assert planned(precision_plan(None, model)) == {layer: sorted(found) for layer, found in live.items()}


@needs_connections
def test_the_plan_has_each_parameter_of_a_real_layer_with_hyper_connections():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.hyper_connection import HyperConnectionModule
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

    from bridge.runtime.megatron.process import training_process

    model = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "enable_mhc_connections": True}
    config = TransformerConfig(**model, mhc_num_residual_streams=3, hidden_dropout=0.0)
    spec = get_gpt_layer_local_spec()
    spec.module = HyperConnectionTransformerLayer
    spec.submodules.self_attention_hyper_connection = HyperConnectionModule
    spec.submodules.mlp_hyper_connection = HyperConnectionModule
    with training_process(config, seed=1):
        layer = build_module(spec, config=config, layer_number=1)
        live = sorted((parameter.numel(), "fp32") for parameter in layer.parameters())
    plan = precision_plan(None, {**model, "mhc_num_residual_streams": 3, "vocab_size": 64})
    assert planned(plan)["1"] == live

"""The activations of the plan against what Transformer Engine's own Python keeps of a forward pass on a CPU."""

import json
from pathlib import Path

import pytest

from bridge.model.layout import ParallelLayout
from bridge.model.shape import ModelShape
from bridge.plan.memory_activations import DELTA_CHUNK, build_segments
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.target.versions import get_installed_version
from tests.runtime.megatron.test_te_cpu import fresh, needs_te

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/plan-and-memory.md"
WITHIN = 0.02
SEQUENCE, BATCH = 128, 2
MODEL = {
    "num_layers": 1,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "seq_length": SEQUENCE,
    "vocab_size": 256,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "bias_activation_fusion": True,
}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 8,
    "qk_layernorm": True,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 32,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
SQUARED = {"gated_linear_unit": False, "activation_func": "squared_relu", "bias_activation_fusion": False}
HYBRID = {
    "hybrid_layer_pattern": "M*-E",
    "num_layers": 4,
    "mamba_num_heads": 128,
    "mamba_head_dim": 4,
    "mamba_state_dim": 32,
    "mamba_num_groups": 4,
    "position_embedding_type": "none",
    **EXPERTS,
    **SQUARED,
}
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1],
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 36,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 16,
}
SPARSE = {
    **LATENT,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_head_dim": 64,
    "dsa_indexer_topk": 16,
    "dsa_indexer_loss_coeff": 0.01,
}
KINDS = {
    "dense, grouped-query attention": {},
    "dense, as many keys as queries": {"num_query_groups": 8},
    "dense, activation function not fused": {"bias_activation_fusion": False},
    "norms of queries and keys": {"qk_layernorm": True},
    "gated attention": {"attention_output_gate": True},
    "latent attention": LATENT,
    "experts": EXPERTS,
    "shared experts": {**EXPERTS, "moe_shared_expert_intermediate_size": 256},
    "multi-token prediction": {"mtp_num_layers": 1},
    "gated delta net": DELTA_NET,
    "sparse attention": SPARSE,
    "hybrid: M*-E": HYBRID,
}
SHARED = "shared experts"
RECOMPUTED = {
    "dense, grouped-query attention": ("core_attn", "layernorm", "mlp", "full"),
    "latent attention": ("core_attn", "mla_up_proj", "layernorm"),
    SHARED: ("moe", "moe_act", "shared_experts", "layernorm"),
}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "dense, grouped-query attention": {"TP 2 + SP": TP},
    "latent attention": {"TP 2 + SP": TP},
    SHARED: {
        "EP 2": EP,
        "TP 2 + SP x EP 2": {**TP, **EP},
        "TP 2 + SP x ETP 2": {**TP, "expert_tensor_parallel_size": 2},
    },
    "gated delta net": {"TP 2 + SP": TP},
    "hybrid: M*-E": {"TP 2 + SP": TP},
}
PRECISIONS = {
    "bf16": {},
    "tensorwise": {"fp8": "hybrid"},
    "delayed": {"fp8": "hybrid"},
    "blockwise": {"fp8": "e4m3"},
    "mxfp8": {"fp8": "e4m3"},
    "nvfp4": {"fp4": "e2m1"},
}
REFUSED = [f"{SHARED}; recompute moe_act", *(f"{kind}; recompute layernorm" for kind in RECOMPUTED)]
"""Rows that Megatron refuses under delayed scaling."""
HOPPER, BLACKWELL = ("bf16", "tensorwise", "delayed", "blockwise"), ("mxfp8", "nvfp4")


def recomputing(module: str) -> dict:
    if module == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": [module]}


def rows() -> dict[str, dict]:
    """Return the rows of the table: what differs in the model, by what is said of it."""
    found = dict(KINDS)
    for kind, modules in RECOMPUTED.items():
        found |= {f"{kind}; recompute {module}": {**KINDS[kind], **recomputing(module)} for module in modules}
    for kind, layouts in LAYOUTS.items():
        found |= {f"{kind}; {name}": {**KINDS[kind], **sizes} for name, sizes in layouts.items()}
    return found


def case(changes: dict, scheme: str) -> dict:
    family = next(iter(PRECISIONS[scheme]), None)
    chosen = {**PRECISIONS[scheme], f"{family}_recipe": scheme} if family is not None else {}
    precision = {"bf16": True, **chosen, "first_last_layers_bf16": False}
    return {
        "scheme": scheme,
        "mixed_precision": precision,
        "model": {**MODEL, **changes},
        "optimizer": {"lr": 1e-3},
        "train": {"micro_batch_size": BATCH, "global_batch_size": 2 * BATCH},
    }


def counted(given: dict, ranks: int) -> float:
    """Return the bytes of the plan, without those of kernels that do not run on a CPU."""
    model = given["model"]
    parallel = ParallelLayout.from_model(model).fit_to_world_size(ranks)
    precision = MixedPrecisionConfig.from_dict(given["mixed_precision"])
    plan = precision_plan(precision, model, parallel, mcore=get_installed_version("mcore"))
    (place,) = plan.parallel.split_layers(plan.shape.num_layers)
    kept = sum(part.kept for part in build_segments(plan, place, Workload.from_sections(model, given["train"])))
    return kept - SEQUENCE * BATCH * read_in_sources(plan.shape, model) / parallel.tensor


def read_in_sources(shape: ModelShape, model: dict) -> float:
    """Return the bytes per token of kernels: the softmax's sums, a scan, the delta rule, attention to chosen keys."""
    delta, space, indexer, latent = shape.delta_net, shape.state_space, shape.indexer, shape.latent
    if delta is not None:  # each layer of the row
        heads = delta.num_value_heads
        inside = (
            delta.projected_width
            + delta.conv_channels
            + heads * (2 * delta.key_head_dim + DELTA_CHUNK)
            + 2 * delta.value
        )
        return inside * 2 + heads * (4 + 4)
    if model.get("recompute_granularity") and model.get("recompute_modules") in (None, ["core_attn"]):
        return 0.0
    attentions = shape.kinds.count("attention") if shape.is_hybrid else shape.num_layers + shape.mtp_num_layers
    sums = attentions * shape.num_attention_heads * 4
    if indexer is not None and latent is not None:
        wide, absorbed = (
            latent.qk_head_dim + latent.qk_pos_emb_head_dim,
            latent.kv_lora_rank + latent.qk_pos_emb_head_dim,
        )
        heads, chosen_by = shape.num_attention_heads, indexer.num_heads * (indexer.head_dim + 1) + indexer.head_dim
        core = heads * (wide + absorbed + latent.kv_lora_rank) + absorbed
        return sums + (core + chosen_by) * 2 + indexer.topk * 4
    if space is None or not shape.is_hybrid:
        return sums
    return sums + (space.projected_width + 2 * space.inner) * 2 + 4 * space.num_groups


def measured(folder: Path, cases: dict[str, dict], *, processes: int = 1) -> dict[str, int]:
    """Return the bytes that each case keeps on the first rank."""
    path = folder / "cases.json"
    path.write_text(json.dumps({str(number): one for number, one in enumerate(cases.values())}))
    fresh("tests.plan.memory_kept", path, processes=processes)
    return {name: json.loads((folder / f"{number}-0.json").read_text()) for number, name in enumerate(cases)}


def differences(folder: Path, named: dict[str, dict], schemes: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """Return (row, scheme) -> how much more is counted than kept, as a part of what is kept."""
    found = {}
    for ranks in (1, 2):
        chosen = {name: changes for name, changes in named.items() if (2 if "P 2" in name else 1) == ranks}
        cases = {
            f"{name}|{scheme}": case(changes, scheme)
            for name, changes in chosen.items()
            for scheme in schemes
            if scheme != "delayed" or name not in REFUSED
        }
        place = folder / f"{schemes[0]}-{ranks}"
        place.mkdir()
        kept = measured(place, cases, processes=ranks) if cases else {}
        for name, size in kept.items():
            row, _, scheme = name.partition("|")
            found[row, scheme] = counted(cases[name], ranks) / size - 1
    return found


def wrong(found: dict[tuple[str, str], float]) -> dict[tuple[str, str], str]:
    return {name: f"{part:+.1%}" for name, part in found.items() if abs(part) > WITHIN}


@needs_te
def test_the_count_of_activations_is_what_transformer_engine_keeps(tmp_path):
    chosen = ("dense, grouped-query attention", "latent attention", SHARED, f"{SHARED}; recompute moe")
    assert wrong(differences(tmp_path, {name: rows()[name] for name in chosen}, ("bf16", "tensorwise"))) == {}


@needs_te
@pytest.mark.slow
def test_the_table_of_the_page_is_what_transformer_engine_keeps_of_every_kind_of_layer(tmp_path):
    found = differences(tmp_path, rows(), HOPPER) | differences(tmp_path, rows(), BLACKWELL)
    assert wrong(found) == {}
    lines = ["| layers | " + " | ".join(PRECISIONS) + " |", "|---" * (1 + len(PRECISIONS)) + "|"]
    for name in rows():
        cells = (
            f"{round(found[name, scheme], 3) + 0:+.1%}" if (name, scheme) in found else "refused"
            for scheme in PRECISIONS
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(), table


LOCAL = {
    "transformer_impl": "local",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "attention_softmax_in_fp32": False,
    "masked_softmax_fusion": False,  # its kernel is CUDA's
}
IN_FP32 = {"attention_softmax_in_fp32": True, "attention_dropout": 0.1}
CORES = {
    "grouped queries": {},
    "as many keys as queries": {"num_query_groups": 8},
    "no rotation": {"num_query_groups": 8, "position_embedding_type": "none"},
    "dropout": {"attention_dropout": 0.1},
    "dropout, softmax in FP32": IN_FP32,
    "grouped queries, short": {"seq_length": 32},
    "dropout, short": {"attention_dropout": 0.1, "seq_length": 32},
}


def test_local_attention_keeps_its_scores_as_a_run_on_a_cpu_does(tmp_path):
    cases = {name: case({**MODEL, **LOCAL, **changes}, "bf16") for name, changes in CORES.items()}
    kept = measured(tmp_path, cases)
    others = {}
    for name, given in cases.items():
        model = given["model"]
        plan = precision_plan(
            MixedPrecisionConfig.from_dict(given["mixed_precision"]), model, ParallelLayout.from_model(model)
        )
        (place,) = plan.parallel.split_layers(plan.shape.num_layers)
        count = sum(part.kept for part in build_segments(plan, place, Workload.from_sections(model, given["train"])))
        tokens = model["seq_length"] * BATCH
        scores = model["num_layers"] * tokens * model["num_attention_heads"] * model["seq_length"]
        if model["attention_dropout"]:
            count += scores  # the mask of dropout takes two bytes on a CPU
        count += model["num_layers"] * model["seq_length"] ** 2  # the causal mask of each layer; Megatron-LM has one
        others[name] = (kept[name] - count) / tokens
    # The norms of a CPU keep more than those of a GPU, by the same bytes of a token whatever the attention keeps.
    assert len(set(others.values())) == 1, others


@pytest.mark.parametrize(
    ("changes", "length", "expected"),
    [
        ({}, 8192, 2),  # no kernel for so long a sequence, and no FP32
        ({"attention_softmax_in_fp32": True}, 8192, 4 + 2),
        ({"attention_softmax_in_fp32": True}, 4096, 2),
        ({"attention_softmax_in_fp32": True, "masked_softmax_fusion": False}, 4096, 4 + 2),
        ({"attention_softmax_in_fp32": True, "attention_dropout": 0.1}, 4096, 2 + 2 + 1),
        ({"transformer_impl": "transformer_engine", "attention_backend": "unfused"}, 8192, 2),
        ({"transformer_impl": "transformer_engine", "attention_backend": "unfused"}, 16384, 4 + 2),
        ({"transformer_impl": "transformer_engine", "attention_backend": "flash"}, 8192, 0),
        ({"transformer_impl": "transformer_engine", "attention_backend": "auto"}, 8192, 0),
        ({"transformer_impl": "transformer_engine", "attention_backend": "auto", "bf16": False}, 8192, 4),
        (recomputing("core_attn"), 8192, 0),
    ],
)
def test_each_score_of_attention_without_a_kernel_takes_the_bytes_that_its_source_keeps(changes, length, expected):
    def kept(seq_length: int) -> float:
        model = {**MODEL, **LOCAL, "masked_softmax_fusion": True, **changes, "seq_length": seq_length}
        precision = MixedPrecisionConfig.from_dict({"bf16": model.pop("bf16", True)})
        plan = precision_plan(precision, model, ParallelLayout.from_model(model))
        (place,) = plan.parallel.split_layers(plan.shape.num_layers)
        return sum(
            part.kept
            for part in build_segments(plan, place, Workload.from_sections(model, {"micro_batch_size": BATCH}))
        )

    tokens = length * BATCH
    scores = 2 * tokens * 8 * length
    per_token = (kept(64) - 2 * 64 * BATCH * 8 * 64 * expected_of_short(changes, expected)) / (64 * BATCH)
    assert (kept(length) - per_token * tokens) / scores == pytest.approx(expected, abs=1e-3)


def expected_of_short(changes: dict, expected: float) -> float:
    """Return the bytes of a score for 64 tokens, which the kernels of the softmax take."""
    if not expected or changes.get("bf16") is False:
        return expected
    if changes.get("masked_softmax_fusion") is False:
        return 4 + 2
    return 2 + 3 * bool(changes.get("attention_dropout"))

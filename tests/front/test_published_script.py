"""`scripts/published.py`: recipes of each kind of layer and of file are asked together, and make the page's tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.front.test_megatron_bridge import PRECISION, container

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MOE = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "expert_model_parallel_size": 4}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 64}
DELTA_NET = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4}
HYBRID = {"hybrid_layer_pattern": "M-M*", "is_hybrid_model": True, "mamba_num_heads": 16, "mamba_num_groups": 2}
SPARSE = {**LATENT, "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 64}
STAGES = {"num_layers": 8, "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
BF16 = {"_target_": PRECISION["_target_"], "bf16": True}
RECIPES: dict[str, dict[str, Any]] = {
    "dense_8gpu_h100_bf16": container(mixed_precision=BF16),
    "dense_8gpu_h100_fp8cs": container(),
    "dense_8gpu_b200_fp8mx": container(mixed_precision=dict(PRECISION, fp8="e4m3", fp8_recipe="mxfp8")),
    "dense_pipeline_8gpu_h100_fp8cs": container(STAGES),
    "dense_layout_8gpu_h100_fp8cs": container(STAGES | {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"}),
    "dense_lengths_8gpu_h100_bf16": container(dataset={"seq_length": 256}, mixed_precision=BF16),
    "experts_8gpu_h100_fp8cs": container(MOE),
    "experts_2gpu_h100_fp8cs": container(MOE),
    "latent_8gpu_h100_fp8cs": container(LATENT),
    "prediction_8gpu_h100_fp8cs": container({"mtp_num_layers": 1}),
    "delta_net_8gpu_h100_fp8cs": container(DELTA_NET),
    "hybrid_8gpu_h100_fp8cs": container(HYBRID),
    "sparse_8gpu_h100_bf16": container({**SPARSE, "dsa_indexer_topk": 64}, mixed_precision=BF16),
    "unknown_8gpu_h100_bf16": container({"experimental_attention_variant": "gdn2"}, mixed_precision=BF16),
}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import published

        yield published
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recipes")
    for name, content in RECIPES.items():
        (made / f"{name}_config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return made


def test_every_kind_of_recipe_is_answered_and_its_findings_are_counted_by_rule(
    script: ModuleType, folder: Path
) -> None:
    found = script.answers(folder)
    refused = {one.name.removesuffix("_config"): one.refused for one in found if one.refused}
    assert set(refused) == {"unknown_8gpu_h100_bf16"}
    assert {one.fit for one in found if not one.refused} == {"fits"}
    errors = {rule: len(recipes) for (kind, rule), recipes in script.rows(found).items() if kind == "error"}
    assert errors == {"PB406": 1, "PB411": 1, "PB412": 1}
    text = script.tables(found)
    assert text.startswith(f"{len(RECIPES)} recipes, asked on ")
    assert "| error PB411, two sequence lengths, which Megatron Bridge refuses | 1 |" in text


def test_a_class_is_layers_scheme_and_parallelism(script: ModuleType, folder: Path) -> None:
    found = script.classes(folder)
    assert [path.stem for path in found["delta_net, transformer | tensorwise | DP 2"]] == [
        "delta_net_8gpu_h100_fp8cs_config"
    ]
    assert "transformer_moe | tensorwise | DP 2 x EP 2" in found
    assert "mamba, mlp, attention | tensorwise | DP 2" in found
    assert "transformer | tensorwise | PP 2 x VPP 2 x DP 2" in found


def test_the_table_of_rehearsals_names_the_release_that_ran_each(script: ModuleType) -> None:
    ran = {"recipe": "a", "mcore": "0.19.2", "te": "2.20.2", "planned": 15, "equal": 15, "resumed": True, "seconds": 7}
    ran |= {"replaced": ["model.tp_comm_overlap"], "left_out": [], "findings": []}
    known = {
        "transformer | bf16 | DP 2": ran,
        "transformer | mxfp8 | DP 2": {**ran, "equal": 14, "findings": ["step 1: planned e4m3, ran bf16"]},
        "transformer | nvfp4 | DP 2": {**ran, "mcore": "0.16.1"},
        "transformer | tensorwise | DP 2": {"recipe": "b", "refused": "model: no such model"},
    }
    found = {name: [Path("a"), Path("b")] for name in (*known, "transformer | delayed | DP 2")}
    lead, _, _, _, *rows = script.rehearsal_table(found, known).splitlines()
    assert lead == (
        "5 classes of 10 recipes. With megatron-core 0.19.2 2 ran, 1 of them as planned and resumed with the same "
        "loss. With megatron-core 0.16.1 1 ran, 1 of them as planned and resumed with the same loss. 1 was refused. "
        "1 was not rehearsed."
    )
    assert rows == [
        "| transformer | bf16 | DP 2 | 2 | 0.19.2 | 15 of 15 | yes | 7 | replaced: `model.tp_comm_overlap` |",
        "| transformer | mxfp8 | DP 2 | 2 | 0.19.2 | 14 of 15 | yes | 7 | step 1: planned e4m3, ran bf16; "
        "replaced: `model.tp_comm_overlap` |",
        "| transformer | nvfp4 | DP 2 | 2 | 0.16.1 | 15 of 15 | yes | 7 | replaced: `model.tp_comm_overlap` |",
        "| transformer | tensorwise | DP 2 | 2 | - | - | - | - | model: no such model |",
        "| transformer | delayed | DP 2 | 2 | - | - | - | - | was not rehearsed |",
    ]

"""The count of a run's bytes, held against what PyTorch's allocator measured on an H100.

Source: NVIDIA/Megatron-LM d98e8a64 tests/functional_tests, `model_config.yaml` and the last values of
`golden_values_dev_dgx_h100.json` of the test that is named. docs/explain/memory-measured.md has all of them.
"""

from pathlib import Path

import pytest
import yaml

from bridge.front.loader import load_run

MIB = 2**20
SMALL = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "micro-batch-size": 4,
    "global-batch-size": 32,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "transformer-impl": "transformer_engine",
    "bf16": True,
}
RUNS = {
    "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer": (
        {**SMALL, "use-distributed-optimizer": True},
        581489664,
        2691792384,
    ),
    "gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion": (
        {
            **SMALL,
            "tensor-model-parallel-size": 2,
            "pipeline-model-parallel-size": 2,
            "cross-entropy-loss-fusion": True,
        },
        514359808,
        1837640192,
    ),
    "gpt/gpt3_mcore_tp1_pp2": (
        {
            **SMALL,
            "transformer-impl": "local",
            "pipeline-model-parallel-size": 2,
            "apply-query-key-layer-scaling": True,
        },
        948653056,
        3633177600,
    ),
    "gpt/gpt3_7b_tp4_pp1_memory_speed": (
        {
            "num-layers": 32,
            "hidden-size": 4096,
            "num-attention-heads": 32,
            "group-query-attention": True,
            "num-query-groups": 8,
            "untie-embeddings-and-output-weights": True,
            "micro-batch-size": 2,
            "global-batch-size": 8,
            "seq-length": 8192,
            "max-position-embeddings": 8192,
            "transformer-impl": "transformer_engine",
            "tensor-model-parallel-size": 4,
            "use-distributed-optimizer": True,
            "overlap-grad-reduce": True,
            "overlap-param-gather": True,
            "bf16": True,
        },
        20663519232,
        57143791616,
    ),
    "hybrid/hybrid_mr_mcore_te_tp2_pp1_cp4_dgx_a100_1N8G": (
        {
            "hidden-size": 1024,
            "num-attention-heads": 16,
            "group-query-attention": True,
            "num-query-groups": 8,
            "hybrid-layer-pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
            "spec": "[megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec]",
            "micro-batch-size": 4,
            "global-batch-size": 32,
            "seq-length": 1024,
            "max-position-embeddings": 1024,
            "transformer-impl": "transformer_engine",
            "tensor-model-parallel-size": 2,
            "context-parallel-size": 4,
            "use-distributed-optimizer": True,
            "overlap-grad-reduce": True,
            "overlap-param-gather": True,
            "attention-backend": "fused",
            "bf16": True,
        },
        1917252608,
        2743789056,
    ),
}
"""Test -> its arguments, the bytes at rest, and the most bytes."""
VOCABULARY = {"gpt/gpt3_7b_tp4_pp1_memory_speed": 131073}
GPT2 = 50257


@pytest.mark.parametrize("name", RUNS)
def test_the_count_is_what_a_gpu_measured(name: str, tmp_path: Path) -> None:
    arguments, at_rest, peak = RUNS[name]
    file = tmp_path / "model_config.yaml"
    file.write_text(yaml.safe_dump({"MODEL_ARGS": {f"--{option}": value for option, value in arguments.items()}}))
    size = VOCABULARY.get(name, GPT2)
    last = load_run([f"model.vocab_size={size}", "target=h100x8"], config_file=file).planned.memory.ranks[-1]
    workspaces = at_rest - last.static - last.step_bytes
    assert 90 * MIB < workspaces < 140 * MIB
    step = peak - at_rest + last.step_bytes
    assert last.bytes_of["activations"] == pytest.approx(step, rel=0.01)

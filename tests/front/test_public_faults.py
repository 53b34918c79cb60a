"""Public faults of frameworks, each reproduced by a small file of its own and named by `check`.

That of verl pull requests 7519 and 7918 is a difference of rollout: `tests/convert/rollout/test_rollout.py` has it.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from bridge.cli.main import main

NEMO_RL = """\
policy:
  model_name: org/a-model
  precision: bfloat16
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  dtensor_cfg: {{enabled: false}}
  megatron_cfg:
    enabled: true
    optimizer: {{optimizer: adam, bf16: true, params_dtype: float32, use_distributed_optimizer: true{more}}}
    {setting}
cluster: {{num_nodes: 1, gpus_per_node: 8}}
"""
MXFP8 = "fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: mxfp8, fp8_param: true}"
BLOCKWISE = "fp8_cfg: {enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}"
SWIFT = """\
#!/bin/bash
megatron sft --model org/a-model --dataset d --torch_dtype bfloat16 --micro_batch_size 1 --max_length 1024 \\
    --fp8_format e4m3 --fp8_recipe delayed --fp8_param_gather true --use_precision_aware_optimizer true{more}
"""
MILES = """\
#!/bin/bash
ray job submit --runtime-env-json='{{"env_vars": {{"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "{scales}"}}}}' -- \\
    python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint /a-model --use-miles-router \\
    --num-layers 4 --hidden-size 512 --num-attention-heads 8 --bf16 --transformer-impl transformer_engine \\
    --fp8-format e4m3 --fp8-recipe blockwise --micro-batch-size 1 --seq-length 1024
"""


class Fault(NamedTuple):
    """A file with a fault, the same file without it, and the finding."""

    name: str
    text: str
    fixed_in: str
    target: str
    rule: str
    path: str
    words: str


def nemo_rl(setting: str, more: str = "") -> str:
    return NEMO_RL.format(setting=setting, more=more)


FAULTS = {
    "NeMo-RL 3281": Fault(
        "run.yaml",
        nemo_rl(MXFP8),
        nemo_rl(MXFP8, ", fp8_recipe: mxfp8"),
        "b200x8",
        "PB124",
        "model.fp8_recipe",
        "must equal optimizer.fp8_recipe, which is None",
    ),
    "NeMo-RL 4126": Fault(
        "run.yaml",
        nemo_rl(f"{BLOCKWISE}\n    first_last_layers_bf16: true"),
        nemo_rl(f"{BLOCKWISE}\n    model_overrides: {{first_last_layers_bf16: true}}"),
        "h100x8",
        "PB801",
        "model.first_last_layers_bf16",
        "pull request 4126",
    ),
    "NeMo-RL 3654": Fault(
        "run.yaml",
        nemo_rl("te_precision_config_file: recipe.yaml"),
        nemo_rl("tensor_model_parallel_size: 1"),
        "h100x8",
        "PB801",
        "model.quant_recipe",
        "does not load the file into quant_recipe",
    ),
    "ms-swift 8001": Fault(
        "run.sh",
        SWIFT.format(more=" --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16"),
        SWIFT.format(more=""),
        "h100x8,te2.10",
        "PB369",
        "optimizer.exp_avg_dtype",
        "takes FP32 moments alone for weights that delayed scaling stores in FP8",
    ),
    "miles 1340": Fault(
        "run.sh",
        MILES.format(scales="1"),
        MILES.format(scales="0"),
        "b200x8",
        "PB521",
        "environment.NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        "takes power-of-two scales only",
    ),
}


def findings(file: Path, text: str, fault: Fault, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    file.write_text(text)
    main(["check", str(file), "--target", fault.target, "--json"])
    answer = json.loads(capsys.readouterr().out)
    return [found for found in answer["findings"] if (found["id"], found["path"]) == (fault.rule, fault.path)]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_public_fault_is_named_and_its_mended_file_is_not(
    fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / fault.name
    found = findings(file, fault.text, fault, capsys)
    assert len(found) == 1
    assert fault.words in json.dumps(found[0])
    assert findings(file, fault.fixed_in, fault, capsys) == []

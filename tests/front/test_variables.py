"""Environment variables of a run's file: overrides set them and take them away."""

from pathlib import Path

import pytest

from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.preflight.rule_check import get_report

SCRIPT = """export NVTE_FUSED_ATTN=0
torchrun pretrain_gpt.py --bf16 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 \\
  --seq-length 64 --max-position-embeddings 64
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("override", "variables", "rules"),
    [
        ((), {"NVTE_FUSED_ATTN": "0"}, ["environment.NVTE_FUSED_ATTN"]),
        (("environment.NVTE_FUSED_ATTN=1",), {"NVTE_FUSED_ATTN": "1"}, []),
        (("~environment.NVTE_FUSED_ATTN",), {}, []),
        (("+environment.A='b c'", "~environment.NVTE_FUSED_ATTN"), {"A": "b c"}, []),
    ],
)
def test_an_override_states_a_variable_of_the_run(
    script: Path, override: tuple[str, ...], variables: dict[str, str], rules: list[str]
) -> None:
    run = load_run(override, config_file=script)
    assert run.reading.environment == variables
    assert [one.path for one in get_report(run).findings if "NVTE_FUSED" in one.path] == rules


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment=1", "environment: names no environment variable, got '1' .* Write environment.NAME=VALUE."),
        ("~environment.NVTE_FUSED_ATN", "no such variable in the file.* Did you mean 'NVTE_FUSED_ATTN'"),
    ],
)
def test_a_variable_that_is_none_is_refused(script: Path, override: str, message: str) -> None:
    with pytest.raises(RunConfigError, match=message):
        load_run((override,), config_file=script)

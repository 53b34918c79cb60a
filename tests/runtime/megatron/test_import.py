"""Importing ours changes nothing of torch, Megatron Core or logging, with and without the optional packages."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridge.runtime.megatron import cuda_shim

SCRIPT = Path(__file__).with_name("purity.py")
OPTIONAL = {
    "mamba_ssm/ops/triton/layernorm_gated.py": "class RMSNorm: pass",
    "mamba_ssm/ops/triton/ssd_combined.py": "def mamba_chunk_scan_combined(state_dtype): pass\n"
    "def mamba_split_conv1d_scan_combined(state_dtype): pass",
    "fla/modules/l2norm.py": "def l2norm(): pass\ndef l2_norm(): pass",
    "fla/modules/convolution.py": "def causal_conv1d(): pass",
    "fla/ops/gated_delta_rule.py": "def chunk_gated_delta_rule(): pass",
    "fla/ops/gated_delta_product.py": "def chunk_gated_delta_product(): pass",
    "fast_hadamard_transform/__init__.py": "def hadamard_transform(): pass",
}
"""File of an optional package -> a text with the names that Megatron imports."""
FLAGS = ("HAVE_FLA", "HAVE_MAMBA_SSM")


def imported(order: str, *folders: Path) -> dict:
    """Return what the script prints, with some folders on the path."""
    given = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(SCRIPT.parents[3]), *map(str, folders), *([given] if given else [])])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), order],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_every_module_of_ours_changes_nothing_of_torch_megatron_or_logging():
    found = imported("megatron-first")
    assert found["imported"] > 300
    assert found["changed"] == []
    assert found["new"] == []
    assert {name: value for name, value in found["flags"].items() if name.endswith(FLAGS) and value} == {}
    assert found["flags"]["hadamard"] is None
    assert (found["flags"]["jit"], found["flags"]["compiled"]) == ("compile", True)


def test_megatron_finds_the_optional_packages_after_ours_was_imported(tmp_path: Path):
    for name, text in OPTIONAL.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = imported("ours-first", tmp_path)
    flags = {name: value for name, value in found["flags"].items() if name.endswith(FLAGS)}
    assert flags
    assert all(flags.values())
    assert found["flags"]["hadamard"] == "fast_hadamard_transform"
    assert (found["flags"]["jit"], found["flags"]["compiled"]) == ("compile", True)


@pytest.mark.skipif(cuda_shim.has_cuda(), reason="the stand-ins are for a CPU")
def test_stand_ins_are_gone_after_a_run():
    from megatron.core.ssm import gated_delta_net
    from megatron.core.transformer.experimental_attention_variant import dsa

    from bridge.runtime.megatron.gpt import GPTConfig
    from bridge.runtime.megatron.process import training_process

    def found() -> tuple[object, ...]:
        mixer = sys.modules.get("megatron.core.ssm.mamba_mixer")
        return gated_delta_net.HAVE_FLA, dsa.hadamard_transform, getattr(mixer, "HAVE_MAMBA_SSM", False)

    before = found()
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    for one in (GPTConfig(**shape, hybrid_layer_pattern="M"), GPTConfig(**shape, hybrid_override_pattern="M")):
        with training_process(one, seed=5):
            assert sys.modules["megatron.core.ssm.mamba_mixer"].HAVE_MAMBA_SSM
            assert gated_delta_net.HAVE_FLA
            assert dsa.hadamard_transform is not None
        assert found() == before
        if find_spec("triton") is None:  # without which it cannot be imported
            assert "megatron.core.ssm.mamba_mixer" not in sys.modules
    with training_process(GPTConfig(**shape), seed=5):
        assert found() == before

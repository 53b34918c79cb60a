"""What a file was written for, and how that shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from bridge.convert.systems import SYSTEM_MODULES, detect_system, get_system, list_systems
from bridge.errors import PayloadError
from bridge.read.foreign.table import load_table
from bridge.read.foreign_system_signs import DOCUMENT_KINDS, SYSTEM_TITLES, Candidate, list_candidates
from bridge.read.text.document import Document

SAMPLES = Path(__file__).parent / "samples"


def test_importing_the_table_imports_no_system() -> None:
    code = "import sys, bridge.convert.systems as s; print([m for m in s.SYSTEM_MODULES.values() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_system_is_what_the_table_calls_it() -> None:
    assert [one.name for one in list_systems()] == list(SYSTEM_MODULES)
    assert [*DOCUMENT_KINDS] == list(SYSTEM_MODULES)
    for one in list_systems():
        assert one.title == (SYSTEM_TITLES.get(one.name) or load_table(one.name).title)
    assert get_system("Megatron_LM").name == "megatron-lm"
    with pytest.raises(PayloadError, match="no system is called 'deepsped'. Did you mean 'deepspeed'?"):
        get_system("deepsped")


@pytest.mark.parametrize(
    ("sample", "name", "evidence"),
    [
        ("gpt_arrays.sh", "megatron-lm", "has --fp8-format, --global-batch-size, --hidden-size"),
        ("options_string.sbatch", "megatron-lm", "has --hidden-size"),
        ("conf_only.sh", "megatron-lm", "has --accumulate-allreduce-grads-in-fp32"),
        ("model_config.yaml", "megatron-lm", "has `MODEL_ARGS`"),
        ("yaml_cfg.yaml", "megatron-lm", "has `language_model` and `model_parallel`"),
        ("moe_args.yaml", "megatron-lm", "has `ARGS`"),
        ("run_config.yaml", "megatron-bridge", "has the target `megatron.bridge"),
        ("megatron_gpt_config_new.yaml", "nemo1", "has `model.megatron_amp_O2`"),
        ("megatron_gpt_config_old.yaml", "nemo1", "has `model.megatron_amp_O2`"),
        ("nemo2_plugin.py", "nemo2", "names `MegatronMixedPrecision`"),
    ],
)
def test_a_sample_is_recognised_and_says_how(sample: str, name: str, evidence: str) -> None:
    found, why = detect_system(Document.load(SAMPLES / sample))
    assert found.name == name
    assert why.startswith(evidence)


@pytest.mark.parametrize(
    ("text", "path", "name"),
    [
        ("mixed_precision: bf16_mixed", "run.yaml", "megatron-bridge"),
        ("bf16: true\nfp8: hybrid\nfp8_recipe: delayed", "mp.yaml", "megatron-bridge"),
        ('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}', "ds.json", "deepspeed"),
        (
            "base_model: x\nadapter: lora\nbf16: auto\ntf32: true\nsequence_len: 8\ngradient_accumulation_steps: 1",
            "ax.yaml",
            "axolotl",
        ),
        ("torchrun pretrain.py --bf16\n", "run.sh", "megatron-lm"),
    ],
)
def test_short_files_are_told_apart(text: str, path: str, name: str) -> None:
    assert detect_system(Document.from_text(text, path))[0].name == name


def test_what_nobody_recognises_is_an_error_that_lists_the_systems() -> None:
    with pytest.raises(
        PayloadError,
        match="x.yaml: no system is recognised in this yaml file. Name the system with --from: megatron-lm",
    ):
        detect_system(Document.from_text("hello: world", "x.yaml"))


def test_a_tie_names_both_and_from_overrules(monkeypatch) -> None:
    import bridge.convert.systems as module

    tie = [
        Candidate(system="megatron-lm", title="Megatron-LM", certainty=0.8, evidence="has a"),
        Candidate(system="nemo1", title="NeMo 1.x", certainty=0.78, evidence="has b"),
    ]
    monkeypatch.setattr(module, "list_candidates", lambda document: tie)
    document = Document.from_text("a: 1", "x.yaml")
    with pytest.raises(PayloadError) as caught:
        detect_system(document)
    assert str(caught.value) == (
        "x.yaml: could be 'megatron-lm' or 'nemo1' (megatron-lm: it has a; nemo1: it has b). Say which with --from."
    )
    assert detect_system(document, "nemo1") == (get_system("nemo1"), "was named with --from")


def test_the_reference_lists_the_systems_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/systems.md").read_text(encoding="utf-8")
    for one in list_systems():
        keys = ", ".join(f"`{key.name}`: {key.meaning}" for key in one.context) or "none"
        assert (
            f"| `{one.name}` | {one.title} | {one.version} | {', '.join(DOCUMENT_KINDS[one.name])} | {keys} |\n" in page
        )


def test_targets_of_others_are_no_run_config_of_megatron_bridge() -> None:
    text = "model:\n  _target_: torch.nn.Linear\noptimizer:\n  _target_: torch.optim.Adam\n"
    assert list_candidates(Document.from_text(text, "x.yaml")) == []


def test_two_switches_alone_are_nobodys() -> None:
    with pytest.raises(PayloadError, match="no system is recognised"):
        detect_system(Document.from_text('{"bf16": true, "fp16": false}', "x.json"))

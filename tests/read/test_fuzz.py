"""Whatever a file holds, reading it ends in a result or in one of our own errors, soon, and runs nothing."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.convert.conversion import import_runs, to_plain_data
from bridge.convert.systems import SYSTEM_MODULES
from bridge.errors import BridgeError
from bridge.read.foreign.semantics import SEMANTICS
from bridge.read.text.document import Document
from tests.work import calls

SAMPLES = sorted(path for path in (Path(__file__).parent / "samples").iterdir() if path.is_file())
NAMES = ["x.yaml", "x.json", "x.sh", "x.py", ".env", "x"]
FUZZ = settings(suppress_health_check=[HealthCheck.too_slow])
KEYS = [
    "bf16",
    "fp16",
    "fp8",
    "fp8_recipe",
    "mixed_precision",
    "model",
    "trainer",
    "precision",
    "optim",
    "transformer_engine",
    "fp8_hybrid",
    "_target_",
    "params_dtype",
    "MODEL_ARGS",
    "--bf16",
    "--fp8-format",
    "ARGS",
    "language_model",
    "recipe",
    "margin",
    "fp8_format",
    "megatron_amp_O2",
    "fp8_params",
    "hysteresis",
    "mcore_gpt",
    "fp16_loss_scale",
    "kwargs",
    "ddp",
    "optimizer",
]
SPLICES = [
    b"\0", b"\xff", b"\r\n", b"'", b'"', b"{", b"[", b"!!python/name:os.system ", b"&a ", b"*a", b"<<: ", b"${", b"$(",
    b"`", b"((", b"fi\n", b"EOF\n", b"<<EOF\n", b": ", b"- ", b"\t", b"true", b"1e999", b"-", b"\xef\xbb\xbf", b"null",
]  # fmt: skip


def survives(data: bytes, name: str, chosen: str | None = None) -> None:
    def read() -> None:
        try:
            for run in import_runs(Document.from_bytes(data, name), chosen):
                assert run.imported.semantics in SEMANTICS
                assert isinstance(to_plain_data(run.imported.config.to_dict()), dict)
        except BridgeError as error:
            assert "Traceback" not in str(error)
            assert len(str(error)) < 1500

    assert calls(read) < 5_000_000


@FUZZ
@given(data=st.binary(max_size=300), name=st.sampled_from(NAMES), chosen=st.sampled_from([None, *SYSTEM_MODULES]))
def test_random_bytes(data: bytes, name: str, chosen: str | None) -> None:
    survives(data, name, chosen)


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_mutated_samples(sample: Path, data: st.DataObject) -> None:
    text = sample.read_bytes()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        splice = data.draw(st.sampled_from(SPLICES))
        gone = data.draw(st.sampled_from([0, 0, 1, 7]))
        text = text[:at] + splice + text[at + gone :]
    survives(text, sample.name)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_truncated_samples(sample: Path) -> None:
    text = sample.read_bytes()
    for end in range(0, len(text), max(1, len(text) // 40)):
        survives(text[:end], sample.name)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_every_sample_as_every_system(sample: Path) -> None:
    for chosen in SYSTEM_MODULES:
        survives(sample.read_bytes(), sample.name, chosen)


@FUZZ
@given(
    payload=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
        max_leaves=20,
    ),
    name=st.sampled_from(["megatron-lm", "megatron-bridge", "nemo1", "nemo2"]),
)
def test_mappings_of_wrong_types(payload: object, name: str) -> None:
    from bridge.convert.systems import get_system

    try:
        get_system(name).import_(payload)
    except BridgeError as error:
        assert "\n" not in str(error)

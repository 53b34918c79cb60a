"""Targets: what their words mean, what this machine is, and what a misspelt one is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.precision.schemes import SCHEMES
from bridge.rules.rule import te
from bridge.target import versions
from bridge.target.declaration import parse_target
from bridge.target.gpus import GPUS, find_gpu_of_device, make_gpu_of_capability
from bridge.target.machine import detect_gpu
from bridge.target.target import Target
from bridge.target.versions import Version, get_installed_version, is_at_least, parse_version


def test_a_target_is_read_in_any_order_and_spelling() -> None:
    target = parse_target("h100x8,te2.8,cuda12.9,mcore0.16")
    assert target == parse_target(" MCORE=0.16, CUDA-12.9 te2.8.0.dev0 H100x8").__class__(
        gpu=GPUS["h100"], count=8, te=Version("2.8"), cuda=Version("12.9"), mcore=Version("0.16"), has_te=True
    )
    assert str(target) == "h100x8,mcore0.16,te2.8,cuda12.9"
    assert parse_target(str(target)) == target
    assert target.capability == (9, 0)


@pytest.mark.parametrize(
    ("word", "gpu", "count"),
    [
        ("mi300xx8", "mi300x", 8),
        ("mi300x", "mi300x", None),
        ("mi300x8", "mi300x", 8),
        ("mi325xx8", "mi325x", 8),
        ("mi350x", "mi350x", None),
        ("mi355x8", "mi355x", 8),
        ("rtx-pro-blackwell", "rtxpro", None),
        ("RTX4090x2", "rtx40", 2),
        ("gb200x72", "gb200", 72),
        ("cpu", "cpu", None),
    ],
)
def test_a_gpu_goes_by_its_names(word: str, gpu: str, count: int | None) -> None:
    target = parse_target(word)
    assert (target.gpu, target.count) == (GPUS[gpu], count)


def test_a_compute_capability_stands_for_a_gpu_that_has_no_row() -> None:
    target = parse_target("sm87x2")
    assert (target.capability, target.count) == ((8, 7), 2)
    assert target.gpu is not None
    assert target.gpu.has_native_bf16
    assert not make_gpu_of_capability((6, 1)).formats


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "h20x8",
            "target: must be a GPU such as h100x8 or a version such as te2.8, got 'h20x8'. "
            "Did you mean 'h200' or 'gh200'?",
        ),
        (
            "coda12.9",
            "target: must be a GPU such as h100x8 or a version such as te2.8, got 'coda12.9'. Did you mean 'cuda'?",
        ),
        (
            "h100x-8",
            "target: must be a GPU such as h100x8 or a version such as te2.8, got 'h100x-8'. Did you mean 'h100x8'?",
        ),
        ("cuda99", "target: there is no such version of CUDA, got 'cuda99'. Versions are from 10 and before 16."),
        ("cuda129", "target: there is no such version of CUDA, got 'cuda129'. Versions are from 10 and before 16."),
        (
            "te",
            "target: must be a GPU such as h100x8 or a version such as te2.8, got 'te'. "
            "Give its version too, as in h100x8,te2.8,cuda12.9,mcore0.16.",
        ),
        ("h100,a100", "target: must name one GPU, got 'h100,a100'. Drop one of the two."),
        ("h100x8,te2.8,h100x16", "target: must name one GPU, got 'h100x8,h100x16'. Drop one of the two."),
        (
            "te2.8,te-none",
            "target: must name one version of Transformer Engine, got 'te2.8,te-none'. Drop one of the two.",
        ),
        ("", "target: must name a GPU or a version, got ''. Write h100x8,te2.8,cuda12.9,mcore0.16, for example."),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(RunConfigError) as error:
        parse_target(text)
    assert str(error.value) == message


def test_this_machine_is_detected_and_words_after_auto_override_it() -> None:
    target = parse_target("auto,te2.8")
    assert target.is_detected
    assert target.gpu is not None
    assert (target.te, target.has_te) == (Version("2.8"), True)
    assert target.torch is not None


@pytest.mark.parametrize(
    ("device", "capability", "name"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA GH200 480GB", (9, 0), "gh200"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA B200", (10, 0), "b200"),
        ("NVIDIA GB200", (10, 0), "gb200"),
        ("NVIDIA L40S", (8, 9), "l40"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx50"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "rtxpro"),
        ("Tesla V100-SXM2-32GB", (7, 0), "v100"),
        ("Tesla T4", (7, 5), "t4"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("Something new", (11, 0), "sm110"),
    ],
)
def test_a_device_is_known_by_its_name_and_judged_by_its_capability(
    device: str, capability: tuple[int, int], name: str
) -> None:
    gpu = detect_gpu(device, capability)
    assert (gpu.name, gpu.capability) == (name, capability)


def test_a_gpu_of_amd_is_known_by_its_name() -> None:
    names = {
        device: find_gpu_of_device(f"AMD Instinct {device}") for device in ("MI300X", "MI325X", "MI350X", "MI355X")
    }
    assert {device: gpu and gpu.title for device, gpu in names.items()} == {device: device for device in names}
    cdna_4 = names["MI355X"]
    assert cdna_4 is not None
    assert (cdna_4.generation, cdna_4.memory_gib, cdna_4.formats) == (
        "CDNA 4",
        287,
        ("fp16", "bf16", "fp8", "mxfp8", "mxfp4"),
    )


def test_native_bf16_is_decided_by_the_gpu_and_not_by_what_torch_can_emulate() -> None:
    assert [gpu.name for gpu in GPUS.values() if gpu.is_gpu and not gpu.has_native_bf16] == ["v100", "t4"]


def test_cudnn_is_known_by_its_package_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "nvidia_cudnn_cu13-9.19.0.56.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-cu13\nVersion: 9.19.0.56\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(get_installed_version.__wrapped__("cudnn")) == "9.19.0.56"


def test_reading_a_target_imports_no_torch() -> None:
    code = (
        "import sys; from bridge.target.declaration import parse_target as p; p('h100'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_version_known_in_part_is_later_earlier_or_unknown() -> None:
    assert is_at_least(parse_version("0.17"), "0.17.1") is None
    assert is_at_least(parse_version("0.17"), "0.17") is True
    assert is_at_least(parse_version("0.17.0"), "0.17.1") is False
    assert is_at_least(parse_version("0.18"), "0.17.1") is True
    assert is_at_least(parse_version("0.16"), "0.17.1") is False
    assert is_at_least(parse_version("2"), "2.0") is True
    assert is_at_least(None, "1") is None
    assert str(te(since="2.1", until="2.8")) == "Transformer Engine from 2.1 and before 2.8"
    with pytest.raises(RunConfigError, match=r"must begin with a number, got 'latest'"):
        parse_version("latest")


def test_a_target_that_says_nothing_knows_nothing() -> None:
    target = Target()
    assert (str(target), target.capability, target.has_te) == ("nothing declared", None, None)


def test_the_memory_of_a_gpu_may_be_stated() -> None:
    target = parse_target("vr200x64,memory=288GiB")
    assert target.gpu is not None
    assert (target.gpu.capability, target.gpu.memory_gib, target.count) == ((10, 7), 288, 64)
    assert str(target) == "vr200x64,memory=288GiB"
    assert str(parse_target("memory=80GB,h100x8,te2.8")) == "h100x8,memory=74GiB,te2.8"
    assert str(parse_target("h100x8")) == "h100x8"
    for text, rule in {
        "memory=80GiB": "must name the GPU of this memory",
        "h100x8,memory=80": "must give the memory of a GPU in GiB or GB",
        "h100x8,memory=80GiB,memory=90GiB": "must name one memory size",
    }.items():
        with pytest.raises(RunConfigError, match=rule):
            parse_target(text)


def test_a_gpu_whose_memory_is_not_published_is_said_to_be_unknown() -> None:
    run = load_run(["model=gpt_5m", "target=r100x1"])
    assert run.planned.memory.notes[-1] == (
        "The memory of R100 is not known here; state it in the target, as in r100,memory=80GiB."
    )
    run = load_run(["model=gpt_5m", "target='r100x1,memory=288GiB'"])
    assert run.planned.memory_bytes == 288 * 2**30
    assert not any("is not known here" in note for note in run.planned.memory.notes)


def test_the_version_of_a_source_tree_of_megatron_core_is_the_one_on_the_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "megatron/core").mkdir(parents=True)
    lines = ("MAJOR = 0", "MINOR = 20", "PATCH = 0", "PRE_RELEASE = 'rc1'")
    (tmp_path / "megatron/core/package_info.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    versions.get_installed_text.cache_clear()
    versions.get_installed_version.cache_clear()
    try:
        assert (versions.get_installed_text("mcore"), str(versions.get_installed_version("mcore"))) == (
            "0.20.0rc1",
            "0.20.0",
        )
    finally:
        versions.get_installed_text.cache_clear()
        versions.get_installed_version.cache_clear()


def test_a_gpu_of_nvidia_has_the_formats_of_the_schemes_that_its_capability_runs() -> None:
    formats = {"tensorwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
    schemes = {scheme.name: scheme for scheme in SCHEMES}
    for gpu in GPUS.values():
        if gpu.capability is None:
            continue
        for scheme, number_format in formats.items():
            if schemes[scheme].runs_on(gpu.capability):
                assert number_format in gpu.formats, f"{gpu.name}: {scheme}"


def test_a_capability_takes_the_formats_of_the_largest_one_that_is_not_larger() -> None:
    assert make_gpu_of_capability((9, 5)).generation == "Hopper"
    assert make_gpu_of_capability((6, 0)).generation == "before Volta"

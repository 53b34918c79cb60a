"""`auto`: the policy's table, row by row, and what it refuses to decide."""

import pytest

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.preflight.auto_recipe import POLICIES, count_parameters, resolve_auto
from bridge.preflight.recipe_support import build_support_matrix, check_support, group_gpus
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.registry.registry import REGISTRY, is_auto
from bridge.target.declaration import parse_target

CURRENT = "bf16_with_fp8_current_scaling_mixed"
DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
MXFP8 = "bf16_with_mxfp8_mixed"
NVFP4 = "bf16_with_nvfp4_mixed"
BIG = 7_000_000_000


@pytest.mark.parametrize(
    ("target", "auto", "stable", "fp8", "fastest"),
    [
        ("sm61", "fp32", "fp32", None, "fp32"),
        ("v100", "fp16_mixed", "fp32", None, "fp16_mixed"),
        ("t4", "fp16_mixed", "fp32", None, "fp16_mixed"),
        ("a100", "bf16_mixed", "bf16_mixed", None, "bf16_mixed"),
        ("a10", "bf16_mixed", "bf16_mixed", None, "bf16_mixed"),
        ("l4,te2.8,cuda12.9", "bf16_mixed", "bf16_mixed", CURRENT, CURRENT),
        ("h100,te2.8,cuda12.9", "bf16_mixed", "bf16_mixed", CURRENT, CURRENT),
        ("h100,te2.1,cuda12.9", "bf16_mixed", "bf16_mixed", DELAYED, DELAYED),
        ("b200,te2.8,cuda12.9,mcore0.18", "bf16_mixed", "bf16_mixed", MXFP8, MXFP8),
        ("b300,te2.14,cuda12.9,mcore0.18", "bf16_mixed", "bf16_mixed", MXFP8, NVFP4),
        ("rtx50,te2.14,cuda12.9,mcore0.18", "bf16_mixed", "bf16_mixed", CURRENT, CURRENT),
        ("rtx50,te2.19,cuda12.9,mcore0.18", "bf16_mixed", "bf16_mixed", CURRENT, NVFP4),
        ("mi300x", "bf16_mixed", "bf16_mixed", None, "bf16_mixed"),
        ("cpu", "fp32", "fp32", None, "bf16_autocast_mixed"),
    ],
)
def test_the_policy_is_this_table(target: str, auto: str, stable: str, fp8: str | None, fastest: str) -> None:
    place = parse_target(target)
    for request, recipe in {"auto": auto, "auto:stable": stable, "auto:fastest": fastest}.items():
        assert resolve_auto(request, target=place, parameters=BIG).recipe == recipe
    if fp8 is None:
        with pytest.raises(BackendUnavailableError, match="no FP8 recipe runs on the target, got 'auto:fp8'"):
            resolve_auto("auto:fp8", target=place, parameters=BIG)
    else:
        assert resolve_auto("auto:fp8", target=place, parameters=BIG).recipe == fp8


def test_a_choice_tells_why_and_what_was_rejected() -> None:
    choice = resolve_auto("auto:fastest", target=parse_target("b200x8,te2.8,cuda12.9,mcore0.16"), parameters=BIG)
    assert choice.to_dict() == {
        "request": "auto:fastest",
        "recipe": MXFP8,
        "reason": "it is the fastest that trains well on Blackwell",
        "rejected": [
            {"recipe": NVFP4, "why": "its FP4 weights are right from Transformer Engine 2.14 on, and this is 2.8"}
        ],
        "target": "b200x8,mcore0.16,te2.8,cuda12.9",
    }
    safe = resolve_auto("auto", target=parse_target("h100x8"), parameters=BIG)
    assert safe.rejected == ((CURRENT, "FP8 and FP4 are taken on ask only"),)
    assert str(safe) == (
        "auto on h100x8: bf16_mixed, because BF16 is native, and FP8 is taken on ask. "
        f"Not {CURRENT}: FP8 and FP4 are taken on ask only."
    )


def test_where_every_faster_recipe_is_refused_the_reason_says_so() -> None:
    choice = resolve_auto("auto:fastest", target=parse_target("h100x8,te-none"), parameters=BIG)
    assert choice.recipe == "bf16_mixed"
    assert choice.reason == "no faster recipe for Hopper runs well with the packages of the target"
    assert [name for name, _ in choice.rejected] == [CURRENT, DELAYED]


def test_a_small_model_is_trained_in_fp32_unless_fp8_was_asked_for() -> None:
    target = parse_target("h100x8,te2.8,cuda12.9")
    for request in ("auto", "auto:stable", "auto:fastest"):
        assert resolve_auto(request, target=target, parameters=99_999_999).recipe == "fp32"
    assert resolve_auto("auto", target=target, parameters=100_000_000).recipe == "bf16_mixed"
    assert resolve_auto("auto:fp8", target=target, parameters=5_000_000).recipe == CURRENT


def test_auto_without_a_gpu_and_without_a_target_is_an_error_that_asks_for_one() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(RunConfigError) as error:
        resolve_auto("auto:fp8")
    assert str(error.value) == (
        "mixed_precision: auto:fp8 is chosen by the GPUs of the run, and no GPU is visible here, got 'auto:fp8'. "
        "Resolve it on the worker, or declare the target: target=h100x8,te2.8,cuda12.9,mcore0.16."
    )
    with pytest.raises(RunConfigError):
        resolve_auto("auto", target=parse_target("auto"))
    with pytest.raises(RunConfigError):
        resolve_auto("auto", target=parse_target("te2.8"))


def test_an_unknown_request_is_answered_with_the_nearest() -> None:
    with pytest.raises(RunConfigError) as error:
        resolve_auto("auto:fastst", target=parse_target("h100"))
    assert str(error.value) == (
        "mixed_precision: no such request, got 'auto:fastst'. Did you mean 'auto:fastest', 'auto:stable' or 'auto:fp8'?"
    )
    assert [is_auto(name) for name in ("auto", "AUTO:fp8", "automatic", None, "bf16_mixed")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_every_recipe_of_the_policy_exists_and_passes_the_check_where_it_is_chosen() -> None:
    capable = {"te": "te2.14", "cuda": "cuda12.9", "mcore": "mcore0.19.2"}
    for gpus in group_gpus().values():
        for gpu in gpus:
            target = parse_target(f"{gpu.name}x8,{','.join(capable.values())}")
            for request in ("auto", "auto:stable", "auto:fastest"):
                chosen = resolve_auto(request, target=target, parameters=BIG)
                assert chosen.recipe in REGISTRY
                assert check(Run.from_configs(chosen.recipe, target=target)).of("error") == ()
    assert [row.since for row in POLICIES] == sorted(row.since for row in POLICIES)


def test_support_says_what_is_missing() -> None:
    assert (
        check_support(MXFP8, parse_target("h100")).reason
        == "mxfp8 needs compute capability 10.0, and the target has 9.0"
    )
    assert check_support(MXFP8, parse_target("rtx50")).reason == (
        "Transformer Engine runs mxfp8 below compute capability 12.0, and the target has 12.0"
    )
    assert check_support(NVFP4, parse_target("h100")).verdict == "no"
    assert (
        check_support(CURRENT, parse_target("h100,te2.1")).reason
        == "tensorwise needs Transformer Engine 2.2, this is 2.1"
    )
    assert check_support(CURRENT, parse_target("h100,te2.2,cuda12.9")).verdict == "native"
    assert check_support(CURRENT, parse_target("h100")).needs == (("te", "2.2"), ("cuda", "12.1"))
    assert check_support(CURRENT, parse_target("h100,te-none")).reason.startswith(
        "tensorwise needs Transformer Engine: without"
    )
    assert check_support("bf16_mixed", parse_target("t4")).verdict == "emulated"
    assert check_support("bf16_mixed", parse_target("te2.8")).reason == "the target names no GPU"


def test_the_matrix_agrees_with_the_rules() -> None:
    """No cell says yes where the check has an error, or no where it has none."""
    for name, row in build_support_matrix(["bf16_mixed", CURRENT, DELAYED, MXFP8, NVFP4]).items():
        for title, gpus in group_gpus().items():
            target = parse_target(f"{gpus[0].name},te2.14,cuda12.9,mcore0.19.2")
            errors = check(Run.from_configs(name, target=target)).of("error")
            refused = {one.id for one in errors} - {"PB604"}  # emulated without two of its parts, by environment
            assert bool(refused) == (row[title].verdict == "no"), f"{name} on {title}: {refused}"


def test_parameters_are_counted_from_config_values() -> None:
    llama = {
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "vocab_size": 128256,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "normalization": "RMSNorm",
    }
    assert count_parameters(llama) == 70_553_706_496
    assert count_parameters({"num_layers": "many"}) is None

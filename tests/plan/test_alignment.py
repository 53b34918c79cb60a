"""Alignment of GEMMs: what each scheme can take, and the nearest sizes that fit."""

import itertools
import math

import pytest

from bridge.errors import RunConfigError
from bridge.model.layout import ParallelLayout
from bridge.plan.alignment import build_alignment_report, pad_multiple
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.precision.schemes import FP8_SCHEMES
from bridge.registry.registry import REGISTRY
from bridge.report.plan.alignment_table import make_alignment_table
from bridge.report.table import render_plain_text
from tests.model.test_shape import DEEPSEEK_V3, LLAMA_3_70B

FITTING = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "seq_length": 64,
    "vocab_size": 256,
}


def report(recipe, model, *, world_size=None, **workload):
    plan = precision_plan(REGISTRY.get(recipe), model, ParallelLayout.from_model(model).fit_to_world_size(world_size))
    return build_alignment_report(plan, Workload.from_sections(model, workload) if workload else None)


@pytest.mark.parametrize(
    ("arguments", "per_sequence", "per_slab"),
    [
        ((None,), 1, 1),
        (("tensorwise",), 1, 16),
        (("mxfp8",), 1, 32),
        (("mxfp8", 2, False), 1, 32),
        (("mxfp8", 2, True), 2, 64),
        (("mxfp8", 2, True, 2), 8, 128),
        (("delayed", 4, True, 2), 16, 128),
        (("nvfp4", 8, True, 1), 8, 128),
        (("mxfp8", 1, False, 3), 6, 96),
    ],
)
def test_tokens_are_padded_per_sequence_and_per_slab(arguments, per_sequence, per_slab):
    pad = pad_multiple(*arguments)
    assert (pad.per_sequence, pad.per_slab) == (per_sequence, per_slab)
    assert str(per_slab) in pad.derivation[-1]


def test_the_derivation_names_every_factor():
    assert pad_multiple("mxfp8", 2, True, 2).derivation == (
        "Context parallelism cuts each sequence into 2 x 2 chunks.",
        "Sequence parallelism shares tokens over 2 ranks.",
        "Each sequence: 8.",
        "The weight gradient contracts over tokens: mxfp8 takes 32 at a time on each rank.",
        "A slab: the least common multiple of 8 and 32 x 4 ranks = 128.",
    )


def test_a_padded_slab_fits_every_rank():
    schemes = [*(name for name in FP8_SCHEMES if name != "custom"), "nvfp4"]
    for case in itertools.product(schemes, (1, 2, 4), (False, True), (1, 2, 3)):
        scheme, tp, sp, cp = case
        pad = pad_multiple(scheme, tp, sp, cp)
        rows = FP8_SCHEMES.get(scheme)
        ranks = cp * (tp if sp else 1)
        assert pad.per_slab % ranks == 0, case
        assert pad.per_slab // ranks % (rows.alignment[0] if rows else 16) == 0, case
        assert pad.per_slab % pad.per_sequence == 0, case


def test_an_unknown_scheme_is_answered_with_the_nearest():
    with pytest.raises(RunConfigError) as raised:
        pad_multiple("mxfp9")
    assert str(raised.value) == "scheme: no such scaling scheme, got 'mxfp9'. Did you mean 'mxfp8'?"


def test_a_model_that_fits_has_no_misfit():
    found = report("bf16_with_mxfp8_mixed", FITTING, micro_batch_size=1)
    assert found.misfits == ()
    assert all(gemm.low for gemm in found.gemms if gemm.module != "output_layer")


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"ffn_hidden_size": 1000, "gated_linear_unit": True, "tensor_model_parallel_size": 2},
            [
                "model.ffn_hidden_size: linear_fc1 (layers 1-2) takes N in multiples of 32 on each rank, 1000 is none, "
                "got 1000. Use 992 or 1024.",
                "model.ffn_hidden_size: linear_fc2 (layers 1-2) takes K in multiples of 32 on each rank, 500 is none, "
                "got 1000. Use 960 or 1024.",
            ],
        ),
        (
            {"kv_channels": 12, "num_query_groups": 1},
            [
                "model.kv_channels: linear_qkv (layers 1-2) takes N in multiples of 32 on each rank, 72 is none, got "
                "12. Use 16.",
                "model.kv_channels: linear_proj (layers 1-2) takes K in multiples of 32 on each rank, 48 is none, got "
                "12. Use 8 or 16.",
            ],
        ),
        (
            {"seq_length": 100},
            [
                "model.seq_length: a micro-batch must be a multiple of 32 tokens and is 1 x 100 tokens, got 100. "
                "Use 96 or 128, or pad."
            ],
        ),
    ],
)
def test_what_does_not_fit_is_told_with_the_nearest_that_does(changes, messages):
    found = report("bf16_with_mxfp8_mixed", {**FITTING, **changes}, micro_batch_size=1)
    assert [str(misfit) for misfit in found.misfits] == messages
    for misfit in found.misfits:
        for value in filter(None, (misfit.below, misfit.above)):
            mended = {**FITTING, **changes, misfit.field.removeprefix("model."): value}
            left = report("bf16_with_mxfp8_mixed", mended, micro_batch_size=1).misfits
            assert (misfit.module, misfit.dimension) not in {(other.module, other.dimension) for other in left}


def test_layers_in_high_precision_take_any_size():
    assert report("bf16_mixed", {**FITTING, "ffn_hidden_size": 1001}, micro_batch_size=1).misfits == ()
    kept = {**FITTING, "ffn_hidden_size": 1000, "num_layers": 3}
    found = report("bf16_with_fp8_current_scaling_mixed", kept)
    assert {misfit.layers for misfit in found.misfits} == {"2"}


def test_dimensions_are_those_of_a_rank():
    model = {
        **LLAMA_3_70B,
        "seq_length": 8192,
        "tensor_model_parallel_size": 4,
        "context_parallel_size": 2,
        "sequence_parallel": True,
    }
    found = report("bf16_with_mxfp8_mixed", model, micro_batch_size=1)
    by_name = {gemm.module: (gemm.tokens, gemm.outputs, gemm.inputs) for gemm in found.gemms}
    assert by_name["linear_qkv"] == (4096, (64 + 16) * 128 // 4, 8192)
    assert by_name["linear_fc1"] == (4096, 2 * 28672 // 4, 8192)
    assert by_name["linear_fc2"] == (4096, 8192, 28672 // 4)
    assert {gemm.module for gemm in found.small} == {"linear_proj"}  # 2048 inputs on a rank
    assert not report("bf16_with_fp8_current_scaling_mixed", model, micro_batch_size=1).small


def test_tokens_of_experts_are_those_of_an_even_load():
    model = {**DEEPSEEK_V3, "seq_length": 4096, "expert_model_parallel_size": 64}
    found = report("bf16_with_fp8_subchannel_scaling_mixed", model, world_size=64, micro_batch_size=1)
    experts = next(gemm for gemm in found.gemms if gemm.module == "experts.linear_fc1")
    assert experts.tokens == 64 * 4096 * 8 / 256
    assert math.isclose(experts.tokens, 8192)
    assert found.pad.per_expert == 16
    assert {gemm.module for gemm in found.small} >= {"linear_kv_up_proj", "experts.linear_fc2"}


def test_each_module_is_held_against_its_own_scheme():
    config = REGISTRY.get("bf16_with_mxfp8_mixed")
    config.override(modules=[{"select": "*.linear_fc1", "precision": "tensorwise"}])
    plan = precision_plan(config, {**FITTING, "ffn_hidden_size": 1008})
    found = build_alignment_report(plan)
    schemes = {gemm.module: gemm.scheme for gemm in found.gemms}
    assert schemes == {
        "linear_qkv": "mxfp8",
        "linear_proj": "mxfp8",
        "linear_fc1": "tensorwise",
        "linear_fc2": "mxfp8",
        "output_layer": None,
    }
    assert {misfit.module for misfit in found.misfits} == {"linear_fc2"}
    assert len(found.small_rules) == 2
    lines = render_plain_text(make_alignment_table(found)).splitlines()
    printed = {line.split()[1]: line.split()[-3:] for line in lines if line.startswith("  1-2 ")}
    assert [name for name, cells in printed.items() if "tensorwise" in cells] == ["linear_fc1"]
    assert [name for name, cells in printed.items() if "no" in cells] == ["linear_fc2"]

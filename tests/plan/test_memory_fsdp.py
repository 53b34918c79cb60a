"""What Megatron-FSDP shards, in the plan and in its live buffers on four ranks of a CPU."""

import json
from dataclasses import replace

from bridge.model.layout import ParallelLayout
from bridge.plan.memory_buffers import build_fsdp_groups, count_gathered_bytes
from bridge.plan.memory_parameters import list_chunk_parameters
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.registry.registry import REGISTRY
from bridge.target.versions import get_installed_version, parse_version
from tests import warm
from tests.plan.test_memory_report import EXACT, EXPERTS, ROOT, SHAPE

RANKS = 4
NUM_LAYERS = 2
HSDP = {"num_distributed_optimizer_instances": 2}
FULL = "optim_grads_params"
CASES = {
    "no_shard": ("no_shard", "bf16_mixed", {}, {}),
    "optim": ("optim", "bf16_mixed", {}, {}),
    "optim_grads": ("optim_grads", "bf16_mixed", {}, {}),
    "all": (FULL, "bf16_mixed", {}, {}),
    "fp32": (FULL, "fp32", {}, {}),
    "buckets": ("optim_grads", "bf16_mixed", {}, {"bucket_size": 20000}),
    "other sizes": (FULL, "bf16_mixed", {"hidden_size": 72, "ffn_hidden_size": 144}, {}),
    "tensor parallel": (FULL, "bf16_mixed", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "experts": (
        FULL,
        "bf16_mixed",
        {**EXPERTS, "moe_layer_freq": [0, 1], "add_bias_linear": False, "expert_model_parallel_size": 2},
        {},
    ),
    "tied": (FULL, "bf16_mixed", {"share_embeddings_and_output_weights": True, "mtp_num_layers": 1}, {}),
    "replicated outside": (FULL, "bf16_mixed", {}, HSDP),
    "sharded outside": (FULL, "bf16_mixed", {}, {**HSDP, "outer_dp_sharding_strategy": "optim"}),
}
"""Name -> strategy, recipe, what differs in the model and in DDP."""


def case(strategy: str, recipe: str, model: dict, ddp: dict) -> dict:
    return {
        "model": {**SHAPE, "num_layers": NUM_LAYERS, **model, "gradient_accumulation_fusion": False},
        "optimizer": {"lr": 1e-3, "use_distributed_optimizer": True},
        "ddp": {
            "use_megatron_fsdp": True,
            "use_distributed_optimizer": True,
            "data_parallel_sharding_strategy": strategy,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            **ddp,
        },
        "mixed_precision": recipe,
    }


def planned(given: dict):
    model = {**given["model"], "vocab_size": 256}
    parallel = ParallelLayout.from_model(model).fit_to_world_size(RANKS)
    config = REGISTRY.get(given["mixed_precision"])
    owners = {"optimizer": given["optimizer"], "ddp": given["ddp"]}
    return precision_plan(config, model, parallel, **owners, mcore=get_installed_version("mcore"))


def counted(given: dict, rank: int) -> tuple[dict[str, int], float, float]:
    """Return a rank's bytes, and those of weights and gradients that are gathered for a while."""
    plan = planned(given)
    (place,) = plan.parallel.places(plan.shape.num_layers)
    data_rank = rank // plan.parallel.tensor
    ddp = {"bucket_size": None, "num_distributed_optimizer_instances": 1, "outer_dp_sharding_strategy": "no_shard"}
    parameters, options = list_chunk_parameters(plan, place), {**ddp, **given["ddp"]}
    groups = build_fsdp_groups(parameters, plan.parallel, options, data_rank, has_units=plan.settings.has_units)
    element, gradient = (4 if plan.settings.mode == "fp32" else 2), (2 if plan.settings.grad_reduce == "bf16" else 4)
    used = count_gathered_bytes(groups, [group.whole * element * group.is_gathered for group in groups])
    reduced = count_gathered_bytes(
        groups, [group.whole * gradient * (group.gradients < group.whole) for group in groups]
    )
    return build_memory_report(plan, ddp=given["ddp"], data_rank=data_rank).ranks[0].bytes_of, used, reduced


def test_what_a_rank_keeps_is_what_the_live_buffers_hold(tmp_path):
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps({name: case(*given) for name, given in CASES.items()}))
    for done in warm.launch(["python", "-m", "tests.plan.fsdp_live", cases], processes=RANKS, cwd=ROOT):
        assert done.returncode == 0, done.stderr[-6000:]
    for name, given in CASES.items():
        for rank in range(RANKS):
            bytes_of, used, reduced = counted(case(*given), rank)
            kept = {kind: bytes_of[kind] for kind in EXACT}
            kept["weights"] -= round(used)
            kept["gradients"] -= round(reduced)
            assert kept == json.loads((tmp_path / f"{name}-{rank}.json").read_text()), f"{name}, rank {rank}"


def test_two_layers_or_a_layer_and_the_largest_other_group_are_gathered():
    plan = planned(case(*CASES["all"]))
    (place,) = plan.parallel.places(NUM_LAYERS)
    given = {"bucket_size": None, "num_distributed_optimizer_instances": 1, **case(*CASES["all"])["ddp"]}
    groups = build_fsdp_groups(list_chunk_parameters(plan, place), plan.parallel, given, 0, has_units=False)
    sizes = [float(group.whole) for group in groups]
    layers = [size for group, size in zip(groups, sizes, strict=True) if group.unit is not None]
    outside = [size for group, size in zip(groups, sizes, strict=True) if group.unit is None]
    assert (len(layers), len(outside)) == (NUM_LAYERS, 1)
    assert count_gathered_bytes(groups, sizes) == layers[0] + max(layers[0], outside[0])
    assert count_gathered_bytes([replace(group, unit=None) for group in groups], sizes) == max(sizes)


def test_decoupled_gradients_are_not_cast_in_the_step() -> None:
    ddp = {**case(FULL, "bf16_mixed", {}, {})["ddp"], "megatron_fsdp_main_grads_dtype": "bf16"}
    model = {**SHAPE, "vocab_size": 256}
    cast = {}
    for version in ("0.17.1", "0.19.2"):
        for is_aware in (False, True):
            optimizer = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": is_aware}
            precision = REGISTRY.get("bf16_mixed").override(grad_reduce_in_fp32=False)
            parallel = ParallelLayout.from_model(model).fit_to_world_size(RANKS)
            owners = {"optimizer": {**optimizer, "fp8_recipe": "tensorwise"}, "ddp": ddp}
            plan = precision_plan(precision, model, parallel, **owners, mcore=parse_version(version))
            cast[version, is_aware] = build_memory_report(plan, ddp=ddp).ranks[0].step_bytes > 0
    assert cast == {("0.17.1", False): True, ("0.17.1", True): True, ("0.19.2", False): True, ("0.19.2", True): False}

"""A run against the memory of its GPUs, and the changes with which it fits."""

import math

import pytest

from bridge.errors import RunConfigError
from bridge.plan.fit import find_fit
from bridge.plan.planned_run import PlannedRun
from bridge.registry.registry import REGISTRY
from bridge.sync.prediction import predict
from bridge.target.declaration import parse_target
from tests.model.test_shape import LLAMA_3_70B

SMALL = {"num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 4096, "vocab_size": 32000}
SHARDED = {"use_distributed_optimizer": True}


def planned(target, model=LLAMA_3_70B, *, train=None, sharded=True, **changes):
    shards = SHARDED if sharded else {}
    sections = {
        "model": {"seq_length": 8192, "hidden_dropout": 0.0, **model, **changes},
        "optimizer": shards,
        "ddp": shards,
        "train": train or {"micro_batch_size": 1, "global_batch_size": 128},
    }
    precision = REGISTRY.get("bf16_with_fp8_current_scaling_mixed")
    return PlannedRun(prediction=predict(precision, sections, target=parse_target(target)))


def test_a_rank_that_needs_more_than_its_gpu_is_named_with_both_sizes():
    run = planned("h100x64")
    overflow = run.memory_overflow
    assert overflow is not None
    needed = run.memory.largest.total
    assert needed > 500 * 2**30
    assert overflow.words == {"needed": f"{needed / 2**30:,.0f} GiB", "memory": "79 GiB", "stage": 0, "but": ""}
    freed = {"deallocate_pipeline_outputs": True}
    assert (
        planned("h100x64", tensor_model_parallel_size=8, pipeline_model_parallel_size=4, **freed).memory_overflow
        is None
    )


@pytest.mark.parametrize("target", ["mcore0.16", "cpu"])
def test_without_the_memory_of_a_gpu_nothing_is_said_and_fit_asks_for_it(target):
    run = planned(target)
    assert run.memory_overflow is None
    with pytest.raises(RunConfigError) as raised:
        find_fit(run)
    assert str(raised.value) == (
        "--fit: needs the memory of a GPU, got a target without one. Add --target h100x8, for example."
    )


def test_shards_that_are_not_counted_are_no_overflow_and_offloaded_tensors_are_named():
    run = planned("h100x8", SMALL, sharded=False, num_layers=80)
    assert (run.memory_overflow.severity, run.memory_overflow.words["but"]) == (None, "")
    overflow = run.with_values({"model.cpu_offloading": True}).memory_overflow
    assert overflow.severity == "warning"
    assert overflow.words["but"] == "; model.cpu_offloading may keep less there than is counted"
    offloaded = {"optimizer.optimizer_cpu_offload": True, "optimizer.use_precision_aware_optimizer": True}
    assert run.with_values(offloaded).memory_overflow.severity is None  # the default of the fraction is 0
    assert run.with_values({**offloaded, "optimizer.optimizer_offload_fraction": 1.0}).memory_overflow is None
    assert run.with_values({"ddp.use_torch_fsdp2": True}).memory_overflow is None


def test_a_run_that_fits_within_the_margin_of_its_activations_may_fit():
    rank = planned("h100x64").memory.largest
    within = (rank.total - 0.02 * rank.bytes_of["activations"]) / 2**30
    for memory, severity in ((math.ceil(within), "warning"), (math.floor(within), None)):
        assert memory * 2**30 < rank.total
        assert planned(f"h100x64,memory={memory}GiB").memory_overflow.severity == severity


def test_fit_names_the_setting_that_shards_weights():
    with pytest.raises(RunConfigError) as raised:
        find_fit(planned("h100x8", SMALL).with_values({"ddp.use_torch_fsdp2": True}))
    assert str(raised.value) == (
        "--fit: weights that are sharded are not counted, got ddp.use_torch_fsdp2=True. Drop --fit, or that setting."
    )


def test_the_search_over_very_many_layers_ends_and_says_so(monkeypatch):
    monkeypatch.setattr("bridge.plan.fit.MAX_PLANNED_LAYERS", 500)
    report = find_fit(planned("h100x2048", SMALL, num_layers=96, hidden_size=6144))
    assert report.untried > 0


def test_every_option_fits_by_the_memory_report_itself():
    run = planned("h100x64")
    report = find_fit(run)
    assert report.options
    assert report.declared_ranks is None
    for option in report.options:
        changed = run.with_values(dict(option.changes))
        assert changed.memory.largest.total == option.needed_bytes <= report.usable_bytes < report.memory_bytes
        assert changed.parallel.world_size == option.ranks == 64
        fuller = changed.with_values({"train.micro_batch_size": option.micro_batch_size})
        assert fuller.memory.largest.total <= report.usable_bytes
        share = 128 // changed.parallel.data
        larger = [size for size in range(option.micro_batch_size + 1, share + 1) if share % size == 0]
        beyond = [changed.with_values({"train.micro_batch_size": size}).memory.largest.total for size in larger]
        assert all(total > report.usable_bytes for total in beyond)


def test_options_are_ordered_by_price_and_none_adds_to_a_cheaper_one():
    options = find_fit(planned("h100x64")).options
    assert [option.price for option in options] == sorted(option.price for option in options)
    names = [{name for name, _ in option.changes} for option in options]
    for later, own in enumerate(names):
        assert not any(cheaper <= own for cheaper in names[:later])


def test_a_run_that_fits_is_the_only_option_and_says_its_largest_micro_batch():
    (option,) = find_fit(planned("h100x8", SMALL)).options
    assert (option.changes, option.price) == ((), 0)
    assert option.micro_batch_size == 16


def test_a_sharded_optimizer_and_a_smaller_micro_batch_come_before_the_rest():
    run = planned("h100x8", SMALL, sharded=False, num_layers=128, hidden_size=1536, num_attention_heads=12)
    assert dict(find_fit(run).options[0].changes) == {
        "optimizer.use_distributed_optimizer": True,
        "ddp.use_distributed_optimizer": True,
    }
    run = planned("h100x8", SMALL, train={"micro_batch_size": 64, "global_batch_size": 512})
    first = find_fit(run).options[0]
    assert dict(first.changes) == {"train.micro_batch_size": first.micro_batch_size}
    assert first.micro_batch_size < 64


def test_a_model_that_no_layout_of_these_gpus_holds_is_planned_on_more():
    run = planned("h100x1")
    report = find_fit(run)
    assert report.declared_ranks == 1
    assert [option.ranks for option in report.options] == sorted(option.ranks for option in report.options)
    for option in report.options:
        more = run.with_target(parse_target(f"h100x{option.ranks}")).with_values(dict(option.changes))
        assert more.memory.largest.total == option.needed_bytes <= report.usable_bytes


def test_layouts_that_the_model_does_not_divide_by_are_left_out():
    run = planned(
        "h100x64",
        {**LLAMA_3_70B, "num_layers": 79, "num_attention_heads": 62, "num_query_groups": 31, "kv_channels": 128},
    )
    for option in find_fit(run).options:
        changes = dict(option.changes)
        assert "model.pipeline_model_parallel_size" not in changes
        assert changes.get("model.tensor_model_parallel_size", 1) == 1


def test_a_model_that_cannot_be_planned_is_refused_by_name():
    with pytest.raises(RunConfigError, match=r"^model.use_kitchen: cannot plan"):
        find_fit(planned("h100x8", SMALL, use_kitchen=True))


@pytest.mark.parametrize(("backend", "is_offered"), [("unfused", True), ("flash", False)])
def test_recomputing_the_core_is_offered_where_attention_keeps_its_scores(backend, is_offered):
    wide = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000}
    model = {**wide, "attention_dropout": 0.0, "attention_backend": backend}
    run = planned(
        "h100x8", model, train={"micro_batch_size": 4, "global_batch_size": 128}, tensor_model_parallel_size=8
    )
    changed = [dict(one.changes) for one in find_fit(run).options]
    modules = [one["model.recompute_modules"] for one in changed if "model.recompute_modules" in one]
    assert (["core_attn"] in modules) is is_offered

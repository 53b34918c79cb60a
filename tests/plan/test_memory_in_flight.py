"""The micro-batches that a pipeline keeps, in the plan and in real pipelines on a CPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from bridge.model.layout import ParallelLayout
from bridge.plan import memory_activations
from bridge.plan.memory_activations import Segment
from bridge.plan.memory_schedule import count_activation_bytes, list_schedule_steps
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.target.versions import get_installed_version
from tests.plan.test_memory_kept import BATCH, PAGE, WITHIN, case, recomputing
from tests.runtime.megatron.test_te_cpu import fresh, needs_te

LAYERS, RANKS = 8, 4
ONE_HEAD = {"num_layers": LAYERS, "num_attention_heads": 1, "num_query_groups": 1}
"""The log of the softmax's sums, which a CPU does not keep, is next to nothing of one head."""
FREED = {"deallocate_pipeline_outputs": True}
FULL, IN_PAIRS = recomputing("full"), {**recomputing("full"), "recompute_num_layers": 2}
FIRST_TWO = {**IN_PAIRS, "recompute_method": "block"}


def pipeline(stages: int, chunks: int = 1, **changes: object) -> dict:
    given = {**ONE_HEAD, "pipeline_model_parallel_size": stages, "pipeline_dtype": "bf16", **changes}
    if chunks == 1:
        return given
    return {**given, "virtual_pipeline_model_parallel_size": chunks, "overlap_p2p_comm": True, "batch_p2p_comm": False}


ROWS = {
    "no pipeline": (3, pipeline(1)),
    "no pipeline; recompute mlp": (2, pipeline(1, **recomputing("mlp"))),
    "no pipeline; recompute full": (2, pipeline(1, **FULL)),
    "1F1B, 2 stages": (4, pipeline(2)),
    "1F1B, 4 stages": (8, pipeline(4)),
    "1F1B, 4 stages, outputs freed": (8, pipeline(4, **FREED)),
    "1F1B, 4 stages, few micro-batches": (2, pipeline(4)),
    "1F1B, 2 stages; recompute mlp": (4, pipeline(2, **recomputing("mlp"))),
    "1F1B, 2 stages; recompute full": (4, pipeline(2, **FULL)),
    "1F1B, 2 stages, outputs freed; recompute full": (4, pipeline(2, **FULL, **FREED)),
    "1F1B, 2 stages; recompute full, two layers at a time": (4, pipeline(2, **IN_PAIRS)),
    "1F1B, 2 stages; recompute the first two layers": (4, pipeline(2, **FIRST_TWO)),
    "1F1B, 2 stages, multi-token prediction": (4, pipeline(2, mtp_num_layers=1)),
    "1F1B, 2 stages, multi-token prediction; recompute full": (4, pipeline(2, mtp_num_layers=1, **FULL)),
    "interleaved, 2 stages of 2 chunks": (4, pipeline(2, 2)),
    "interleaved, 2 stages of 2 chunks, outputs freed": (4, pipeline(2, 2, **FREED)),
    "interleaved, 2 stages of 2 chunks, groups of 4": (8, pipeline(2, 2, microbatch_group_size_per_vp_stage=4)),
    "interleaved, 2 stages of 2 chunks, outputs freed; recompute full": (6, pipeline(2, 2, **FULL, **FREED)),
    "interleaved, 4 stages of 2 chunks": (8, pipeline(4, 2)),
    "interleaved, 4 stages of 2 chunks; recompute full": (8, pipeline(4, 2, **FULL)),
}
"""What is said of a run -> (micro-batches of a rank, model)."""


@pytest.mark.parametrize("is_combined", [False, True])
@pytest.mark.parametrize(
    ("stages", "chunks", "group", "micro_batches"),
    [(1, 1, 1, 4), (4, 1, 4, 9), (4, 1, 4, 2), (2, 2, 2, 4), (4, 3, 6, 16), (4, 2, 4, 4), (8, 4, 8, 64)],
)
def test_the_first_backward_pass_finds_what_megatron_runs_before_it(stages, chunks, group, micro_batches, is_combined):
    order = [chunk for _, chunk in get_schedule_table(micro_batches, chunks, group)]
    for stage in range(stages):
        sizes = {"size": lambda: stages, "rank": lambda stage=stage: stage}
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(**sizes),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        *_, warm_up, _ = get_pp_rank_microbatches(
            micro_batches,
            chunks,
            group,
            overlap_moe_expert_parallel_comm=is_combined and chunks > 1,
            p2p_communicator=communicator,
        )
        first, *_ = list_schedule_steps(
            stage, stages, chunks, group, micro_batches, is_combined=is_combined and chunks > 1
        )
        run = order[: warm_up + 1]
        assert first.in_flight == tuple(run.count(chunk) for chunk in range(chunks))
        assert first.backward == chunks - 1


def test_a_long_step_has_the_moments_of_a_shorter_one_that_ends_alike():
    assert list_schedule_steps(1, 4, 3, 6, 9000, is_combined=False) == list_schedule_steps(
        1, 4, 3, 6, 90, is_combined=False
    )
    assert len(list_schedule_steps(0, 16, 8, 16, None, is_combined=False)) < 1000


def test_passes_that_run_at_once_keep_a_single_micro_batch_whole():
    (only,) = list_schedule_steps(0, 1, 1, None, 1, is_combined=True)
    assert (only.in_flight, only.forward, only.backward) == ((1,), None, 0)


@needs_te
@pytest.mark.slow
def test_the_table_of_the_page_is_what_real_pipelines_keep(tmp_path: Path, monkeypatch) -> None:
    # What autograd keeps is compared; the gradient of the logits is only there in the backward pass.
    head = memory_activations._ActivationCounter.head
    monkeypatch.setattr(memory_activations._ActivationCounter, "head", lambda self: Segment(head(self).kept))
    cases = {}
    for name, (micro_batches, model) in ROWS.items():
        cases[name] = case(model, "bf16")
        replicas = RANKS // model["pipeline_model_parallel_size"]
        cases[name]["train"]["global_batch_size"] = BATCH * micro_batches * replicas
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({str(number): one for number, one in enumerate(cases.values())}))
    fresh("tests.plan.memory_in_flight", path, processes=RANKS)
    lines = ["| schedule | kept at the fullest moment, by stage | counted |", "|---" * 3 + "|"]
    for number, (name, given) in enumerate(cases.items()):
        kept, differences = [], []
        for stage, (planned, counts) in enumerate(counted(given)):
            rank = stage * (RANKS // given["model"]["pipeline_model_parallel_size"])
            found = json.loads((tmp_path / f"{number}-{rank}.json").read_text())
            assert tuple(found["in flight"]) in counts, (name, stage)
            kept.append("+".join(map(str, found["in flight"])))
            differences.append(planned / found["bytes"] - 1)
        assert max(map(abs, differences)) < WITHIN, name
        largest = max(differences, key=abs)
        lines.append(f"| {name} | {', '.join(kept)} | {round(largest, 3) + 0:+.1%} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(), table


def counted(given: dict) -> list[tuple[int, set[tuple[int, ...]]]]:
    """Return of each stage the plan's bytes, and what it may keep at a time of its chunks."""
    model = given["model"]
    parallel = ParallelLayout.from_model(model).fit_to_world_size(RANKS)
    precision = MixedPrecisionConfig.from_dict(given["mixed_precision"])
    plan = precision_plan(precision, model, parallel, mcore=get_installed_version("mcore"))
    load = Workload.from_sections(model, given["train"], data_parallel=parallel.data)
    places = parallel.split_layers(LAYERS)
    found = []
    for stage in range(parallel.pipeline):
        own = [place for place in places if place.stage == stage]
        group = load.group_size
        listed = list_schedule_steps(
            stage, parallel.pipeline, parallel.virtual, group, load.micro_batches, is_combined=False
        )
        found.append((count_activation_bytes(plan, own, load), {step.in_flight for step in listed}))
    return found

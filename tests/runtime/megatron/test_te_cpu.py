"""Transformer Engine's own Python on this CPU, held against the emulation, GEMM by GEMM."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path

import pytest
import torch
import yaml

from bridge.errors import BackendUnavailableError, RunConfigError
from bridge.precision.formats import FORMATS
from bridge.precision.schemes import GEMMS
from bridge.preflight.gpu_for_te_cpu import declare
from bridge.runtime.megatron.backend import choose_backend
from bridge.runtime.megatron.model.gpt import GPTConfig
from bridge.runtime.megatron.te_cpu import multi_tensor, shards, storage
from bridge.runtime.megatron.te_cpu.enums import ENUMS
from bridge.runtime.megatron.te_cpu.extension import build_extension
from bridge.runtime.megatron.te_cpu.install import find_te
from bridge.runtime.megatron.te_cpu.patches import build_patch_table
from bridge.runtime.megatron.te_cpu.storage import create_empty_quantized_tensor
from bridge.runtime.numerics import QuantSpec, pad_scales, quantise
from bridge.runtime.numerics.grid import list_code_values
from tests import warm
from tests.training.grid import slow

ROOT = Path(__file__).resolve().parents[3]
TE = Path(sys.prefix) / "te"
BACKENDS = ("te_cpu", "emulated")
SCHEMES = ("tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4")
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "bf16": True}

needs_te = pytest.mark.skipif(
    not (TE / "transformer_engine").is_dir(), reason=f"needs Transformer Engine's Python in {TE} (make setup)"
)


def fresh(module: str, plan: Path, *, processes: int = 1) -> None:
    """Run a module over a plan in new processes, as the ranks of one job; these import Megatron by themselves."""
    with warm.ranks_of_a_job(processes) as job:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", module, str(plan)],
                cwd=ROOT,
                env={**os.environ, **(variables if processes > 1 else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for variables in job
        ]
        for rank in ranks:
            _, errors = rank.communicate(timeout=warm.LIMIT_SECONDS)
            assert rank.returncode == 0, errors[-4000:]


def operands(folder: Path, runs: dict[str, dict], *, processes: int = 1) -> dict[str, list]:
    """Return what both backends multiplied: run -> a pair per rank, of Transformer Engine's Python and the emulation.

    Args:
        folder: Takes plans and results.
        runs: Name -> plan of `te_cpu_operands`, with what differs in it by backend; all on one GPU.
        processes: Ranks of each run.
    """
    module = "tests.runtime.megatron.te_cpu_operands"
    for backend in BACKENDS:
        path = folder / f"{backend}.json"
        plans = [
            {**plan, **plan.get(backend, {}), "backend": backend, "out": f"{folder}/{backend}-{name}"}
            for name, plan in runs.items()
        ]
        path.write_text(json.dumps(plans))
        if backend == "te_cpu":
            fresh(module, path, processes=processes)
            continue
        words = ["python", "-W", "ignore", "-m", module, path]
        alone = processes == 1
        for done in [warm.run(words, cwd=ROOT)] if alone else warm.launch(words, processes=processes, cwd=ROOT):
            assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: [
            tuple(torch.load(folder / f"{backend}-{name}-{rank}.pt") for backend in BACKENDS)
            for rank in range(processes)
        ]
        for name in runs
    }


def by_gemm(run: dict) -> dict:
    """Return the operands of each GEMM, micro-batch after micro-batch, in each of these expert after expert."""
    found = defaultdict(list)
    batches = Counter()
    for gemm in run["operands"]:
        key = (gemm["step"], gemm["layer"], re.sub(r"local_experts\.\d+\.", "", gemm["module"]), gemm["gemm"])
        expert = (*key, gemm["module"])  # sequential experts are modules of their own; grouped ones come in order
        batches[expert] += "local_experts" in gemm["module"]
        found[key].append(((batches[expert], gemm["module"]), gemm))
    return {key: [gemm for _, gemm in sorted(rows, key=itemgetter(0))] for key, rows in found.items()}


def value_of(operand: dict) -> torch.Tensor:
    """Return an operand dequantised; powers of two may be in the values or in the factor."""
    return operand["values"].double() * operand["factor"]


def assert_equal_operands(ours: dict, emulated: dict, modules: set[str], name: str = "") -> None:
    """Both backends ran all GEMMs of these modules, and no others, in the same formats, on the same bits."""
    ours, emulated = by_gemm(ours), by_gemm(emulated)
    assert ours.keys() == emulated.keys(), name
    assert {key[2:] for key in ours} == {(module, gemm) for module in modules for gemm in GEMMS}, name
    wrong = [
        (*key, side)
        for key in ours
        for mine, theirs in zip(ours[key], emulated[key], strict=True)
        for side in ("left", "right")
        if mine[side]["spec"] != theirs[side]["spec"] or not torch.equal(value_of(mine[side]), value_of(theirs[side]))
    ]
    assert wrong == [], name


@needs_te
@pytest.mark.parametrize("scheme", [one if one == "tensorwise" else slow(one) for one in SCHEMES])
def test_every_gemm_reads_the_bits_of_the_emulation(scheme, tmp_path):
    # Under delayed scaling Transformer Engine's norm quantises before it rounds; a test of its own measures that.
    kinds = ("dense", "latent", "grouped") if scheme == "tensorwise" else ("dense",)
    runs = {kind: {"scheme": scheme, "unfused": True, "arguments": {"model": KINDS[kind]}} for kind in kinds}
    for kind, ((ours, emulated),) in operands(tmp_path, runs).items():
        assert_equal_operands(ours, emulated, modules_of(kind), kind)
        assert ours["losses"] == emulated["losses"]
        if kind == "dense":
            assert len(ours["measured"]) == 2 * len(DENSE) * 3
            assert ours["measured"] == emulated["measured"]


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
}
LATENT = {"qk_head_dim": 32, "qk_pos_emb_head_dim": 32, "v_head_dim": 32, "rope_type": "rope"}
LATENT |= {"multi_latent_attention": True, "q_lora_rank": 64, "kv_lora_rank": 64}
KINDS = {
    "dense": {},
    "gated": {"gated_linear_unit": True, "activation_func": "silu", "num_query_groups": 2, "qk_layernorm": True},
    "biases": {"normalization": "LayerNorm", "add_bias_linear": True},
    "latent": LATENT,
    "latent_keys": {**LATENT, "q_lora_rank": None},
    "prediction": {"mtp_num_layers": 1},
    "sequential": EXPERTS,
    "grouped": {**EXPERTS, "moe_grouped_gemm": True},
    "shared": {**EXPERTS, "moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 128},
}
"""Kind of model -> its fields."""
DENSE = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}


def modules_of(kind: str, *, scheme: str = "tensorwise") -> set[str]:
    """Return the modules in low precision of a kind of model."""
    shape, found = KINDS[kind], set(DENSE)
    if "multi_latent_attention" in shape:
        queries = {"linear_q_down_proj", "linear_q_up_proj"} if shape["q_lora_rank"] else {"linear_q_proj"}
        names = {"linear_kv_down_proj", "linear_kv_up_proj", *queries}
        found = found - {"self_attention.linear_qkv"} | {f"self_attention.{name}" for name in names}
    if "num_moe_experts" in shape:
        found -= {"mlp.linear_fc1", "mlp.linear_fc2"}
        owners = ["experts", "shared_experts"] if "moe_shared_expert_intermediate_size" in shape else ["experts"]
        found |= {f"mlp.{owner}.{name}" for owner in owners for name in ("linear_fc1", "linear_fc2")}
    return found | ({"eh_proj"} if "mtp_num_layers" in shape and scheme != "nvfp4" else set())


TWO_STAGES = {"pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
MIXED = ("tensorwise", "mxfp8")
LAYOUTS = {
    "hopper": (1, {}, ("tensorwise", "delayed", "blockwise"), KINDS),
    "blackwell": (1, {}, ("tensorwise", "delayed", "mxfp8", "nvfp4"), KINDS),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, MIXED, [*KINDS][3:]),
    "pp2": (2, {"pipeline_model_parallel_size": 2}, MIXED, KINDS),
    "pp2-vpp2": (2, {**TWO_STAGES, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4}, MIXED, KINDS),
    "cp2": (2, {"context_parallel_size": 2, "cp_comm_type": "all_gather"}, MIXED, KINDS),
    "ep2": (2, {"expert_model_parallel_size": 2}, MIXED, ("sequential", "grouped", "shared")),
}
"""Layout -> processes, its fields, schemes, kinds of models."""


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kinds_of_models_read_the_bits_of_the_emulation_in_every_layout(layout, tmp_path):
    processes, fields, schemes, kinds = LAYOUTS[layout]
    target = "h100" if layout == "hopper" else "b200"
    runs = {
        f"{kind}-{scheme}": {
            "scheme": scheme,
            "target": target,
            "unfused": True,
            "to_nearest": True,
            "arguments": {"model": {**KINDS[kind], **fields}},
        }
        for kind in kinds
        for scheme in schemes
    }
    for name, pairs in operands(tmp_path, runs, processes=processes).items():
        kind, _, scheme = name.partition("-")
        modules = modules_of(kind, scheme=scheme)
        for rank, (ours, emulated) in enumerate(pairs):
            if layout == "tp2-sp" and kind.startswith("latent"):  # down projections are whole in one, cut in the other
                assert_near_operands(ours, emulated, modules, name)
                continue
            is_first_stage = "pipeline_model_parallel_size" in fields and rank == 0
            assert_equal_operands(ours, emulated, modules - {"eh_proj"} if is_first_stage else modules, name)
            assert ours["losses"] == emulated["losses"], name


@needs_te
@pytest.mark.slow
def test_a_row_in_bf16_on_weights_stored_with_delayed_scales_reads_the_bits_of_the_emulation(tmp_path):
    rows = [{"select": "*.linear_fc2", "precision": "bf16"}]
    plan = {"scheme": "delayed", "unfused": True, "arguments": {"stored": True, "sharded": True, "rows": rows}}
    plan["arguments"]["optimizer"] = {"lr": 1e-3}
    ((ours, emulated),) = operands(tmp_path, {"rows": plan})["rows"]
    assert_equal_operands(ours, emulated, DENSE - {"mlp.linear_fc2"})
    assert ours["losses"] == emulated["losses"]


@needs_te
@pytest.mark.slow
def test_context_parallelism_by_a2a_trains_as_by_all_gather_and_as_one_rank(tmp_path):
    cp2 = LAYOUTS["cp2"][1]
    plan = {"scheme": "mxfp8", "unfused": True, "arguments": {"model": {**KINDS["gated"], **cp2}}}
    a2a = {"arguments": {"model": {**KINDS["gated"], **cp2, "cp_comm_type": "a2a"}}}
    pairs = operands(tmp_path, {"gated": {**plan, "te_cpu": a2a}}, processes=2)["gated"]
    alone = {"arguments": {"model": KINDS["gated"]}}
    ((one, _),) = operands(tmp_path, {"one": {**plan, **alone}})["one"]
    for ours, emulated in pairs:
        key = (0, 1, "self_attention.linear_proj", "fprop")
        mine, theirs = (value_of(by_gemm(run)[key][0]["left"]) for run in (ours, emulated))
        assert (mine != theirs).float().mean() < 0.02
        assert ours["losses"] == pytest.approx(emulated["losses"], abs=1e-3)
        assert ours["losses"] == pytest.approx(one["losses"], abs=1e-2)


def assert_near_operands(ours: dict, emulated: dict, modules: set[str], name: str) -> None:
    """Both backends ran all GEMMs of these modules; with MXFP8 the forward pass reads the same bits."""
    forward = {key: rows for key, rows in by_gemm(ours).items() if key[3] == "fprop"}
    assert {key[2] for key in forward} == modules
    assert ours["losses"] == pytest.approx(emulated["losses"], abs=0.02)
    if name.endswith("mxfp8"):
        others = by_gemm(emulated)
        for key, rows in forward.items():
            if "_down_proj" not in key[2]:
                for mine, theirs in zip(rows, others[key], strict=True):
                    assert torch.equal(value_of(mine["left"]), value_of(theirs["left"])), (name, key)


@needs_te
@pytest.mark.slow
def test_the_fused_norm_of_delayed_scaling_moves_some_inputs_by_one_code(tmp_path):
    ((ours, emulated),) = operands(tmp_path, {"fused": {"scheme": "delayed"}})["fused"]
    key = (0, 1, "self_attention.linear_qkv", "fprop")
    (mine, *_), (theirs, *_) = by_gemm(ours)[key], by_gemm(emulated)[key]
    assert torch.equal(value_of(mine["right"]), value_of(theirs["right"]))  # the weights
    grid = torch.tensor(sorted({value for value in list_code_values(FORMATS["e4m3"]) if not math.isnan(value)}))
    places = [torch.searchsorted(grid, value_of(side["left"]).float()) for side in (mine, theirs)]
    apart = (places[0] - places[1]).abs()
    assert apart.max() == 1
    assert 0 < (apart > 0).float().mean() < 0.08


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", [{"model": LAYOUTS["tp2-sp"][1]}, {"sharded": True}], ids=["tp2-sp", "dp2-sharded"])
def test_two_ranks_read_the_bits_of_the_emulation(scheme, layout, tmp_path):
    # Where ranks hold parts of a gradient, each draws its own random numbers for it: so NVFP4 rounds to nearest here.
    to_nearest = scheme == "nvfp4" and "model" in layout
    plan = {"scheme": scheme, "arguments": layout, "to_nearest": to_nearest, "unfused": True}
    for ours, emulated in operands(tmp_path, {"dense": plan}, processes=2)["dense"]:
        assert_equal_operands(ours, emulated, DENSE)
        assert ours["losses"] == emulated["losses"]


@functools.cache
def resumed(folder: Path, group: tuple[str, ...]) -> Path:
    """Make whole, interrupted and resumed runs of some schemes, with stored weights where Megatron can hold them."""
    schedule = {"lr_decay_iters": 6, "eval_iters": 0}
    plan = {}
    for scheme in group:
        own = {"sharded": True, "stored": scheme != "nvfp4"}
        plan[scheme] = {
            f"{scheme}-whole": {**own, "train": {**schedule, "train_iters": 6}},
            f"{scheme}-first": {**own, "train": {**schedule, "train_iters": 3}, "save": f"{scheme}-saved"},
            f"{scheme}-resumed": {**own, "train": {**schedule, "train_iters": 6}, "load": f"{scheme}-saved"},
        }
    (folder / "plan.json").write_text(json.dumps(plan))
    fresh("tests.runtime.megatron.te_cpu_runs", folder / "plan.json")
    return folder


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_resumed_run_is_the_whole_one(scheme, tmp_path_factory):
    def trace(name: str) -> list:
        lines = (folder / f"{scheme}-{name}" / "metrics.jsonl").read_text().splitlines()
        steps = [record for record in map(json.loads, lines) if record["kind"] == "train"]
        return [(step["step"], step["loss"], step["grad_norm"]) for step in steps]

    group = next(group for group in (SCHEMES[:3], SCHEMES[3:]) if scheme in group)
    base = tmp_path_factory.getbasetemp() / f"te_cpu-{group[0]}"
    base.mkdir(exist_ok=True)
    folder = resumed(base, group)
    assert trace("first") + trace("resumed") == trace("whole")
    assert trace("whole")[-1][1] < trace("whole")[0][1] - 0.5


RECIPES = {
    "fp8_current": "tensorwise, fprop e4m3 x e4m3, dgrad e5m2 x e4m3, wgrad e5m2 x e4m3",
    "fp8_delayed": "delayed, fprop e4m3 x e4m3, dgrad e5m2 x e4m3, wgrad e5m2 x e4m3",
    "blockwise": "blockwise, fprop e4m3 x e4m3, dgrad e5m2 x e4m3, wgrad e5m2 x e4m3",
    "mxfp8": "mxfp8, fprop e4m3 x e4m3, dgrad e4m3 x e4m3, wgrad e4m3 x e4m3",
    "nvfp4": "nvfp4, fprop e2m1 x e2m1, dgrad e2m1 x e2m1, wgrad e2m1 x e2m1",
}


@needs_te
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.slow) if name != "fp8_delayed" else name for name in RECIPES]
)
def test_the_training_command_runs_every_scheme(recipe, tmp_path):
    words = ["model=gpt_tiny", "train=smoke", f"mixed_precision={recipe}", "precision_backend=te_cpu"]
    if recipe == "nvfp4":
        words.append("mixed_precision.fp4_param_gather=false")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", *words, f"logging.run_dir={tmp_path}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=warm.LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{RECIPES[recipe]} (linear_fc1, linear_fc2, linear_proj, linear_qkv)" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train_loss"] < 4.8


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_te_without_cuda_names_te_cpu():
    model = GPTConfig(**SHAPE, fp8="hybrid", fp8_recipe="tensorwise")
    with pytest.raises(BackendUnavailableError, match="use te_cpu for its Python on this CPU"):
        choose_backend("te", model)


def test_te_cpu_needs_a_process_of_its_own():
    model = GPTConfig(**SHAPE, fp8="hybrid", fp8_recipe="tensorwise")
    with pytest.raises(BackendUnavailableError) as refused:
        choose_backend("te_cpu", model)
    assert str(refused.value) == (
        "precision_backend: te_cpu needs a process in which Megatron Core was not imported before, because Megatron "
        "decides at import whether there is Transformer Engine. Start the run by itself, or call "
        "bridge.preflight.gpu_for_te_cpu.declare() before anything else."
    )


def test_the_declared_target_must_name_a_gpu():
    with pytest.raises(RunConfigError, match="^target: must name a GPU for precision_backend=te_cpu, got 'cpu'"):
        declare("cpu")


def test_absent_files_are_named_with_the_command_that_brings_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(BackendUnavailableError) as refused:
        find_te()
    folder = tmp_path / "te"
    assert str(refused.value) == (
        f"precision_backend=te_cpu: needs the Python files of Transformer Engine 2.20, and it is not installed in "
        f"{folder}. Run: pip install --target {folder} transformer-engine==2.20.2 'pydantic>=2' einops"
    )


def test_a_function_that_is_not_there_raises_its_own_name_when_it_is_called():
    missing = build_extension().moe_permute_fwd
    with pytest.raises(
        BackendUnavailableError, match=r"transformer_engine_torch\.moe_permute_fwd of Transformer Engine's"
    ):
        missing(1, 2)


def test_every_patch_has_its_reason():
    reasons = yaml.safe_load((ROOT / "bridge" / "runtime" / "megatron" / "te_cpu" / "patches.yaml").read_text())
    assert reasons.keys() == build_patch_table((9, 0)).keys()
    assert all(reason["needed_by"] and reason["without"] for reason in reasons.values())


def test_shards_of_nvfp4_weights_are_cast_as_the_whole_is():
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 48)[:, None]
    whole = quantise(x, QuantSpec(scheme="nvfp4", format="e2m1", rowwise_tile=(16, 16), columnwise_tile=(16, 16)))
    parts, starts, tiles = (x.flatten()[:1030], x.flatten()[1030:]), (0, 1030), (3, 4)
    amaxes, largest = torch.zeros(2, *tiles), torch.zeros(2, 1)
    shape = ([48, 48], [64, 64], [*starts])
    shards.nvfp4_multi_tensor_compute_partial_amax([*parts], [*amaxes], [*largest], *shape, 16)
    amax, whole_amax, factor, scale = amaxes.amax(0), largest.amax(0), torch.zeros(tiles), torch.zeros(1)
    shards.nvfp4_compute_global_scale(whole_amax, scale)
    scales, held = torch.zeros(128, 4, dtype=torch.uint8), torch.zeros(1)
    shards.nvfp4_multi_tensor_fused_scale([amax], [whole_amax], [factor], [scales], [held], [3], [4], [128], 16)
    codes = torch.zeros(48 * 32, dtype=torch.uint8)
    outs = [codes[:515], codes[515:]]
    shards.nvfp4_multi_tensor_2d_partial_cast([*parts], outs, [factor] * 2, [scale] * 2, *shape, 16)
    codes_t, scales_t = torch.zeros(64, 24, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
    shards.nvfp4_2d_multi_tensor_transpose([codes.view(48, 32)], [codes_t], [scales], [scales_t], [48], [64])
    assert torch.equal(held, whole.amax.reshape(1))
    assert torch.equal(codes.view(48, 32), whole.codes)
    assert torch.equal(scales, pad_scales(whole))
    assert torch.equal(codes_t, whole.codes_t)
    assert torch.equal(scales_t, pad_scales(whole, columnwise=True))


def test_a_master_of_a_bf16_parameter_and_its_low_half_steps_as_the_whole_one():
    whole, gradient = torch.randn(64, generator=torch.Generator().manual_seed(1)), torch.full((64,), 0.1)
    halves = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int16)
    multi_tensor._split_master(whole, *halves)
    assert torch.equal(multi_tensor._join_master(*halves), whole)
    rows = [[gradient], [whole.bfloat16()], [torch.zeros(64)], [torch.zeros(64)], [whole]]
    split = [[gradient], [halves[0]], [torch.zeros(64)], [torch.zeros(64)], [halves[1]]]
    for step in (1, 2, 3):
        for tensors in (rows, split):
            multi_tensor.multi_tensor_adam(0, None, tensors, 1e-3, 0.9, 0.95, 1e-8, step, 1, True, 0.1)
    assert torch.equal(multi_tensor._join_master(*halves), whole)
    assert (halves[0].float() - whole).abs().max() <= 2**-8 * whole.abs().max()


def test_columns_of_nvfp4_are_a_matrix_whatever_the_axes_of_the_tensor():
    made = type(
        "NVFP4Quantizer", (), {"inner_tensor_specs": lambda *_: {"_columnwise_data": ((96, 64, 0), torch.uint8)}}
    )
    assert storage._get_buffer_specs(made(), (64, 1, 96)) == {"_columnwise_data": ((96, 32), torch.uint8)}


@needs_te
def test_the_enums_have_every_member_that_transformer_engine_names():
    names = "|".join(ENUMS)
    asked = set()
    for path in (TE / "transformer_engine" / "pytorch").rglob("*.py"):
        asked |= set(re.findall(rf"\b(?:tex\.)?({names})\.([A-Za-z]\w*)", path.read_text()))
    members = {(name, member) for name, member in asked if not member.startswith("__") and member not in NO_MEMBERS}
    assert len(members) > 60
    absent = {(name, member) for name, member in members if member not in ENUMS[name].__members__}
    assert absent == set()


NO_MEMBERS = ("cast", "members", "kX")
"""Methods, and a placeholder in a docstring."""


def test_mxfp8_of_a_size_that_is_no_multiple_of_32_is_refused_in_one_sentence():
    quantizer = type("MXFP8Quantizer", (), {})()
    with pytest.raises(BackendUnavailableError) as refused:
        create_empty_quantized_tensor(quantizer, (200, 64), torch.bfloat16)
    assert str(refused.value) == (
        "te_cpu: Transformer Engine quantises to MXFP8 what is a multiple of 32 on both sides, got a tensor of "
        "(200, 64). Use widths and tokens of a micro-batch that are, on each rank."
    )


SMALL = (
    *("model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.num_attention_heads=4"),
    *("model.seq_length=64", "train.train_iters=3", "train.micro_batch_size=2", "train.global_batch_size=2"),
    *("train.lr_warmup_iters=0", "train.audit=error"),
)
ZOO = "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo"


def trained(folder, words, variables=()):
    """Run the training command; return its process and the losses and gradient norms of its steps."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", *SMALL, *words, f"logging.run_dir={folder}"],
        cwd=folder.parent,
        env={**os.environ, **dict(variables)},
        capture_output=True,
        text=True,
        check=False,
        timeout=warm.LIMIT_SECONDS,
    )
    if done.returncode:
        return done, []
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return done, [(record["loss"], record["grad_norm"]) for record in records if record["kind"] == "train"]


@needs_te
@pytest.mark.parametrize("override", ["high_precision", pytest.param("dequantized", marks=pytest.mark.slow)])
def test_a_backward_override_trains_alike_in_the_emulation_and_in_transformer_engines_python(override, tmp_path):
    words = ["mixed_precision=mxfp8", "mixed_precision.first_last_layers_bf16=false", "target=b200"]
    traces = {}
    for backend in BACKENDS:
        folder = tmp_path / backend
        done, trace = trained(
            folder, [*words, f"precision_backend={backend}"], {"NVTE_BACKWARD_OVERRIDE": override}.items()
        )
        assert done.returncode == 0, done.stderr[-4000:]
        formats = "mxfp8, fprop e4m3 x e4m3, dgrad bf16 x bf16, wgrad bf16 x bf16"
        assert f"layers 1-2: {formats} (linear_fc1, linear_fc2, linear_proj, linear_qkv)" in done.stdout
        assert json.loads((folder / "record.json").read_text())["audit"] == []
        traces[backend] = trace
    assert traces["emulated"] != []
    for step, emulated in zip(traces["te_cpu"], traces["emulated"], strict=True):
        assert step == pytest.approx(emulated, rel=1e-6)  # GEMMs in BF16 sum in an order of their own


def of_factory(name):
    """Return the words of a run whose quantizers a factory of the zoo makes."""
    factory = {"fp8": "hybrid", "fp8_recipe": "custom", "fp8_quantizer_factory": f"{ZOO}.{name}"}
    stated = [f"+mixed_precision.{field}={value}" for field, value in factory.items()]
    return ["mixed_precision=bf16_mixed", *stated, "precision_backend=te_cpu", "target=b200"]


@needs_te
@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("mxfp8_fwd_nvfp4_bwd_factory", "fprop e4m3 x e4m3, dgrad e2m1 x e2m1, wgrad e2m1 x e2m1"),
        pytest.param(
            "mxfp8_fwd_high_precision_bwd_factory",
            "fprop e4m3 x e4m3, dgrad bf16 x bf16, wgrad bf16 x bf16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "high_precision_fwd_mxfp8_bwd_factory",
            "fprop bf16 x bf16, dgrad e4m3 x e4m3, wgrad e4m3 x e4m3",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "nvfp4_1d_weight_factory", "fprop e2m1 x e2m1, dgrad e2m1 x e2m1, wgrad e2m1 x e2m1", marks=pytest.mark.slow
        ),
    ],
)
def test_a_factory_of_transformer_engine_runs_what_the_plan_says(name, formats, tmp_path):
    done, trace = trained(tmp_path / "run", of_factory(name))
    assert done.returncode == 0, done.stderr[-4000:]
    assert formats in done.stdout
    assert json.loads((tmp_path / "run" / "record.json").read_text())["audit"] == []
    assert trace


@needs_te
@pytest.mark.slow
def test_row_scaled_activations_are_refused_in_one_sentence(tmp_path):
    done, _ = trained(tmp_path / "run", of_factory("nvfp4_row_scaled_fwd_high_precision_bwd_factory"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "te_cpu: has no NVFP4 with row_scaled_nvfp4. Leave it off."

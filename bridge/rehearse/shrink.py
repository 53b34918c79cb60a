"""A run made small enough for a laptop, with its precision, kinds of layers and layout.

    small = shrink(run.sections, run.precision)
    small.sections["model"]["hidden_size"], small.changes[0].reason, small.rounds[0].processes

Every number is the smallest that Megatron and Transformer Engine treat as they treat the one of the
run: sizes keep their ratio, and the width or the tokens of a rank keep the greatest common divisor
with the scaling scheme's multiple. So a size that the scheme refuses in the run is refused in the
rehearsal too.
"""

from collections.abc import Mapping
from math import gcd
from typing import Any

from bridge.plan.precision_plan import make_plan
from bridge.registry.config import MixedPrecisionConfig
from bridge.rehearse.layers import shrink_layers
from bridge.rehearse.layout import LaunchLayout
from bridge.rehearse.small_run import SmallRun
from bridge.rehearse.widths import shrink_widths
from bridge.sync.prediction import predict
from bridge.target.fields import OWNER_FIELDS, parse_integer, read_field
from bridge.target.target import Target
from bridge.target.versions import Version, get_installed_version

MIN_TOKENS = 64
"""The fewest tokens of a sequence on each context-parallel rank."""
TRAIN_STEPS = 2
"""Steps before the checkpoint; one more follows it."""

SWITCHED_OFF = {
    "tp_comm_overlap": "its user buffers need GPUs",
    "moe_permute_fusion": "its kernels need a GPU",
    "moe_router_fusion": "its kernels need a GPU",
    "use_transformer_engine_op_fuser": "its kernels need a GPU",
    "moe_router_force_load_balancing": "a resume would draw other routes",
}
"""Switch of the model that changes no format -> the reason why it is off in a rehearsal."""
UNSUPPORTED_SWITCHES = {
    "fp8_dot_product_attention": "attention in FP8 has no CPU version",
    "fp8_multi_head_attention": "attention in FP8 has no CPU version",
}
"""Switch of the model or the precision that changes formats -> the reason why it is left out."""
FSDP_PREFIXES = (
    "megatron_fsdp_",
    "fsdp_",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
)
"""Prefixes of the fields of DDP that act under Megatron-FSDP alone."""
INITIALISER_FIELDS = ("init_method", "output_layer_init_method", "embedding_init_method")
"""Functions, saved as text, which Megatron makes of other fields."""
CUDA_GRAPH_FIELDS = ("cuda_graph_scope", "cuda_graph_modules")
"""Parts of a run that its CUDA graphs capture, without effect where none is captured. Of the scope
``full_iteration`` megatron-core 0.19.2 makes another `cuda_graph_impl`
(transformer_config.py:2412)."""

FLEX_DISPATCHER_FIELDS = (
    "moe_deepep_num_sms",
    "moe_hybridep_num_sms",
    "moe_flex_dispatcher_num_sms",
)
"""Streaming multiprocessors of the flex dispatcher, which no rehearsal has.

A run folder of megatron-core 0.16.1 states the first two with their class defaults, and 0.19.2
refuses both together (transformer_config.py:1631).
"""


def shrink(
    sections: Mapping[str, Any],
    precision: MixedPrecisionConfig | None,
    *,
    target: Target | None = None,
    here: Version | None = None,
    processes: int = 4,
    max_layers: int = 8,
) -> SmallRun:
    """Return a run made small.

    Args:
        sections: The sections of the run.
        precision: Its precision; None where the configs alone decide it.
        target: The GPUs of the run. Where their number is not stated, it is the least that the
            parallel sizes need.
        here: The release of Megatron Core that will run, None for the installed release.
        processes: The most processes of a launch.
        max_layers: The most layers. There are more where the first and last layers and the pipeline
            need more.

    Raises:
        RunConfigError: No such model can be built, or planned.
    """
    copies = {}
    for name in ("model", "optimizer", "ddp", "train"):
        copies[name] = dict(sections.get(name) or {})
    place = target or Target()
    whole = predict(precision, copies, target=Target(count=place.count))
    plan = make_plan(whole)
    layout = LaunchLayout.from_parallel(whole.parallel, is_sharded=plan.settings.distributed)
    stated = None
    if precision is not None:
        stated = precision.to_dict()
    run = SmallRun(
        sections=copies, precision=stated, plan=plan, parallel=whole.parallel, layout=layout
    )
    split = shrink_layers(run, max_layers)
    shrink_widths(run)
    _shrink_tokens(run)
    _replace_schedule(run)
    _replace_optimizer(run)
    _replace_kernels(run)
    # Each launch has its own layout and communication.
    of_launch = (*LaunchLayout().fields(), "overlap_p2p_comm", "batch_p2p_comm")
    for name in (*INITIALISER_FIELDS, *CUDA_GRAPH_FIELDS, *FLEX_DISPATCHER_FIELDS, *of_launch):
        run.model.pop(name, None)
    _leave_out(run, sections, place, here or get_installed_version("mcore"))
    run.rounds = layout.rounds(processes, split)
    return run


def _replace_kernels(run: SmallRun) -> None:
    """Switch off what runs on a GPU alone, and routes that are drawn."""
    if run.layout.size("context") > 1 and run.model.get("cp_comm_type") != "a2a":
        run.set("model.cp_comm_type", "all_gather", "context parallelism by p2p has no CPU version")
    if str(read_field(run.model, "attention_backend")).lower() in ("flash", "fused"):
        run.set("model.attention_backend", "auto", "its kernels need a GPU")
    for name, reason in SWITCHED_OFF.items():
        if read_field(run.model, name):
            run.set(f"model.{name}", False, reason)


def _leave_out(
    run: SmallRun, sections: Mapping[str, Any], target: Target, here: Version | None
) -> None:
    """Leave out the settings of formats and of trained weights that no run here can have."""
    for name, reason in UNSUPPORTED_SWITCHES.items():
        run.leave_out(name, reason)
    has_buffers = OWNER_FIELDS["ddp"]["fp4_param_gather"].has
    is_later = False
    if has_buffers is not None:
        is_later = bool(has_buffers.holds(target.mcore)) and not has_buffers.holds(here)
    is_sharded = run.plan.settings.distributed
    if run.sections["ddp"].get("use_distributed_optimizer"):
        is_sharded = True
    if is_later and is_sharded:
        why = "this Megatron Core cannot keep NVFP4 weights in the distributed optimizer's buffers"
        for name in ("fp4_param", "fp4_param_gather"):
            run.leave_out(name, why)
    dtype = run.model.get("moe_router_dtype")
    if dtype not in (None, "fp32", "fp64"):
        del run.model["moe_router_dtype"]
        run.note_left_out("model.moe_router_dtype", dtype, "the router does not know it")
    if sections.get("peft"):
        run.note_left_out("peft", sections["peft"], "a run trains all weights")


def _shrink_tokens(run: SmallRun) -> None:
    """Make the sequence and the micro-batch small; a rank's tokens keep their alignment."""
    parallel = run.parallel
    samples = parse_integer(read_field(run.sections["train"], "micro_batch_size")) or 1
    small_samples = min(samples, 2)

    def alignment(tokens: int, samples: int, context: int, tensor: int) -> tuple[object, ...]:
        rows = tokens // context
        is_shared = context == 1 or tokens % (2 * context) == 0
        is_split = not parallel.sequence_parallel or rows % tensor == 0
        return is_shared, is_split, gcd(rows * samples, run.unit)

    wanted = alignment(
        run.shape.seq_length or MIN_TOKENS, samples, parallel.context, parallel.tensor
    )
    context = run.layout.size("context")
    seq_length = MIN_TOKENS * context
    for tokens in range(seq_length, seq_length + 8 * run.unit * context):
        if alignment(tokens, small_samples, context, run.tensor_ranks) == wanted:
            seq_length = tokens
            break
    run.set("model.seq_length", seq_length, "keeps the alignment of a rank's tokens")
    run.model.pop("max_position_embeddings", None)
    run.set("train.micro_batch_size", small_samples, "samples of a micro-batch are alike")


def _replace_schedule(run: SmallRun) -> None:
    """Replace the schedule by one of a few steps; the schedule of the run is not reported."""
    samples = run.sections["train"]["micro_batch_size"]
    run.sections["train"] = {
        "train_iters": TRAIN_STEPS,
        "lr_decay_iters": TRAIN_STEPS + 1,
        "micro_batch_size": samples,
        "global_batch_size": samples,
        "lr_warmup_iters": 0,
        "eval_iters": 0,
        "eval_interval": 0,
    }
    for name, value in {"lr": 1e-4, "min_lr": 0.0}.items():  # a schedule of Megatron's needs both
        if run.sections["optimizer"].get(name) is None:
            run.sections["optimizer"][name] = value


def _replace_optimizer(run: SmallRun) -> None:
    """Let Adam stand for Muon, and the distributed optimizer for the sharding of FSDP and Muon."""
    has_fsdp = bool(run.sections["ddp"].get("use_megatron_fsdp"))
    has_muon = "muon" in str(run.sections["optimizer"].get("optimizer"))
    for section, inert in (("ddp", FSDP_PREFIXES), ("optimizer", ("muon_",))):
        values = dict(run.sections[section])
        for name in run.sections[section]:
            if name.startswith(inert):
                del values[name]
        run.sections[section] = values
    if has_muon:
        run.set("optimizer.optimizer", "adam", "no package of Muon is here")
    if not (has_fsdp or has_muon):
        return
    why = "stands for the sharding of Muon"
    if has_fsdp:
        why = "stands for Megatron-FSDP"
    for section in ("ddp", "optimizer"):
        run.set(f"{section}.use_distributed_optimizer", True, why)
    settings = run.plan.settings
    if settings.low_parameters and settings.scheme == "mxfp8":
        reused = "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"
        run.set(reused, True, f"the distributed optimizer, which {why}")

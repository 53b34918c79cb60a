"""`shrink`: makes a run small enough for a laptop, and keeps its precision and kinds of layers.

    small_run = shrink(run.sections, run.precision)
    small_run.sections["model"]["hidden_size"]
    small_run.changes[0].reason
    small_run.launches[0].processes

Each small size must pass or fail the checks of Megatron and Transformer Engine as the size of the
full run does. So sizes keep their ratio. The width and the tokens of a rank keep their greatest
common divisor with the multiple that the scaling scheme needs. A size that the scheme refuses in
the full run is then refused in the rehearsal too.
"""

from collections.abc import Mapping
from math import gcd
from typing import Any

from bridge.plan.precision_plan import make_plan
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.rehearse.layers import shrink_layers
from bridge.rehearse.layout import LaunchLayout
from bridge.rehearse.small_run import SmallRun
from bridge.rehearse.widths import shrink_widths
from bridge.sync.prediction import predict
from bridge.target.fields import OWNER_FIELDS, parse_integer, read_field
from bridge.target.target import Target
from bridge.target.versions import Version, get_installed_version

MIN_TOKENS = 64
"""The least number of tokens of a sequence on each context-parallel rank."""
TRAIN_STEPS = 2
"""Steps before the checkpoint. One more step follows it."""

SWITCHED_OFF = {
    "tp_comm_overlap": "its user buffers need GPUs",
    "moe_permute_fusion": "its kernels need a GPU",
    "moe_router_fusion": "its kernels need a GPU",
    "use_transformer_engine_op_fuser": "its kernels need a GPU",
    "moe_router_force_load_balancing": "a resume would draw other routes",
}
"""Switch of the model that changes no format -> the reason why a rehearsal switches it off."""
UNSUPPORTED_SWITCHES = {
    "fp8_dot_product_attention": "attention in FP8 has no CPU version",
    "fp8_multi_head_attention": "attention in FP8 has no CPU version",
}
"""Switch of the model or the precision that changes formats -> the reason why a rehearsal leaves
it out."""
FSDP_PREFIXES = (
    "megatron_fsdp_",
    "fsdp_",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
)
"""Prefixes of the fields of DDP that have an effect only under Megatron-FSDP."""
INITIALISER_FIELDS = ("init_method", "output_layer_init_method", "embedding_init_method")
"""Fields whose values are functions. A file has them only as text, and Megatron makes them from
other fields."""
CUDA_GRAPH_FIELDS = ("cuda_graph_scope", "cuda_graph_modules")
"""Parts of a run that its CUDA graphs capture. A CPU captures none.

They are removed because megatron-core 0.19.2 changes `cuda_graph_impl` for the scope
``full_iteration`` (transformer_config.py:2412).
"""

FLEX_DISPATCHER_FIELDS = (
    "moe_deepep_num_sms",
    "moe_hybridep_num_sms",
    "moe_flex_dispatcher_num_sms",
)
"""Streaming multiprocessors of the flex dispatcher, which a rehearsal replaces.

They are removed because megatron-core 0.19.2 refuses the first two together
(transformer_config.py:1631), and a run folder of 0.16.1 states both with their class defaults.
"""


def shrink(
    sections: Mapping[str, Any],
    precision: MixedPrecisionConfig | None,
    *,
    target: Target | None = None,
    local_version: Version | None = None,
    processes: int = 4,
    max_layers: int = 8,
) -> SmallRun:
    """Return a small copy of a run, with its precision, kinds of layers and layout.

    Args:
        sections: The sections of the run.
        precision: The precision of the run. None if only the configs decide it.
        target: The GPUs of the run. If their number is not stated, the least number that the
            parallel sizes need is assumed.
        local_version: The release of Megatron Core that the rehearsal imports. None: the installed
            release.
        processes: The most processes of a launch.
        max_layers: The most layers. There are more if the first and last layers and the pipeline
            need more.

    Raises:
        RunConfigError: The model cannot be built, or cannot be planned.
    """
    target = target or Target()
    small_run = _copy_run(sections, precision, target)
    split_fields = shrink_layers(small_run, max_layers)
    shrink_widths(small_run)
    _shrink_tokens(small_run)
    _replace_schedule(small_run)
    _replace_optimizer(small_run)
    _replace_kernels(small_run)
    _remove_fields(small_run)
    _leave_out_format_switches(
        small_run, target.mcore, local_version or get_installed_version("mcore")
    )
    _leave_out_router_dtype(small_run)
    if sections.get("peft"):
        small_run.record_left_out("peft", sections["peft"], "a run trains all weights")
    small_run.launches = small_run.layout.split_into_launches(processes, split_fields)
    return small_run


def _copy_run(
    sections: Mapping[str, Any], precision: MixedPrecisionConfig | None, target: Target
) -> SmallRun:
    """Return a copy of a run that is not small yet, with the plan of the run."""
    copies = {}
    for name in ("model", "optimizer", "ddp", "train"):
        copies[name] = dict(sections.get(name) or {})
    prediction = predict(precision, copies, target=Target(count=target.count))
    plan = make_plan(prediction)
    stated = None
    if precision is not None:
        stated = precision.to_dict()
    return SmallRun(
        sections=copies,
        precision=stated,
        plan=plan,
        parallel=prediction.parallel,
        layout=LaunchLayout.from_parallel(
            prediction.parallel, is_sharded=plan.settings.distributed
        ),
    )


def _remove_fields(small_run: SmallRun) -> None:
    """Remove model fields that would hinder a launch, or that each launch sets itself."""
    launch_fields = (*LaunchLayout().fields(), "overlap_p2p_comm", "batch_p2p_comm")
    for name in (*INITIALISER_FIELDS, *CUDA_GRAPH_FIELDS, *FLEX_DISPATCHER_FIELDS, *launch_fields):
        small_run.model.pop(name, None)


def _replace_kernels(small_run: SmallRun) -> None:
    """Replace settings that need a GPU, and switch off the random routing of tokens."""
    if small_run.layout.size("context") > 1 and small_run.model.get("cp_comm_type") != "a2a":
        small_run.set(
            "model.cp_comm_type", "all_gather", "context parallelism by p2p has no CPU version"
        )
    if str(read_field(small_run.model, "attention_backend")).lower() in ("flash", "fused"):
        small_run.set("model.attention_backend", "auto", "its kernels need a GPU")
    for name, reason in SWITCHED_OFF.items():
        if read_field(small_run.model, name):
            small_run.set(f"model.{name}", False, reason)


def _leave_out_format_switches(
    small_run: SmallRun, target_version: Version | None, local_version: Version | None
) -> None:
    """Leave out the switches of formats that a rehearsal cannot have on this machine.

    Args:
        target_version: The release of Megatron Core that the run is for.
        local_version: The release of Megatron Core that the rehearsal imports.
    """
    for name, reason in UNSUPPORTED_SWITCHES.items():
        small_run.remove_switch(name, reason)
    versions = OWNER_FIELDS["ddp"]["fp4_param_gather"].has
    needs_later_release = False
    if versions is not None:
        needs_later_release = bool(versions.holds(target_version))
        needs_later_release = needs_later_release and not versions.holds(local_version)
    # The small run may have the distributed optimizer in place of Megatron-FSDP.
    is_sharded = small_run.plan.settings.distributed
    if small_run.sections["ddp"].get("use_distributed_optimizer"):
        is_sharded = True
    if needs_later_release and is_sharded:
        reason = (
            "this Megatron Core cannot keep NVFP4 weights in the distributed optimizer's buffers"
        )
        for name in ("fp4_param", "fp4_param_gather"):
            small_run.remove_switch(name, reason)


def _leave_out_router_dtype(small_run: SmallRun) -> None:
    """Leave out a dtype of the router that Megatron's router ignores."""
    dtype = small_run.model.get("moe_router_dtype")
    if dtype not in (None, "fp32", "fp64"):
        del small_run.model["moe_router_dtype"]
        small_run.record_left_out("model.moe_router_dtype", dtype, "the router does not know it")


def _shrink_tokens(small_run: SmallRun) -> None:
    """Make the sequence and the micro-batch small, and keep the alignment of a rank's tokens."""
    samples = parse_integer(read_field(small_run.sections["train"], "micro_batch_size")) or 1
    small_samples = min(samples, 2)
    seq_length = _find_sequence_length(small_run, samples, small_samples)
    small_run.set("model.seq_length", seq_length, "keeps the alignment of a rank's tokens")
    small_run.model.pop("max_position_embeddings", None)
    small_run.set("train.micro_batch_size", small_samples, "samples of a micro-batch are alike")


def _find_sequence_length(small_run: SmallRun, samples: int, small_samples: int) -> int:
    """Return the least length of a sequence with the alignment of the full run.

    If no length has it, the length is `MIN_TOKENS` for each context-parallel rank.

    Args:
        samples: Samples of a micro-batch in the full run.
        small_samples: Samples of a micro-batch in the rehearsal.
    """
    multiple = small_run.alignment
    context_ranks = small_run.layout.size("context")
    sequence_ranks, small_sequence_ranks = 1, 1
    if small_run.parallel.sequence_parallel:
        sequence_ranks, small_sequence_ranks = small_run.parallel.tensor, small_run.tensor_ranks
    wanted = _measure_token_alignment(
        multiple,
        tokens=small_run.shape.seq_length or MIN_TOKENS,
        samples=samples,
        context_ranks=small_run.parallel.context,
        sequence_ranks=sequence_ranks,
    )
    shortest = MIN_TOKENS * context_ranks
    for tokens in range(shortest, shortest + 8 * multiple * context_ranks):
        alignment = _measure_token_alignment(
            multiple,
            tokens=tokens,
            samples=small_samples,
            context_ranks=context_ranks,
            sequence_ranks=small_sequence_ranks,
        )
        if alignment == wanted:
            return tokens
    return shortest


def _measure_token_alignment(
    multiple: int, *, tokens: int, samples: int, context_ranks: int, sequence_ranks: int
) -> tuple[object, ...]:
    """Return the divisibility of a sequence, on which checks of Megatron and TE depend.

    Args:
        multiple: The multiple that the scaling scheme needs.
        tokens: Tokens of a sequence.
        samples: Samples of a micro-batch.
        context_ranks: Context-parallel ranks. Each has two parts of a sequence.
        sequence_ranks: Ranks that share the tokens under sequence parallelism, 1 without it.
    """
    tokens_on_rank = tokens // context_ranks
    is_context_divisible = context_ranks == 1 or tokens % (2 * context_ranks) == 0
    is_sequence_divisible = tokens_on_rank % sequence_ranks == 0
    return is_context_divisible, is_sequence_divisible, gcd(tokens_on_rank * samples, multiple)


def _replace_schedule(small_run: SmallRun) -> None:
    """Replace the schedule by a schedule of a few steps.

    It is not recorded as a change, since every rehearsal has it.
    """
    samples = small_run.sections["train"]["micro_batch_size"]
    small_run.sections["train"] = {
        "train_iters": TRAIN_STEPS,
        "lr_decay_iters": TRAIN_STEPS + 1,
        "micro_batch_size": samples,
        "global_batch_size": samples,
        "lr_warmup_iters": 0,
        "eval_iters": 0,
        "eval_interval": 0,
    }
    # Megatron's schedule needs both learning rates.
    for name, value in {"lr": 1e-4, "min_lr": 0.0}.items():
        if small_run.sections["optimizer"].get(name) is None:
            small_run.sections["optimizer"][name] = value


def _replace_optimizer(small_run: SmallRun) -> None:
    """Replace Muon by Adam, and Megatron-FSDP and Muon's sharding by the distributed optimizer."""
    has_fsdp = bool(small_run.sections["ddp"].get("use_megatron_fsdp"))
    has_muon = "muon" in str(small_run.sections["optimizer"].get("optimizer"))
    # These fields have no effect without Megatron-FSDP and Muon.
    for section, prefixes in (("ddp", FSDP_PREFIXES), ("optimizer", ("muon_",))):
        values = dict(small_run.sections[section])
        for name in small_run.sections[section]:
            if name.startswith(prefixes):
                del values[name]
        small_run.sections[section] = values
    if has_muon:
        small_run.set("optimizer.optimizer", "adam", "no package of Muon is here")
    if not (has_fsdp or has_muon):
        return
    reason = "stands for the sharding of Muon"
    if has_fsdp:
        reason = "stands for Megatron-FSDP"
    for section in ("ddp", "optimizer"):
        small_run.set(f"{section}.use_distributed_optimizer", True, reason)
    settings = small_run.plan.settings
    if settings.low_parameters and settings.scheme == "mxfp8":
        # The distributed optimizer needs this switch for weights that are stored in MXFP8.
        path = "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"
        small_run.set(path, True, f"the distributed optimizer, which {reason}")

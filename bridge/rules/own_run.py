"""What scripts/train.py refuses: fields that its build does not honour, and values that Megatron misreads.

`check` asks the rules of the whole run, and the build asks them of its configs before it makes a model. Both get the
same sentence and the same id.

A run honours the fields of the release that it was tried with: it reads them, or they change no number here; a test
changes each of them alone and compares two steps. The others are refused where they differ from the default of
Megatron's class, so that no run silently trains another model than the one in its config: `REFUSED` in every run,
`REFUSED_WITHOUT_TE` where the layers are not Transformer Engine's, `REFUSED_ON_CPU` where its Python runs without its
GPU, and a field of another release.

Source: megatron-core 0.16.1, its readers of each field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from bridge.errors import close_matches, did_you_mean
from bridge.model.hybrid import HybridPattern
from bridge.model.variants import DELTA_NET, SPARSE
from bridge.rules.rule import error
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.fields import DEFAULTS, FIELDS, differ
from bridge.target.versions import parse_version

Found = Iterator[tuple[str, Violation]]
"""Id of a rule, and where the run breaks it."""
TRIED = parse_version("0.16.1")
"""The release of Megatron Core that each field was tried with."""
BUILT = (
    *("vocab_size", "seq_length", "make_vocab_size_divisible_by", "position_embedding_type"),
    *("hybrid_layer_pattern", "hybrid_override_pattern"),
)
"""Fields of the model that the build reads and no class of Megatron Core has."""
BUILT_LAYERS = frozenset("M*-E")
"""Letters of the layers of a hybrid model that megatron-core 0.16.1 has."""
LATER = ("cuda_graph_modules", "inference_cuda_graph_scope", "fp4_param_gather")
"""Fields of later releases that change no number here, or that another check refuses."""


def _by_field(**reasons: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return section -> field -> reason, of section -> reason -> fields."""
    rows = [
        (key, name, why)
        for key, of in reasons.items()
        for why, names in of.items()
        for name in names.split()
    ]
    if len({row[:2] for row in rows}) < len(rows):
        raise ValueError("a field has two reasons")
    return {key: {name: why for section, name, why in rows if section == key} for key in reasons}


REFUSED = _by_field(
    model={
        "the layers of a run are all of one config": "heterogeneous_block_specs hetereogenous_dist_checkpoint",
        "the library is not a backend of a run": "use_kitchen use_kitchen_attention",
        "context-parallel ranks of a run share each sequence alike, in one step": """
            hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel
            """,
        "Megatron Core reads it nowhere": """
            apply_residual_connection_post_layernorm moe_router_topk_limited_devices moe_extended_tp moe_token_dropping
            keep_mtp_spec_in_bf16
            """,
        "the step takes the mean of each micro-batch": "calculate_per_token_loss",
        "the step clips no weights of queries and keys, and logs no logits": "qk_clip log_max_attention_logit",
        "the run logs no losses of single layers": "moe_per_layer_logging",
        "the step records no routes": "moe_enable_routing_replay",
        "the step passes no such switch to a micro-batch": "num_microbatches_with_partial_activation_checkpoints",
        "the step has no schedule for it": """
            overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
            defer_embedding_wgrad_compute wgrad_deferral_limit
            """,
        "the run trains every weight, and has no part in front of the language model": """
            freeze_language_model freeze_vision_model freeze_vision_projection freeze_audio_model freeze_sound_encoder
            """,
        "the run captures no graphs": "enable_cuda_graph external_cuda_graph cuda_graph_impl",
        "the run has its own hook": """
            finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
            """,
        "the run has Megatron's own random states": "use_te_rng_tracker inference_rng_tracker",
        "the process groups of a run take no such choice": "pipeline_model_parallel_comm_backend",
        "weights are made with values at once": "init_model_with_meta_device",
        "Megatron's distributed checkpoints cannot hold Transformer Engine's activations": "use_te_activation_func",
        "this torch has no ring exchange": "use_ring_exchange_p2p",
        "its experts are one matrix, which no plan and no format knows": "moe_use_legacy_grouped_gemm",
        "it belongs to inference, and training refuses it": "cache_mla_latents flash_decode",
        "the run enables no batch-invariant kernels, which megatron.training does": "batch_invariant_mode",
    },
    optimizer={
        "no parameter of the model is marked for a rate of its own": "decoupled_lr decoupled_min_lr",
        "the run records no number of zeros": "log_num_zeros_in_grad",
        "the step has no order for it": "overlap_param_gather_with_optimizer_step",
    },
    ddp={
        "the run shards with the distributed optimizer only": """
            use_megatron_fsdp use_custom_fsdp use_torch_fsdp2 data_parallel_sharding_strategy outer_dp_sharding_strategy
            """,
        "the process groups of a run have one instance": "num_distributed_optimizer_instances",
        "the step has no schedule for it": "delay_wgrad_compute",
    },
)
"""Section -> field that no run honours -> reason."""

REFUSED_WITHOUT_TE = _by_field(
    model={
        "Megatron's local layers keep residual and norm in one dtype": "fp32_residual_connection",
        "Megatron's local norm has no such form": "layernorm_zero_centered_gamma memory_efficient_layer_norm",
        "its kernel is Transformer Engine's": """
            fused_single_qkv_rope moe_permute_fusion moe_router_fusion moe_latent_size symmetric_ar_type
            activation_func_fp8_input_store
            """,
        "Transformer Engine moves the tensors": "cpu_offloading fine_grained_activation_offloading",
        "Transformer Engine overlaps the two": "tp_comm_overlap moe_shared_expert_overlap",
    },
    optimizer={"it moves tensors between a GPU and its host": "optimizer_cpu_offload"},
    ddp={"the buffers are registered with NCCL": "nccl_ub"},
)
"""Section -> field that needs Transformer Engine's layers, or the GPU that these run on -> reason."""

REFUSED_OF_HYBRIDS = _by_field(
    model={
        "Megatron Core interleaves no hybrid model": "virtual_pipeline_model_parallel_size",
        "the pipeline stages of a hybrid model have equal numbers of layers": """
            pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            """,
        "Megatron Core before 0.18 recomputes no whole layer of a hybrid model": "recompute_granularity",
        "the attention layers of megatron-core 0.16.1's hybrid models are plain": """
            qk_layernorm qk_l2_norm multi_latent_attention experimental_attention_variant
            """,
    }
)["model"]
"""Field of the model that a hybrid does not honour -> reason."""

REFUSED_ON_CPU = _by_field(
    model={
        "Transformer Engine's kernel has no CPU version": """
            fused_single_qkv_rope moe_permute_fusion moe_router_fusion symmetric_ar_type
            """,
        "attention in FP8 has no CPU version": "fp8_dot_product_attention fp8_multi_head_attention",
        "userbuffers have no CPU version": "tp_comm_overlap",
        "there is no GPU to move tensors from": "cpu_offloading fine_grained_activation_offloading",
        "Transformer Engine's norms take residuals in the dtype of their weights": "fp32_residual_connection",
    },
)
REFUSED_ON_CPU |= {section: REFUSED_WITHOUT_TE[section] for section in ("optimizer", "ddp")}
"""Section -> field that needs more than Transformer Engine's Python (`precision_backend=te_cpu`) -> reason."""

WITH_TE = ("te", "te_cpu")
"""Backends whose linear layers are Transformer Engine's."""

ACCEPTED: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "position_embedding_type": ("rope", "learned_absolute", "none"),
        "moe_token_dispatcher_type": ("allgather", "alltoall"),
        "transformer_impl": ("transformer_engine", "local"),
        "normalization": ("LayerNorm", "RMSNorm"),
        "rope_type": ("rope", "yarn"),
        "experimental_attention_variant": (*DELTA_NET, SPARSE),
    },
    "optimizer": {"optimizer": ("adam", "sgd")},
}
"""Section -> field -> the only values that a run can have."""
ACCEPTED_WITHOUT_TE = {"attention_backend": ("auto", "local", "unfused")}
"""Field of the model -> the only values without Transformer Engine's layers."""

COMMUNICATION = {"te": ("p2p", "all_gather", "a2a"), "te_cpu": ("all_gather", "a2a")}
"""Backend -> values of `cp_comm_type` under context parallelism; any other has `all_gather` alone."""
PLAIN_ATTENTION = {"attention_dropout": 0.0, "window_size": None, "softmax_type": "vanilla"}
PLAIN_LOCAL_ATTENTION = {"apply_query_key_layer_scaling": False, "attention_softmax_in_fp32": True}
"""Field of the model -> the only value under context parallelism without a GPU, and without Transformer Engine."""

BETWEEN: tuple[tuple[str, float, float], ...] = (
    ("rotary_percent", 0, 1),
    ("embedding_init_method_std", 0, math.inf),
    ("num_attention_heads", 1, math.inf),
    ("mtp_loss_scaling_factor", 0, math.inf),
    ("moe_z_loss_coeff", 0, math.inf),
)
"""Field of the model, and the least and the most that it can be; None is left to the field's own meaning."""

UNKNOWN = "this build was not tried with a Megatron Core that has it"


KNOWN = {
    section: frozenset(
        name
        for name, row in FIELDS[section].items()
        if name in (*BUILT, *LATER, "share_embeddings_and_output_weights", "use_torch_fsdp2")
        or (row.is_megatron and (row.has is None or row.has.holds(TRIED)))
    )
    for section in REFUSED
}
"""Section -> fields that a run was tried with."""

NOT_HONOURED, WRONG_VALUE, WRONG_LAYOUT = "PB701", "PB702", "PB703"
_DEFAULTS = {
    role: {
        name: DEFAULTS[role][name]
        for name, row in FIELDS[role].items()
        if row.is_megatron or name in (*BUILT, *REFUSED[role])
    }
    for role in REFUSED
}


def unhonoured(section: str, values: Mapping[str, Any], *, backend: str | None) -> Found:
    """Yield the fields of a section that a run would not honour, and the values that it does not know.

    Args:
        section: model, optimizer or ddp.
        values: Field -> value; fields that are not there have their default.
        backend: te, te_cpu, emulated or local; None: not known, so that only refusals of all of them count.
    """
    reasons = REFUSED[section]
    if backend not in ("te", None):
        reasons = reasons | (REFUSED_ON_CPU if backend == "te_cpu" else REFUSED_WITHOUT_TE)[section]
    has_te_layers = section != "model" or backend in (*WITH_TE, None)
    accepted = ACCEPTED.get(section, {}) | ({} if has_te_layers else ACCEPTED_WITHOUT_TE)
    for name, default in _DEFAULTS[section].items():
        value = values.get(name, default)
        if not differ(value, default):
            continue
        if name in accepted and str(getattr(value, "name", value)) not in accepted[name]:
            hint = did_you_mean(close_matches(str(value), accepted[name])) or "Choose one of them."
            yield _fault(
                WRONG_VALUE,
                f"{section}.{name}",
                value,
                f"must be one of {', '.join(accepted[name])}",
                hint,
            )
        elif name in reasons or name not in KNOWN[section]:
            yield _left_out(
                f"{section}.{name}", value, reasons.get(name, UNKNOWN), f"Leave it at {default!r}."
            )
    if section == "model":
        yield from _unhonoured_context({**_DEFAULTS["model"], **values}, backend)


def _unhonoured_context(model: Mapping[str, Any], backend: str | None) -> Found:
    """Yield the fault of context parallelism that the attention of a backend has not."""
    path, size, stated = (
        "model.context_parallel_size",
        model["context_parallel_size"],
        model["cp_comm_type"],
    )
    if size == 1:
        return
    if model["experimental_attention_variant"] == SPARSE:
        reason = "the sparse attention of megatron-core 0.16.1 has no context parallelism"
        yield _left_out(path, size, reason, "Leave it at 1.")
        return
    kinds = COMMUNICATION.get(backend or "te", ("all_gather",))
    found = {*map(str, stated if isinstance(stated, list) else [stated or "p2p"])} - {*kinds}
    plain = PLAIN_ATTENTION | ({} if backend == "te_cpu" else PLAIN_LOCAL_ATTENTION)
    wanted = {} if backend in ("te", None) else plain
    others = [
        name for name, value in wanted.items() if getattr(model[name], "name", model[name]) != value
    ]
    if found or others:
        causes = [*(f"by {kind}" for kind in sorted(found)), *(f"with {name}" for name in others)]
        steps = [f"model.cp_comm_type={' or '.join(kinds)}"] if found else []
        steps += [f"model.{name}={wanted[name]}" for name in others]
        also = " precision_backend=te_cpu has a2a." if "a2a" in found else ""
        reason = f"the backend {backend} has no context parallelism {', '.join(causes)}"
        yield _left_out(path, size, reason, f"Set {', '.join(steps)}.{also}")


def _fields(run: RunContext, backend: str | None) -> Found:
    """Yield the fields that the build would leave out, those of a release that nobody tried included."""
    for role in REFUSED:
        yield from unhonoured(role, run.views[role].values, backend=backend)
        for name, value in run.sections[role].newer.items():
            yield _left_out(f"{role}.{name}", value, UNKNOWN, "Leave it at its default.")


def _values(run: RunContext, backend: str | None) -> Found:
    """Yield the values of a model that Megatron would build a model with, or end in a traceback for."""
    wrong, model = partial(_wrong, WRONG_VALUE, run), run.model
    for name, least, most in BETWEEN:
        value = getattr(model, name)
        if value is not None and not least <= value <= most:
            limits = (
                f"must be at least {least}"
                if most == math.inf
                else f"must be from {least} to {most}"
            )
            yield wrong(name, limits, "Correct it.")
    experts = model.num_moe_experts
    if not experts:
        return
    if not 1 <= model.moe_router_topk <= experts:
        yield wrong("moe_router_topk", f"must be from 1 to the {experts} experts", "Correct it.")
    if model.add_bias_linear and model.moe_shared_expert_intermediate_size:
        yield wrong(
            "add_bias_linear", "shared experts have no biases", "Set model.add_bias_linear=false."
        )
    elif model.add_bias_linear and backend not in (
        *WITH_TE,
        None,
    ):  # local experts add them in place: no autograd
        rule = "experts have no biases without Transformer Engine's layers"
        yield wrong("add_bias_linear", rule, "Set model.add_bias_linear=false.")


def _sparse(run: RunContext, backend: str | None) -> Found:
    """Yield what DeepSeek sparse attention of Megatron Core ends in a traceback for."""
    wrong, model = partial(_wrong, WRONG_VALUE, run), run.model
    if model.experimental_attention_variant != SPARSE:
        return
    if model.dsa_indexer_loss_coeff is None:
        rule = (
            "must be stated for sparse attention: Megatron Core multiplies the indexer's loss by it"
        )
        yield wrong("dsa_indexer_loss_coeff", rule, "Set it to 0.01, for example.")
    recomputed = run.views["model"].recompute_modules or ["core_attn"]
    if model.recompute_granularity == "selective" and "core_attn" in recomputed:
        rule = "must not name core_attn for sparse attention, which Megatron Core recomputes without its hidden states"
        yield wrong("recompute_modules", rule, "Recompute whole layers, or other modules.")
    if model.mtp_num_layers:
        rule = (
            "must be unset for sparse attention: megatron-core 0.16.1 keeps indexers' losses of the "
            "other layers alone"
        )
        yield wrong("mtp_num_layers", rule, "Leave it at None.")
    if model.tensor_model_parallel_size > 1 and backend not in (*WITH_TE, None):
        rule = "must be 1 for sparse attention without Transformer Engine's layers: its indexer is whole on every rank"
        yield _wrong(WRONG_LAYOUT, run, "tensor_model_parallel_size", rule, "Set it to 1.")


def _hybrid(run: RunContext, _: str | None) -> Found:
    pattern = HybridPattern.of(run.views["model"].values)
    if pattern is None or pattern.faults:
        return
    for name, reason in REFUSED_OF_HYBRIDS.items():
        value = getattr(run.model, name)
        if (
            value and value != "selective"
        ):  # the recomputation of a part of a layer, which is the layer's
            yield _left_out(f"model.{name}", value, reason, "Leave it at its default.")
    if {*pattern.layers} - BUILT_LAYERS or pattern.chunks or pattern.depths:
        rule = "a run builds layers of M, *, - and E; Megatron Core has |, / and other layers from 0.17 on"
        yield _wrong(WRONG_VALUE, run, pattern.field, rule, "Write those alone.")


def _layouts(run: RunContext, backend: str | None) -> Found:
    """Yield the fields of a layout with which Megatron ends in a traceback, or trains another model."""
    wrong, model = partial(_wrong, WRONG_LAYOUT, run), run.model
    tensor, context, stages = run.parallel.tensor, run.parallel.context, run.parallel.pipeline
    for name in ("num_attention_heads", "num_query_groups"):
        if (
            context > 1
            and "a2a" in str(model.cp_comm_type)
            and (getattr(model, name) or 0) % (tensor * context)
        ):
            rule = f"must be a multiple of tensor x context ranks = {tensor * context} with cp_comm_type=a2a"
            yield wrong(name, rule, "Use cp_comm_type=all_gather, or change one of them.")
    if model.virtual_pipeline_model_parallel_size is not None and stages < 2:
        rule = f"interleaves the stages of a pipeline, and there is {stages} (pipeline_model_parallel_size)"
        yield wrong("virtual_pipeline_model_parallel_size", rule, "Leave it at None.")
    if tensor > 1:
        yield from _tensor_parallel(run, backend)
    parts, dispatcher = run.parallel.expert_tensor, model.moe_token_dispatcher_type
    is_uneven = model.num_moe_experts and run.parallel.expert > 1 and dispatcher == "alltoall"
    if parts > 1 and is_uneven and backend not in ("te", None):
        rule = "must be 1 where experts are on several ranks without a GPU: gloo gathers equal numbers of tokens alone"
        remedy = "Set it to 1, or model.moe_token_dispatcher_type=allgather."
        yield _fault(WRONG_LAYOUT, "model.expert_tensor_parallel_size", parts, rule, remedy)


def _tensor_parallel(run: RunContext, backend: str | None) -> Found:
    """Yield what Megatron trains wrong under tensor parallelism."""
    wrong, model = partial(_wrong, WRONG_LAYOUT, run), run.model
    if model.num_moe_experts and not model.sequence_parallel:
        rule = "must be on for experts under tensor parallelism, without which Megatron Core does not train them"
        yield wrong("sequence_parallel", rule, "Set model.sequence_parallel=true.")
    if model.multi_latent_attention and not model.sequence_parallel:
        remedy = (
            "Without it Megatron Core's gradients of the rotary key and of the latent's norm are not those of the "
            "model. Set model.sequence_parallel=true."
        )
        yield wrong(
            "sequence_parallel", "must be on for latent attention under tensor parallelism", remedy
        )
    if model.sequence_parallel and model.enable_autocast and backend not in (*WITH_TE, None):
        rule = (
            "must be off under autocast without Transformer Engine's layers: the backward pass of Megatron Core's own "
            "would reduce gradients in half precision into an FP32 tensor, which is an error"
        )
        yield wrong("sequence_parallel", rule, "Set model.sequence_parallel=false.")


def _left_out(path: str, value: object, reason: str, remedy: str) -> tuple[str, Violation]:
    return _fault(NOT_HONOURED, path, value, f"this run does not honour it: {reason}", remedy)


def _wrong(
    rule: str, run: RunContext, name: str, clause: str, remedy: str
) -> tuple[str, Violation]:
    return _fault(rule, f"model.{name}", getattr(run.model, name), clause, remedy)


def _fault(rule: str, path: str, value: object, clause: str, remedy: str) -> tuple[str, Violation]:
    return rule, Violation(
        path, value=getattr(value, "name", value), clause=clause, remedy=remedy.removesuffix(".")
    )


def _broken(rule: str) -> Callable[[RunContext], list[Violation]]:
    def found(run: RunContext) -> list[Violation]:
        if not run.program.is_own:
            return []
        backend = run.backend
        if backend is None and run.target.gpu is not None:
            backend = "te" if run.has_gpu else "emulated"
        laws = (_fields, _values, _sparse, _hybrid, _layouts)
        return [one for law in laws for name, one in law(run, backend) if name == rule]

    return found


_SOURCE = "bridge/rules/own_run.py: megatron-core 0.16.1, its readers of each field"
_row = partial(error, setting="model", message="{clause}", remedies=("{remedy}",))

RULES = (
    _row(
        id=NOT_HONOURED,
        title="field that the run does not honour",
        when=_broken(NOT_HONOURED),
        source=_SOURCE,
        explanation="The build of scripts/train.py would leave the field out and train another model. Which fields it "
        "honours depends on the layers: Transformer Engine's, its Python on a CPU, or the emulated ones.",
    ),
    _row(
        id=WRONG_VALUE,
        title="value that the run cannot have",
        when=_broken(WRONG_VALUE),
        source=_SOURCE,
        explanation="The build of scripts/train.py has no such value, or Megatron would end in a traceback for it.",
    ),
    _row(
        id=WRONG_LAYOUT,
        title="layout that trains another model",
        when=_broken(WRONG_LAYOUT),
        source="Runs of megatron-core 0.16.1 over gloo, compared with one process",
    ),
)

"""Weights stored in FP8 or FP4: the configs that have to agree on it, and its cost."""

from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, PARSER, Rule, mcore, owners_rule, precision_rule, target_rule


def storing(s: RuleContext, family: str) -> dict[str, Any]:
    """Return the setting that stores the weights in low precision: the recipe's, or that of an owner's own."""
    gather = f"{family}_param_gather"
    if s.precision is None or s.precision.is_stated(gather):
        return {"path": gather, "value": True}
    role, name = ("ddp", gather) if getattr(s.ddp, gather) else ("model", f"{family}_param")
    return {"path": f"{role}.{name}", "value": True, "where": s.where(f"{role}.{name}") or role}


def _is_unsharded(s: RuleContext) -> bool:
    owners = [s.views[role] for role in ("optimizer", "ddp") if role in s.given]
    known = any(owner.use_distributed_optimizer is not None for owner in owners)
    return known and not s.is_sharded and not s.has_megatron_fsdp and not s.has_torch_fsdp2


def _two_answers(s: RuleContext) -> list[dict[str, Any]]:
    found = []
    for family in ("fp8", "fp4"):
        mine, theirs = f"{family}_param", f"{family}_param_gather"
        if mine in s.stated and theirs in s.stated and s.stated[mine] != s.stated[theirs]:
            found.append({"path": mine, "value": s.stated[mine], "other": theirs, "theirs": s.stated[theirs]})
    return found


def _without_format(s: RuleContext) -> list[dict[str, Any]]:
    found = []
    for family, chosen in (("fp8", "e4m3"), ("fp4", "e2m1")):
        if getattr(s, family) or family in s.stated:  # stated to be off: no doubt about the run
            continue
        for name in (f"{family}_param_gather", f"{family}_param"):
            if s.stated.get(name) or (s.precision is None and getattr(s, f"gathers_{family}")):
                found.append({"path": name, "value": True, "family": family, "name": family.upper(), "chosen": chosen})
                break
    return found


def _half_told(s: RuleContext) -> list[dict[str, Any]]:
    """Return the families of which only the model or only DDP knows that weights are stored in them."""
    if not (s.has_model and s.has_ddp):
        return []
    return [
        {"path": f"model.{family}_param", "other": f"ddp.{family}_param_gather", "theirs": theirs}
        for family, mine, theirs in (
            ("fp8", s.model.fp8_param, s.ddp.fp8_param_gather),
            ("fp4", s.model.fp4_param, s.ddp.fp4_param_gather),
        )
        if mine != theirs
    ]


RULES = (
    owners_rule(
        heading="PB301: FP8 weights without sharded optimizer",
        sync="strict",
        predicate=lambda s: _is_unsharded(s) and storing(s, "fp8"),
        error="fp8_param_gather: weights can be stored in FP8 only under the distributed optimizer or FSDP",
        remedies=("set use_distributed_optimizer=True in optimizer and ddp", "set fp8_param_gather=False"),
        verified=PARSER,
        gate="gathers_fp8",
    ),
    owners_rule(
        heading="PB302: FP4 weights without sharded optimizer",
        sync="strict",
        predicate=lambda s: _is_unsharded(s) and storing(s, "fp4"),
        error="fp4_param_gather: weights can be stored in FP4 only under the distributed optimizer or FSDP",
        remedies=("set use_distributed_optimizer=True in optimizer and ddp", "set fp4_param_gather=False"),
        verified="megatron-core 0.19.2 optimizer/distrib_optimizer.py: the only optimizer that updates FP4 weights",
        gate="gathers_fp4",
    ),
    owners_rule(
        heading="PB303: stored weights that are never updated",
        predicate=_half_told,
        error="model.fp8_param: must equal {other}, which is {theirs!r}: the optimizer skips low-precision weights "
        "that DDP does not know of",
        remedies=("give both the same value", "choose a recipe, which writes both"),
        verified="megatron-core 0.19.2 optimizer/distrib_optimizer.py (since 0.17.1; up to 0.17.0 the copy was "
        "unconditional)",
        versions=(mcore(since="0.17.1"),),
        explanation="The weights keep the values they were made with, and the loss falls only as far as the other "
        "parameters take it.",
    ),
    precision_rule(
        heading="PB304: two answers to one question",
        predicate=_two_answers,
        error="fp8_param: is another name of {other}, which says {theirs!r} and is the one that is read",
        remedies=("give one of the two names", "give both the same value"),
        verified="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py, 2026-08-22: the last one set wins silently",
        gate="precision",
    ),
    precision_rule(
        heading="PB305: stored weights without their format",
        predicate=_without_format,
        error="fp8_param_gather: weights can be stored in {name} only in an {family} run",
        remedies=("set it to False", "say {family}={chosen!r}"),
        verified=f"{MODEL_CHECK}; Megatron-LM training/arguments.py, 0.19.2",
    ),
    target_rule(
        heading="PB306: FP8 that takes more memory",
        predicate=lambda s: s.has_owners and not s.gathers_fp8 and not s.is_emulated,
        info="fp8_param_gather: weights stay in {s.mode} and are cast again in every step: expect more memory than "
        "{s.mode} alone, not less",
        remedies=("store them in FP8 (fp8_param_gather=True)", "count it with `precision-bridge memory`"),
        reported="NVIDIA/TransformerEngine issues 257 (2023-06-01 to 2026-01-15) and 1261 (2024-10-16)",
        gate="fp8",
    ),
    owners_rule(
        heading="PB307: FP16 weights that pass through BF16",
        predicate=lambda s: s.is_fp16 and s.gathers_fp8 and s.reuses_buffer and s.ddp.grad_reduce_in_fp32,
        warning="reuse_grad_buf_for_mxfp8_param_ag: Megatron gathers weights through the FP32 gradient buffer as BF16, "
        "whatever the mode, so FP16 weights lose three bits",
        remedies=("use BF16", "set reuse_grad_buf_for_mxfp8_param_ag=False and fp8_param_gather=False"),
        verified="megatron-core 0.16.1 distributed/param_and_grad_buffer.py:786-790; measured on a run",
        gate="is_mxfp8",
    ),
    target_rule(
        heading="PB308: stored weights with masters of nothing",
        predicate=lambda s: bool(s.model.use_cpu_initialization) and (s.backend == "te_cpu" or not s.is_emulated),
        error="model.use_cpu_initialization: must be off where weights are stored in FP8, whose masters would be "
        "memory that nothing has written",
        remedies=("set model.use_cpu_initialization=False", "set fp8_param_gather=False"),
        verified="megatron-core 0.16.1 extensions/transformer_engine.py:836-853, optimizer/distrib_optimizer.py:385; "
        "measured on a run with Transformer Engine 2.20.2 on a CPU",
        explanation="Transformer Engine keeps a stored weight's first value for the master when it makes the weight. "
        "Megatron initialises the weight on the CPU after that.",
        gate="gathers_fp8",
    ),
    target_rule(
        heading="PB309: stored weights without masters",
        predicate=lambda s: (
            s.mode == "fp32"
            and not s.is_delayed
            and s.optimizer.optimizer == "adam"
            and not (s.has_megatron_fsdp or s.has_torch_fsdp2)
            and (s.backend == "te_cpu" or not s.is_emulated)
        ),
        error="fp8_param_gather: an FP32 run has no master weights, and Transformer Engine's Adam refuses to update "
        "{s.scheme} weights without them in the first step",
        remedies=("state bf16=True", "set fp8_param_gather=False"),
        verified="Transformer Engine 2.20.2 pytorch/optimizers/fused_adam.py:700; met in a rehearsal of Megatron-LM "
        "tests/functional_tests/test_cases/moe/deepseek_proxy_fsdp_ep2_fsdp2 (main of 2026-08-22) without its FSDP",
        gate="gathers_fp8",
    ),
    Rule(
        heading="PB310: a shared buffer that the training loop has to fill",
        predicate=lambda s: (
            s.gathers_fp8 and s.reuses_buffer and s.ddp.overlap_param_gather and not s.has_megatron_fsdp
        ),
        info="reuse_grad_buf_for_mxfp8_param_ag: under overlap_param_gather the training loop has to copy the master "
        "weights into the shared buffer before each step, or the loss stays where it was, without an error",
        remedies=("call _copy_main_params_to_param_buffer() behind zero_grad_buffer() in a loop of your own",),
        verified="megatron-core 0.16.1 optimizer/optimizer.py:579-583, which leaves it to the loop; Megatron-LM main "
        "of 2026-08-22 training/training.py train_step; measured on a run",
        explanation="Weights and gradients share the buffer, and zeroing the gradients zeroes the weights. A gather "
        "that is forced before a validation or a checkpoint marks the weights as gathered (0.16.1: "
        "distributed_data_parallel.py:491, param_and_grad_buffer.py:300), so that the loop has to finish it too.",
        gate="is_mxfp8",
    ),
)

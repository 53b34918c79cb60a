"""In which dtype gradients are accumulated, reduced and applied."""

from functools import partial
from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import PARSER, Rule, mcore, owners_rule, sync_rule


def _unread_accumulation(s: RuleContext) -> list[dict[str, Any]]:
    sends, keeps = "reduce_scatter_with_fp32_accumulation", "param_name_patterns_for_fp32_local_accumulation"
    stated = [name for name in (sends, keeps) if s.stands_out(name) and s.has_ddp]
    found = []
    for name in stated:
        if s.has_megatron_fsdp:
            found.append({"path": name, "why": "Megatron-FSDP has buffers of its own"})
        elif s.is_fp32:
            found.append({"path": name, "why": "gradients are FP32 in an FP32 run"})
        elif name == sends and not s.is_sharded:
            found.append({"path": name, "why": "without the distributed optimizer gradients are all-reduced"})
    return found


_ddp = partial(owners_rule, gate="has_ddp")

RULES = (
    owners_rule(
        heading="PB361: BF16 gradients by default",
        predicate=lambda s: (
            s.has_ddp
            and s.precision is None
            and not s.ddp.grad_reduce_in_fp32
            and not s.has_megatron_fsdp
            and s.optimizer.main_grads_dtype == "fp32"
        ),
        warning="ddp.grad_reduce_in_fp32: is Megatron's class default, while Megatron-LM's argument parser turns it on "
        "for BF16: gradients are accumulated over micro-batches and ranks in BF16",
        remedies=("set it to True", "choose a recipe: the bf16 ones state True", "silence this if BF16 is meant"),
        verified=f"{PARSER}; NVIDIA/Megatron-LM issue 1335, 2024-12-24",
        gate="is_bf16",
    ),
    Rule(
        heading="PB362: half-precision reduction",
        predicate=lambda s: s.stated.get("grad_reduce_in_fp32") is False and s.has_ddp and not s.has_megatron_fsdp,
        info="grad_reduce_in_fp32: gradients go {s.flow}",
        remedies=("state grad_reduce_in_fp32=True for FP32 sums",),
        verified="megatron-core 0.16.1 distributed/distributed_data_parallel.py",
        gate="is_bf16",
    ),
    owners_rule(
        heading="PB363: main gradient dtype without a reader",
        predicate=lambda s: s.optimizer.main_grads_dtype not in ("fp32", None) and s.ddp.grad_reduce_in_fp32,
        warning="optimizer.main_grads_dtype: contradicts ddp.grad_reduce_in_fp32, which alone decides: main gradients "
        "are FP32",
        remedies=("leave it at fp32", "set grad_reduce_in_fp32=False"),
        verified="Megatron-LM training/arguments.py validate_args, 0.19.2: asserted there, ignored by configs built in "
        "Python",
        gate="has_precision_aware",
    ),
    _ddp(
        heading="PB364: FP32 accumulation in the reduce-scatter turned off",
        predicate=lambda s: s.ddp.reduce_scatter_with_fp32_accumulation and s.ddp.grad_reduce_in_fp32,
        warning="ddp.reduce_scatter_with_fp32_accumulation: Megatron-LM sets it to False together with "
        "grad_reduce_in_fp32",
        remedies=("drop it: the reduction is in FP32 already", "set grad_reduce_in_fp32=False"),
        verified="Megatron-LM main of 2026-08-22 training/arguments.py validate_args",
    ),
    _ddp(
        heading="PB365: local FP32 accumulation together with FP32 reduction",
        predicate=lambda s: s.ddp.param_name_patterns_for_fp32_local_accumulation and s.ddp.grad_reduce_in_fp32,
        error="ddp.param_name_patterns_for_fp32_local_accumulation: chooses parameters to accumulate in FP32 where "
        "grad_reduce_in_fp32 does it for all of them",
        remedies=("drop the patterns", "state grad_reduce_in_fp32=False"),
        verified="megatron-core 0.17.1 distributed_data_parallel_config.py __post_init__: an assertion",
        versions=(mcore(since="0.17"),),
    ),
    sync_rule(
        heading="PB366: FP32 accumulation without effect",
        predicate=_unread_accumulation,
        warning="reduce_scatter_with_fp32_accumulation: has no effect: {why}",
        remedies=("drop it",),
        verified="megatron-core 0.16.1 distributed/param_and_grad_buffer.py:163, :488; 0.19.2 :1365",
    ),
)

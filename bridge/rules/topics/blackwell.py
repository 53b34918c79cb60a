"""MXFP8 and NVFP4, the schemes of Blackwell: the shared gradient buffer, and where FP4 does not reach."""

from functools import partial
from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import Rule, mcore, owners_rule, precision_rule, target_rule, te
from bridge.rules.topics.stored import storing


def _gathers_through_buffer(s: RuleContext) -> bool:
    return s.gathers_fp8 and s.reuses_buffer and not s.has_megatron_fsdp and not s.is_emulated


def _stored_without_buffer(s: RuleContext) -> Any:
    is_known = s.has_ddp or s.is_whole
    needs = s.gathers_fp8 and not s.reuses_buffer and not s.has_megatron_fsdp
    return is_known and needs and storing(s, "fp8")


_mxfp8_written = partial(owners_rule, gate="is_mxfp8")
_under_fp4 = partial(Rule, gate="fp4")
_mxfp8_run = partial(target_rule, gate="is_mxfp8")

RULES = (
    _mxfp8_run(
        heading="PB241: MXFP8 weights gathered without overlap",
        predicate=lambda s: (
            s.has_ddp
            and _gathers_through_buffer(s)
            and not (s.ddp.overlap_param_gather or s.optimizer.overlap_param_gather)
        ),
        error="ddp.overlap_param_gather: MXFP8 weights gathered through the gradient buffer became NaN without "
        "overlapped gathering",
        remedies=(
            "set overlap_param_gather=True in optimizer and ddp",
            "use megatron-core 0.18",
            "set fp8_param_gather=False",
        ),
        reported="NVIDIA/Megatron-LM issue 2272, 2025-11-17; fixed by pull request 4800 in core_v0.18.0",
        versions=(mcore(until="0.18"),),
        explanation="The advice changed with the version: in November 2025 overlapping was first the cure, then the "
        "requirement, and from 0.18 on it is neither.",
    ),
    _mxfp8_run(
        heading="PB242: MXFP8 weights stale after evaluation or a checkpoint",
        predicate=lambda s: (
            _gathers_through_buffer(s) and (s.ddp.overlap_param_gather or s.optimizer.overlap_param_gather)
        ),
        warning="ddp.overlap_param_gather: an evaluation or a checkpoint between two steps can use stale MXFP8 weights "
        "when gathering is overlapped",
        remedies=("use megatron-core 0.19", "set fp8_param_gather=False", "evaluate in a run of its own"),
        reported="NVIDIA/Megatron-LM issues 4562 and 5236 (2026-06-09); fixed in core_v0.19.0",
        versions=(mcore(until="0.19"),),
    ),
    _mxfp8_written(
        heading="PB243: MXFP8 weights without the shared buffer",
        sync="strict",
        predicate=_stored_without_buffer,
        error="fp8_param_gather: MXFP8 weights need reuse_grad_buf_for_mxfp8_param_ag, except under Megatron-FSDP",
        remedies=("state reuse_grad_buf_for_mxfp8_param_ag=True", "set fp8_param_gather=False"),
        verified="megatron-core 0.16.1 distributed/param_and_grad_buffer.py: Transformer Engine raises "
        "NotImplementedError while DDP is built",
    ),
    precision_rule(
        heading="PB244: shared buffer without MXFP8 weights",
        predicate=lambda s: (
            (s.stated.get("reuse_grad_buf_for_mxfp8_param_ag") or s.reuses_buffer)
            and not (s.is_mxfp8 and s.gathers_fp8)
            and not ("fp8" in s.stated and not s.fp8)
        ),
        error="reuse_grad_buf_for_mxfp8_param_ag: the gradient buffer can be reused only where weights are gathered as "
        "MXFP8 (fp8_param_gather)",
        remedies=("set it to False", "gather the weights of an MXFP8 recipe in FP8"),
        verified="megatron-core 0.16.1 distributed_data_parallel_config.py __post_init__: an assertion",
    ),
    _mxfp8_written(
        heading="PB245: shared buffer with gathering inside the step",
        predicate=lambda s: s.reuses_buffer and s.optimizer.overlap_param_gather_with_optimizer_step,
        error="optimizer.overlap_param_gather_with_optimizer_step: cannot be combined with "
        "reuse_grad_buf_for_mxfp8_param_ag",
        remedies=("set one of the two to False",),
        verified="megatron-core 0.19.2 optimizer_config.py __post_init__",
    ),
    _mxfp8_written(
        heading="PB246: MXFP8 without MXFP8 weights costs memory",
        predicate=lambda s: not s.gathers_fp8 and not s.has_megatron_fsdp,
        warning="fp8_param_gather: {s.mode} weights and both MXFP8 copies of them are kept",
        remedies=("state fp8_param_gather=True and reuse_grad_buf_for_mxfp8_param_ag=True", "count the memory first"),
        verified="megatron-core 0.16.1 optimizer_config.py __post_init__ warns of it",
    ),
    _under_fp4(
        heading="PB247: FP4 weights before Transformer Engine 2.14",
        needs="target",
        predicate=lambda s: s.gathers_fp4 and not s.is_emulated,
        warning="fp4_param_gather: weights stored in FP4 came out wrong before Transformer Engine 2.14",
        remedies=("use Transformer Engine 2.14 and megatron-core 0.18", "set fp4_param_gather=False"),
        reported="NVIDIA/TransformerEngine issue 2352",
        versions=(te(until="2.14"),),
    ),
    _under_fp4(
        heading="PB248: FP4 weights before megatron-core 0.18",
        needs="target",
        predicate=lambda s: s.gathers_fp4 and not s.is_emulated,
        warning="fp4_param_gather: weights stored in FP4 came out wrong before megatron-core 0.18, and 0.16 starts "
        "masters from the rounded weights",
        remedies=("use megatron-core 0.18 and Transformer Engine 2.14", "set fp4_param_gather=False"),
        reported="NVIDIA/TransformerEngine issue 2352; megatron-core 0.16.1 fp4_utils.py",
        versions=(mcore(until="0.18"),),
    ),
    _under_fp4(
        heading="PB249: no late layers in BF16 under FP4",
        needs="owners",
        predicate=lambda s: not (s.model.first_last_layers_bf16 and s.model.num_layers_at_end_in_bf16),
        info="num_layers_at_end_in_bf16: the published NVFP4 runs keep their last layers in BF16",
        remedies=("state first_last_layers_bf16=True and num_layers_at_end_in_bf16=4, say",),
        verified="NVIDIA, Pretraining Large Language Models with NVFP4, 2025; Megatron Bridge "
        "nemotron_3_super_bf16_with_nvfp4_mixed keeps 14",
    ),
    _under_fp4(
        heading="PB250: FP4 does not reach multi-token prediction",
        predicate=lambda s: s.has_mtp and not s.is_hybrid,
        warning="fp4: multi-token prediction (layers: {s.model.mtp_num_layers}) enters the FP8 context only, so it "
        "runs in {s.mode}",
        remedies=("accept it: they are a small part of the model", "set mtp_num_layers=None"),
        verified="megatron-core 0.16.1 and 0.19.2 transformer/multi_token_prediction.py (a TODO there)",
    ),
    _under_fp4(
        heading="PB251: FP4 does not reach hybrid models",
        predicate=lambda s: s.is_hybrid,
        warning="fp4: Mamba and hybrid blocks know FP8 only, so this run would be {s.mode}",
        remedies=("use megatron-core 0.17", "choose an FP8 recipe"),
        verified="megatron-core 0.16.1 ssm/mamba_block.py; FP4 added in 0.17.0",
        versions=(mcore(until="0.17"),),
    ),
    _under_fp4(
        heading="PB252: NVFP4 outside BF16",
        needs="owners",
        predicate=lambda s: not s.is_bf16 and not (s.model.enable_autocast and s.model.autocast_dtype == "bf16"),
        error="fp4: NVFP4's random Hadamard transform takes BF16 tensors only, and this run is {s.mode}",
        remedies=("choose a bf16 recipe",),
        verified="Transformer Engine 2.20 pytorch/csrc/quantizer.cpp",
    ),
)

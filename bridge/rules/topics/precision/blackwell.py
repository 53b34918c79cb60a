"""Rules about Blackwell's schemes MXFP8 and NVFP4: the gradient buffer, and modules without FP4."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import contradiction, error, info, mcore, sync_error, te, warning
from bridge.rules.run_context import RunContext
from bridge.rules.storage_violation import make_storage_violation
from bridge.rules.violation import Violation
from bridge.target.versions import is_at_least


def _gathers_through_grad_buffer(context: RuleContext) -> bool:
    """Return whether MXFP8 weights are gathered through the gradient buffer of DDP."""
    return (
        context.is_mxfp8
        and context.gathers_fp8
        and context.reuses_buffer
        and not context.has_megatron_fsdp
        and not context.is_emulated
    )


def _overlaps(context: RuleContext) -> bool:
    return context.ddp.overlap_param_gather or context.optimizer.overlap_param_gather


def find_mxfp8_weights_without_buffer(context: RuleContext) -> Violation | None:
    """Return a violation if MXFP8 weights are stored without the shared buffer."""
    if (
        not context.is_mxfp8
        or not context.gathers_fp8
        or context.reuses_buffer
        or context.has_megatron_fsdp
    ):
        return None
    if context.has_ddp or isinstance(context, RunContext):
        return make_storage_violation(context, "fp8")
    return None


def reuses_buffer_without_mxfp8_weights(context: RuleContext) -> bool:
    """Return whether the buffer is reused although no MXFP8 weights are gathered.

    If a recipe states that FP8 is off, the field has no effect, and there is no violation.
    """
    if not context.stated.get("reuse_grad_buf_for_mxfp8_param_ag") and not context.reuses_buffer:
        return False
    if context.is_mxfp8 and context.gathers_fp8:
        return False
    is_stated_off = "fp8" in context.stated and not context.is_fp8
    return not is_stated_off


def find_releases_for_fp4_weights(context: RuleContext) -> Violation | None:
    """Return a violation with the releases in which weights stored in FP4 are correct."""
    if not context.is_fp4 or not context.gathers_fp4 or context.is_emulated:
        return None
    missing = []
    if is_at_least(context.target.te, "2.14") is not True:
        missing.append("Transformer Engine 2.14")
    if is_at_least(context.target.mcore, "0.18") is not True:
        missing.append("megatron-core 0.18")
    return Violation(releases=" and ".join(missing))


def has_nvfp4_transform_outside_bf16(context: RuleContext) -> bool:
    """Return whether NVFP4's random Hadamard transform gets tensors that are not BF16.

    The transform is on unless an environment variable turns it off.
    """
    if not context.is_nvfp4 or context.is_bf16:
        return False
    if context.environment.get("NVTE_NVFP4_DISABLE_RHT") == "1":
        return False
    casts_to_bf16 = context.model.enable_autocast and context.model.autocast_dtype == "bf16"
    return not casts_to_bf16


RULES = (
    error(
        id="PB241",
        title="MXFP8 weights gathered without overlap",
        setting="ddp.overlap_param_gather",
        versions=(mcore(until="0.18"),),
        when=lambda context: (
            context.has_ddp and _gathers_through_grad_buffer(context) and not _overlaps(context)
        ),
        message="MXFP8 weights gathered through the gradient buffer became NaN "
        "without overlapped gathering",
        remedies=(
            "set overlap_param_gather=True in optimizer and ddp",
            "use megatron-core 0.18",
            "set fp8_param_gather=False",
        ),
        source="NVIDIA/Megatron-LM issue 2272, 2025-11-17; fixed by pull "
        "request 4800 in core_v0.18.0",
        evidence="reported",
        explanation="The advice changed with the version: in November 2025 overlapping was first "
        "the cure, then the requirement, and from 0.18 on it is neither.",
    ),
    warning(
        id="PB242",
        title="MXFP8 weights stale after evaluation or a checkpoint",
        setting="ddp.overlap_param_gather",
        versions=(mcore(until="0.19"),),
        when=lambda context: _gathers_through_grad_buffer(context) and _overlaps(context),
        message="an evaluation or a checkpoint between two steps can use stale MXFP8 weights when "
        "gathering is overlapped",
        remedies=(
            "use megatron-core 0.19",
            "set fp8_param_gather=False",
            "evaluate in a run of its own",
        ),
        source="NVIDIA/Megatron-LM issues 4562 and 5236 (2026-06-09); fixed in core_v0.19.0",
        evidence="reported",
    ),
    sync_error(
        id="PB243",
        title="MXFP8 weights without the shared buffer",
        setting="fp8_param_gather",
        sync="last",
        when=find_mxfp8_weights_without_buffer,
        message="MXFP8 weights need reuse_grad_buf_for_mxfp8_param_ag, except under Megatron-FSDP",
        remedies=("state reuse_grad_buf_for_mxfp8_param_ag=True", "set fp8_param_gather=False"),
        source="megatron-core 0.16.1 distributed/param_and_grad_buffer.py: Transformer Engine "
        "raises NotImplementedError while DDP is built",
    ),
    contradiction(
        id="PB244",
        title="shared buffer without MXFP8 weights",
        setting="reuse_grad_buf_for_mxfp8_param_ag",
        when=reuses_buffer_without_mxfp8_weights,
        message="the gradient buffer can be reused only where weights are gathered as MXFP8 "
        "(fp8_param_gather)",
        remedies=("set it to False", "gather the weights of an MXFP8 recipe in FP8"),
        source="megatron-core 0.16.1 distributed_data_parallel_config.py __post_init__: "
        "an assertion",
    ),
    error(
        id="PB245",
        title="shared buffer with gathering inside the step",
        setting="optimizer.overlap_param_gather_with_optimizer_step",
        when=lambda context: (
            context.is_mxfp8
            and context.reuses_buffer
            and context.optimizer.overlap_param_gather_with_optimizer_step
        ),
        message="cannot be combined with reuse_grad_buf_for_mxfp8_param_ag",
        remedies=("set one of the two to False",),
        source="megatron-core 0.19.2 optimizer_config.py __post_init__",
    ),
    warning(
        id="PB246",
        title="MXFP8 without MXFP8 weights costs memory",
        setting="fp8_param_gather",
        when=lambda context: (
            context.is_mxfp8 and not context.gathers_fp8 and not context.has_megatron_fsdp
        ),
        message="{run.mode} weights and both MXFP8 copies of them are kept",
        remedies=(
            "state fp8_param_gather=True and reuse_grad_buf_for_mxfp8_param_ag=True",
            "count the memory first",
        ),
        source="megatron-core 0.16.1 optimizer_config.py __post_init__ warns of it",
    ),
    warning(
        id="PB247",
        title="FP4 weights before Transformer Engine 2.14",
        setting="fp4_param_gather",
        versions=(te(until="2.14"),),
        when=find_releases_for_fp4_weights,
        message="weights stored in FP4 came out wrong before Transformer Engine 2.14",
        remedies=("use {releases}", "set fp4_param_gather=False"),
        source="NVIDIA/TransformerEngine issue 2352",
        evidence="reported",
    ),
    warning(
        id="PB248",
        title="FP4 weights before megatron-core 0.18",
        setting="fp4_param_gather",
        versions=(mcore(until="0.18"),),
        when=find_releases_for_fp4_weights,
        message="weights stored in FP4 came out wrong before megatron-core 0.18, and 0.16 starts "
        "masters from the rounded weights",
        remedies=("use {releases}", "set fp4_param_gather=False"),
        source="NVIDIA/TransformerEngine issue 2352; megatron-core 0.16.1 fp4_utils.py",
        evidence="reported",
    ),
    info(
        id="PB249",
        title="no late layers in BF16 under FP4",
        setting="num_layers_at_end_in_bf16",
        when=lambda context: (
            context.is_nvfp4
            and not (
                context.model.first_last_layers_bf16 and context.model.num_layers_at_end_in_bf16
            )
        ),
        message="the published NVFP4 runs keep their last layers in BF16",
        remedies=(
            "state first_last_layers_bf16=True and num_layers_at_end_in_bf16=4, for example",
        ),
        source="NVIDIA, Pretraining Large Language Models with NVFP4, 2025; Megatron Bridge "
        "nemotron_3_super_bf16_with_nvfp4_mixed keeps 14",
    ),
    warning(
        id="PB250",
        title="FP4 does not reach multi-token prediction",
        setting="fp4",
        when=lambda context: (
            context.is_fp4 and context.shape.has_mtp and not context.shape.is_hybrid
        ),
        message="multi-token prediction (layers: {run.model.mtp_num_layers}) enters the FP8 "
        "context only, so it runs in {run.mode}",
        remedies=("accept it: they are a small part of the model", "set mtp_num_layers=None"),
        source="megatron-core 0.16.1 and 0.19.2 "
        "transformer/multi_token_prediction.py (a TODO there)",
    ),
    warning(
        id="PB251",
        title="FP4 does not reach hybrid models",
        setting="fp4",
        versions=(mcore(until="0.17"),),
        when=lambda context: context.is_fp4 and context.shape.is_hybrid,
        message="Mamba and hybrid blocks know FP8 only, so this run would be {run.mode}",
        remedies=("use megatron-core 0.17", "choose an FP8 recipe"),
        source="megatron-core 0.16.1 ssm/mamba_block.py; FP4 added in 0.17.0",
    ),
    error(
        id="PB252",
        title="NVFP4 outside BF16",
        setting="fp4",
        when=has_nvfp4_transform_outside_bf16,
        message="NVFP4's random Hadamard transform takes BF16 tensors only, "
        "and this run is {run.mode}",
        remedies=("choose a bf16 recipe",),
        source="Transformer Engine 2.8, 2.14 and 2.20 pytorch/csrc/quantizer.cpp",
    ),
)

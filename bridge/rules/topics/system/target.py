"""Rules about the formats and schemes that the target's GPUs, CUDA and TE can run."""

from collections.abc import Iterator

from bridge.model.attention_variants import find_unplanned_fields
from bridge.precision.schemes import Scheme
from bridge.rules.context import RuleContext
from bridge.rules.rule import error, info, te, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.versions import Version, format_dotted, is_at_least

BLOCKWISE_ON_BLACKWELL = "2.9"
"""The oldest Transformer Engine that runs blockwise scaling on Blackwell."""
OLDEST_KNOWN_TE = "2.7"
"""The oldest Transformer Engine that the rules know."""
GPU_FORMAT_BY_SCHEME = {
    "delayed": "fp8",
    "tensorwise": "fp8",
    "blockwise": "fp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}
"""Scheme -> the format of its GEMMs in `Gpu.formats`.

Only for GPUs of other vendors. For NVIDIA's GPUs, the compute capability decides.
"""
EXAMPLE_TARGETS = {
    "delayed": "--target h100 or --target mi300x",
    "tensorwise": "--target h100 or --target mi300x",
    "blockwise": "--target h100",
    "mxfp8": "--target b200 or --target mi355x",
    "nvfp4": "--target b200",
    "mxfp4": "--target mi355x",
}
"""Scheme -> targets that run it, for the remedy of a run without a target."""
NVFP4_VARIABLES = ("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")


def find_undeclared_target(context: RuleContext) -> Violation | None:
    """Return a violation if a run with FP8 or FP4 GEMMs declares no GPU."""
    if not context.is_low_precision or context.target.gpu is not None:
        return None
    return Violation(example=EXAMPLE_TARGETS.get(context.scheme or "", "--target h100"))


def is_blockwise_on_blackwell(context: RuleContext) -> bool:
    """Return whether blockwise GEMMs run as MXFP8 GEMMs."""
    return context.is_blockwise and context.target.is_from(10)


def _get_scheme_on_gpu(context: RuleContext) -> Scheme | None:
    """Return the row of the run's scheme, or None if no GPU has to run the scheme."""
    if not context.needs_gpu_formats:
        return None
    return context.scheme_row


def find_gpu_too_old(context: RuleContext) -> Violation | None:
    """Return a violation if the GPU is below the scheme's minimum compute capability."""
    row, capability = _get_scheme_on_gpu(context), context.target.capability
    if row is None or capability is None or row.min_compute_capability is None:
        return None
    if capability >= row.min_compute_capability:
        return None
    minimum = format_dotted(row.min_compute_capability)
    return Violation(limit=minimum, has=format_dotted(capability))


def find_gpu_too_new(context: RuleContext) -> Violation | None:
    """Return a violation if the GPU is not below the scheme's upper compute capability."""
    row, capability = _get_scheme_on_gpu(context), context.target.capability
    if row is None or capability is None or row.below_compute_capability is None:
        return None
    if capability < row.below_compute_capability:
        return None
    limit = format_dotted(row.below_compute_capability)
    return Violation(limit=limit, has=format_dotted(capability))


def runs_nvfp4_on_rtx(context: RuleContext) -> bool:
    """Return whether NVFP4 runs on compute capability 12 with transform or stochastic rounding."""
    if not context.needs_gpu_formats or not context.target.is_from(12) or not context.is_nvfp4:
        return False
    return any(context.environment.get(name) != "1" for name in NVFP4_VARIABLES)


def find_cuda_too_old(context: RuleContext) -> Violation | None:
    """Return a violation if the target's CUDA is older than the scheme needs."""
    row = _get_scheme_on_gpu(context)
    if row is None:
        return None
    return _find_version_below(context.target.cuda, row.min_cuda)


def find_te_too_old(context: RuleContext) -> Violation | None:
    """Return a violation if the target's Transformer Engine is older than the scheme needs."""
    row = _get_scheme_on_gpu(context)
    if row is None:
        return None
    return _find_version_below(context.target.te, row.min_transformer_engine)


def _find_version_below(version: Version | None, floor: str | None) -> Violation | None:
    if floor is not None and is_at_least(version, floor) is False:
        return Violation(floor=floor)
    return None


def is_te_older_than_rules(context: RuleContext) -> bool:
    """Return whether Transformer Engine is too old for the rules, unless PB606 reports it."""
    if (
        not context.is_low_precision
        or context.is_emulated
        or is_at_least(context.target.te, OLDEST_KNOWN_TE) is not False
    ):
        return False
    return find_te_too_old(context) is None


def find_unknown_versions(context: RuleContext) -> Violation | None:
    """Return a violation with the products whose version the scheme needs and no target states."""
    row = _get_scheme_on_gpu(context)
    if row is None or context.target.capability is None or context.target.has_te is False:
        return None
    floors = []
    if context.target.te is None and row.min_transformer_engine:
        floors.append(f"Transformer Engine {row.min_transformer_engine}")
    if context.target.cuda is None and row.min_cuda:
        floors.append(f"CUDA {row.min_cuda}")
    if floors:
        return Violation(floors=" and ".join(floors))
    return None


def find_formats_of_other_gpu(context: RuleContext) -> Violation | None:
    """Return a violation if a GPU of another vendor does not have the scheme's format."""
    gpu = context.target.gpu
    needed = GPU_FORMAT_BY_SCHEME.get(context.scheme or "")
    if (
        not context.needs_gpu_formats
        or gpu is None
        or context.target.capability is not None
        or needed is None
    ):
        return None
    if runs_nvfp4_on_rocm(context):
        return None
    if needed not in gpu.formats:
        return Violation(formats=", ".join(gpu.formats))
    return None


def runs_blockwise_on_rocm(context: RuleContext) -> bool:
    """Return whether ROCm's Transformer Engine would have to run blockwise scaling."""
    gpu = context.target.gpu
    return (
        context.is_blockwise
        and gpu is not None
        and gpu.generation.startswith("CDNA")
        and not context.is_emulated
    )


def runs_nvfp4_on_rocm(context: RuleContext) -> bool:
    """Return whether ROCm's Transformer Engine would have to run NVFP4."""
    gpu = context.target.gpu
    return (
        context.scheme == "nvfp4"
        and gpu is not None
        and gpu.generation.startswith("CDNA")
        and not context.is_emulated
    )


def is_other_vendor_unverified(context: RuleContext) -> bool:
    """Return whether the scheme is not known to be refused on a GPU that is not NVIDIA's."""
    if (
        not context.needs_gpu_formats
        or context.target.capability is not None
        or context.target.gpu is None
    ):
        return False
    if runs_blockwise_on_rocm(context) or runs_nvfp4_on_rocm(context):
        return False
    if context.scheme in context.added_schemes:
        return False  # a scheme of ROCm's Transformer Engine itself
    return find_formats_of_other_gpu(context) is None


def find_te_without_gpu(context: RuleContext) -> Violation | None:
    """Return a violation if the backend is Transformer Engine and the machine has no GPU."""
    if not context.is_low_precision or context.backend != "te":
        return None
    if context.target.gpu is None or context.target.gpu.is_gpu:
        return None
    missing = ""
    if context.target.has_te is False:
        missing = " and transformer_engine"
    return Violation(missing=missing)


def find_settings_not_emulated(context: RuleContext) -> Iterator[Violation]:
    """Yield the settings that are on and that the emulated backend does not run."""
    if not context.is_low_precision or not context.is_emulated:
        return
    if context.model.fp8_dot_product_attention:
        yield Violation("fp8_dot_product_attention")
    if context.model.fp8_multi_head_attention:
        yield Violation("fp8_multi_head_attention")
    if context.model.tp_comm_overlap:
        yield Violation("model.tp_comm_overlap")
    if "moe_act" in context.recomputed_modules or "layernorm" in context.recomputed_modules:
        yield Violation("model.recompute_modules")


def find_memory_overflow(context: RunContext) -> Violation | None:
    """Return a violation if the fullest rank needs more memory than the GPU has."""
    return context.memory_overflow


def find_unplanned_model(context: RunContext) -> Iterator[Violation]:
    """Yield the reasons for which the model has no plan."""
    for fault in find_unplanned_fields(context.built_model):
        remedy = fault.remedy.removesuffix(".")
        yield Violation(fault.path, value=fault.value, why=fault.rule, remedy=remedy)


RULES = (
    info(
        id="PB601",
        title="no target declared",
        setting="target",
        when=find_undeclared_target,
        message="whether a GPU, its CUDA and its Transformer Engine run "
        "{run.scheme} was not checked",
        remedies=("declare its GPU: {example}, for example",),
        source="this check",
    ),
    error(
        id="PB602",
        title="GPU too old for the scheme",
        setting="target.gpu",
        when=find_gpu_too_old,
        message="{run.scheme} needs compute capability {limit}, and the target has {has}",
        remedies=(
            "use newer GPUs",
            "choose a recipe that they run (`precision-bridge recipes --support`)",
        ),
        source="Transformer Engine 2.20 pytorch/quantization.py; its check_recipe_support has no "
        "branch for NVFP4, so that one fails later",
    ),
    error(
        id="PB603",
        title="GPU too new for the scheme",
        setting="target.gpu",
        when=find_gpu_too_new,
        message="Transformer Engine runs {run.scheme} below compute capability {limit}, "
        "and the target has {has}",
        remedies=("choose current scaling", "use GPUs of the B200 kind"),
        source="Transformer Engine 2.20 pytorch/quantization.py; "
        "NVIDIA/Megatron-LM issue 4175, 2026-04-07",
    ),
    error(
        id="PB604",
        title="NVFP4 on compute capability 12",
        setting="target.gpu",
        versions=(te(until="2.19"),),
        when=runs_nvfp4_on_rtx,
        message="before Transformer Engine 2.19 NVFP4 trains on this GPU only without Hadamard transform and "
        "stochastic rounding: the fused transform fails, and gradients that are rounded "
        "stochastically are zero",
        remedies=(
            "use Transformer Engine 2.19",
            "set NVTE_NVFP4_DISABLE_RHT=1 and NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1",
            "choose current scaling",
            "use GPUs of the B200 kind",
        ),
        source="NVIDIA/TransformerEngine issues 2255 (2025-11-01) and 2956 (2026-05-03), pull "
        "requests 3265 and 3281 (2026-08-12), which its branch of release 2.19 has",
    ),
    error(
        id="PB605",
        title="CUDA too old for the scheme",
        setting="target.cuda",
        when=find_cuda_too_old,
        message="{run.scheme} needs CUDA {floor}",
        remedies=("use CUDA {floor}", "choose another scheme"),
        source="Transformer Engine 2.20 pytorch/quantization.py, common/gemm/cublaslt_gemm.cu",
    ),
    error(
        id="PB606",
        title="Transformer Engine too old for the scheme",
        setting="target.te",
        when=find_te_too_old,
        message="{run.scheme} needs Transformer Engine {floor}",
        remedies=("use Transformer Engine {floor}", "choose another scheme"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe; "
        "Transformer Engine release tags",
    ),
    info(
        id="PB607",
        title="versions not declared",
        setting="target",
        when=find_unknown_versions,
        message="{run.scheme} needs {floors}, which the target does not say",
        remedies=("add them to --target",),
        source="Transformer Engine 2.20 pytorch/quantization.py; Transformer Engine release tags",
    ),
    error(
        id="PB608",
        title="no Transformer Engine",
        setting="target.te",
        when=lambda context: context.needs_gpu_formats and context.target.has_te is False,
        message="{run.scheme} needs Transformer Engine: without it Megatron's local layers run "
        "{run.mode} and say nothing",
        remedies=("install Transformer Engine", "choose a recipe without FP8 and FP4"),
        source="megatron-core 0.16.1 to 0.19.2 fp8_utils.get_fp8_context: a null context, "
        "whatever is asked for",
    ),
    warning(
        id="PB609",
        title="blockwise scaling emulated on Blackwell",
        setting="fp8_recipe",
        when=lambda context: context.needs_gpu_formats and is_blockwise_on_blackwell(context),
        message="blockwise GEMMs run as MXFP8 GEMMs from compute capability 10.0 on",
        remedies=("choose an MXFP8 recipe", "accept another order of summation"),
        source="Transformer Engine 2.20 pytorch/csrc/extensions/gemm.cpp; "
        "NVIDIA/TransformerEngine issue 2157, 2025-09-05",
    ),
    error(
        id="PB610",
        title="blockwise scaling on Blackwell needs Transformer Engine 2.9",
        setting="target.te",
        when=lambda context: (
            context.needs_gpu_formats
            and is_blockwise_on_blackwell(context)
            and is_at_least(context.target.te, BLOCKWISE_ON_BLACKWELL) is False
        ),
        message="blockwise scaling runs on Blackwell from Transformer Engine 2.9 on",
        remedies=("use Transformer Engine 2.9", "choose an MXFP8 recipe"),
        source="NVIDIA/TransformerEngine issue 2157, 2025-09-05",
    ),
    warning(
        id="PB611",
        title="emulated low precision",
        setting="target.gpu",
        when=lambda context: (
            context.is_low_precision and context.is_emulated and context.backend != "te"
        ),
        message="this machine has no {run.scheme} GEMMs: the emulation computes their values at a "
        "lower speed",
        remedies=("use the run to study the numerics alone", "choose a recipe without FP8 and FP4"),
        source="this project: bridge.runtime.numerics",
    ),
    error(
        id="PB612",
        title="Transformer Engine without a GPU",
        setting="target.gpu",
        when=find_te_without_gpu,
        message="precision_backend=te needs a CUDA device{missing}, which the machine does not have",
        remedies=("use a machine that has it", "use precision_backend=auto, emulated or te_cpu"),
        source="Transformer Engine 2.20",
    ),
    warning(
        id="PB613",
        title="no native BF16",
        setting="target.gpu",
        when=lambda context: (
            context.is_bf16
            and context.has_gpu
            and context.target.gpu is not None
            and not context.target.gpu.has_native_bf16
        ),
        message="BF16 is emulated before compute capability 8.0, whatever "
        "torch.cuda.is_bf16_supported() says",
        remedies=("choose an fp16 recipe", "use newer GPUs"),
        source="PyTorch 2.13 torch/cuda/__init__.py: is_bf16_supported counts emulation; "
        "huggingface/accelerate issue 1693, 2023-07-07",
    ),
    warning(
        id="PB614",
        title="scheme on a GPU that is not NVIDIA's",
        setting="target.gpu",
        when=is_other_vendor_unverified,
        message="the rules for {run.scheme} were read in NVIDIA's Transformer Engine; ROCm's "
        "has other checks",
        remedies=("run a few steps and compare the loss with BF16",),
        source="pytorch/torchtitan issue 3760, 2026-06-24",
        evidence="weak",
    ),
    error(
        id="PB615",
        title="setting that is not emulated",
        setting="fp8_dot_product_attention",
        when=find_settings_not_emulated,
        message="the emulated backend does not run it",
        remedies=("turn it off", "run this where Transformer Engine works"),
        source="this project: bridge.runtime.megatron.emulation.parallel_linear",
    ),
    error(
        id="PB616",
        title="custom scheme that is not emulated",
        setting="fp8_recipe",
        when=lambda context: context.is_custom and not context.calls_te,
        message="a custom factory makes Transformer Engine's objects, which the emulated backend does not have",
        remedies=(
            "choose a named scheme",
            "choose the backend te_cpu",
            "run this where Transformer Engine works",
        ),
        source="this project: bridge.runtime.megatron.emulation.parallel_linear",
    ),
    warning(
        id="PB617",
        title="blockwise scaling on compute capability 12",
        setting="fp8_recipe",
        when=lambda context: (
            context.is_blockwise and context.target.is_from(12) and not context.is_emulated
        ),
        message="blockwise scaling was reported not to converge on compute capability 12.0",
        remedies=("choose current scaling",),
        source="NVIDIA/TransformerEngine issue 2382, 2025-11-14",
        evidence="weak",
    ),
    error(
        id="PB618",
        title="more memory than the GPU has",
        setting="target",
        when=find_memory_overflow,
        message="{needed} of {memory} on stage {stage}: does not fit{caveat}",
        remedies=(
            "choose among the changes of `precision-bridge memory --fit`",
            "use more or larger GPUs",
        ),
        source="this project: bridge.plan.memory_report, 2026-08, which leaves out the CUDA context, "
        "messages, workspaces",
    ),
    info(
        id="PB619",
        title="model that cannot be planned",
        setting="model",
        when=find_unplanned_model,
        message="{why}; its memory and its rows of modules are not judged",
        remedies=("{remedy}",),
        source="this project: bridge.model.shape",
    ),
    warning(
        id="PB620",
        title="Transformer Engine before 2.7",
        setting="target.te",
        when=is_te_older_than_rules,
        message="the rules know Transformer Engine from 2.7 on; what this release refuses or "
        "ignores is not found",
        remedies=("use Transformer Engine 2.7",),
        source="this project: the releases that it supports",
    ),
    error(
        id="PB621",
        title="GPU without the scheme's format",
        setting="target.gpu",
        when=find_formats_of_other_gpu,
        message="its matrix units multiply {formats}, and {run.scheme} is none of them",
        remedies=(
            "use GPUs that have it",
            "choose a recipe that they run (`precision-bridge recipes --support`)",
        ),
        source="AMD CDNA 3 and CDNA 4 white papers; ROCm/TransformerEngine pull requests 167 "
        "(2025-04-16: FP8 on gfx94x and gfx95x) and 234 (2025-07-18: MXFP8 on gfx950), and its "
        "030b7921 of 2026 transformer_engine/pytorch/quantization.py check_mxfp8_support",
    ),
    error(
        id="PB622",
        title="blockwise scaling on a GPU of AMD",
        setting="fp8_recipe",
        when=runs_blockwise_on_rocm,
        message="ROCm's Transformer Engine refuses blockwise scaling; it has delayed and current "
        "scaling on MI300X to MI355X, and MXFP8 on MI350X and MI355X, where "
        "NVTE_ROCM_ENABLE_MXFP8 is 1",
        remedies=("choose current scaling",),
        source="ROCm/TransformerEngine 04a84095 transformer_engine/pytorch/fp8.py and 030b7921 of "
        "2026 pytorch/quantization.py check_fp8_block_scaling_support, check_mxfp8_support; its "
        "pull request 460, 2026-02-25",
    ),
    warning(
        id="PB623",
        title="NVFP4 on a GPU of AMD",
        setting="target.gpu",
        when=runs_nvfp4_on_rocm,
        message="ROCm's Transformer Engine of 2026 rounds to NVFP4 there and multiplies in BF16, "
        "without a gain in speed; earlier releases refuse NVFP4",
        remedies=("choose current scaling", "use it to study the rounding alone"),
        source="ROCm/TransformerEngine 030b7921 of 2026 transformer_engine/pytorch/quantization.py "
        "check_nvfp4_support (gfx94x and gfx95x); its pull request 675, 2026-07-20: GPUs other than "
        "gfx1250 multiply in BF16",
    ),
)

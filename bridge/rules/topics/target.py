"""Formats and schemes that the declared GPUs, CUDA and Transformer Engine can run."""

from functools import partial
from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import each, environment_rule, target_rule
from bridge.rules.versions import at_least, dotted

BLOCKWISE_ON_BLACKWELL = "2.9"
"""The oldest Transformer Engine that runs blockwise scaling on Blackwell."""


def is_blockwise_on_blackwell(s: RuleContext) -> bool:
    """Return whether blockwise GEMMs run as MXFP8 GEMMs."""
    return s.is_blockwise and s.capability is not None and s.capability >= (10, 0)


def _gpu(s: RuleContext) -> dict[str, Any]:
    return {"value": s.target.gpu.title if s.target.gpu else None}


def _too_old(s: RuleContext) -> Any:
    floor = s.row.min_compute_capability if s.row is not None else None
    if floor is None or s.capability is None or s.capability >= floor:
        return None
    return {**_gpu(s), "least": dotted(floor), "has": dotted(s.capability)}


def _too_new(s: RuleContext) -> Any:
    ceiling = s.row.below_compute_capability if s.row is not None else None
    if ceiling is None or s.capability is None or s.capability < ceiling:
        return None
    return {**_gpu(s), "limit": dotted(ceiling), "has": dotted(s.capability)}


def _nvfp4_on_rtx(s: RuleContext) -> Any:
    if s.scheme != "nvfp4" or s.capability is None or s.capability < (12, 0):
        return None
    off = ("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    if all(s.environment.get(name) == "1" for name in off):
        return None
    return _gpu(s)


def _below(s: RuleContext, product: str) -> Any:
    """Return the floor that a known version of a product is below of."""
    row = s.row
    floor = (row.min_cuda if product == "cuda" else row.min_transformer_engine) if row is not None else None
    version = getattr(s.target, product)
    if floor is None or version is None or at_least(version, floor) is not False:
        return None
    return {"value": str(version), "floor": floor}


def _unknown_versions(s: RuleContext) -> Any:
    row = s.row
    if row is None or s.capability is None or s.target.has_te is False:
        return None
    floors = []
    if s.te is None and row.min_transformer_engine:
        floors.append(f"Transformer Engine {row.min_transformer_engine}")
    if s.cuda is None and row.min_cuda:
        floors.append(f"CUDA {row.min_cuda}")
    return bool(floors) and {"value": str(s.target), "floors": " and ".join(floors)}


def _missing_for_te(s: RuleContext) -> Any:
    gpu = s.target.gpu
    if s.backend != "te" or gpu is None or gpu.is_gpu:
        return None
    missing = ["a CUDA device", *(["transformer_engine"] if s.target.has_te is False else [])]
    return {"value": gpu.title, "missing": " and ".join(missing)}


_gpu_formats = partial(target_rule, gate="needs_gpu_formats")

RULES = (
    target_rule(
        heading="PB601: no target declared",
        predicate=lambda s: s.is_low and s.target.gpu is None and {"value": str(s.target)},
        info="target: whether a GPU, its CUDA and its Transformer Engine run {s.scheme} was not checked",
        remedies=("declare it: --target h100x8,te2.8,cuda12.9, say",),
        verified="this check",
    ),
    _gpu_formats(
        heading="PB602: GPU too old for the scheme",
        predicate=_too_old,
        error="target.gpu: {s.scheme} needs compute capability {least}, and the target has {has}",
        remedies=("use newer GPUs", "choose a recipe that they run (`precision-bridge support-matrix`)"),
        verified="Transformer Engine 2.20 pytorch/quantization.py; its check_recipe_support has no branch for NVFP4, "
        "so that one fails later",
    ),
    _gpu_formats(
        heading="PB603: GPU too new for the scheme",
        predicate=_too_new,
        error="target.gpu: Transformer Engine runs {s.scheme} below compute capability {limit}, and the target has "
        "{has}",
        remedies=("choose current scaling", "use GPUs of the B200 kind"),
        verified="Transformer Engine 2.20 pytorch/quantization.py; NVIDIA/Megatron-LM issue 4175, 2026-04-07",
    ),
    environment_rule(
        heading="PB604: NVFP4 on compute capability 12",
        predicate=_nvfp4_on_rtx,
        error="target.gpu: NVFP4 trains there without Hadamard transform and stochastic rounding only",
        remedies=(
            "set NVTE_NVFP4_DISABLE_RHT=1 and NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1",
            "choose current scaling",
            "use GPUs of the B200 kind",
        ),
        reported="NVIDIA/TransformerEngine issues 2255 (2025-11-01: no GEMM for the backward pass) and 2956 "
        "(2026-05-03: the fused transform fails)",
        gate="needs_gpu_formats",
    ),
    _gpu_formats(
        heading="PB605: CUDA too old for the scheme",
        predicate=lambda s: _below(s, "cuda"),
        error="target.cuda: {s.scheme} needs CUDA {floor}",
        remedies=("use CUDA {floor}", "choose another scheme"),
        verified="Transformer Engine 2.20 pytorch/quantization.py, common/gemm/cublaslt_gemm.cu",
    ),
    _gpu_formats(
        heading="PB606: Transformer Engine too old for the scheme",
        predicate=lambda s: _below(s, "te"),
        error="target.te: {s.scheme} needs Transformer Engine {floor}",
        remedies=("use Transformer Engine {floor}", "choose another scheme"),
        verified="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe; Transformer Engine release "
        "tags",
    ),
    _gpu_formats(
        heading="PB607: versions not declared",
        predicate=_unknown_versions,
        info="target: {s.scheme} needs {floors}, which the target does not say",
        remedies=("add them to --target",),
        verified="Transformer Engine 2.20 pytorch/quantization.py; Transformer Engine release tags",
    ),
    _gpu_formats(
        heading="PB608: no Transformer Engine",
        predicate=lambda s: s.target.has_te is False and {"value": "none"},
        error="target.te: {s.scheme} needs Transformer Engine: without it Megatron's local layers run {s.mode} and say "
        "nothing",
        remedies=("install Transformer Engine", "choose a recipe without FP8 and FP4"),
        verified="megatron-core 0.16.1 to 0.19.2 fp8_utils.get_fp8_context: a null context, whatever is asked for",
    ),
    _gpu_formats(
        heading="PB609: blockwise scaling emulated on Blackwell",
        predicate=is_blockwise_on_blackwell,
        warning="fp8_recipe: blockwise GEMMs run as MXFP8 GEMMs from compute capability 10.0 on",
        remedies=("choose an MXFP8 recipe", "accept another order of summation"),
        verified="Transformer Engine 2.20 pytorch/csrc/extensions/gemm.cpp; NVIDIA/TransformerEngine issue 2157, "
        "2025-09-05",
    ),
    _gpu_formats(
        heading="PB610: blockwise scaling on Blackwell needs Transformer Engine 2.9",
        predicate=lambda s: (
            is_blockwise_on_blackwell(s) and at_least(s.te, BLOCKWISE_ON_BLACKWELL) is False and {"value": str(s.te)}
        ),
        error="target.te: blockwise scaling runs on Blackwell from Transformer Engine 2.9 on",
        remedies=("use Transformer Engine 2.9", "choose an MXFP8 recipe"),
        verified="NVIDIA/TransformerEngine issue 2157, 2025-09-05",
    ),
    target_rule(
        heading="PB611: emulated low precision",
        predicate=lambda s: s.is_emulated and s.backend != "te" and _gpu(s),
        warning="target.gpu: nothing there runs {s.scheme} natively: the values can be emulated, the speed cannot",
        remedies=("take it as a study of the numerics", "choose a recipe without FP8 and FP4"),
        verified="this project: bridge.numerics",
        gate="is_low",
    ),
    target_rule(
        heading="PB612: Transformer Engine without a GPU",
        predicate=_missing_for_te,
        error="target.gpu: precision_backend=te cannot run there; missing: {missing}",
        remedies=("use a machine that has it", "use precision_backend=auto, emulated or te_cpu"),
        verified="Transformer Engine 2.20",
        gate="is_low",
    ),
    target_rule(
        heading="PB613: no native BF16",
        predicate=lambda s: s.has_gpu and s.target.gpu is not None and not s.target.gpu.has_native_bf16 and _gpu(s),
        warning="target.gpu: BF16 is emulated before compute capability 8.0, whatever torch.cuda.is_bf16_supported() "
        "says",
        remedies=("choose an fp16 recipe", "use newer GPUs"),
        verified="PyTorch 2.13 torch/cuda/__init__.py: is_bf16_supported counts emulation; huggingface/accelerate "
        "issue 1693, 2023-07-07",
        gate="is_bf16",
    ),
    _gpu_formats(
        heading="PB614: scheme on a GPU that is not NVIDIA's",
        predicate=lambda s: s.capability is None and s.target.gpu is not None and _gpu(s),
        warning="target.gpu: the rules for {s.scheme} were read in NVIDIA's Transformer Engine; the ROCm one has gates "
        "of its own",
        remedies=("run a few steps and compare the loss with BF16",),
        weak="pytorch/torchtitan issue 3760, 2026-06-24",
    ),
    target_rule(
        heading="PB615: setting that is not emulated",
        predicate=lambda s: (
            s.is_emulated
            and each(
                ("fp8_dot_product_attention", s.model.fp8_dot_product_attention),
                ("fp8_multi_head_attention", s.model.fp8_multi_head_attention),
                ("model.tp_comm_overlap", s.model.tp_comm_overlap),
                ("model.recompute_modules", {"moe_act", "layernorm"} & set(s.recomputed)),
            )
        ),
        error="fp8_dot_product_attention: the emulated backend does not run it",
        remedies=("turn it off", "run this where Transformer Engine works"),
        verified="this project: bridge.megatron.emulation.linear",
        gate="is_low",
    ),
    target_rule(
        heading="PB616: custom scheme that is not emulated",
        predicate=lambda s: s.is_emulated,
        error="fp8_recipe: a custom factory makes Transformer Engine's objects, which the emulated backend has not",
        remedies=("choose a named scheme", "run this where Transformer Engine works"),
        verified="this project: bridge.megatron.emulation.linear",
        gate="is_custom",
    ),
    target_rule(
        heading="PB617: blockwise scaling on compute capability 12",
        predicate=lambda s: s.capability is not None and s.capability >= (12, 0) and not s.is_emulated,
        warning="fp8_recipe: blockwise scaling was reported not to converge on compute capability 12.0",
        remedies=("choose current scaling",),
        weak="NVIDIA/TransformerEngine issue 2382, 2025-11-14",
        gate="is_blockwise",
    ),
    target_rule(
        heading="PB618: more memory than the GPU has",
        predicate=lambda s: s.overflow,
        error="target: {needed} of {memory} on stage {stage}: does not fit{but}",
        remedies=("choose among the changes of `precision-bridge memory --fit`", "use more or larger GPUs"),
        verified="this project: bridge.plan.memory, 2026-08, which leaves out the CUDA context, messages, workspaces",
        gate="has_gpu",
    ),
)

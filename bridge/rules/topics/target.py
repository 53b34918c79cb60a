"""Formats and schemes that the declared GPUs, CUDA and Transformer Engine can run."""

from bridge.model.variants import unplanned
from bridge.rules.context import RuleContext
from bridge.rules.rule import error, info, te, warning
from bridge.rules.violation import Violation, all_of, violations
from bridge.target.versions import Version, at_least, dotted

BLOCKWISE_ON_BLACKWELL = "2.9"
"""The oldest Transformer Engine that runs blockwise scaling on Blackwell."""
SUPPORTED = "2.7"
"""The oldest Transformer Engine that the rules know."""


def is_blockwise_on_blackwell(run: RuleContext) -> bool:
    """Return whether blockwise GEMMs run as MXFP8 GEMMs."""
    return run.scheme == "blockwise" and run.target.is_from(10)


def _beyond(run: RuleContext, limit: tuple[int, int] | None, *, is_too_new: bool) -> list[Violation]:
    """Return the violation of a GPU on the wrong side of a scheme's first, or of the first later, capability."""
    if not run.needs_gpu_formats or limit is None or run.capability is None:
        return []
    is_beyond = (run.capability >= limit) is is_too_new
    return [Violation(limit=dotted(limit), has=dotted(run.capability))] if is_beyond else []


def _nvfp4_on_rtx(run: RuleContext) -> bool:
    is_rtx = run.needs_gpu_formats and run.target.is_from(12)
    off = ("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    return is_rtx and run.scheme == "nvfp4" and any(run.environment.get(name) != "1" for name in off)


def _below(run: RuleContext, version: Version | None, floor: str | None) -> list[Violation]:
    is_below = floor is not None and version is not None and at_least(version, floor) is False
    return [Violation(floor=floor)] if run.needs_gpu_formats and is_below else []


def _lacks_the_scheme(run: RuleContext) -> list[Violation]:
    return _below(run, run.te, getattr(run.row, "min_transformer_engine", None))


def _unknown_versions(run: RuleContext) -> list[Violation]:
    row = run.row
    if not run.needs_gpu_formats or row is None or run.capability is None or run.target.has_te is False:
        return []
    floors = []
    if run.te is None and row.min_transformer_engine:
        floors.append(f"Transformer Engine {row.min_transformer_engine}")
    if run.cuda is None and row.min_cuda:
        floors.append(f"CUDA {row.min_cuda}")
    return [Violation(floors=" and ".join(floors))] if floors else []


FORMATS = {"delayed": "fp8", "tensorwise": "fp8", "blockwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Scheme -> the format of its GEMMs, as `Gpu.formats` calls it. NVIDIA's GPUs are judged by their capability."""


def _lacks_the_format(run: RuleContext) -> list[Violation]:
    gpu, needed = run.target.gpu, FORMATS.get(run.scheme or "")
    if not run.needs_gpu_formats or gpu is None or run.capability is not None or needed is None:
        return []
    return [Violation(formats=", ".join(gpu.formats))] if needed not in gpu.formats else []


def _not_emulated(run: RuleContext) -> list[Violation]:
    return violations(
        {
            "fp8_dot_product_attention": run.model.fp8_dot_product_attention,
            "fp8_multi_head_attention": run.model.fp8_multi_head_attention,
            "model.tp_comm_overlap": run.model.tp_comm_overlap,
            "model.recompute_modules": {"moe_act", "layernorm"} & {*run.recomputed},
        }
    )


def _unplanned(run: RuleContext) -> list[Violation]:
    faults = unplanned(run.prediction.model)
    return [Violation(one.path, value=one.value, why=one.rule, remedy=one.remedy.removesuffix(".")) for one in faults]


RULES = (
    info(
        id="PB601",
        title="no target declared",
        setting="target",
        when=all_of("is_low", "target.gpu is None"),
        message="whether a GPU, its CUDA and its Transformer Engine run {run.scheme} was not checked",
        remedies=("declare it: --target h100x8,te2.8,cuda12.9, for example",),
        source="this check",
    ),
    error(
        id="PB602",
        title="GPU too old for the scheme",
        setting="target.gpu",
        when=lambda run: _beyond(run, getattr(run.row, "min_compute_capability", None), is_too_new=False),
        message="{run.scheme} needs compute capability {limit}, and the target has {has}",
        remedies=("use newer GPUs", "choose a recipe that they run (`precision-bridge support-matrix`)"),
        source="Transformer Engine 2.20 pytorch/quantization.py; its check_recipe_support has no branch for NVFP4, so "
        "that one fails later",
    ),
    error(
        id="PB603",
        title="GPU too new for the scheme",
        setting="target.gpu",
        when=lambda run: _beyond(run, getattr(run.row, "below_compute_capability", None), is_too_new=True),
        message="Transformer Engine runs {run.scheme} below compute capability {limit}, and the target has {has}",
        remedies=("choose current scaling", "use GPUs of the B200 kind"),
        source="Transformer Engine 2.20 pytorch/quantization.py; NVIDIA/Megatron-LM issue 4175, 2026-04-07",
    ),
    error(
        id="PB604",
        title="NVFP4 on compute capability 12",
        setting="target.gpu",
        versions=(te(until="2.19"),),
        when=all_of(_nvfp4_on_rtx),
        message="before Transformer Engine 2.19 NVFP4 trains there without Hadamard transform and stochastic rounding "
        "only: the fused transform fails, and gradients that are rounded stochastically are zero",
        remedies=(
            "use Transformer Engine 2.19",
            "set NVTE_NVFP4_DISABLE_RHT=1 and NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1",
            "choose current scaling",
            "use GPUs of the B200 kind",
        ),
        source="NVIDIA/TransformerEngine issues 2255 (2025-11-01) and 2956 (2026-05-03), pull requests 3265 and 3281 "
        "(2026-08-12), which its branch of release 2.19 has",
    ),
    error(
        id="PB605",
        title="CUDA too old for the scheme",
        setting="target.cuda",
        when=lambda run: _below(run, run.cuda, getattr(run.row, "min_cuda", None)),
        message="{run.scheme} needs CUDA {floor}",
        remedies=("use CUDA {floor}", "choose another scheme"),
        source="Transformer Engine 2.20 pytorch/quantization.py, common/gemm/cublaslt_gemm.cu",
    ),
    error(
        id="PB606",
        title="Transformer Engine too old for the scheme",
        setting="target.te",
        when=_lacks_the_scheme,
        message="{run.scheme} needs Transformer Engine {floor}",
        remedies=("use Transformer Engine {floor}", "choose another scheme"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe; Transformer Engine release "
        "tags",
    ),
    info(
        id="PB607",
        title="versions not declared",
        setting="target",
        when=_unknown_versions,
        message="{run.scheme} needs {floors}, which the target does not say",
        remedies=("add them to --target",),
        source="Transformer Engine 2.20 pytorch/quantization.py; Transformer Engine release tags",
    ),
    error(
        id="PB608",
        title="no Transformer Engine",
        setting="target.te",
        when=all_of("needs_gpu_formats", "target.has_te is False"),
        message="{run.scheme} needs Transformer Engine: without it Megatron's local layers run {run.mode} and say "
        "nothing",
        remedies=("install Transformer Engine", "choose a recipe without FP8 and FP4"),
        source="megatron-core 0.16.1 to 0.19.2 fp8_utils.get_fp8_context: a null context, whatever is asked for",
    ),
    warning(
        id="PB609",
        title="blockwise scaling emulated on Blackwell",
        setting="fp8_recipe",
        when=all_of("needs_gpu_formats", is_blockwise_on_blackwell),
        message="blockwise GEMMs run as MXFP8 GEMMs from compute capability 10.0 on",
        remedies=("choose an MXFP8 recipe", "accept another order of summation"),
        source="Transformer Engine 2.20 pytorch/csrc/extensions/gemm.cpp; NVIDIA/TransformerEngine issue 2157, "
        "2025-09-05",
    ),
    error(
        id="PB610",
        title="blockwise scaling on Blackwell needs Transformer Engine 2.9",
        setting="target.te",
        when=all_of(
            "needs_gpu_formats",
            is_blockwise_on_blackwell,
            lambda run: at_least(run.te, BLOCKWISE_ON_BLACKWELL) is False,
        ),
        message="blockwise scaling runs on Blackwell from Transformer Engine 2.9 on",
        remedies=("use Transformer Engine 2.9", "choose an MXFP8 recipe"),
        source="NVIDIA/TransformerEngine issue 2157, 2025-09-05",
    ),
    warning(
        id="PB611",
        title="emulated low precision",
        setting="target.gpu",
        when=all_of("is_low", "is_emulated", "backend is not te"),
        message="nothing there runs {run.scheme} natively: the values can be emulated, the speed cannot",
        remedies=("take it as a study of the numerics", "choose a recipe without FP8 and FP4"),
        source="this project: bridge.runtime.numerics",
    ),
    error(
        id="PB612",
        title="Transformer Engine without a GPU",
        setting="target.gpu",
        when=all_of(
            *("is_low", "backend is te", "target.gpu", "not target.gpu.is_gpu"),
            find=lambda run: [Violation(missing=" and transformer_engine" if run.target.has_te is False else "")],
        ),
        message="precision_backend=te cannot run there; missing: a CUDA device{missing}",
        remedies=("use a machine that has it", "use precision_backend=auto, emulated or te_cpu"),
        source="Transformer Engine 2.20",
    ),
    warning(
        id="PB613",
        title="no native BF16",
        setting="target.gpu",
        when=all_of("is_bf16", "has_gpu", "not target.gpu.has_native_bf16"),
        message="BF16 is emulated before compute capability 8.0, whatever torch.cuda.is_bf16_supported() says",
        remedies=("choose an fp16 recipe", "use newer GPUs"),
        source="PyTorch 2.13 torch/cuda/__init__.py: is_bf16_supported counts emulation; huggingface/accelerate issue "
        "1693, 2023-07-07",
    ),
    warning(
        id="PB614",
        title="scheme on a GPU that is not NVIDIA's",
        setting="target.gpu",
        when=all_of(
            *("needs_gpu_formats", "capability is None", "target.gpu is not None"),
            lambda run: not _lacks_the_format(run),
        ),
        message="the rules for {run.scheme} were read in NVIDIA's Transformer Engine; the ROCm one has gates of its "
        "own",
        remedies=("run a few steps and compare the loss with BF16",),
        source="pytorch/torchtitan issue 3760, 2026-06-24",
        evidence="weak",
    ),
    error(
        id="PB615",
        title="setting that is not emulated",
        setting="fp8_dot_product_attention",
        when=all_of("is_low", "is_emulated", find=_not_emulated),
        message="the emulated backend does not run it",
        remedies=("turn it off", "run this where Transformer Engine works"),
        source="this project: bridge.runtime.megatron.emulation.linear",
    ),
    error(
        id="PB616",
        title="custom scheme that is not emulated",
        setting="fp8_recipe",
        when=all_of("scheme is custom", "is_emulated"),
        message="a custom factory makes Transformer Engine's objects, which the emulated backend has not",
        remedies=("choose a named scheme", "run this where Transformer Engine works"),
        source="this project: bridge.runtime.megatron.emulation.linear",
    ),
    warning(
        id="PB617",
        title="blockwise scaling on compute capability 12",
        setting="fp8_recipe",
        when=all_of("scheme is blockwise", lambda run: run.target.is_from(12), "not is_emulated"),
        message="blockwise scaling was reported not to converge on compute capability 12.0",
        remedies=("choose current scaling",),
        source="NVIDIA/TransformerEngine issue 2382, 2025-11-14",
        evidence="weak",
    ),
    error(
        id="PB618",
        title="more memory than the GPU has",
        setting="target",
        when=lambda run: [run.overflow] if run.overflow is not None else [],
        message="{needed} of {memory} on stage {stage}: does not fit{but}",
        remedies=("choose among the changes of `precision-bridge memory --fit`", "use more or larger GPUs"),
        source="this project: bridge.plan.memory, 2026-08, which leaves out the CUDA context, messages, workspaces",
    ),
    info(
        id="PB619",
        title="model that cannot be planned",
        setting="model",
        when=_unplanned,
        message="{why}; its memory and its rows of modules are not judged",
        remedies=("{remedy}",),
        source="this project: bridge.model.shape",
    ),
    warning(
        id="PB620",
        title="Transformer Engine before 2.7",
        setting="target.te",
        when=all_of(
            *("is_low", "not is_emulated"),
            lambda run: at_least(run.te, SUPPORTED) is False and not _lacks_the_scheme(run),
        ),
        message="the rules know Transformer Engine from 2.7 on; what this release refuses or ignores is not found",
        remedies=("use Transformer Engine 2.7",),
        source="this project: the releases that it supports",
    ),
    error(
        id="PB621",
        title="GPU without the scheme's format",
        setting="target.gpu",
        when=_lacks_the_format,
        message="its matrix units multiply {formats}, and {run.scheme} is none of them",
        remedies=("use GPUs that have it", "choose a recipe that they run (`precision-bridge support-matrix`)"),
        source="AMD CDNA 3 and CDNA 4 white papers; ROCm/TransformerEngine pull requests 167 (2025-04-16: FP8 on "
        "gfx94x and gfx95x) and 234 (2025-07-18: MXFP8 on gfx950); meta-pytorch/MSLK pull request 381 (2026-06-10: "
        "NVFP4 on none)",
    ),
)

"""`auto`: a recipe chosen by target, model and versions, with the reason and what was rejected.

    target = parse_target("h100x8,te2.8,cuda12.9,mcore0.18")
    resolve_auto("auto:fp8", target=target, parameters=70_000_000_000)

The policy is a table: per compute capability what is safe ("auto"), what an FP8 ask gets, and what
is fastest. Nothing is chosen for a machine without a visible GPU unless a target says so: what a
driver or a login node sees is not what the run will find.

`check_support` says which recipe runs on which target, and `build_support_matrix` of all of them: for FP8 and FP4 the
rules decide.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bridge.errors import BackendUnavailableError, RunConfigError, close_matches, did_you_mean
from bridge.model.modules import list_embedding_modules, list_layer_modules, list_output_modules
from bridge.model.read_tracking import AttributeView
from bridge.model.shape import ModelShape
from bridge.precision.grouping import group_pairs
from bridge.precision.mode import get_mode, get_scheme
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.context import PRECISION_OWNERS, RuleContext, get_effective_values
from bridge.rules.rule import RuleFinding, cast_to_precision_rules, evaluate_rules
from bridge.rules.rulebook import RULES_BY_ID
from bridge.rules.topics.system.target import BLOCKWISE_ON_BLACKWELL, is_blockwise_on_blackwell
from bridge.target.declaration import TARGET_EXAMPLE
from bridge.target.fields import OWNER_DEFAULTS
from bridge.target.gpus import GPUS, Gpu
from bridge.target.machine import detect_target
from bridge.target.target import Target
from bridge.target.versions import PRODUCT_TITLES, format_dotted, is_at_least

SMALL_MODEL_PARAMETERS = 100_000_000
"""Parameters below which a model is trained in FP32."""

REQUESTS = {
    "auto": "what is safe there: no FP8 or FP4",
    "auto:stable": "the same, and never FP16",
    "auto:fp8": "FP8 in the scheme that suits the GPU, or an error where there is none",
    "auto:fastest": "the fastest scheme that the GPU and the versions train well with",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One row: compute capabilities, and the recipes to try, best first."""

    since: tuple[int, int]
    """First compute capability of the row; the row holds up to the next one."""
    title: str
    safe: str = "bf16_mixed"
    """For "auto"."""
    fp8: tuple[str, ...] = ()
    """For "auto:fp8"; empty: there is none."""
    fastest: tuple[str, ...] = ()
    """For "auto:fastest", before what is safe."""
    why: str = "BF16 is native, and FP8 is taken on ask"
    """The reason for the safe choice."""
    no_fp8_reason: str = "no FP8 matrix units"
    """Why an FP8 ask is refused where there is no recipe for it."""


_CURRENT = "bf16_with_fp8_current_scaling_mixed"
_DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
_BLOCKWISE = "bf16_with_fp8_subchannel_scaling_mixed"
_MXFP8 = "bf16_with_mxfp8_mixed"
_NVFP4 = "bf16_with_nvfp4_mixed"

_BLACKWELL = (_MXFP8, _CURRENT)
POLICIES = (
    Policy(
        since=(0, 0),
        title="before Volta",
        safe="fp32",
        why="no matrix units: FP16 only on explicit ask",
    ),
    Policy(
        since=(7, 0),
        title="Volta and Turing",
        safe="fp16_mixed",
        fastest=("fp16_mixed",),
        why="FP16 matrix units and no BF16; a dynamic loss scale",
    ),
    Policy(since=(8, 0), title="Ampere", fastest=("bf16_mixed",), why="BF16 is native"),
    Policy(since=(8, 9), title="Ada", fp8=(_CURRENT, _DELAYED), fastest=(_CURRENT, _DELAYED)),
    Policy(
        since=(9, 0),
        title="Hopper",
        fp8=(_CURRENT, _BLOCKWISE, _DELAYED),
        fastest=(_CURRENT, _DELAYED),
    ),
    Policy(
        since=(10, 0),
        title="Blackwell",
        fp8=_BLACKWELL,
        fastest=(_NVFP4, *_BLACKWELL),
        why="BF16 is native, and MXFP8 and NVFP4 are taken on ask",
    ),
    Policy(since=(12, 0), title="RTX Blackwell", fp8=_BLACKWELL, fastest=(_NVFP4, *_BLACKWELL)),
)
"""Merged from the choices of Transformer Engine, Megatron Bridge, torchtitan and Accelerate.

As of 2026-08-22.
"""

_NO_GPU = Policy(
    since=(0, 0),
    title="a CPU",
    safe="fp32",
    fastest=("bf16_autocast_mixed",),
    why="a CPU gains nothing from BF16 for sure",
    no_fp8_reason="no GPU: low precision can be emulated there, never gained from",
)
_ROCM = Policy(
    since=(0, 0),
    title="CDNA 3",
    fastest=("bf16_mixed",),
    why="BF16 is native",
    no_fp8_reason="the gates of ROCm's Transformer Engine are not known here",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The recipe that was chosen, and the reason; kept with the run."""

    request: str
    recipe: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    """(recipe, why not) of those that came before it."""
    target: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the choice as plain data."""
        rejected = [{"recipe": name, "why": why} for name, why in self.rejected]
        return {**asdict(self), "rejected": rejected}

    def __str__(self) -> str:
        text = f"{self.request} on {self.target}: {self.recipe}, because {self.reason}."
        for name, why in self.rejected:
            text += f" Not {name}: {why}."
        return text


def count_parameters(model: Any) -> int | None:
    """Return the parameters of the model that a config describes, without MTP layers.

    None where it cannot be read.
    """
    try:
        shape = ModelShape.from_model(model)
    except RunConfigError:
        return None
    *norms, head = list_output_modules(shape)
    modules = [*list_embedding_modules(shape), *norms]
    if not shape.share_embeddings_and_output_weights:
        modules.append(head)
    for kind in shape.kinds:
        modules += list_layer_modules(shape, kind)
    return sum(module.parameters for module in modules)


def resolve_auto(
    request: str, *, target: Target | None = None, parameters: int | None = None
) -> Choice:
    """Choose a recipe for a request, a key of `REQUESTS`.

    Without a target it is for this machine, which has to show a GPU; a model of unknown size is not
    taken for small. BackendUnavailableError where FP8 was asked for, and no FP8 recipe runs there.
    """
    wanted = request.strip().lower()
    if wanted not in REQUESTS:
        matches = close_matches(wanted, REQUESTS)
        hint = did_you_mean(matches) or f"There are {', '.join(REQUESTS)}."
        raise RunConfigError(f"mixed_precision: no such request, got {request!r}. {hint}", matches)
    place = target
    if place is None or place.gpu is None:
        place = detect_target()
    if place.gpu is None or (place.is_detected and not place.gpu.is_gpu):
        raise RunConfigError(
            f"mixed_precision: {wanted} is chosen by the GPUs of the run, "
            f"and no GPU is visible here, got {request!r}. "
            f"Resolve it on the worker, or declare the target: target={TARGET_EXAMPLE}."
        )
    policy = _get_policy(place.gpu)
    if wanted == "auto:fp8":
        return _choose_fp8(wanted, policy, place)
    if parameters is not None and parameters < SMALL_MODEL_PARAMETERS:
        why = (
            f"{parameters / 1e6:.1f} million parameters gain nothing from less than FP32 "
            "(the line is at 100 million)"
        )
        return Choice(request=wanted, recipe="fp32", reason=why, target=str(place))
    if wanted == "auto:fastest" and policy.fastest:
        return _choose_fastest(wanted, policy, place)
    return _choose_safe(wanted, policy, place)


def _choose_fastest(request: str, policy: Policy, target: Target) -> Choice:
    recipe, rejected = _find_first_supported(policy.fastest, target)
    reason = f"it is the fastest that trains well on {policy.title}"
    if recipe is None:
        recipe = policy.safe
        reason = f"no faster recipe for {policy.title} runs well with the packages of the target"
    return Choice(
        request=request,
        recipe=recipe,
        reason=reason,
        rejected=tuple(rejected),
        target=str(target),
    )


def _choose_safe(request: str, policy: Policy, target: Target) -> Choice:
    recipe = policy.safe
    rejected = []
    if policy.fp8:
        rejected.append((policy.fp8[0], "FP8 and FP4 are taken on ask only"))
    if request == "auto:stable" and recipe == "fp16_mixed":
        rejected.append((recipe, "FP16 overflows where BF16 and FP32 do not"))
        recipe = "fp32"
    return Choice(
        request=request,
        recipe=recipe,
        reason=policy.why,
        rejected=tuple(rejected),
        target=str(target),
    )


def _choose_fp8(request: str, policy: Policy, target: Target) -> Choice:
    recipe, rejected = _find_first_supported(policy.fp8, target)
    if recipe is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        if not rejected:
            why = f"{policy.title}: {policy.no_fp8_reason}"
        raise BackendUnavailableError(
            f"mixed_precision: no FP8 recipe runs on the target, got {request!r} on {target} "
            f"({why}). Choose {policy.safe}, or another target."
        )
    return Choice(
        request=request,
        recipe=recipe,
        reason=f"it is the FP8 scheme for {policy.title}",
        rejected=tuple(rejected),
        target=str(target),
    )


def _get_policy(gpu: Gpu) -> Policy:
    if not gpu.is_gpu:
        return _NO_GPU
    if gpu.capability is None:
        return _ROCM
    policy = POLICIES[0]
    for row in POLICIES:
        if row.since <= gpu.capability:
            policy = row
    return policy


def _find_first_supported(
    candidates: tuple[str, ...], target: Target
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the first recipe that runs well on the target, and those before it with the reason."""
    rejected: list[tuple[str, str]] = []
    for name in candidates:
        supported = check_support(name, target)
        is_worse = supported.verdict == "emulated" and name in (_NVFP4, _BLOCKWISE)
        if supported.verdict == "no" or is_worse:
            why: str | None = supported.reason
        else:
            why = _find_version_fault(name, target)
        if why is None:
            return name, rejected
        rejected.append((name, why))
    return None, rejected


def _find_version_fault(name: str, target: Target) -> str | None:
    """Return why a recipe that would run is not trained with yet, or None."""
    if name != _NVFP4:
        return None
    for product, least in (("te", "2.14"), ("mcore", "0.18")):
        version = getattr(target, product)
        if is_at_least(version, least) is not True:
            known = "the target does not say"
            if version:
                known = f"this is {version}"
            return (
                f"its FP4 weights are right from {PRODUCT_TITLES[product]} {least} on, and {known}"
            )
    return None


_RULE_VERDICTS = {
    **dict.fromkeys(("PB602", "PB603", "PB621", "PB622", "PB608", "PB606", "PB610", "PB605"), "no"),
    **dict.fromkeys(("PB611", "PB609", "PB617", "PB604", "PB623"), "emulated"),
    **dict.fromkeys(("PB614", "PB607"), "unknown"),
}
"""Rule -> the verdict where it speaks; the first verdict counts."""
_VERSION_INDEPENDENT_RULES = (
    "PB602",
    "PB603",
    "PB608",
    "PB611",
    "PB614",
    "PB621",
    "PB622",
    "PB623",
)
"""Rules whose verdict no version changes."""
_SUPPORT_RULES = cast_to_precision_rules(RULES_BY_ID[name] for name in _RULE_VERDICTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Whether a target runs a recipe."""

    verdict: str
    """native, emulated, unknown or no.

    native: in hardware. emulated: runs, but not in hardware of that format. unknown: depends on
    versions that the target does not state. no: does not run.
    """
    reason: str
    needs: tuple[tuple[str, str], ...] = ()
    """(product, least version) pairs that the recipe needs there."""


def check_support(recipe: str | MixedPrecisionConfig, target: Target) -> Support:
    """Return whether `target` runs `recipe`, as far as GPU, CUDA and Transformer Engine decide."""
    config = get_mixed_precision_config(recipe)
    if target.gpu is None:
        return Support(verdict="unknown", reason="the target names no GPU")
    if get_scheme(config) is not None:
        return _check_low_precision(config, target)
    mode = get_mode(config)
    if config.autocast_enabled:
        mode = "bf16"
    if mode == "bf16" and not target.gpu.has_native_bf16:
        return Support(verdict="emulated", reason="BF16 is native from compute capability 8.0 on")
    if mode == "fp16" and not target.gpu.is_gpu:
        return Support(verdict="emulated", reason="CPUs convert FP16 for most operators")
    return Support(verdict="native", reason=f"{mode.upper()} is native")


def _check_low_precision(config: MixedPrecisionConfig, target: Target) -> Support:
    views = {
        role: AttributeView({**OWNER_DEFAULTS[role], **get_effective_values(config)})
        for role in PRECISION_OWNERS
    }
    context = RuleContext(config, views=views, target=target)
    findings = evaluate_rules(_SUPPORT_RULES, context)
    verdict = _find_verdict(findings)
    reasons = []
    for finding in findings:
        if _RULE_VERDICTS[finding.id] == verdict:
            reasons.append(finding.rule + _format_version(finding))
    reason = "; ".join(reasons) or f"{get_scheme(config)} is native"
    needs: tuple[tuple[str, str], ...] = ()
    if not any(finding.id in _VERSION_INDEPENDENT_RULES for finding in findings):
        needs = _list_least_versions(context)
    return Support(verdict=verdict, reason=reason, needs=needs)


def _find_verdict(findings: Collection[RuleFinding]) -> str:
    ids = {finding.id for finding in findings}
    for rule_id, verdict in _RULE_VERDICTS.items():
        if rule_id in ids:
            return verdict
    return "native"


def _format_version(finding: RuleFinding) -> str:
    """Return the version that a rule speaks about, as the end of its sentence."""
    # PB608: there is no Transformer Engine, hence no version to name.
    if finding.path not in ("target.te", "target.cuda") or finding.id == "PB608":
        return ""
    return f", this is {finding.value}"


def _list_least_versions(context: RuleContext) -> tuple[tuple[str, str], ...]:
    """Return (product, least version) pairs that the scheme needs on the target."""
    if context.row is None:
        return ()
    te = context.row.min_transformer_engine
    if is_blockwise_on_blackwell(context):
        te = BLOCKWISE_ON_BLACKWELL
    needs = []
    for product, least in (("te", te), ("cuda", context.row.min_cuda)):
        if least is not None:
            needs.append((product, least))
    return tuple(needs)


def group_gpus() -> dict[str, list[Gpu]]:
    """Return the columns of the matrix: architecture and compute capability -> its GPUs.

    The GPUs of a column run the same recipes.
    """
    titles = []
    for gpu in GPUS.values():
        capability = format_dotted(gpu.capability or ())
        titles.append((f"{gpu.generation} {capability}".rstrip(), gpu))
    return group_pairs(titles)


def build_support_matrix(recipes: Iterable[str]) -> dict[str, dict[str, Support]]:
    """Return recipe -> generation's title -> support, with no versions assumed."""
    columns = group_gpus()
    rows: dict[str, dict[str, Support]] = {}
    for name in recipes:
        rows[name] = {}
        for title, gpus in columns.items():
            rows[name][title] = check_support(name, Target(gpu=gpus[0]))
    return rows

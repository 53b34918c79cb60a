"""`auto`: a recipe chosen by target, model and versions, with the reason and what was rejected.

    target = parse_target("h100x8,te2.8,cuda12.9,mcore0.18")
    resolve_auto("auto:fp8", target=target, parameters=70_000_000_000)

`POLICIES` is a table. For each compute capability it has the safe recipe ("auto"), the recipes of an
FP8 request, and the fastest recipes. Without a target, a machine with no visible GPU is refused:
the GPUs of a login node are not those of the run.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bridge.errors import BackendUnavailableError, RunConfigError, close_matches, did_you_mean
from bridge.model.modules import list_embedding_modules, list_layer_modules, list_output_modules
from bridge.model.shape_reader import require_shape
from bridge.preflight.recipe_support import check_support
from bridge.target.declaration import TARGET_EXAMPLE
from bridge.target.gpus import Gpu
from bridge.target.machine import detect_target
from bridge.target.target import Target
from bridge.target.versions import PRODUCT_TITLES, is_at_least

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
    """First compute capability of the row, which counts up to that of the next row."""
    title: str
    """The generation of GPUs, in messages."""
    safe: str = "bf16_mixed"
    """The recipe for "auto"."""
    fp8: tuple[str, ...] = ()
    """The recipes for "auto:fp8", best first; empty: FP8 is refused."""
    fastest: tuple[str, ...] = ()
    """The recipes for "auto:fastest", best first; then comes the safe one."""
    why: str = "BF16 is native, and FP8 is taken on ask"
    """The reason for the safe choice."""
    no_fp8_reason: str = "no FP8 matrix units"
    """Why an FP8 request is refused if there is no recipe for it."""


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
    """The recipe that was chosen for a request, and the reason. The run folder records it."""

    request: str
    """A key of `REQUESTS`."""
    recipe: str
    """The name of the chosen recipe."""
    reason: str
    """Why it was chosen, as a clause."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(recipe, why not) pairs of the recipes that would have been better."""
    target: str = ""
    """The target as text."""

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
    """Return the number of parameters of a model, without its MTP layers.

    None if the model's config cannot be read.
    """
    try:
        shape = require_shape(model)
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
    """Choose a recipe for a request.

    Args:
        request: A key of `REQUESTS`.
        target: The target; without a GPU in it, this machine, which must have one.
        parameters: The number of parameters of the model. A model of unknown size is not small.

    Raises:
        RunConfigError: An unknown request, or no GPU is known.
        BackendUnavailableError: FP8 is requested, and no FP8 recipe runs on the target.
    """
    wanted = request.strip().lower()
    if wanted not in REQUESTS:
        matches = close_matches(wanted, REQUESTS)
        hint = did_you_mean(matches) or f"There are {', '.join(REQUESTS)}."
        raise RunConfigError(f"mixed_precision: no such request, got {request!r}. {hint}", matches)
    if target is None or target.gpu is None:
        target = detect_target()
    if target.gpu is None or (target.is_detected and not target.gpu.is_gpu):
        raise RunConfigError(
            f"mixed_precision: {wanted} is chosen by the GPUs of the run, "
            f"and no GPU is visible here, got {request!r}. "
            f"Resolve it on the worker, or declare the target: target={TARGET_EXAMPLE}."
        )
    policy = _get_policy(target.gpu)
    if wanted == "auto:fp8":
        return _choose_fp8(wanted, policy, target)
    if parameters is not None and parameters < SMALL_MODEL_PARAMETERS:
        why = (
            f"{parameters / 1e6:.1f} million parameters gain nothing from less than FP32 "
            "(the line is at 100 million)"
        )
        return Choice(request=wanted, recipe="fp32", reason=why, target=str(target))
    if wanted == "auto:fastest" and policy.fastest:
        return _choose_fastest(wanted, policy, target)
    return _choose_safe(wanted, policy, target)


def _choose_fastest(request: str, policy: Policy, target: Target) -> Choice:
    """Choose the fastest recipe that runs well, or else the safe one."""
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
    """Choose the safe recipe."""
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
    """Choose the best FP8 recipe that runs on the target.

    Raises:
        BackendUnavailableError: None does.
    """
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
    """Return the row of a GPU: the last one that begins at or below its compute capability."""
    if not gpu.is_gpu:
        return _NO_GPU
    if gpu.capability is None:
        return _ROCM
    policy = POLICIES[0]
    for row in POLICIES:
        if row.since <= gpu.capability:
            policy = row
    return policy


class _Candidates(NamedTuple):
    """The first of some recipes that runs well on a target, and the rejected ones before it."""

    recipe: str | None
    rejected: list[tuple[str, str]]


def _find_first_supported(candidates: tuple[str, ...], target: Target) -> _Candidates:
    """Return the first recipe that runs well on the target, and the rejected ones before it."""
    rejected: list[tuple[str, str]] = []
    for name in candidates:
        supported = check_support(name, target)
        # An emulated recipe is no gain in NVFP4 and blockwise FP8, so another one is better.
        is_worse = supported.verdict == "emulated" and name in (_NVFP4, _BLOCKWISE)
        if supported.verdict == "no" or is_worse:
            why: str | None = supported.reason
        else:
            why = _find_version_fault(name, target)
        if why is None:
            return _Candidates(recipe=name, rejected=rejected)
        rejected.append((name, why))
    return _Candidates(recipe=None, rejected=rejected)


def _find_version_fault(name: str, target: Target) -> str | None:
    """Return why a recipe that runs is rejected for the versions of the target; None if it is not."""
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

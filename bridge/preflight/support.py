"""Which recipe runs on which target, and the matrix of all of them. Read from the scheme rows and the GPU rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.preflight.target import Target
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.gpus import GPUS, Gpu
from bridge.rules.versions import TITLES, at_least, dotted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.registry.config import MixedPrecisionConfig
    from bridge.rules.versions import Version

__all__ = ["VERDICTS", "Generation", "Support", "generations", "matrix", "support"]

VERDICTS = {
    "native": "runs in hardware",
    "emulated": "runs, but not in hardware of that format",
    "unknown": "depends on versions that the target does not say",
    "no": "does not run",
}
"""Verdict -> what it means."""

_BLOCKWISE_ON_BLACKWELL = "2.9"


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Whether a target runs a recipe."""

    verdict: str
    """A key of `VERDICTS`."""
    reason: str
    """Why, as a clause."""
    needs: tuple[tuple[str, str], ...] = ()
    """(product, least version) pairs that the recipe needs there."""

    @property
    def runs(self) -> bool:
        """Whether it may be chosen: nothing known speaks against it."""
        return self.verdict != "no"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """GPUs that run the same recipes: one column of the matrix."""

    title: str
    """Architecture and compute capability."""
    gpus: tuple[Gpu, ...]
    """Its rows."""


def support(recipe: str | MixedPrecisionConfig, target: Target) -> Support:
    """Return whether `target` runs `recipe`, as far as GPU, CUDA and Transformer Engine decide it.

    Raises:
        UnknownRecipeError: No such recipe.
    """
    config = get_mixed_precision_config(recipe)
    if target.gpu is None:
        return Support(verdict="unknown", reason="the target names no GPU")
    family = FP8_SCHEMES if config.fp8 else FP4_SCHEMES
    row = family.get(config.scheme or "")
    if row is not None:
        return _scheme(row, target, target.gpu)
    mode = "bf16" if config.mode == "bf16" or config.autocast_enabled else config.mode
    if mode == "bf16" and not target.gpu.has_native_bf16:
        return Support(verdict="emulated", reason="BF16 is native from compute capability 8.0 on")
    if mode == "fp16" and not target.gpu.is_gpu:
        return Support(verdict="emulated", reason="CPUs convert FP16 for most operators")
    return Support(verdict="native", reason=f"{mode.upper()} is native")


def _scheme(row: Scheme, target: Target, gpu: Gpu) -> Support:
    if not gpu.is_gpu:
        return Support(verdict="emulated", reason="no GPU: the values are emulated, the speed is not")
    if gpu.capability is None:
        return Support(verdict="unknown", reason="the gates of ROCm's Transformer Engine are not known here")
    has = dotted(gpu.capability)
    if row.min_compute_capability and gpu.capability < row.min_compute_capability:
        least = dotted(row.min_compute_capability)
        return Support(verdict="no", reason=f"{row.name} needs compute capability {least}, this is {has}")
    if row.below_compute_capability and gpu.capability >= row.below_compute_capability:
        limit = dotted(row.below_compute_capability)
        return Support(verdict="no", reason=f"{row.name} runs below compute capability {limit}, this is {has}")
    if target.has_te is False:
        return Support(verdict="no", reason="Transformer Engine is not installed")
    needs = _needs(row, gpu)
    for product, least in needs:
        if at_least(getattr(target, product), least) is False:
            version: Version = getattr(target, product)
            return Support(
                verdict="no",
                reason=f"{row.name} needs {TITLES[product]} {least}, this is {version}",
                needs=needs,
            )
    return _with_limits(row, target, gpu, needs)


def _with_limits(row: Scheme, target: Target, gpu: Gpu, needs: tuple[tuple[str, str], ...]) -> Support:
    """Return the verdict for what no gate refuses."""
    open_ = [f"{TITLES[product]} {least}" for product, least in needs if getattr(target, product) is None]
    if gpu.capability is not None and row.name == "blockwise" and gpu.capability >= (10, 0):
        unsure = ", and were reported not to converge" if gpu.capability >= (12, 0) else ""
        return Support(verdict="emulated", reason=f"blockwise GEMMs run as MXFP8 GEMMs{unsure}", needs=needs)
    if gpu.capability is not None and row.name == "nvfp4" and gpu.capability >= (12, 0):
        why = "NVFP4 trains there without Hadamard transform and stochastic rounding only"
        return Support(verdict="emulated", reason=why, needs=needs)
    if open_:
        return Support(verdict="unknown", reason=f"{row.name} needs {' and '.join(open_)}", needs=needs)
    return Support(verdict="native", reason=f"{row.name} is native", needs=needs)


def _needs(row: Scheme, gpu: Gpu) -> tuple[tuple[str, str], ...]:
    te = row.min_transformer_engine
    if row.name == "blockwise" and gpu.capability is not None and gpu.capability >= (10, 0):
        te = _BLOCKWISE_ON_BLACKWELL
    return tuple((product, least) for product, least in (("te", te), ("cuda", row.min_cuda)) if least is not None)


def generations() -> tuple[Generation, ...]:
    """Return the columns of the matrix: GPUs of one architecture and compute capability together."""
    found: dict[str, list[Gpu]] = {}
    for gpu in GPUS.values():
        title = gpu.generation if gpu.capability is None else f"{gpu.generation} {dotted(gpu.capability)}"
        found.setdefault(title, []).append(gpu)
    return tuple(Generation(title=title, gpus=tuple(gpus)) for title, gpus in found.items())


def matrix(recipes: Iterable[str]) -> dict[str, dict[str, Support]]:
    """Return recipe -> generation's title -> support, with no versions assumed."""
    columns = generations()
    return {name: {column.title: support(name, Target(gpu=column.gpus[0])) for column in columns} for name in recipes}

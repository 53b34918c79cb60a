"""Which recipe runs on which target, and the matrix of all of them. For FP8 and FP4 the rules of the target decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.preflight.setup import Setup
from bridge.preflight.target import Target
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.rule import ask, by_gate
from bridge.rules.rulebook import BY_ID
from bridge.rules.target import GPUS, Gpu
from bridge.rules.topics.target import BLOCKWISE_ON_BLACKWELL, is_blockwise_on_blackwell
from bridge.rules.versions import dotted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["Support", "generations", "matrix", "support"]

_VERDICT_OF = {
    **dict.fromkeys(("PB602", "PB603", "PB608", "PB606", "PB610", "PB605"), "no"),
    **dict.fromkeys(("PB611", "PB609", "PB617", "PB604"), "emulated"),
    **dict.fromkeys(("PB614", "PB607"), "unknown"),
}
"""Rule -> the verdict where it speaks; the first verdict counts."""
_WHATEVER_VERSIONS = ("PB602", "PB603", "PB608", "PB611", "PB614")
"""Rules whose verdict no version changes."""
_GATES = by_gate(BY_ID[name] for name in _VERDICT_OF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Whether a target runs a recipe."""

    verdict: str
    """native: in hardware. emulated: runs, but not in hardware of that format. unknown: depends on versions that the
    target does not state. no: does not run."""
    reason: str
    """Why, as a clause."""
    needs: tuple[tuple[str, str], ...] = ()
    """(product, least version) pairs that the recipe needs there."""


def support(recipe: str | MixedPrecisionConfig, target: Target) -> Support:
    """Return whether `target` runs `recipe`, as far as GPU, CUDA and Transformer Engine decide it.

    Raises:
        UnknownRecipeError: No such recipe.
    """
    config = get_mixed_precision_config(recipe)
    if target.gpu is None:
        return Support(verdict="unknown", reason="the target names no GPU")
    if config.scheme is not None:
        return _low_precision(config, target)
    mode = "bf16" if config.autocast_enabled else config.mode
    if mode == "bf16" and not target.gpu.has_native_bf16:
        return Support(verdict="emulated", reason="BF16 is native from compute capability 8.0 on")
    if mode == "fp16" and not target.gpu.is_gpu:
        return Support(verdict="emulated", reason="CPUs convert FP16 for most operators")
    return Support(verdict="native", reason=f"{mode.upper()} is native")


def _low_precision(config: MixedPrecisionConfig, target: Target) -> Support:
    setup = Setup(config, target=target)
    found = ask(_GATES, setup)
    verdict = next((verdict for name, verdict in _VERDICT_OF.items() if name in {one.id for one in found}), "native")
    reasons = [
        f"{one.rule}, this is {one.value}"
        if one.path in ("target.te", "target.cuda") and one.id != "PB608"
        else one.rule
        for one in found
        if _VERDICT_OF[one.id] == verdict
    ]
    needs: tuple[tuple[str, str], ...] = ()
    if setup.row is not None and not any(one.id in _WHATEVER_VERSIONS for one in found):
        te = BLOCKWISE_ON_BLACKWELL if is_blockwise_on_blackwell(setup) else setup.row.min_transformer_engine
        floors = (("te", te), ("cuda", setup.row.min_cuda))
        needs = tuple((product, least) for product, least in floors if least is not None)
    return Support(verdict=verdict, reason="; ".join(reasons) or f"{config.scheme} is native", needs=needs)


def generations() -> dict[str, list[Gpu]]:
    """Return the columns of the matrix: architecture and compute capability -> its GPUs, which run the same recipes."""
    found: dict[str, list[Gpu]] = {}
    for gpu in GPUS.values():
        title = gpu.generation if gpu.capability is None else f"{gpu.generation} {dotted(gpu.capability)}"
        found.setdefault(title, []).append(gpu)
    return found


def matrix(recipes: Iterable[str]) -> dict[str, dict[str, Support]]:
    """Return recipe -> generation's title -> support, with no versions assumed."""
    columns = generations()
    return {name: {title: support(name, Target(gpu=gpus[0])) for title, gpus in columns.items()} for name in recipes}

"""Early warnings: signs of trouble in the records of a run, each with its threshold."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from bridge.audit.run_folder import RunFolder

Records = list[dict[str, Any]]

RECENT = 20
"""Records that are compared with the last one."""


def early_warnings(run: RunFolder, *, silenced: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return (name, sentence) of each sign of trouble in the records so far."""
    train = run.metrics("train")
    found = ((name, look(train, run.config)) for name, look in WARNINGS.items() if name not in silenced)
    return [(name, sentence) for name, sentence in found if sentence is not None]


def _not_finite(train: Records, _config: dict[str, Any]) -> str | None:
    first = next((one["step"] for one in train if one["loss"] is None), None)
    return f"the loss is not finite since step {first}." if first is not None else None


def _loss_spike(train: Records, _config: dict[str, Any]) -> str | None:
    losses = [one["loss"] for one in train[-RECENT - 1 :] if one["loss"] is not None]
    if len(losses) < RECENT // 2:
        return None
    usual = median(losses[:-1])
    if losses[-1] <= 1.2 * usual:
        return None
    return f"the loss is {losses[-1]:.4f}, more than 1.2 times the median of the records before, {usual:.4f}."


def _gradient_spike(train: Records, _config: dict[str, Any]) -> str | None:
    norms = [one["grad_norm"] for one in train[-RECENT - 1 :] if one["grad_norm"] is not None]
    if len(norms) < RECENT // 2:
        return None
    usual = median(norms[:-1])
    if norms[-1] <= 10 * usual:
        return None
    return f"the gradient norm is {norms[-1]:.3g}, more than 10 times the median of the records before, {usual:.3g}."


def _skipped(train: Records, _config: dict[str, Any]) -> str | None:
    if not train or 10 * train[-1]["skipped_steps"] <= train[-1]["step"]:
        return None
    last = train[-1]
    return f"{last['skipped_steps']} of {last['step']} steps were skipped, more than a tenth."


def _scale_floor(train: Records, config: dict[str, Any]) -> str | None:
    optimizer = config.get("optimizer", {})
    floor = optimizer.get("min_loss_scale")
    if not train or not optimizer.get("fp16") or optimizer.get("loss_scale") or floor is None:
        return None
    if train[-1]["loss_scale"] > floor:
        return None
    return f"the loss scale is at its floor, {floor:g}: the next overflow cannot lower it."


WARNINGS: dict[str, Callable[[Records, dict[str, Any]], str | None]] = {
    "loss-not-finite": _not_finite,
    "loss-spike": _loss_spike,
    "gradient-spike": _gradient_spike,
    "skipped-steps": _skipped,
    "loss-scale-floor": _scale_floor,
}
"""Name of a warning -> what looks for it in the records and the config."""

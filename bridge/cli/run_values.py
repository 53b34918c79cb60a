"""The arguments of every command that is about a run rather than a recipe, and the run that they describe.

Hydra is imported when a run is read, not before: commands about recipes do without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from bridge.front.values import Values
    from bridge.plan.memory_activations import Workload
    from bridge.plan.precision_plan import PrecisionPlan

__all__ = [
    "Described",
    "add_values_arguments",
    "as_overrides",
    "described",
    "read_values",
    "with_vocabulary",
]

BYTES = 256
"""Vocabulary of text that is tokenised to bytes."""


def add_values_arguments(parser: Any) -> None:
    """Add what says which run is meant."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="as for scripts/train.py, mixed_precision=NAME or model.num_layers=8 say; a bare NAME is the recipe",
    )
    parser.add_argument("--config-path", metavar="FOLDER", help="the configs of the training script (default: conf)")
    parser.add_argument("--config", metavar="FILE", help="a YAML file with the sections themselves, instead of configs")
    parser.add_argument("--target", metavar="TARGET", help="the GPUs, h100x64 say; without it, what the config says")


def read_values(chosen: argparse.Namespace, *, recipe: str | None = None) -> Values:
    """Return the values that the arguments describe, with another recipe if one is given.

    Raises:
        BridgeError: As `bridge.front.values.load_values`.
    """
    from bridge.front.values import load_values

    words = as_overrides(chosen.overrides)
    if recipe is not None:
        words = [word for word in words if not word.startswith("mixed_precision")]
        words.append(f"mixed_precision={recipe}")
    if chosen.target is not None:
        words.append(f"target={chosen.target}")
    return load_values(words, chosen.config_path, chosen.config)


def as_overrides(words: list[str]) -> list[str]:
    """Return the words as overrides: a word without ``=`` or ``~`` is a recipe's name."""
    return [word if "=" in word or word.startswith("~") else f"mixed_precision={word}" for word in words]


@dataclass(frozen=True, kw_only=True)
class Described:
    """A run as the calculators take it."""

    values: Values
    plan: PrecisionPlan
    workload: Workload
    capability: tuple[int, int] | None
    """Compute capability of the target's GPU, None where nothing says."""


def described(chosen: argparse.Namespace) -> Described:
    """Return the plan, layout and workload of a run.

    The number of GPUs is the target's, or else the least that the parallel sizes need.

    Raises:
        BridgeError: As `read_values`; no such model or layout; a target that cannot be read.
    """
    from bridge.plan.memory_activations import Workload
    from bridge.plan.precision_plan import precision_plan
    from bridge.plan.stages import Parallel
    from bridge.preflight.target import parse_target

    values = read_values(chosen)
    target = parse_target(values.target) if isinstance(values.target, str) else None
    model = with_vocabulary(values)
    parallel = Parallel.of(model, world_size=target.count if target is not None else None)
    plan = precision_plan(values.precision, model, parallel, optimizer=values.optimizer, ddp=values.ddp)
    return Described(
        values=values,
        plan=plan,
        workload=Workload.of(model, values.train, data_parallel=parallel.data),
        capability=target.capability if target is not None else None,
    )


def with_vocabulary(values: Values) -> dict[str, Any]:
    """Return the model's fields with the vocabulary that the data bring: text is tokenised to bytes."""
    model = dict(values.model)
    if model.get("vocab_size") is None and values.data:
        model["vocab_size"] = values.data.get("vocab_size") or BYTES
    return model

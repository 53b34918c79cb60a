"""The arguments that every command about a run takes, and the run that they describe.

Hydra is imported when a run is read, not before: commands about recipes do without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError

if TYPE_CHECKING:
    import argparse

    from bridge.front.loader import RunValues
    from bridge.plan.memory_activations import Workload
    from bridge.plan.precision_plan import PrecisionPlan

__all__ = [
    "Described",
    "add_run_arguments",
    "as_overrides",
    "described",
    "plan_of",
    "read_run",
    "with_vocabulary",
    "write_file",
]

BYTES = 256
"""Vocabulary of text that is tokenised to bytes."""


def add_run_arguments(parser: Any) -> None:
    """Add the arguments that say which run is meant."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="as for scripts/train.py, mixed_precision=NAME or model.num_layers=8 say; a bare NAME is the recipe",
    )
    parser.add_argument("--config-path", metavar="FOLDER", help="folder of the config tree (default: conf)")
    parser.add_argument("--config-name", default="config", metavar="NAME", help="the primary config in it")
    parser.add_argument("--config-dir", metavar="FOLDER", help="another folder, of a team's own groups and recipes")
    parser.add_argument("--config", metavar="FILE", help="a saved run's config.yaml, or Megatron Bridge's, instead")
    parser.add_argument(
        "--target", metavar="TARGET", help="where it runs: h100x8,te2.8,cuda12.9,mcore0.16, or auto for this machine"
    )


def read_run(
    chosen: argparse.Namespace, *, recipe: str | None = None, file: str | None = None, strict: bool = True
) -> RunValues:
    """Return the run that the arguments describe.

    Args:
        chosen: The arguments.
        recipe: Another recipe for it.
        file: A YAML file to read instead.
        strict: As for `bridge.front.loader.load_run`.

    Raises:
        BridgeError: As `load_run`.
    """
    from bridge.front.loader import load_run

    if file is not None:
        return load_run((), config_file=file)
    words = as_overrides(chosen.overrides)
    if recipe is not None:
        words = [word for word in words if not word.lstrip("+~").startswith("mixed_precision")]
        words.append(f"mixed_precision={recipe}")
    if chosen.target is not None:
        words.append(f"target={chosen.target}")
    return load_run(
        [_quoted(word) for word in words],
        chosen.config_path,
        chosen.config,
        config_name=chosen.config_name,
        config_dir=chosen.config_dir,
        strict=strict,
    )


def as_overrides(words: list[str]) -> list[str]:
    """Return the words as overrides: a word without ``=`` or ``~`` is a recipe's name."""
    return [word if "=" in word or word.startswith("~") else f"mixed_precision={word}" for word in words]


def _quoted(word: str) -> str:
    """Return ``target=h100x8,te2.8`` with quotes: Hydra takes a comma for a sweep."""
    key, _, value = word.partition("=")
    return f"{key}='{value}'" if key == "target" and value[:1] not in ("", "[", "'", '"') else word


def plan_of(run: RunValues) -> PrecisionPlan:
    """Return the precision plan of a run."""
    from bridge.plan.precision_plan import precision_plan

    return precision_plan(run.precision, run.model, optimizer=run.optimizer, ddp=run.ddp)


@dataclass(frozen=True, kw_only=True)
class Described:
    """A run as the calculators take it."""

    values: RunValues
    plan: PrecisionPlan
    workload: Workload
    capability: tuple[int, int] | None
    """Compute capability of the target's GPU, None where no target is declared."""


def described(chosen: argparse.Namespace) -> Described:
    """Return the plan, layout and workload of a run.

    The number of GPUs is the target's, or else the least that the parallel sizes need.

    Raises:
        BridgeError: As `read_run`; no such model or layout; a target that cannot be read.
    """
    from bridge.plan.memory_activations import Workload
    from bridge.plan.precision_plan import precision_plan
    from bridge.plan.stages import Parallel
    from bridge.preflight.target import parse_target

    run = read_run(chosen)
    target = parse_target(run.target) if run.target is not None else None
    model = with_vocabulary(run)
    parallel = Parallel.of(model, world_size=target.count if target is not None else None)
    return Described(
        values=run,
        plan=precision_plan(run.precision, model, parallel, optimizer=run.optimizer, ddp=run.ddp),
        workload=Workload.of(model, run.train, data_parallel=parallel.data),
        capability=target.capability if target is not None else None,
    )


def with_vocabulary(run: RunValues) -> dict[str, Any]:
    """Return the model's fields with the vocabulary that the data bring: text is tokenised to bytes."""
    model = dict(run.model)
    if model.get("vocab_size") is None and run.data:
        model["vocab_size"] = run.data.get("vocab_size") or BYTES
    return model


def write_file(path: Path | str, text: str, option: str) -> None:
    """Write a file that an option names.

    Raises:
        RunConfigError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        why = (error.strerror or "an error").lower()
        raise RunConfigError(f"{option}: cannot be written ({why}), got {str(path)!r}. Give another file.") from None

"""The comparison command: a sweep over recipes and seeds, and a verdict on the loss of each recipe.

    python scripts/compare.py mixed_precision=bf16_mixed,fp8_current seeds=3 gate=1%

Hydra runs the sweep. Every other argument is an override or a flag of the training script, and may
choose a launcher. A seed decides the weights and the order of the data, which are the same for every
recipe. A run that is already finished in the folder of the sweep is not run again.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bridge.errors import BridgeError, RunConfigError, TrainingError
from bridge.extras import require_extra
from bridge.front.folders import find_config_folder
from bridge.front.job import StartRun, is_first_process
from bridge.front.main import AroundSweep, main
from bridge.front.plain_config import container_to_dict
from bridge.front.train import check_and_sync, report_sweep
from bridge.runtime.compare.arm import FAILURE_FILE
from bridge.runtime.compare.comparison import Comparison, get_exit_code
from bridge.runtime.compare.gap import DEFAULT_GATE, describe_too_short, parse_gate
from bridge.training.config import ConfigContainer

DEFAULT_SEEDS = 3
SWEEP_FOLDER = "outputs/comparison"
"""The folder of the sweep. Every launch has the same folder, so that finished runs are found."""
LENGTH_SETTINGS = (
    "train",
    r"train\.train_iters",
    r"train\.lr_warmup_iters",
    r"logging\.log_interval",
)
"""Patterns of the settings that decide whether a run is long enough.

If the sweep varies such a setting, the length of each run is checked, not only the first run's.
"""

log = logging.getLogger("compare")


def main_compare(
    arguments: Sequence[str] | None = None, *, config_path: Path | None = None
) -> None:
    """Run the sweep of a command line, print the comparison, and end with its exit code.

    Args:
        arguments: The arguments of the command line. None: the arguments of this process.
        config_path: The folder of the Hydra tree. None: the folder that `find_config_folder` finds.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(__doc__)
        return
    try:
        sweep = _parse_arguments(arguments)
    except BridgeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    comparisons: list[Comparison] = []

    def before(sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse a sweep whose runs are too short."""
        require_extra("train", "A training run")
        sweeps_length = re.compile(rf"\+*({'|'.join(LENGTH_SETTINGS)})=.*,")
        if not any(sweeps_length.match(argument) for argument in sweep.arguments):
            require_enough_steps(sections["train"], sections["logging"])

    def after(folder: Path, runs: Sequence[Path]) -> None:
        """Print the comparisons and keep them for the exit code."""
        comparisons.extend(report_sweep(folder, runs, gate=sweep.gate))

    around = AroundSweep(before=before, after=after)
    main(
        check_and_sync_arm,
        config_path=config_path or find_config_folder(),
        name="train",
        arguments=sweep.arguments,
        around=around,
    )
    code = get_exit_code(comparisons)
    if code:
        sys.exit(code)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sweep:
    """A sweep that a command line states."""

    arguments: list[str]
    """The overrides and flags for Hydra."""
    gate: float
    """The share of the baseline's loss that a gap may reach."""


def _parse_arguments(arguments: Sequence[str]) -> _Sweep:
    """Return the sweep of a command line.

    Raises:
        RunConfigError: Fewer than two recipes are named, or a setting of the comparison is wrong.
    """
    settings: dict[str, str] = {}
    overrides: list[str] = []
    keys: set[str] = set()
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in ("seeds", "gate"):
            settings[key] = value
        else:
            overrides.append(argument)
            keys.add(key)
    if not any(_names_several_recipes(override) for override in overrides):
        remedy = "Write mixed_precision=bf16_mixed,fp8_current, the baseline first."
        raise RunConfigError(f"mixed_precision: a comparison needs two recipes or more. {remedy}")
    if "train.seed" in keys and "seeds" in settings:
        rule, remedy = "counts the seeds that train.seed names", "Give one of the two."
        raise RunConfigError.of("seeds", rule, settings["seeds"], remedy)
    seeds = _parse_seed_count(settings.get("seeds", str(DEFAULT_SEEDS)))
    gate = parse_gate(settings.get("gate", f"{100 * DEFAULT_GATE:g}%"))
    # These settings are left out of the name of a run's folder: they are paths, or follow the seed.
    excluded = "[recipes_from,data.path,data.cache_dir,data.seed]"
    defaults = {
        "hydra.sweep.dir": SWEEP_FOLDER,
        "hydra.job.config.override_dirname.exclude_keys": excluded,
        "train.seed": ",".join(map(str, range(1, seeds + 1))),
        "data.seed": "${train.seed}",
        "hydra.mode": "MULTIRUN",
    }
    for key, default in defaults.items():
        if key not in keys:
            overrides.append(f"{key}={default}")
    return _Sweep(arguments=overrides, gate=gate)


def _names_several_recipes(override: str) -> bool:
    """Return whether an override sweeps over recipes."""
    return override.startswith("mixed_precision=") and "," in override


def _parse_seed_count(text: str) -> int:
    """Return the number of ``seeds=``.

    Raises:
        RunConfigError: The text is not a number from 1 to 999.
    """
    if not re.fullmatch(r"[1-9]\d{0,2}", text):
        raise RunConfigError.of("seeds", "must be a number from 1 to 999", text, "Write seeds=3.")
    return int(text)


def check_and_sync_arm(container: ConfigContainer) -> StartRun:
    """Check a run of the sweep and write its precision, as the training script does.

    Raises:
        BridgeError: The run is too short to be compared, or cannot begin.
    """
    require_enough_steps(vars(container.train), vars(container.logging))
    return partial(_train_unless_finished, container, check_and_sync(container))


def require_enough_steps(train: Mapping[str, Any], logging: Mapping[str, Any]) -> None:
    """Refuse runs that are too short to be compared.

    Args:
        train: The section `train`.
        logging: The section `logging`.

    Raises:
        RunConfigError: The runs are too short.
    """
    interval, last = logging["log_interval"], train["train_iters"]
    reason = describe_too_short([*range(interval, last, interval), last], train["lr_warmup_iters"])
    if reason is not None:
        raise RunConfigError(f"train.train_iters: a comparison could not tell anything: {reason}")


def _train_unless_finished(container: ConfigContainer, start: StartRun, run_dir: Path) -> None:
    """Train a run of the sweep, unless it is finished.

    A run that ends with a `TrainingError` is a result of the comparison, so the sweep continues.
    """
    if _is_finished(container, run_dir):
        log.info("%s is finished and is not run again.", run_dir)
        return
    (run_dir / FAILURE_FILE).unlink(missing_ok=True)
    try:
        start(run_dir)
    except TrainingError as error:
        log.warning("%s: %s", run_dir, error)
        if is_first_process():
            content = json.dumps({"error": str(error)}) + "\n"
            (run_dir / FAILURE_FILE).write_text(content, encoding="utf-8")


def _is_finished(container: ConfigContainer, run_dir: Path) -> bool:
    """Return whether the folder has a run of this config that took its last step or failed."""
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        return False
    ended = (run_dir / FAILURE_FILE).is_file()
    summary = run_dir / "summary.json"
    if summary.is_file():
        iteration = json.loads(summary.read_text(encoding="utf-8"))["iteration"]
        ended = ended or iteration >= container.train.train_iters
    # Through YAML and back, as the saved config: tuples become lists, for example.
    plain = yaml.safe_load(yaml.safe_dump(container_to_dict(container)))
    return ended and yaml.safe_load(saved.read_text(encoding="utf-8")) == plain

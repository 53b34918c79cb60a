"""The comparison command: a sweep over recipes and seeds, and the verdict on each recipe's loss.

    python scripts/compare.py mixed_precision=bf16_mixed,fp8_current seeds=3 gate=1%

The sweep is Hydra's: every other word is an override or a flag of the training script, launchers
included. A seed decides the weights and the order of the data, so that every recipe sees the same.
A run that is finished in the sweep's folder is not run again.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
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
"""The sweep's folder: the same from launch to launch, so that finished runs are found."""
LENGTH_SETTINGS = (
    "train",
    r"train\.train_iters",
    r"train\.lr_warmup_iters",
    r"logging\.log_interval",
)
"""Settings that decide whether a run is long enough; where a sweep goes over one, each of its runs
is judged."""

log = logging.getLogger("compare")


def main_compare(words: Sequence[str] | None = None, *, config_path: Path | None = None) -> None:
    """Run the sweep of a command line, print the comparison, and end with its exit code."""
    if words is None:
        words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.stdout.write(__doc__)
        return
    try:
        rest, gate = _build_sweep_arguments(words)
    except BridgeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    made: list[Comparison] = []

    def before(sections: Mapping[str, Mapping[str, Any]]) -> None:
        require_extra("train", "A training run")
        sweeps_length = re.compile(rf"\+*({'|'.join(LENGTH_SETTINGS)})=.*,")
        if not any(sweeps_length.match(word) for word in rest):
            require_enough_steps(sections["train"], sections["logging"])

    def after(folder: Path, runs: Sequence[Path]) -> None:
        made.extend(report_sweep(folder, runs, gate=gate))

    around = AroundSweep(before=before, after=after)
    main(
        prepare_arm,
        config_path=config_path or find_config_folder(),
        name="train",
        words=rest,
        around=around,
    )
    code = get_exit_code(made)
    if code:
        sys.exit(code)


def _build_sweep_arguments(words: Sequence[str]) -> tuple[list[str], float]:
    """Return the words of the sweep and the gate; RunConfigError where no recipes are named."""
    settings: dict[str, str] = {}
    rest: list[str] = []
    keys: set[str] = set()
    for word in words:
        key, _, value = word.partition("=")
        if key in ("seeds", "gate"):
            settings[key] = value
        else:
            rest.append(word)
            keys.add(key)
    if not any(word.startswith("mixed_precision=") and "," in word for word in rest):
        remedy = "Write mixed_precision=bf16_mixed,fp8_current, the baseline first."
        raise RunConfigError(f"mixed_precision: a comparison needs two recipes or more. {remedy}")
    if "train.seed" in keys and "seeds" in settings:
        rule, remedy = "counts the seeds that train.seed names", "Give one of the two."
        raise RunConfigError.of("seeds", rule, settings["seeds"], remedy)
    seeds = _parse_seed_count(settings.get("seeds", str(DEFAULT_SEEDS)))
    gate = parse_gate(settings.get("gate", f"{100 * DEFAULT_GATE:g}%"))
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
            rest.append(f"{key}={default}")
    return rest, gate


def _parse_seed_count(text: str) -> int:
    """Return the number that ``seeds=`` states."""
    if not re.fullmatch(r"[1-9]\d{0,2}", text):
        raise RunConfigError.of("seeds", "must be a number from 1 to 999", text, "Write seeds=3.")
    return int(text)


def prepare_arm(config: ConfigContainer) -> StartRun:
    """Prepare a run of the sweep, as the training script does.

    RunConfigError where the runs are too short to tell anything.
    """
    require_enough_steps(vars(config.train), vars(config.logging))
    return partial(_train_unless_finished, config, check_and_sync(config))


def require_enough_steps(train: Mapping[str, Any], logging: Mapping[str, Any]) -> None:
    """Raise RunConfigError where runs of these settings are too short to tell anything."""
    interval, last = logging["log_interval"], train["train_iters"]
    reason = describe_too_short([*range(interval, last, interval), last], train["lr_warmup_iters"])
    if reason is not None:
        raise RunConfigError(f"train.train_iters: a comparison could not tell anything: {reason}")


def _train_unless_finished(config: ConfigContainer, start: StartRun, run_dir: Path) -> None:
    """Train a run of the sweep, unless it is finished.

    A run that ends with an error is a result, too.
    """
    if _is_finished(config, run_dir):
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


def _is_finished(config: ConfigContainer, run_dir: Path) -> bool:
    """Return whether exactly this run is in the folder, to its last step or to its error."""
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        return False
    ended = (run_dir / FAILURE_FILE).is_file()
    summary = run_dir / "summary.json"
    if summary.is_file():
        iteration = json.loads(summary.read_text(encoding="utf-8"))["iteration"]
        ended = ended or iteration >= config.train.train_iters
    plain = yaml.safe_load(yaml.safe_dump(container_to_dict(config)))
    return ended and yaml.safe_load(saved.read_text(encoding="utf-8")) == plain

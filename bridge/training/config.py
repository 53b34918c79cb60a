"""The one object that describes a run: `ConfigContainer` and its sections.

The sections of Megatron Core (`model`, `optimizer`, `ddp`) are Megatron's own dataclasses or
subclasses of them, as the two named here, whose checks wait for `finalize`; the others are ours and
use Megatron's names for what Megatron has a name for (`train_iters`, `micro_batch_size`,
`lr_warmup_iters`, ...).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError
from bridge.precision.owners import ModelOwner
from bridge.preflight.run import resolve_precision
from bridge.registry.registry import get_mixed_precision_config, is_auto
from bridge.target.declaration import target_of

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig
    from bridge.registry.schedule import PrecisionSchedule
    from bridge.runtime.megatron.deferred import DistributedDataParallelConfig, OptimizerConfig
    from bridge.sync.report import SyncReport

__all__ = [
    "CheckpointConfig",
    "ConfigContainer",
    "DataConfig",
    "DistributedDataParallelConfig",
    "LoggingConfig",
    "OptimizerConfig",
    "ResumeConfig",
    "TrainConfig",
    "runtime_config_update",
]

PAGE = "docs/howto/migrate-from-megatron-bridge.md"

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class DataConfig:
    """The training data."""

    path: str | None = None
    """A text file, or the prefix of a Megatron ``.bin``/``.idx`` pair; None: the text of CPython's
    documentation."""
    vocab_size: int | None = None
    """Vocabulary of an existing ``.bin``/``.idx`` pair; required there, and never used for text
    (bytes: 256)."""
    split: str = "90,5,5"
    """Parts of the documents for training, validation and test, as Megatron writes them."""
    seed: int = 1234
    """Seed of the sample order."""
    cache_dir: str | None = None
    """Where tokenised text and sample indices are kept; None: ``precision-bridge`` in the user's
    cache folder."""
    num_workers: int = 0
    """DataLoader worker processes per rank."""


@dataclass(kw_only=True)
class TrainConfig:
    """How long, how much at a time, and with which learning-rate schedule."""

    train_iters: int = 400
    """Optimizer steps."""
    micro_batch_size: int = 8
    """Sequences per forward pass on one data-parallel rank."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks; the rest of the factor is gradient
    accumulation."""
    eval_interval: int = 100
    """Steps between two validations; 0: only after the last step."""
    eval_iters: int = 8
    """Global batches per validation; 0: no validation."""
    lr_decay_style: str = "cosine"
    """Megatron's schedule name: cosine, linear, constant, inverse-square-root or WSD."""
    lr_warmup_iters: int = 40
    """Steps of linear warm-up from zero to `optimizer.lr`."""
    lr_decay_iters: int | None = None
    """Steps after which the rate is `optimizer.min_lr`; None: `train_iters`."""
    seed: int = 1234
    """Seed of the weights and of dropout."""
    distributed_timeout_minutes: float = 30.0
    """How long a collective waits for a rank that stalls, in validation and in a save too; then all
    ranks end."""
    check_for_nan_in_loss: bool = True
    """Stop at a loss that is not finite. Off under FP16 with a dynamic loss scale, which overflows
    by design."""
    audit: str = "error"
    """End the run where a step does not multiply and keep what the plan says: error, warn (log it
    and go on) or off."""
    audit_interval: int = 0
    """Steps between two audits; 0: only the first and the last step."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where the run's state is written and read, with Megatron's ``dist_checkpointing``."""

    save: str | None = None
    """Folder to write to; None: nothing is saved."""
    save_interval: int | None = None
    """Steps between two checkpoints; None: one after the last step."""
    save_last: bool = True
    """Save after the last step too. A run that is stopped before it always saves."""
    load: str | None = None
    """Folder to resume from (its newest checkpoint); None: start fresh."""
    checksum: bool = True
    """Write a checksum of every file into the manifest, and compare it before a file is read; off:
    sizes alone."""
    trust: bool = False
    """Load a checkpoint without a manifest, which another program wrote. Code in it is refused all
    the same."""


@dataclass(kw_only=True)
class ResumeConfig:
    """Differences between a checkpoint and the run that continues from it."""

    allow_precision_change: bool = False
    """Continue in a precision that rounds weights or optimizer state of the checkpoint again."""


@dataclass(kw_only=True)
class LoggingConfig:
    """The files that a run writes about itself."""

    run_dir: str | None = None
    """Folder for metrics, plots, configs and reports; None: Hydra's run folder, or ``runs/<time>``
    without Hydra."""
    log_interval: int = 10
    """Steps between two records in ``metrics.jsonl``, TensorBoard and (without a terminal) the
    log."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    plots: bool = True
    """Draw the curves of the run as pictures."""
    mlflow: str | None = None
    """Tracking store of MLflow that gets the same values, ``http://tracking:5000`` say; None:
    none."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the same values; None: none."""
    quantisation_interval: int = 50
    """Steps between two measurements of what FP8 or FP4 does to the matmuls' operands; 0: none."""
    progress: bool = True
    """Show a progress bar where the output is a terminal."""


@dataclass(kw_only=True)
class ConfigContainer:
    """Everything a run is configured with."""

    model: ModelOwner | None = None
    optimizer: OptimizerConfig | None = None
    ddp: DistributedDataParallelConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    mixed_precision: str | MixedPrecisionConfig | None = None
    """A recipe's name, a config (of Megatron Bridge's class, too), or None: the owners keep their
    own settings."""
    precision_backend: str = "auto"
    """Who runs FP8 and FP4 matmuls: auto, te (Transformer Engine), emulated (the same values, on
    any machine) or te_cpu (Transformer Engine's Python on a CPU: slow, and proves the
    emulation)."""
    precision_schedule: list[Any] | PrecisionSchedule | None = None
    """Later phases of the run in another recipe, ``[{until: 0.9}, {recipe: bf16_mixed}]`` say;
    None: one precision."""
    target: str | None = None
    """The GPUs and versions of the run, ``h100x8,te2.8`` say; None: this machine."""
    silence: dict[str, str] = field(default_factory=dict)
    """Id of a rule of the check -> why it may be broken."""
    precision_choice: dict[str, Any] | None = None
    """The recipe that ``mixed_precision=auto`` was resolved to, why, and the rejected ones; None
    without ``auto``."""
    set_by: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Dotted key -> each file, and the command line, that set it, the last one in effect -> its
    value."""


def runtime_config_update(config: ConfigContainer) -> SyncReport | None:
    """Resolve the container's precision and write it into its sections.

    Those are model, optimizer, DDP and training config.

    This is the strict path: what Megatron is known to refuse later is refused here. Switches of
    sharding that are on in one of optimizer and DDP are turned on in both, and the two are
    finalized where their checks waited for that.

    Args:
        config: The container; `config.mixed_precision` is the resolved config afterwards.

    Returns:
        Every field with its old and new value and the reason; None where no precision is set and
            the owners keep their own settings. A warning is logged for each value of an owner's own
            that was replaced.

    Raises:
        UnknownRecipeError: No such recipe.
        PrecisionTypeError: No container, one without model, optimizer and DDP config, or owners
            that are none.
        PrecisionConfigError: The precision can never be right.
        SyncError: It cannot be written into these configs, or without one model and optimizer
            disagree. Nothing was changed.
    """
    if not hasattr(config, "mixed_precision"):
        raise PrecisionTypeError.of(
            "config", "must be a ConfigContainer", config, "Give the run's container."
        )
    precision: Any = config.mixed_precision
    if is_auto(precision):
        target = target_of(config.target or "auto")
        precision, choice = resolve_precision(precision, config.model, target)
        config.precision_choice = None
        if choice is not None:
            config.precision_choice = choice.to_dict()
    if precision is not None:
        precision = get_mixed_precision_config(precision)
        precision.finalize()
    from bridge.preflight.last_sync import last_sync  # the classes of this module do without it

    report = last_sync(config, precision)
    if report is not None:
        report.log_all(log)
    return report


def __getattr__(name: str) -> Any:
    """Return the configs of Megatron's classes on first use.

    So importing this module does not import Megatron.

    Raises:
        ImportError: A section of Megatron Bridge's trainer; `from ... import` would hide the text
            of any other error.
        AttributeError: Any other name.
    """
    if name in ("OptimizerConfig", "DistributedDataParallelConfig"):
        from bridge.runtime.megatron import deferred

        return getattr(deferred, name)
    if name[:1].isupper() and name.endswith(("Config", "Provider", "Context")):
        raise ImportError(
            f"{name} is not provided by {__name__}: the trainer's sections stay with "
            f"Megatron Bridge. Import it from there; {PAGE} says what is here.",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {PAGE} says what is here")

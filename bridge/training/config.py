"""`ConfigContainer`, the configuration of a run, and its sections.

The sections `model`, `optimizer` and `ddp` are dataclasses of Megatron Core or subclasses of them.
The subclasses that this module exports check nothing before `finalize`. The other sections are
ours. Their fields have Megatron's names if Megatron has such a setting (`train_iters`,
`micro_batch_size`, `lr_warmup_iters`, ...).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError
from bridge.precision.owners import ModelOwner
from bridge.preflight.run import resolve_precision
from bridge.registry.registry import get_mixed_precision_config, is_auto
from bridge.target.declaration import make_target

if TYPE_CHECKING:
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig
    from bridge.registry.schedule import PrecisionSchedule
    from bridge.runtime.megatron.deferred_configs import (
        DistributedDataParallelConfig,
        OptimizerConfig,
    )
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

MIGRATION_PAGE = "docs/howto/migrate-from-megatron-bridge.md"
"""The page that error messages about missing names point to."""

NAMES_OF_MEGATRON_BRIDGE = frozenset(
    {
        "CommOverlapConfig",
        "DataloaderConfig",
        "DatasetBuildContext",
        "DatasetProvider",
        "DirectHFSFTDatasetConfig",
        "DistributedInitConfig",
        "EnergonDatasetConfig",
        "FaultToleranceConfig",
        "FinetuningDatasetConfig",
        "GPTDatasetConfig",
        "GPTFIMDatasetConfig",
        "GPTModelConfig",
        "GPTModelProvider",
        "GPTSFTDatasetConfig",
        "HFDatasetSourceConfig",
        "HybridModelConfig",
        "HybridModelProvider",
        "InProcessRestartConfig",
        "LoggerConfig",
        "MegatronMIMOProvider",
        "MockGPTDatasetConfig",
        "MockVLMSFTDatasetConfig",
        "NVRxStragglerDetectionConfig",
        "OptimizerConfigOverrideProvider",
        "OptimizerConfigOverrideProviderContext",
        "ProfilingConfig",
        "RNGConfig",
        "RerunStateMachineConfig",
        "SchedulerConfig",
        "StragglerDetectionConfig",
        "T5ModelProvider",
        "TensorInspectConfig",
        "TokenizerConfig",
        "TrainingConfig",
        "ValidationConfig",
    }
)
"""Classes that can be imported from Megatron Bridge's module of this name, and not from this one.

Source: Megatron Bridge 0.6.2, training/config.py.
"""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class DataConfig:
    """The training data."""

    path: str | None = None
    """A text file, or the prefix of a Megatron ``.bin``/``.idx`` pair. None: the text of CPython's
    documentation."""
    vocab_size: int | None = None
    """Size of the vocabulary of a ``.bin``/``.idx`` pair, which needs it. None: the 256 bytes of
    a text file."""
    split: str = "90,5,5"
    """Shares of the documents for training, validation and test, in Megatron's spelling."""
    seed: int = 1234
    """Seed of the sample order."""
    cache_dir: str | None = None
    """Folder of tokenised text and sample indices. None: ``precision-bridge`` in the user's cache
    folder."""
    num_workers: int = 0
    """DataLoader worker processes per rank. 0: the process of the rank loads the data."""


@dataclass(kw_only=True)
class TrainConfig:
    """Steps, batches, learning-rate schedule and audit of a run."""

    train_iters: int = 400
    """Optimizer steps."""
    micro_batch_size: int = 8
    """Sequences per forward pass on a data-parallel rank."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks. Gradients are accumulated over
    `global_batch_size` / (`micro_batch_size` * data-parallel ranks) micro-batches."""
    eval_interval: int = 100
    """Steps between two validations. 0: only after the last step."""
    eval_iters: int = 8
    """Global batches per validation. 0: no validation."""
    lr_decay_style: str = "cosine"
    """Megatron's schedule name: cosine, linear, constant, inverse-square-root or WSD."""
    lr_warmup_iters: int = 40
    """Steps of linear warm-up from zero to `optimizer.lr`."""
    lr_decay_iters: int | None = None
    """Steps after which the rate is `optimizer.min_lr`. None: `train_iters`."""
    seed: int = 1234
    """Seed of the weights and of dropout."""
    distributed_timeout_minutes: float = 30.0
    """Minutes that a collective waits for a rank that stalls. After that all ranks end. It applies
    to validations and saves too."""
    check_for_nan_in_loss: bool = True
    """End the run if the loss is not finite. Switch it off under FP16 with a dynamic loss scale,
    which overflows by design."""
    audit: str = "error"
    """Reaction to a step whose GEMMs or tensors differ from the plan: error (end the run), warn
    (log it and go on), or off (no comparison)."""
    audit_interval: int = 0
    """Steps between two further audits. 0: only the first two steps, the first step of each phase
    and the last step are audited."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Folders of the run's state, which Megatron's ``dist_checkpointing`` writes and reads."""

    save: str | None = None
    """Folder to write to. None: no checkpoint is written."""
    save_interval: int | None = None
    """Steps between two checkpoints. None: only after the last step."""
    save_last: bool = True
    """Save after the last step too. A run that is stopped early saves in any case."""
    load: str | None = None
    """Folder whose newest checkpoint the run resumes from. None: a fresh run."""
    checksum: bool = True
    """Write a checksum of every file into the manifest, and compare it before a file is read. False:
    only sizes are compared."""
    trust: bool = False
    """Load a checkpoint that has no manifest because another program wrote it. Code in it is
    refused in any case."""


@dataclass(kw_only=True)
class ResumeConfig:
    """Allowed differences between a run and the checkpoint that it resumes from."""

    allow_precision_change: bool = False
    """Resume in a precision that rounds weights or optimizer state of the checkpoint again."""


@dataclass(kw_only=True)
class LoggingConfig:
    """The files that a run writes about itself."""

    run_dir: str | None = None
    """Folder for metrics, plots, configs and reports. None: Hydra's run folder, or
    ``runs/<time>`` without Hydra."""
    log_interval: int = 10
    """Steps between two records in ``metrics.jsonl``, TensorBoard and (without a terminal) the
    log."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    plots: bool = True
    """Draw the curves of the run as pictures."""
    mlflow: str | None = None
    """Tracking store of MLflow that gets the same values, for example ``http://tracking:5000``.
    None: nothing is sent."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the same values. None: nothing is sent."""
    quantisation_interval: int = 50
    """Steps between two measurements of the quantisation error of FP8 and FP4 operands. 0: no
    measurement."""
    progress: bool = True
    """Show a progress bar if the output is a terminal."""


@dataclass(kw_only=True)
class ConfigContainer:
    """The configuration of a run."""

    model: ModelOwner | None = None
    optimizer: OptimizerConfig | None = None
    ddp: DistributedDataParallelConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    mixed_precision: str | MixedPrecisionConfig | None = None
    """The name of a recipe, or a config of our class or of Megatron Bridge's class. None: model,
    optimizer and DDP config keep their settings."""
    precision_backend: str = "auto"
    """Backend of FP8 and FP4 matmuls: te (Transformer Engine), emulated (the same values, on any
    machine), te_cpu (Transformer Engine's Python on a CPU: slow, and a proof of the emulation), or
    auto (te if it works here, else emulated)."""
    precision_schedule: Sequence[Mapping[str, Any]] | PrecisionSchedule | None = None
    """Phases of the run in different recipes, for example ``[{until: 0.9}, {recipe: bf16_mixed}]``.
    None: a single precision."""
    target: str | None = None
    """GPUs and versions of the run, for example ``h100x8,te2.8``. None: this machine."""
    silence: dict[str, str] = field(default_factory=dict)
    """Id of a rule of the check -> the reason why the rule may be broken."""

    # -- records of the settings above, which the package writes and no user sets ------------------

    precision_choice: dict[str, Any] | None = None
    """The recipe that ``mixed_precision=auto`` was resolved to, with the reason, and the rejected
    recipes. None: the run was not started with ``auto``."""
    set_by: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Dotted key -> origin -> value. Origins are files and the command line, in the order in which
    they set the key. The last value is in effect."""


def runtime_config_update(config: ConfigContainer) -> SyncReport | None:
    """Resolve the container's precision, and write it into the model, optimizer and DDP config.

    Settings that Megatron is known to refuse later are refused here. A switch of sharding that is
    on in the optimizer config or in the DDP config is turned on in both. Then both are finalized,
    if their checks waited for that. A warning is logged for each replaced value that an owner had
    set.

    Args:
        config: The container. A container of Megatron Bridge can be used too. Its `mixed_precision`
            is the resolved config afterwards.

    Returns:
        Every field with its old and new value and the reason, or None if the container has no
        precision. Then the configs are not changed.

    Raises:
        UnknownRecipeError: No recipe has this name.
        PrecisionTypeError: The container is of another type or has no model, optimizer and DDP
            config, or a section is not a config.
        PrecisionConfigError: The precision is wrong for any run.
        SyncError: The precision cannot be written into these configs, or there is no precision and
            model and optimizer disagree. Nothing was changed.
    """
    # Imported here, since the classes of this module do not need it.
    from bridge.preflight.last_sync import Container, apply_last_sync

    if not isinstance(config, Container):
        raise PrecisionTypeError.of(
            "config", "must be a ConfigContainer", config, "Give the run's container."
        )
    precision: Any = config.mixed_precision
    if is_auto(precision):
        target = make_target(config.target or "auto")
        precision, choice = resolve_precision(precision, config.model, target)
        config.precision_choice = None
        if choice is not None:
            config.precision_choice = choice.to_dict()
    if precision is not None:
        precision = get_mixed_precision_config(precision)
        precision.finalize()
    report = apply_last_sync(config, precision)
    if report is not None:
        report.log_warnings(log)
    return report


def __getattr__(name: str) -> Any:
    """Return a class derived from Megatron's on its first use, so that an import loads no Megatron.

    Raises:
        ImportError: The name is in `NAMES_OF_MEGATRON_BRIDGE`. It is not an AttributeError, since
            `from ... import` replaces the message of an AttributeError.
        AttributeError: Any other name.
    """
    if name in ("OptimizerConfig", "DistributedDataParallelConfig"):
        from bridge.runtime.megatron import deferred_configs

        return getattr(deferred_configs, name)
    if name in NAMES_OF_MEGATRON_BRIDGE:
        raise ImportError(
            f"{name} is not provided by {__name__}: the trainer's sections stay with "
            f"Megatron Bridge. Import it from there; {MIGRATION_PAGE} says what is here.",
            name=__name__,
        )
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; {MIGRATION_PAGE} says what is here"
    )

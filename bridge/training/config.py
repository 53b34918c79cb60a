"""The one object that describes a run: `ConfigContainer` and its sections.

The sections of Megatron Core (`model`, `optimizer`, `ddp`) are Megatron's own dataclasses; the others are ours and use
Megatron's names for what Megatron has a name for (`train_iters`, `micro_batch_size`, `lr_warmup_iters`, ...).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, SyncCheckError
from bridge.precision.auto import is_auto
from bridge.precision.registry import get_mixed_precision_config
from bridge.preflight.run_check import resolve_precision, target_of
from bridge.sync import SyncReport, synchronize

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    from bridge.precision.config import MixedPrecisionConfig

__all__ = [
    "CheckpointConfig",
    "ConfigContainer",
    "DataConfig",
    "DistributedDataParallelConfig",
    "LoggingConfig",
    "OptimizerConfig",
    "TrainConfig",
    "runtime_config_update",
]


@dataclass(kw_only=True)
class DataConfig:
    """What the run learns from."""

    path: str | None = None
    """A text file, or the prefix of a Megatron ``.bin``/``.idx`` pair; None: the text of CPython's documentation."""
    vocab_size: int | None = None
    """Vocabulary of an existing ``.bin``/``.idx`` pair; required there, and never used for text (bytes: 256)."""
    split: str = "90,5,5"
    """Parts of the documents for training, validation and test, as Megatron writes them."""
    seed: int = 1234
    """Seed of the sample order."""
    cache_dir: str | None = None
    """Where tokenised text and sample indices are kept; None: ``precision-bridge`` in the user's cache folder."""
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
    """Sequences per optimizer step over all ranks; the rest of the factor is gradient accumulation."""
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
    check_for_nan_in_loss: bool = True
    """Stop at a loss that is not finite. Off under FP16 with a dynamic loss scale, which overflows by design."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where the run's state is written and read, with Megatron's ``dist_checkpointing``."""

    save: str | None = None
    """Folder to write to; None: nothing is saved."""
    save_interval: int | None = None
    """Steps between two checkpoints; None: one after the last step."""
    load: str | None = None
    """Folder to resume from (its newest checkpoint); None: start fresh."""


@dataclass(kw_only=True)
class LoggingConfig:
    """What the run writes about itself."""

    run_dir: str | None = None
    """Folder for metrics, plots, configs and reports; None: Hydra's run folder, or ``runs/<time>`` without Hydra."""
    log_interval: int = 10
    """Steps between two records in ``metrics.jsonl``, TensorBoard and (without a terminal) the log."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    quantisation_interval: int = 50
    """Steps between two measurements of what FP8 or FP4 does to the matmuls' operands; 0: none."""
    progress: bool = True
    """Show a progress bar where the output is a terminal."""


@dataclass(kw_only=True)
class ConfigContainer:
    """Everything a run is configured with."""

    model: TransformerConfig | None = None
    optimizer: OptimizerConfig | None = None
    ddp: DistributedDataParallelConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    mixed_precision: str | MixedPrecisionConfig | None = None
    """A recipe's name, a config, or None: the owners keep their own settings."""
    precision_backend: str = "auto"
    """Who runs FP8 and FP4 matmuls: auto, te (Transformer Engine) or emulated (the same values, on any machine)."""
    target: str | None = None
    """The GPUs and versions of the run, ``h100x8,te2.8`` say; None: this machine."""
    silence: dict[str, str] = field(default_factory=dict)
    """Id of a rule of the check -> why it may be broken."""
    precision_choice: dict[str, Any] | None = None
    """What ``mixed_precision=auto`` was resolved to, why, and what was rejected; None where nothing was chosen."""


def runtime_config_update(config: ConfigContainer) -> SyncReport | None:
    """Resolve the container's precision and write it into model, optimizer, DDP and training config.

    This is the strict path: what Megatron is known to refuse later is refused here.

    Args:
        config: The container; `config.mixed_precision` is the resolved config afterwards.

    Returns:
        What was changed and why; None where no precision is set and the owners keep their own settings.

    Raises:
        UnknownRecipeError: No such recipe.
        PrecisionConfigError: The precision can never be right.
        SyncError: It cannot be written into these configs, or without one model and optimizer disagree. Nothing was
            changed.
    """
    if config.mixed_precision is None:
        _require_agreement(config)
        return None
    if is_auto(config.mixed_precision):
        config.mixed_precision, choice = resolve_precision(
            config.mixed_precision, config.model, target_of(config.target or "auto")
        )
        config.precision_choice = choice.to_dict() if choice is not None else None
    precision = get_mixed_precision_config(config.mixed_precision)
    report = synchronize(
        precision, model=config.model, optimizer=config.optimizer, ddp=config.ddp, train=config.train, strict=True
    )
    config.mixed_precision = precision
    return report


def _require_agreement(config: ConfigContainer) -> None:
    """Refuse a model and an optimizer of different precision: without a recipe nobody else would notice."""
    for name in ("fp16", "bf16"):
        ours, theirs = getattr(config.model, name, None), getattr(config.optimizer, name, None)
        if None not in (ours, theirs) and ours != theirs:
            finding = Finding(
                path=f"model.{name}",
                rule=f"must equal optimizer.{name}, which is {theirs!r}",
                value=ours,
                remedy="Give both the same value, or choose a recipe.",
            )
            raise SyncCheckError("Without a recipe the owners' own settings have to agree:", [finding])


def __getattr__(name: str) -> Any:
    """Return Megatron's own config classes on first use, so that importing this module does not import Megatron."""
    if name in ("OptimizerConfig", "DistributedDataParallelConfig"):
        from bridge.megatron import owners  # heavy and optional

        return getattr(owners, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

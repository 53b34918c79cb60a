"""Values that no run can begin with: numbers out of range, unknown names, misfit batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import Finding, RunConfigError, close_matches, did_you_mean
from bridge.runtime.checkpoint.folder import find_pointer_fault
from bridge.runtime.megatron.backend import BACKENDS
from bridge.training.config import ConfigContainer, TrainConfig
from bridge.training.metrics import SINK_PACKAGES


class Bound(NamedTuple):
    """The range of a field's numbers. The value None is in every range."""

    least: float
    """The smallest allowed number."""
    below: float = math.inf
    """The smallest number that is too large."""
    takes_infinity: bool = False
    """Whether infinity is allowed."""


# NumPy's seeds have 32 bits. Ranks add their numbers to a seed, so half of the range stays free.
SEED_BOUND = Bound(0, below=2**31)
FIELD_BOUNDS: Mapping[str, Bound] = {
    **dict.fromkeys(
        ("train.train_iters", "train.micro_batch_size", "train.global_batch_size"), Bound(1)
    ),
    **dict.fromkeys(("train.eval_interval", "train.eval_iters", "train.lr_warmup_iters"), Bound(0)),
    "train.distributed_timeout_minutes": Bound(0.01),
    "train.audit_interval": Bound(0),
    "train.seed": SEED_BOUND,
    "data.seed": SEED_BOUND,
    "data.num_workers": Bound(0),
    "logging.log_interval": Bound(1),
    "logging.quantisation_interval": Bound(0),
    "checkpoint.save_interval": Bound(1),
    **dict.fromkeys(
        ("model.num_layers", "model.hidden_size", "model.seq_length", "model.rotary_base"), Bound(1)
    ),
    **dict.fromkeys(("model.hidden_dropout", "model.attention_dropout"), Bound(0, below=1)),
    **dict.fromkeys(("model.layernorm_epsilon", "model.init_method_std"), Bound(0)),
    **dict.fromkeys(("model.embedding_init_method_std", "model.rotary_percent"), Bound(0)),
    **dict.fromkeys(("model.mtp_loss_scaling_factor", "model.moe_z_loss_coeff"), Bound(0)),
    "model.num_attention_heads": Bound(1),
    **dict.fromkeys(
        ("optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.adam_eps"),
        Bound(0),
    ),
    **dict.fromkeys(
        ("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.sgd_momentum"),
        Bound(0, below=1),
    ),
    "optimizer.clip_grad": Bound(0, takes_infinity=True),  # infinity: no clipping
}
"""Dotted key of a run -> the range of its numbers."""
FIELD_CHOICES: Mapping[str, tuple[str, ...]] = {
    "train.audit": ("error", "warn", "off"),
    "train.lr_decay_style": ("cosine", "linear", "constant", "inverse-square-root", "WSD"),
    "precision_backend": BACKENDS,
}
"""Dotted key of a run -> its allowed values. The learning-rate schedules are Megatron's."""


def find_value_faults(
    config: ConfigContainer, origin_of: Callable[[str], str] | None = None
) -> list[Finding]:
    """Return the faults of single values: numbers, names and packages.

    Args:
        config: The run.
        origin_of: Returns the origin of a dotted key, for the messages. None: they have no origins.
    """
    faults = [
        *_find_bound_faults(config),
        *_find_checkpoint_faults(config),
        *_find_choice_faults(config),
    ]
    if getattr(config.optimizer, "lr", None) is None:
        faults.append(
            _make_fault(
                "optimizer.lr", "a learning rate is required", None, "Set it, for example 1e-3."
            )
        )
    faults += _find_sink_faults(config)
    warm_up_fault = _find_warm_up_fault(config.train, {fault.path for fault in faults}, origin_of)
    if warm_up_fault is not None:
        faults.append(warm_up_fault)
    return faults


def _find_choice_faults(config: ConfigContainer) -> Iterator[Finding]:
    """Yield the faults of fields that have another value than the allowed ones."""
    for path, choices in FIELD_CHOICES.items():
        value = attrgetter(path)(config)
        if value not in choices:
            remedy = did_you_mean(close_matches(str(value), choices)) or "Choose one of them."
            yield _make_fault(path, f"must be one of {', '.join(choices)}", value, remedy)


def _find_sink_faults(config: ConfigContainer) -> Iterator[Finding]:
    """Yield the faults of sinks whose packages are not installed."""
    for name, package in SINK_PACKAGES.items():
        value = getattr(config.logging, name)
        if value is not None and find_spec(name) is None:
            rule = f"needs the package {package}, which is not installed"
            remedy = "Install precision-bridge[sinks], or leave it out."
            yield _make_fault(f"logging.{name}", rule, value, remedy)


def _find_warm_up_fault(
    train: TrainConfig, faulty: Collection[str], origin_of: Callable[[str], str] | None
) -> Finding | None:
    """Return the fault of a warm-up that is longer than the schedule, or None.

    Args:
        train: The section.
        faulty: Keys that have a fault already. The lengths are not compared if one is among them.
        origin_of: As for `find_value_faults`.
    """
    length_key, length = "train.train_iters", train.train_iters
    if train.lr_decay_iters:
        length_key, length = "train.lr_decay_iters", train.lr_decay_iters
    is_faulty = not {length_key, "train.lr_warmup_iters"}.isdisjoint(faulty)
    if is_faulty or train.lr_warmup_iters <= length:
        return None
    origin = _format_origin(origin_of, length_key)
    rule = f"must not be longer than the schedule of {length} steps{origin}"
    return _make_fault("train.lr_warmup_iters", rule, train.lr_warmup_iters, "Shorten it.")


def _find_bound_faults(config: ConfigContainer) -> Iterator[Finding]:
    """Yield the faults of numbers that are out of their bounds."""
    for path, bound in FIELD_BOUNDS.items():
        section, _, name = path.partition(".")
        value: Any = getattr(getattr(config, section), name, None)
        if value is None:
            continue
        # Not `value < bound.least`, which is false of NaN.
        if not value >= bound.least:
            rule, remedy = f"must be at least {bound.least}", f"Use {bound.least} or more."
            yield _make_fault(path, rule, value, remedy)
        elif math.isinf(value) and not bound.takes_infinity:
            yield _make_fault(path, "must be finite", value, "Use a number.")
        elif value >= bound.below and not math.isinf(value):
            rule = f"must be less than {bound.below}"
            yield _make_fault(path, rule, value, "Use a smaller number.")


def _find_checkpoint_faults(config: ConfigContainer) -> Iterator[Finding]:
    """Yield the faults of the checkpoint section."""
    checkpoint = config.checkpoint
    for name, default in (("save_interval", None), ("save_last", True)):
        value = getattr(checkpoint, name)
        if value != default and checkpoint.save is None:
            remedy = "Give the folder with checkpoint.save, or leave this out."
            yield _make_fault(
                f"checkpoint.{name}", "has no effect without checkpoint.save", value, remedy
            )
    folders = (("checkpoint.load", checkpoint.load), ("checkpoint.save", checkpoint.save))
    for key, folder in folders:
        if folder is None:
            continue
        fault = find_pointer_fault(Path(folder), key)
        if fault is not None:
            yield fault


def require_sane_values(config: ConfigContainer) -> None:
    """Require the sections that a run needs, and values without faults.

    Raises:
        RunConfigError: A section is missing, or `find_value_faults` finds faults.
    """
    missing = [name for name in ("model", "optimizer", "ddp") if getattr(config, name) is None]
    if missing:
        raise RunConfigError(
            f"{', '.join(missing)}: a run needs this section, got None. Give Megatron's own config."
        )
    if not hasattr(config.model, "seq_length"):
        raise RunConfigError(
            "model: must be a bridge.runtime.megatron.model.gpt.GPTConfig, "
            f"got {type(config.model).__name__}. "
            "A TransformerConfig alone does not say how long sequences are."
        )
    faults = find_value_faults(config)
    if faults:
        raise RunConfigError("\n".join(map(str, faults)))


def find_batch_fault(
    train: TrainConfig, *, ranks: int | None = None, origin_of: Callable[[str], str] | None = None
) -> Finding | None:
    """Return the fault of a global batch that is not a multiple of the ranks' micro-batches, or None.

    Args:
        train: The section.
        ranks: Data-parallel ranks. None: they are not known, or there is a single rank.
        origin_of: As for `find_value_faults`.
    """
    samples = train.micro_batch_size * (ranks or 1)
    if train.global_batch_size % samples == 0:
        return None
    origin = _format_origin(origin_of, "train.micro_batch_size")
    size = f"{train.micro_batch_size}{origin}"
    rule = f"must be a multiple of micro_batch_size {size}"
    if ranks is not None:
        rule = f"must be a multiple of micro_batch_size {size} x {ranks} data-parallel ranks"
    remedy = f"Use {samples}, for example."
    return _make_fault("train.global_batch_size", rule, train.global_batch_size, remedy)


def _format_origin(origin_of: Callable[[str], str] | None, path: str) -> str:
    """Return the origin of a key in parentheses after a space, or "" if origins are left out."""
    if origin_of is None:
        return ""
    return f" ({origin_of(path)})"


def _make_fault(path: str, rule: str, value: object, remedy: str) -> Finding:
    """Return a finding about a value."""
    return Finding(path=path, rule=rule, value=value, remedy=remedy)

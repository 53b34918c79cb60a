"""Values that no run can begin with: numbers out of range, unknown names, unequal batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import Finding, RunConfigError, close_matches, did_you_mean
from bridge.model.layout import Parallel
from bridge.precision.mode import scheme_of
from bridge.preflight.context import CheckContext
from bridge.preflight.run import Run
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.program import Program
from bridge.rules.rule import RuleFinding, ask
from bridge.rules.rulebook import BY_ID
from bridge.runtime.checkpoint.folder import load_fault, pointer_fault
from bridge.runtime.megatron.backend import BACKENDS
from bridge.runtime.megatron.data.corpus import path_fault
from bridge.runtime.megatron.te.machine import missing_for_te
from bridge.target.declaration import target_of
from bridge.training.config import ConfigContainer, TrainConfig
from bridge.training.metrics import PACKAGES


class Bound(NamedTuple):
    """The range of a field's numbers; a field that is None is not checked."""

    least: float
    below: float = math.inf
    takes_infinity: bool = False


SEED = Bound(0, below=2**31)  # NumPy's seeds have 32 bits, and ranks add to them
BOUNDS: Mapping[str, Bound] = {
    **dict.fromkeys(
        ("train.train_iters", "train.micro_batch_size", "train.global_batch_size"), Bound(1)
    ),
    **dict.fromkeys(("train.eval_interval", "train.eval_iters", "train.lr_warmup_iters"), Bound(0)),
    "train.distributed_timeout_minutes": Bound(0.01),
    "train.audit_interval": Bound(0),
    "train.seed": SEED,
    "data.seed": SEED,
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
    "optimizer.clip_grad": Bound(0, takes_infinity=True),  # which clips nothing
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "train.audit": ("error", "warn", "off"),
    "train.lr_decay_style": ("cosine", "linear", "constant", "inverse-square-root", "WSD"),
    "precision_backend": BACKENDS,
}
"""Key of a run -> the values that it can have. The schedules are those of Megatron."""
OF_CONFIGS = ("PB407", "PB408", "PB701", "PB702", "PB703")
"""Rules of a run that its configs show before the precision is written into them."""
OF_PHASES = ("PB109", "PB213", "PB266", "PB296", *OF_CONFIGS)
"""Rules of a run that its configs show in the precision of a phase."""
OF_EMULATION = ("PB615", "PB616")


def early_faults(config: ConfigContainer, origin_of: Callable[[str], str]) -> list[Finding]:
    """Return all faults that are known before data and model are built.

    Args:
        config: The run.
        origin_of: Returns the origin of a dotted key, for the messages.
    """
    faults = value_faults(config, origin_of)
    further: list[Finding | None] = []
    sizes = {"train.micro_batch_size", "train.global_batch_size"}
    if sizes.isdisjoint(fault.path for fault in faults):
        further.append(batch_fault(config.train, ranks=_ranks(config.model), origin_of=origin_of))
    if config.data.path is not None:
        further.append(path_fault(config.data.path))
    if config.checkpoint.load is not None:
        further.append(load_fault(Path(config.checkpoint.load)))
    for fault in further:
        if fault is not None:
            faults.append(fault)
    return [*faults, *_refused_fields(config)]


def _ranks(model: Any) -> int | None:
    """Return the number of data-parallel ranks of this launch, None for a single rank.

    It is None too where the launcher does not state the number of processes.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal():
        return None
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
    )
    ranks: int = int(world) // max(1, math.prod(sizes))
    if ranks < 2:
        return None
    return ranks


def _refused_fields(config: ConfigContainer) -> list[RuleFinding]:
    """Return the findings about fields that the build refuses.

    `require_honoured` asks once more after the precision is written into the sections.
    """
    scheme = None
    if isinstance(config.mixed_precision, MixedPrecisionConfig):
        scheme = scheme_of(config.mixed_precision)
    backend = config.precision_backend
    if backend == "auto":
        backend = "te"
        if missing_for_te(scheme):
            backend = "emulated"
    return refusals(config, backend=backend, rules=OF_CONFIGS)


def refusals(
    config: Any, *, backend: str, rules: Iterable[str], model: Any = None
) -> list[RuleFinding]:
    """Return the errors that some rules find in model, optimizer and DDP config.

    Args:
        config: The run.
        backend: Backend of its GEMMs.
        rules: Ids of the rules.
        model: Model config that takes the place of `config.model`.
    """
    if model is None:
        model = config.model
    sections = {"model": model, "optimizer": config.optimizer, "ddp": config.ddp}
    run = Run.of(**sections, target=target_of(None), program=Program(is_own=True))
    context = CheckContext(run, backend=backend)
    asked = [BY_ID[name] for name in rules]
    return [finding for finding in ask(asked, context) if finding.severity == "error"]


def require_honoured(config: Any, phases: Sequence[Any], *, backend: str) -> None:
    """Refuse a run with fields that have no effect here or cannot run.

    Args:
        config: The run.
        phases: The model config of each phase of its precision.
        backend: Backend of its GEMMs.

    Raises:
        RunConfigError: A rule finds an error in the config of a phase.
    """
    rules = list(OF_PHASES)
    if backend == "emulated":
        rules += OF_EMULATION
    lines: dict[str, None] = {}
    for model in phases:
        for fault in refusals(config, backend=backend, rules=rules, model=model):
            lines[f"{fault.id} {fault}"] = None
    if lines:
        raise RunConfigError("\n".join(lines))
    Parallel.of(config.model).places(config.model.num_layers)


def value_faults(
    config: ConfigContainer, origin_of: Callable[[str], str] | None = None
) -> list[Finding]:
    """Return the faults of single values: numbers, names and packages.

    Args:
        config: The run.
        origin_of: Returns the origin of a dotted key, for the messages; None leaves origins out.
    """
    faults = _bound_faults(config)
    faults += _checkpoint_faults(config)
    for path, known in CHOICES.items():
        value = attrgetter(path)(config)
        if value not in known:
            hint = did_you_mean(close_matches(str(value), known)) or "Choose one of them."
            faults.append(_fault(path, f"must be one of {', '.join(known)}", value, hint))
    if getattr(config.optimizer, "lr", None) is None:
        faults.append(
            _fault("optimizer.lr", "a learning rate is required", None, "Set it, 1e-3 say.")
        )
    for name, package in PACKAGES.items():
        value = getattr(config.logging, name)
        if value is not None and find_spec(name) is None:
            rule = f"needs the package {package}, which is not installed"
            remedy = "Install precision-bridge[sinks], or leave it out."
            faults.append(_fault(f"logging.{name}", rule, value, remedy))
    train = config.train
    steps, length = "train.train_iters", train.train_iters
    if train.lr_decay_iters:
        steps, length = "train.lr_decay_iters", train.lr_decay_iters
    is_derived = {fault.path for fault in faults} & {steps, "train.lr_warmup_iters"}
    if train.lr_warmup_iters > length and not is_derived:
        rule = f"must not be longer than the schedule of {length} steps{_by(origin_of, steps)}"
        faults.append(_fault("train.lr_warmup_iters", rule, train.lr_warmup_iters, "Shorten it."))
    return faults


def _bound_faults(config: ConfigContainer) -> list[Finding]:
    """Return the faults of numbers that are out of their bounds."""
    faults = []
    for path, bound in BOUNDS.items():
        section, _, name = path.partition(".")
        value: Any = getattr(getattr(config, section), name, None)
        if value is None:
            continue
        if not value >= bound.least:  # true of NaN too
            rule, remedy = f"must be at least {bound.least}", f"Use {bound.least} or more."
            faults.append(_fault(path, rule, value, remedy))
        elif math.isinf(value) and not bound.takes_infinity:
            faults.append(_fault(path, "must be finite", value, "Use a number."))
        elif value >= bound.below and not math.isinf(value):
            rule = f"must be less than {bound.below}"
            faults.append(_fault(path, rule, value, "Use a smaller number."))
    return faults


def _checkpoint_faults(config: ConfigContainer) -> Iterator[Finding]:
    """Yield the faults of the checkpoint section."""
    files = config.checkpoint
    for name, unstated in (("save_interval", None), ("save_last", True)):
        value = getattr(files, name)
        if value != unstated and files.save is None:
            remedy = "Give the folder with checkpoint.save, or leave this out."
            yield _fault(
                f"checkpoint.{name}", "has no effect without checkpoint.save", value, remedy
            )
    for key, folder in (("checkpoint.load", files.load), ("checkpoint.save", files.save)):
        if folder is None:
            continue
        fault = pointer_fault(Path(folder), key)
        if fault is not None:
            yield fault


def require_sane_values(config: ConfigContainer) -> None:
    """Refuse a container without a section that a run needs, or with faulty values.

    Raises:
        RunConfigError: A section is missing, or `value_faults` finds faults.
    """
    missing = [name for name in ("model", "optimizer", "ddp") if getattr(config, name) is None]
    if missing:
        raise RunConfigError(
            f"{', '.join(missing)}: a run needs this section, got None. Give Megatron's own config."
        )
    if not hasattr(config.model, "seq_length"):
        raise RunConfigError(
            "model: must be a bridge.runtime.megatron.gpt.GPTConfig, "
            f"got {type(config.model).__name__}. "
            "A TransformerConfig alone does not say how long sequences are."
        )
    faults = value_faults(config)
    if faults:
        raise RunConfigError("\n".join(map(str, faults)))


def batch_fault(
    train: TrainConfig, *, ranks: int | None = None, origin_of: Callable[[str], str] | None = None
) -> Finding | None:
    """Return the fault of a global batch that is no multiple of the ranks' micro-batches, or None."""
    samples = train.micro_batch_size * (ranks or 1)
    if train.global_batch_size % samples == 0:
        return None
    size = f"micro_batch_size {train.micro_batch_size}{_by(origin_of, 'train.micro_batch_size')}"
    rule = f"must be a multiple of {size}"
    if ranks is not None:
        rule = f"{rule} x {ranks} data-parallel ranks"
    remedy = f"Use {samples}, for example."
    return _fault("train.global_batch_size", rule, train.global_batch_size, remedy)


def _by(origin_of: Callable[[str], str] | None, path: str) -> str:
    """Return the origin of a key in brackets, for the middle of a sentence."""
    if origin_of is None:
        return ""
    return f" ({origin_of(path)})"


def _fault(path: str, rule: str, value: object, remedy: str) -> Finding:
    return Finding(path=path, rule=rule, value=value, remedy=remedy)

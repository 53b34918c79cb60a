"""`RuleContext`: what a rule may ask about a precision and the configs it is written into.

`finalize` asks with `RuleContext.of_precision`, a sync makes one of its owners, a check with
`bridge.preflight.check.Setup`, which knows the whole run. A value that is not given is Megatron's class default; where
Megatron has none (`seq_length`, `target.te`), None stands for "not known", and a rule that needs it stays silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.rules.fields import DEFAULTS, SWITCHES, differ
from bridge.rules.inert import BUFFER, inert_fields
from bridge.rules.target import Target

if TYPE_CHECKING:
    from bridge.precision.config import PrecisionConfig
    from bridge.rules.shape.model import ModelShape
    from bridge.rules.shape.parallel import Parallel
    from bridge.sync.prediction import Prediction
    from bridge.sync.report import SyncRow

PRECISION_OWNERS = ("model", "optimizer", "ddp")
FAMILIES = ("fp8", "fp4")


class OffSwitch(NamedTuple):
    """A switch of `SWITCHES` that is off in one config and has to be on."""

    role: str
    attribute: str
    why: str
    """Why it has to be on."""


def off_switches(value: Callable[[str, str], Any]) -> Iterator[OffSwitch]:
    """Yield each switch that is off in the optimizer or in DDP and has to be on."""
    is_fsdp = value("ddp", "use_megatron_fsdp") is True
    for name in SWITCHES:
        on = [role for role in ("optimizer", "ddp") if value(role, name) is True]
        needed = name == "use_distributed_optimizer" and is_fsdp
        for role in ("optimizer", "ddp"):
            if value(role, name) is False and (on or needed):
                yield OffSwitch(role, name, f"{on[0]}.{name} is" if on else "Megatron-FSDP always shards the optimizer")


def _owner_of(field: str) -> str | None:
    return next((role for role in PRECISION_OWNERS if field in DEFAULTS[role]), None)


def reading_of(config: PrecisionConfig) -> dict[str, Any]:
    """Return what the fields of `config` read as, and what Megatron makes of them before any owner is known."""
    values = config.to_dict(full=True)
    values["params_dtype"] = values["params_dtype"] or config.mode
    values["enable_autocast"] = values["autocast_enabled"]
    return values


class RuleContext:
    """The facts that a rule is asked about. Read-only by intent; made again each time.

    A context has the attributes of what it knows and no others: a row that reads more than that fails at once.

    Args:
        precision: The config; None: the owners keep their own settings.
        views: Role -> values of that config after the plan, as attributes, dtypes as tokens.
        given: Roles of the configs that are there.
        rows: The plan that made the values.
        scheme: The scaling scheme of the run where it is known already.
        target: The GPUs and versions of the run.
        is_last: The run begins after this sync.
        origins: Path of a setting -> its source.
    """

    # Known to a check alone.
    prediction: Prediction
    train: Any
    data: Any
    peft: Any
    sections: Mapping[str, Any]
    malformed: list[Any]
    unknown: dict[str, Any]
    """Keys of the precision that are no field -> their values."""
    has_ncclep: bool
    has_peft: bool
    is_resumed: bool
    selection: Any
    """The modules that each row of `modules`, or each matcher of a foreign recipe, takes; None without any."""
    plan: Any
    """The precision plan of the run; RunConfigError for a model that cannot be planned."""
    recomputed: tuple[str, ...]
    is_own: bool
    """The run is one of scripts/train.py."""
    is_bridge: bool
    """Megatron Bridge wrote the run's file."""
    overflow: Any
    """The violation of the fullest rank, where it needs more memory than its GPU has; None elsewhere."""

    def __init__(
        self,
        precision: PrecisionConfig | None,
        *,
        views: Mapping[str, Any],
        given: frozenset[str] = frozenset(),
        rows: Sequence[SyncRow] = (),
        scheme: str | None = None,
        target: Target | None = None,
        is_last: bool = False,
        origins: Callable[[str], str] | None = None,
    ) -> None:
        self.precision = precision
        self.stated: Mapping[str, Any] = {} if precision is None else precision.stated_values
        self.put_aside: Mapping[str, str] = {} if precision is None else precision.put_aside
        self.views = views
        self.given = given
        self.rows = rows
        self.target = target or Target()
        self.is_last = is_last
        self.is_whole = False
        self._origins = origins
        self.model, self.optimizer, self.ddp = views["model"], views["optimizer"], views["ddp"]
        self._read_precision(scheme)

    @classmethod
    def of_precision(cls, config: PrecisionConfig) -> RuleContext:
        """Return the context of a config alone: every owner holds what the config reads as."""
        return cls(config, views=dict.fromkeys(PRECISION_OWNERS, SimpleNamespace(**reading_of(config))))

    def _read_precision(self, scheme: str | None) -> None:
        model, ddp = self.model, self.ddp
        modes = [mode for mode in ("bf16", "fp16") if getattr(model, mode) is True]
        self.mode = self.precision.mode if self.precision is not None else (*modes, "fp32")[0]
        self.is_bf16, self.is_fp16, self.is_fp32 = self.mode == "bf16", self.mode == "fp16", self.mode == "fp32"
        self.is_half = not self.is_fp32
        self.fp8: str | None = model.fp8 or None
        self.fp4: str | None = model.fp4 or None
        self.is_low = bool(self.fp8 or self.fp4)
        own = model.fp8_recipe if self.fp8 else model.fp4_recipe
        self.scheme: str | None = scheme or (own if self.is_low else None)
        self.row: Scheme | None = (FP8_SCHEMES if self.fp8 else FP4_SCHEMES).get(self.scheme or "")
        self.gathers_fp8 = bool(model.fp8_param or ddp.fp8_param_gather)
        self.gathers_fp4 = bool(model.fp4_param or ddp.fp4_param_gather)
        self.reuses_buffer = bool(getattr(ddp, BUFFER) or getattr(self.optimizer, BUFFER))
        self.has_dynamic_scale = self.is_fp16 and not self.optimizer.loss_scale

    def read_owners(self) -> None:
        """Set what the owners are, and the versions of the libraries that read them."""
        ddp, given = self.ddp, self.given
        self.has_model, self.has_optimizer, self.has_ddp = "model" in given, "optimizer" in given, "ddp" in given
        self.has_owners = self.has_model or self.has_optimizer or self.has_ddp
        self.has_precision_aware = bool(self.optimizer.use_precision_aware_optimizer)
        self.has_megatron_fsdp = bool(ddp.use_megatron_fsdp or ddp.use_custom_fsdp)
        self.has_fsdp = self.has_megatron_fsdp or bool(ddp.use_torch_fsdp2)
        self.has_emerging_optimizer = self.has_optimizer and self.optimizer.optimizer not in ("adam", "sgd")
        self.is_sharded = bool(self.optimizer.use_distributed_optimizer or ddp.use_distributed_optimizer)
        self.mcore, self.te = self.target.mcore, self.target.te

    @cached_property
    def shape(self) -> ModelShape:
        """The model; a size that is impossible is replaced."""
        return self.prediction.shape_and_faults[0]

    @cached_property
    def parallel(self) -> Parallel:
        """The layout; what cannot be read of it is left out."""
        return self.prediction.layout_and_faults[0]

    def read_target(self, backend: str | None, environment: Mapping[str, str] | None) -> None:
        """Set what is known of the GPUs of the run, their libraries and its variables.

        `is_emulated`: FP8 and FP4 GEMMs are emulated. `calls_te`: Transformer Engine's Python runs, on a GPU or a CPU.
        `needs_gpu_formats`: the GPU itself has to run FP8 or FP4.
        """
        target = self.target
        self.backend = backend
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self.cuda, self.cudnn, self.capability = target.cuda, target.cudnn, target.capability
        self.has_gpu = target.gpu is not None and target.gpu.is_gpu
        is_cpu = target.gpu is not None and not target.gpu.is_gpu
        self.is_emulated = backend in ("emulated", "te_cpu") or (backend is None and is_cpu)
        self.calls_te = backend == "te_cpu" or not self.is_emulated
        self.needs_gpu_formats = self.is_low and self.has_gpu and not self.is_emulated

    @cached_property
    def inert(self) -> dict[str, str]:
        """Fields of the precision without effect in this run, with the reason."""
        if self.precision is None:
            return {}
        return inert_fields(
            self.precision,
            scheme=self.scheme,
            is_autocast=bool(self.model.enable_autocast),
            keeps_layers=bool(self.model.first_last_layers_bf16),
        )

    def stands_out(self, field: str) -> bool:
        """Return whether a field was stated with another value than its default, in the precision or for an owner."""
        if field in self.stated:
            return differ(self.stated[field], FIELD_DEFAULTS[field])
        role = _owner_of(field) if field in MEGATRON_FIELDS else None
        held = getattr(self.views[role], field) if role in self.given else None
        return held is not None and differ(held, DEFAULTS[role or ""][field])

    def path(self, name: str) -> str:
        """Return the full path of a setting: a precision field is the recipe's, or without one an owner's."""
        section, _, setting = name.rpartition(".")
        if section in PRECISION_OWNERS and setting in MEGATRON_FIELDS and setting in self.stated:
            return f"mixed_precision.{setting}"
        if name not in FIELD_DEFAULTS:
            return name
        is_of_an_owner = name in MEGATRON_FIELDS and name not in self.stated
        if self.precision is not None and not is_of_an_owner:
            return f"mixed_precision.{name}"
        return f"{_owner_of(name) or 'model'}.{name}"

    def value(self, path: str) -> Any:
        """Return what a path holds; None for one that is no setting."""
        section, _, name = path.partition(".")
        if section == "mixed_precision":
            if name in self.stated:
                return self.stated[name]
            role = _owner_of(name)
            return FIELD_DEFAULTS.get(name) if role is None else getattr(self.views[role], name)
        if section == "environment":
            return self.environment.get(name)
        if section == "target":
            return self.target.stated(name)
        return getattr(self.views[section], name, None) if section in self.views else None

    def held(self, name: str) -> Any:
        """Return what a setting of the precision holds: as stated, or else in its owner."""
        return self.value(self.path(name))

    def where(self, path: str) -> str | None:
        """Return the source that set a path, or None where that is not known."""
        section, _, name = path.partition(".")
        if section == "mixed_precision" and self.precision is not None:
            is_stated = name in self.precision.field_names() and self.precision.is_stated(name)
            return self.precision.source_of(name) if is_stated else None
        return self._origins(path) if self._origins is not None and section in self.views else None

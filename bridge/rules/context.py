"""`RuleContext`: what a rule may ask about a precision and the configs it is written into.

`finalize` asks with `RuleContext.of_precision`, a sync makes one of its owners, a check with
`bridge.preflight.check.Setup`, which knows the whole run. A value that is not given is Megatron's class default; where
Megatron has none (`seq_length`, `target.te`), None stands for "not known", and a rule that needs it stays silent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.model.reads import View, kept_property
from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.mode import mode_of
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.precision.statements import field_names, is_stated, source_of, stated_values, switches_put_aside
from bridge.rules.inert import BUFFER, inert_fields
from bridge.target.fields import DEFAULTS, SWITCHES, differ
from bridge.target.target import Target
from bridge.target.versions import Version

if TYPE_CHECKING:
    from bridge.model.layout import Parallel
    from bridge.model.shape import ModelShape
    from bridge.precision.config import PrecisionConfig
    from bridge.sync.prediction import Prediction
    from bridge.sync.report import SyncRow

PRECISION_OWNERS = ("model", "optimizer", "ddp")
FAMILIES = ("fp8", "fp4")

Weaknesses = Callable[[str], str | None]
"""Path of a setting -> what decides its value, as a noun; None where the value is stated or a known default."""


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
    values["params_dtype"] = values["params_dtype"] or mode_of(config)
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
        weaknesses: Path of a setting -> what decides its value where that is assumed or open; None: all are known.
        backend: te, emulated or te_cpu: what runs low-precision GEMMs; None: Transformer Engine where the target has a
            GPU.
        environment: Environment variables of the run; None: not known.
    """

    # Known to a check alone.
    prediction: Prediction
    sections: Mapping[str, Any]
    malformed: list[Any]
    unknown: dict[str, Any]
    """Keys of the precision that are no field -> their values."""
    is_resumed: bool
    refused: Sequence[Any]
    """Words of the command line that the program's parser refuses, as findings."""
    dropped: Sequence[Any]
    """Settings of the file that its framework does not forward, as `bridge.read.file_reading.Dropped`."""
    selection: Any
    """The modules that each row of `modules`, or each matcher of a foreign recipe, takes; None without any."""
    plan: Any
    """The precision plan of the run; RunConfigError for a model that cannot be planned."""
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
        weaknesses: Weaknesses | None = None,
        backend: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.precision = precision
        self.stated: Mapping[str, Any] = {} if precision is None else stated_values(precision)
        self.put_aside: Mapping[str, str] = {} if precision is None else switches_put_aside(precision)
        self.views = views
        self.given = given
        self.rows = rows
        self.target = target or Target()
        self.is_last = is_last
        self.is_whole = False
        self.backend = backend
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self.weaknesses = weaknesses
        self._origins = origins
        self._scheme = scheme

    @classmethod
    def of_precision(cls, config: PrecisionConfig) -> RuleContext:
        """Return the context of a config alone: every owner holds what the config reads as."""
        return cls(config, views=dict.fromkeys(PRECISION_OWNERS, View(reading_of(config))))

    def leaves_out(self, rule: str, paths: Collection[str]) -> bool:  # noqa: ARG002  a check leaves some out
        """Return whether a rule that read these settings is not asked; a check leaves out some of them."""
        return False

    def unknown_among(self, paths: Iterable[str]) -> dict[str, str]:
        """Return those of some settings whose values are assumed or open -> what decides each."""
        if self.weaknesses is None:
            return {}
        found = {}
        for path in paths:
            decider = self.weaknesses(path)
            if decider is not None:
                found[path] = decider
        return found

    def is_own_known(self, path: str) -> bool:  # noqa: ARG002  a check may know of values that nothing states
        """Return whether the value that an owner holds before the sync is stated, or a known default."""
        return True

    # -- the owners' values ------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """Values of the model config."""
        return self.views["model"]

    @property
    def optimizer(self) -> Any:
        """Values of the optimizer config."""
        return self.views["optimizer"]

    @property
    def ddp(self) -> Any:
        """Values of the DDP config."""
        return self.views["ddp"]

    @property
    def train(self) -> Any:
        """Values of the training section."""
        return self.views["train"]

    @property
    def data(self) -> Any:
        """Values of the data section."""
        return self.views["data"]

    @property
    def peft(self) -> Any:
        """Values of the adapter's section."""
        return self.views["peft"]

    # -- the precision -----------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """The mode: bf16, fp16 or fp32."""
        if self.precision is not None:
            return mode_of(self.precision)
        if self.model.bf16 is True:
            return "bf16"
        if self.model.fp16 is True:
            return "fp16"
        return "fp32"

    @property
    def is_bf16(self) -> bool:
        """Whether the mode is BF16."""
        return self.mode == "bf16"

    @property
    def is_fp16(self) -> bool:
        """Whether the mode is FP16."""
        return self.mode == "fp16"

    @property
    def is_fp32(self) -> bool:
        """Whether the mode is FP32."""
        return self.mode == "fp32"

    @property
    def is_half(self) -> bool:
        """Whether the mode is BF16 or FP16."""
        return not self.is_fp32

    @property
    def fp8(self) -> str | None:
        """The FP8 format, None where FP8 is off."""
        return self.model.fp8 or None

    @property
    def fp4(self) -> str | None:
        """The FP4 format, None where FP4 is off."""
        return self.model.fp4 or None

    @property
    def is_low(self) -> bool:
        """Whether GEMMs run in FP8 or FP4."""
        return bool(self.fp8 or self.fp4)

    @property
    def scheme(self) -> str | None:
        """The scaling scheme, None without FP8 and FP4."""
        if self._scheme:
            return self._scheme
        if self.fp8:
            return self.model.fp8_recipe  # type: ignore[no-any-return]
        if self.fp4:
            return self.model.fp4_recipe  # type: ignore[no-any-return]
        return None

    @property
    def row(self) -> Scheme | None:
        """The scheme's row in the table of schemes."""
        schemes = FP8_SCHEMES if self.fp8 else FP4_SCHEMES
        return schemes.get(self.scheme or "")

    @property
    def gathers_fp8(self) -> bool:
        """Whether weights are stored and gathered in FP8."""
        return bool(self.model.fp8_param or self.ddp.fp8_param_gather)

    @property
    def gathers_fp4(self) -> bool:
        """Whether weights are stored and gathered in FP4."""
        return bool(self.model.fp4_param or self.ddp.fp4_param_gather)

    @property
    def reuses_buffer(self) -> bool:
        """Whether MXFP8 weights are gathered through the gradient buffer."""
        return bool(getattr(self.ddp, BUFFER) or getattr(self.optimizer, BUFFER))

    @property
    def has_dynamic_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.is_fp16 and not self.optimizer.loss_scale

    # -- the owners --------------------------------------------------------------------------------------------

    @property
    def has_model(self) -> bool:
        """Whether a model config is there."""
        return "model" in self.given

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer config is there."""
        return "optimizer" in self.given

    @property
    def has_ddp(self) -> bool:
        """Whether a DDP config is there."""
        return "ddp" in self.given

    @property
    def has_owners(self) -> bool:
        """Whether any owner is there."""
        return self.has_model or self.has_optimizer or self.has_ddp

    @property
    def has_peft(self) -> bool:
        """Whether the run trains adapters."""
        return "peft" in self.given

    @property
    def has_precision_aware(self) -> bool:
        """Whether the precision-aware optimizer runs."""
        return bool(self.optimizer.use_precision_aware_optimizer)

    @property
    def has_megatron_fsdp(self) -> bool:
        """Whether Megatron-FSDP runs."""
        return bool(self.ddp.use_megatron_fsdp or self.ddp.use_custom_fsdp)

    @property
    def has_fsdp(self) -> bool:
        """Whether any fully sharded data parallelism runs."""
        return self.has_megatron_fsdp or bool(self.ddp.use_torch_fsdp2)

    @property
    def has_emerging_optimizer(self) -> bool:
        """Whether the optimizer is neither Adam nor SGD."""
        return self.has_optimizer and self.optimizer.optimizer not in ("adam", "sgd")

    @property
    def is_sharded(self) -> bool:
        """Whether the distributed optimizer runs."""
        return bool(self.optimizer.use_distributed_optimizer or self.ddp.use_distributed_optimizer)

    @property
    def has_ncclep(self) -> bool:
        """Whether NCCL's own kernels dispatch tokens to experts."""
        is_flexible: bool = self.model.moe_token_dispatcher_type == "flex"  # noqa: S105  tokens of text
        return is_flexible and bool(self.model.moe_flex_dispatcher_backend == "ncclep")

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The modules that selective recomputation runs again."""
        modules = self.model.recompute_modules
        if self.model.recompute_granularity == "selective" and isinstance(modules, list | tuple):
            return tuple(map(str, modules))
        return ()

    # -- the target --------------------------------------------------------------------------------------------

    @property
    def mcore(self) -> Version | None:
        """Release of megatron-core, None where it is not known."""
        return self.target.mcore

    @property
    def te(self) -> Version | None:
        """Release of Transformer Engine, None where it is not known."""
        return self.target.te

    @property
    def cuda(self) -> Version | None:
        """Release of CUDA, None where it is not known."""
        return self.target.cuda

    @property
    def cudnn(self) -> Version | None:
        """Release of cuDNN, None where it is not known."""
        return self.target.cudnn

    @property
    def capability(self) -> Any:
        """Compute capability of the GPU, None where it is not known."""
        return self.target.capability

    @property
    def has_gpu(self) -> bool:
        """Whether the target is a GPU."""
        return self.target.gpu is not None and self.target.gpu.is_gpu

    @property
    def is_emulated(self) -> bool:
        """Whether FP8 and FP4 GEMMs are emulated."""
        is_cpu = self.target.gpu is not None and not self.target.gpu.is_gpu
        return self.backend in ("emulated", "te_cpu") or (self.backend is None and is_cpu)

    @property
    def calls_te(self) -> bool:
        """Whether Transformer Engine's Python runs, on a GPU or a CPU."""
        return self.backend == "te_cpu" or not self.is_emulated

    @property
    def needs_gpu_formats(self) -> bool:
        """Whether the GPU itself has to run FP8 or FP4."""
        return self.is_low and self.has_gpu and not self.is_emulated

    @kept_property
    def shape(self) -> ModelShape:
        """The model; a size that is impossible is replaced."""
        return self.prediction.shape_and_faults[0]

    @kept_property
    def parallel(self) -> Parallel:
        """The layout; what cannot be read of it is left out."""
        return self.prediction.layout_and_faults[0]

    @kept_property
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
            if name in field_names(self.precision) and is_stated(self.precision, name):
                return source_of(self.precision, name)
            return None
        return self._origins(path) if self._origins is not None and section in self.views else None

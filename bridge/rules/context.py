"""`RuleContext`: what a rule may ask about a precision and the configs it is written into.

`finalize` asks with `RuleContext.of_precision`, a sync makes one of its owners, a check a
`RunContext`, which knows the whole run. A value that no config states is Megatron's class default.
Where Megatron has none (`seq_length`, `target.te`), None stands for "not known", and a rule that
needs it stays silent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from bridge.model.read_tracking import AttributeView, tracked_property
from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.mode import get_mode
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.precision.statements import (
    get_source,
    get_stated_values,
    get_switches_put_aside,
    is_stated,
    list_field_names,
)
from bridge.rules.inert import GRAD_BUFFER_REUSE, find_inert_fields
from bridge.target.fields import OWNER_DEFAULTS, is_different
from bridge.target.target import Target
from bridge.target.versions import Version

if TYPE_CHECKING:
    from bridge.precision.config import PrecisionConfig
    from bridge.rules.owner_values import (
        DataValues,
        DdpValues,
        ModelValues,
        OptimizerValues,
        PeftValues,
        TrainValues,
    )
    from bridge.rules.sync_row import SyncRow

PRECISION_OWNERS = ("model", "optimizer", "ddp")
FAMILIES = ("fp8", "fp4")

DeciderLookup = Callable[[str], str | None]
"""Path of a setting -> what decides its value, as a noun; None: it is stated or a known default."""


def _find_owner_name(field: str) -> str | None:
    for role in PRECISION_OWNERS:
        if field in OWNER_DEFAULTS[role]:
            return role
    return None


def get_effective_values(config: PrecisionConfig) -> dict[str, Any]:
    """Return the fields of `config` as read, and the fields that Megatron makes of them."""
    values = config.to_dict(full=True)
    values["params_dtype"] = values["params_dtype"] or get_mode(config)
    values["enable_autocast"] = values["autocast_enabled"]
    return values


class RuleContext:
    """The facts that a rule is asked about. Read-only by intent; made again each time.

    Args:
        precision: The config; None: the owners keep their own settings.
        views: Role -> values of that config after the plan, as attributes, dtypes as tokens. A view
            has the fields that are known and no others: a row that reads more fails at once.
        present: Roles of the configs that are there.
        rows: The plan that made the values.
        scheme: The scaling scheme of the run where it is known already.
        target: The GPUs and versions of the run.
        is_last: The run begins after this sync.
        origins: Path of a setting -> its source.
        weaknesses: Path of a setting -> what decides its value where that is assumed or open; None:
            all are known.
        backend: te, emulated or te_cpu: what runs low-precision GEMMs; None: Transformer Engine
            where the target has a GPU.
        environment: Environment variables of the run; None: not known.
    """

    def __init__(
        self,
        precision: PrecisionConfig | None,
        *,
        views: Mapping[str, AttributeView],
        present: frozenset[str] = frozenset(),
        rows: Sequence[SyncRow] = (),
        scheme: str | None = None,
        target: Target | None = None,
        is_last: bool = False,
        origins: Callable[[str], str] | None = None,
        weaknesses: DeciderLookup | None = None,
        backend: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.precision = precision
        self.stated: Mapping[str, Any] = {}
        self.put_aside: Mapping[str, str] = {}
        if precision is not None:
            self.stated = get_stated_values(precision)
            self.put_aside = get_switches_put_aside(precision)
        self.views = views
        self.present = present
        self.rows = rows
        self.target = target or Target()
        self.is_last = is_last
        self.backend = backend
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self.weaknesses = weaknesses
        self._origins = origins
        self._scheme = scheme

    @classmethod
    def from_precision(cls, config: PrecisionConfig) -> RuleContext:
        """Return the context of a config alone: every owner holds what the config reads as."""
        return cls(
            config,
            views=dict.fromkeys(PRECISION_OWNERS, AttributeView(get_effective_values(config))),
        )

    def skips_rule(self, rule: str, paths: Collection[str]) -> bool:  # noqa: ARG002  of a check
        """Return whether a rule that read these settings is not asked; a check leaves out some."""
        return False

    def find_unknown(self, paths: Iterable[str]) -> dict[str, str]:
        """Return those of some settings whose values are assumed or open -> what decides each."""
        if self.weaknesses is None:
            return {}
        deciders = {}
        for path in paths:
            decider = self.weaknesses(path)
            if decider is not None:
                deciders[path] = decider
        return deciders

    def is_value_before_sync_known(self, path: str) -> bool:  # noqa: ARG002  of a check
        """Return whether an owner's value before the sync is stated, or a known default."""
        return True

    # -- the owners' values ----------------------------------------------------------------------

    @property
    def model(self) -> ModelValues:
        """Values of the model config."""
        return cast("ModelValues", self.views["model"])

    @property
    def optimizer(self) -> OptimizerValues:
        """Values of the optimizer config."""
        return cast("OptimizerValues", self.views["optimizer"])

    @property
    def ddp(self) -> DdpValues:
        """Values of the DDP config."""
        return cast("DdpValues", self.views["ddp"])

    @property
    def train(self) -> TrainValues:
        """Values of the training section."""
        return cast("TrainValues", self.views["train"])

    @property
    def data(self) -> DataValues:
        """Values of the data section."""
        return cast("DataValues", self.views["data"])

    @property
    def peft(self) -> PeftValues:
        """Values of the adapter's section."""
        return cast("PeftValues", self.views["peft"])

    # -- the precision ---------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """The mode: bf16, fp16 or fp32."""
        if self.precision is not None:
            return get_mode(self.precision)
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
    def is_half_precision(self) -> bool:
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
    def is_fp8(self) -> bool:
        """Whether FP8 is on."""
        return self.fp8 is not None

    @property
    def is_fp4(self) -> bool:
        """Whether FP4 is on."""
        return self.fp4 is not None

    @property
    def is_low_precision(self) -> bool:
        """Whether GEMMs run in FP8 or FP4."""
        return self.is_fp8 or self.is_fp4

    def get_format(self, family: str) -> str | None:
        """Return the format of a family, fp8 or fp4; None where it is off."""
        if family == "fp8":
            return self.fp8
        return self.fp4

    @property
    def scheme(self) -> str | None:
        """The scaling scheme, None without FP8 and FP4."""
        if self._scheme:
            return self._scheme
        if self.is_fp8:
            return self.model.fp8_recipe
        if self.is_fp4:
            return self.model.fp4_recipe
        return None

    @property
    def is_delayed(self) -> bool:
        """Whether the scheme is delayed scaling."""
        return self.scheme == "delayed"

    @property
    def is_tensorwise(self) -> bool:
        """Whether the scheme is current scaling."""
        return self.scheme == "tensorwise"

    @property
    def is_blockwise(self) -> bool:
        """Whether the scheme is blockwise scaling."""
        return self.scheme == "blockwise"

    @property
    def is_mxfp8(self) -> bool:
        """Whether the scheme is MXFP8."""
        return self.scheme == "mxfp8"

    @property
    def is_nvfp4(self) -> bool:
        """Whether the scheme is NVFP4."""
        return self.scheme == "nvfp4"

    @property
    def is_custom(self) -> bool:
        """Whether the scheme is made by a factory of the user."""
        return self.scheme == "custom"

    @property
    def row(self) -> Scheme | None:
        """The scheme's row in the table of schemes."""
        if self.is_fp8:
            return FP8_SCHEMES.get(self.scheme or "")
        return FP4_SCHEMES.get(self.scheme or "")

    @property
    def gathers_fp8(self) -> bool:
        """Whether weights are stored and gathered in FP8."""
        return bool(self.model.fp8_param or self.ddp.fp8_param_gather)

    @property
    def gathers_fp4(self) -> bool:
        """Whether weights are stored and gathered in FP4."""
        return bool(self.model.fp4_param or self.ddp.fp4_param_gather)

    def gathers_family(self, family: str) -> bool:
        """Return whether weights are stored and gathered in a family, fp8 or fp4."""
        if family == "fp8":
            return self.gathers_fp8
        return self.gathers_fp4

    @property
    def reuses_buffer(self) -> bool:
        """Whether MXFP8 weights are gathered through the gradient buffer."""
        return bool(
            getattr(self.ddp, GRAD_BUFFER_REUSE) or getattr(self.optimizer, GRAD_BUFFER_REUSE)
        )

    @property
    def has_dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.is_fp16 and not self.optimizer.loss_scale

    # -- the owners ------------------------------------------------------------------------------

    @property
    def has_model(self) -> bool:
        """Whether a model config is there."""
        return "model" in self.present

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer config is there."""
        return "optimizer" in self.present

    @property
    def has_ddp(self) -> bool:
        """Whether a DDP config is there."""
        return "ddp" in self.present

    @property
    def has_owners(self) -> bool:
        """Whether any owner is there."""
        return self.has_model or self.has_optimizer or self.has_ddp

    @property
    def has_peft(self) -> bool:
        """Whether the run trains adapters."""
        return "peft" in self.present

    @property
    def has_precision_aware_optimizer(self) -> bool:
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
        is_flexible = self.model.moe_token_dispatcher_type == "flex"  # noqa: S105  tokens of text
        return is_flexible and self.model.moe_flex_dispatcher_backend == "ncclep"

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules that selective recomputation runs again."""
        modules = self.model.recompute_modules
        if self.model.recompute_granularity == "selective" and isinstance(modules, list | tuple):
            return tuple(map(str, modules))
        return ()

    # -- the target ------------------------------------------------------------------------------

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
    def capability(self) -> tuple[int, int] | None:
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
        return self.is_low_precision and self.has_gpu and not self.is_emulated

    @tracked_property
    def reasons_without_effect(self) -> dict[str, str]:
        """Fields of the precision without effect in this run, with the reason."""
        if self.precision is None:
            return {}
        return find_inert_fields(
            self.precision,
            scheme=self.scheme,
            is_autocast=bool(self.model.enable_autocast),
            keeps_layers=bool(self.model.first_last_layers_bf16),
        )

    def differs_from_default(self, field: str) -> bool:
        """Return whether the precision or an owner gives a field another value than its default."""
        if field in self.stated:
            return is_different(self.stated[field], FIELD_DEFAULTS[field])
        role = None
        if field in MEGATRON_FIELDS:
            role = _find_owner_name(field)
        if role is None or role not in self.present:
            return False
        value = getattr(self.views[role], field)
        return value is not None and is_different(value, OWNER_DEFAULTS[role][field])

    def path(self, name: str) -> str:
        """Return the full path of a setting: of a recipe, or of an owner where there is none."""
        section, _, setting = name.rpartition(".")
        if section in PRECISION_OWNERS and setting in MEGATRON_FIELDS and setting in self.stated:
            return f"mixed_precision.{setting}"
        if name not in FIELD_DEFAULTS:
            return name
        is_of_an_owner = name in MEGATRON_FIELDS and name not in self.stated
        if self.precision is not None and not is_of_an_owner:
            return f"mixed_precision.{name}"
        return f"{_find_owner_name(name) or 'model'}.{name}"

    def value(self, path: str) -> Any:
        """Return the value of a path; None for a path that is no setting."""
        section, _, name = path.partition(".")
        if section == "mixed_precision":
            if name in self.stated:
                return self.stated[name]
            role = _find_owner_name(name)
            if role is None:
                return FIELD_DEFAULTS.get(name)
            return getattr(self.views[role], name)
        if section == "environment":
            return self.environment.get(name)
        if section == "target":
            return self.target.stated(name)
        if section in self.views:
            return getattr(self.views[section], name, None)
        return None

    def value_of(self, name: str) -> Any:
        """Return the value of a setting of the precision: the stated one, or else its owner's."""
        return self.value(self.path(name))

    def where(self, path: str) -> str | None:
        """Return the source that set a path, or None where that is not known."""
        section, _, name = path.partition(".")
        if section == "mixed_precision" and self.precision is not None:
            if name in list_field_names(self.precision) and is_stated(self.precision, name):
                return get_source(self.precision, name)
            return None
        if self._origins is not None and section in self.views:
            return self._origins(path)
        return None

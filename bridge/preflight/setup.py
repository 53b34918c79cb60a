"""`Setup`: a whole run as rules see it, after the recipe has been written into the owners.

    setup = Setup("bf16_mixed", model={"num_layers": 80, "hidden_size": 8192}, target=parse_target("h100x8"))
    setup.scheme, setup.model.num_layers, setup.target.gpu

Owners may be Megatron's own objects, subclasses of them, mappings from YAML, or nothing at all. Nothing heavy is
imported.

`read_section` brings the values of a section to one form: dtypes become tokens, enums their values, numbers and
switches written as text the values they mean. A value of a wrong type is noted and read as the default, so that a rule
about it speaks and the others still work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, PrecisionTypeError, RunConfigError, WrongValueError
from bridge.precision.dtypes import dtype_token
from bridge.precision.fields import coerce
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.nearest import nearest_label
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.context import RuleContext, View
from bridge.rules.fields import DEFAULTS, FIELDS, NAMES, OwnerField
from bridge.rules.rule import Violation
from bridge.rules.shape.parallel import virtual_stages
from bridge.rules.target import Target
from bridge.rules.versions import at_least
from bridge.sync.owner import WRITTEN, MappingOwner, Owner, seen_through
from bridge.sync.plan import plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.plan.selection import ModuleSelection
    from bridge.preflight.auto import Choice
    from bridge.sync.report import SyncRow

ROLES = ("model", "optimizer", "ddp", "train", "data", "peft")
OWNERS = ("model", "optimizer", "ddp", "train")
Origins = Callable[[str], str]


class Setup(RuleContext):
    """A run before it is built. Read-only by intent; made anew for each check.

    Args:
        precision: A recipe's name, a config, a mapping of stated fields, or None: the owners keep their own settings.
        model: A TransformerConfig, a mapping of its fields, or None.
        optimizer: An OptimizerConfig, likewise.
        ddp: A DistributedDataParallelConfig, likewise.
        train: Batch sizes and the loss check.
        data: Sequence length and packing.
        peft: An adapter's settings, None for full training.
        checkpoint: The precision fingerprint of the checkpoint that the run resumes from.
        target: Where it is going to run; None: nothing is known but what is installed.
        environment: Environment variables of the run; None: not known.
        backend: te, emulated or te_cpu: what runs low-precision GEMMs; None: Transformer Engine where the target has a
            GPU.
        is_own: The run is one of scripts/train.py, whose build does not honour every field.
        origins: Path of a setting -> its source.
        choice: What `auto` was resolved to, for reports.
    """

    def __init__(
        self,
        precision: str | MixedPrecisionConfig | Mapping[str, Any] | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        ddp: Any = None,
        train: Any = None,
        data: Any = None,
        peft: Any = None,
        checkpoint: Mapping[str, Any] | None = None,
        target: Target | None = None,
        environment: Mapping[str, str] | None = None,
        backend: str | None = None,
        is_own: bool = False,
        origins: Origins | None = None,
        choice: Choice | None = None,
    ) -> None:
        config, misread, self.unknown = _precision(precision)
        owners = (model, optimizer, ddp, train, data, peft)
        sections = {role: read_section(role, owner) for role, owner in zip(ROLES, owners, strict=True)}
        self.sections: Mapping[str, Section] = sections
        self.malformed = misread + [one for section in sections.values() for one in section.malformed]
        values = {role: section.values for role, section in sections.items()}
        target = target or Target()
        super().__init__(
            config,
            rows=() if config is None else _write(config, values, target),
            views={role: View(held) for role, held in values.items()},
            given=frozenset(role for role, section in sections.items() if section.is_given),
            target=target,
            origins=origins,
        )
        self.is_whole = True
        self.checkpoint = checkpoint
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self.backend, self.is_own = backend, is_own
        self.choice = choice
        self.read_owners()
        self._read_shape()
        self._read_target()

    def _read_shape(self) -> None:
        """Set sizes of the parallel groups (at least 1) and what kind of model it is."""
        model = self.model
        self.train, self.data, self.peft = self.views["train"], self.views["data"], self.views["peft"]
        self.tp: int = max(1, model.tensor_model_parallel_size or 1)
        self.pp: int = max(1, model.pipeline_model_parallel_size or 1)
        self.vpp = virtual_stages(vars(model))
        self.cp: int = max(1, model.context_parallel_size or 1)
        self.ep: int = max(1, model.expert_model_parallel_size or 1)
        self.etp: int = max(1, model.expert_tensor_parallel_size or self.tp)
        self.sp: bool = bool(model.sequence_parallel) and self.tp > 1
        self.is_moe = bool(model.num_moe_experts)
        self.is_hybrid = bool(model.is_hybrid_model or model.hybrid_override_pattern or model.hybrid_layer_pattern)
        self.has_mtp = bool(model.mtp_num_layers)
        self.rank: int | None = self.peft.rank or self.peft.dim
        routes = (model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend)
        self.has_ncclep = routes == ("flex", "ncclep")
        modules = model.recompute_modules
        self.recomputed: tuple[str, ...] = ()
        if model.recompute_granularity == "selective" and isinstance(modules, list | tuple):
            self.recomputed = tuple(map(str, modules))
        self.has_peft = "peft" in self.given
        self.is_resumed = self.checkpoint is not None

    def _read_target(self) -> None:
        """Set what is known of the GPUs of the run and their libraries."""
        target = self.target
        self.cuda, self.cudnn, self.capability = target.cuda, target.cudnn, target.capability
        self.has_gpu = target.gpu is not None and target.gpu.is_gpu
        self.is_emulated = self.backend in ("emulated", "te_cpu") or (
            self.backend is None and target.gpu is not None and not target.gpu.is_gpu
        )
        self.needs_gpu_formats = self.is_low and self.has_gpu and not self.is_emulated

    @cached_property
    def overflow(self) -> Violation | None:
        """The fullest rank, where it needs more memory than its GPU has.

        Nothing is known of runs with an adapter, whose frozen weights have no gradients, of emulated ones, and of
        models that cannot be planned.
        """
        if not self.has_model or not self.has_gpu or self.has_peft or self.is_emulated:
            return None
        sections = {role: vars(self.views[role]) for role in ("model", "optimizer", "ddp", "train")}
        sections["model"] = {**sections["model"], "seq_length": self.model.seq_length or self.data.seq_length}
        from bridge.plan.run import PlannedRun  # heavy for an import of the config classes

        try:
            found = PlannedRun(sections=sections, target=self.target).overflow
        except BridgeError:
            return None
        if found is None:
            return None
        needed, memory = (f"{size / 2**30:,.0f} GiB" for size in (found.needed_bytes, found.memory_bytes))
        words = {"needed": needed, "memory": memory, "stage": found.stage, "but": ""}
        if found.uncounted:
            words["but"] = f"; {' and '.join(found.uncounted)} may keep less there than is counted"
        return Violation(severity="warning" if found.uncounted else None, words=words)

    @cached_property
    def selection(self) -> ModuleSelection | None:
        """The modules that each row of `modules`, or each matcher of a foreign recipe, takes.

        None without any, and for a model that cannot be planned, which other findings name.
        """
        if self.model.quant_recipe is None:
            return None
        model = self.sections["model"].values
        from bridge.plan.precision_plan import precision_plan

        try:
            return precision_plan(self.precision, model).selection
        except RunConfigError:
            return None

    @property
    def label(self) -> str:
        """The precision in a few words."""
        return nearest_label(self.precision) if self.precision is not None else f"{self.mode}, without a recipe"

    @property
    def flow(self) -> str:
        """The dtypes of a gradient, from the weight gradient to the master weight."""
        weights = self.mode
        if self.has_megatron_fsdp and at_least(self.mcore, "0.19"):
            main = self.ddp.megatron_fsdp_main_grads_dtype or weights
            sent = self.ddp.megatron_fsdp_grad_comm_dtype or main
        else:
            main = sent = "fp32" if self.ddp.grad_reduce_in_fp32 else weights
        master = self.optimizer.main_params_dtype if self.has_precision_aware else "fp32"
        wgrad = f"{self.scheme} wgrad GEMM" if self.is_low else f"{weights} wgrad GEMM"
        return f"{wgrad} -> accumulated in {main} -> reduced in {sent} -> {master} master weights"


def _write(config: MixedPrecisionConfig, values: Mapping[str, dict[str, Any]], target: Target) -> Sequence[SyncRow]:
    """Write into `values` what a sync would write into the owners, and return its plan."""
    rows = plan(config, [MappingOwner(role, values[role], target.mcore) for role in OWNERS])
    for row in rows:
        if row.verdict != "absent":
            values[row.owner][row.attribute] = row.new
    return rows


def _precision(given: Any) -> tuple[MixedPrecisionConfig | None, list[Malformed], dict[str, Any]]:
    """Return the config, what is of a wrong type in it, and keys that are no field."""
    if given is None or isinstance(given, MixedPrecisionConfig):
        return given, [], {}
    if isinstance(given, Mapping):
        return read_precision(given)
    return get_mixed_precision_config(given), [], {}


_PRECISION = frozenset(MixedPrecisionConfig.field_names())
_MISSING = object()
_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int), "name": (str,)}
_ROWS = {role: {name: (_PLAIN.get(row.kind, ()), row) for name, row in rows.items()} for role, rows in FIELDS.items()}
"""Section -> field -> types whose values are kept as they are, and the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Malformed:
    """A value that is not of its field's type."""

    path: str
    """section.field."""
    value: Any
    why: str
    """The type it must have, as a clause."""


@dataclass(kw_only=True, slots=True)
class Section:
    """The values of a section."""

    values: dict[str, Any]
    """Field -> value in one form; the class default where none is given."""
    is_given: bool
    malformed: list[Malformed] = field(default_factory=list)
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a mapping that no version of Megatron has -> their values."""
    stated: frozenset[str] = frozenset()
    """Fields that a mapping gives; all of an object's, which does not say what was given."""


def read_section(role: str, owner: object) -> Section:
    """Return the section that `owner`, a mapping, an object with attributes or None, describes."""
    values = DEFAULTS[role].copy()
    if owner is None:
        return Section(values=values, is_given=False)
    rows = _ROWS[role]
    unknown: dict[str, Any] = {}
    malformed: list[Malformed] = []
    is_mapping = isinstance(owner, Mapping)
    given: Mapping[str, Any] = owner if is_mapping else _attributes(role, owner)  # type: ignore[assignment]
    for name, value in given.items():
        found = rows.get(name)
        if found is None:
            unknown[name] = value
        elif type(value) in found[0]:
            values[name] = value
        else:
            _put(values, found[1], value, role, malformed)
    known = NAMES.get(role) if is_mapping else None
    misspelt = {} if known is None else {str(name): unknown[name] for name in unknown if name not in known}
    stated = frozenset(map(str, given))
    return Section(values=values, is_given=True, malformed=malformed, unknown=misspelt, stated=stated)


def read_precision(given: Mapping[str, Any]) -> tuple[MixedPrecisionConfig, list[Malformed], dict[str, Any]]:
    """Return the config of a mapping of stated fields, what is of a wrong type in it, and what is no field."""
    stated: dict[str, Any] = {}
    malformed: list[Malformed] = []
    unknown: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key)
        if name.startswith("_"):  # Megatron Bridge's _target_ and _call_
            continue
        if name not in _PRECISION:
            unknown[name] = value
            continue
        dtype = isinstance(value, Mapping) and "_target_" in value  # by its import path
        try:
            stated |= MixedPrecisionConfig.from_dict({name: value["_target_"] if dtype else value}).to_dict()
        except PrecisionTypeError as error:
            malformed.append(Malformed(path=error.path, value=value, why=error.rule))
    return MixedPrecisionConfig.from_dict(stated), malformed, unknown


def _put(values: dict[str, Any], row: OwnerField, value: Any, role: str, malformed: list[Malformed]) -> None:
    """Store a value in its one form, or note that it has none."""
    if value is None:
        if row.default is None or row.kind in ("name", "dtype"):
            values[row.name] = None
        return  # Optional[...] with another default: Megatron reads None as that
    if row.kind == "any":
        values[row.name] = value
        return
    try:
        values[row.name] = _dtype(value) if row.kind == "dtype" else coerce(value, row.kind, switch=True)
    except WrongValueError as error:
        malformed.append(Malformed(path=f"{role}.{row.name}", value=value, why=error.rule))


def _dtype(value: Any) -> str | None:
    """Return a dtype's token; Megatron Bridge's YAML has ``{_target_: torch.bfloat16, _call_: false}`` for one."""
    if isinstance(value, Mapping) and "_target_" in value:
        value = value["_target_"]
    if value == "fp8":  # Megatron-LM's spelling for optimizer states kept as bytes
        return "uint8"
    return None if isinstance(value, str) and value.lower() in ("none", "null", "auto") else dtype_token(value)


def _attributes(role: str, owner: object) -> Mapping[str, Any]:
    """Return an object's values as they were before any sync wrote to it."""
    owner = seen_through(owner)
    if not dataclasses.is_dataclass(owner) or not hasattr(owner, "__dict__"):
        found = {name: getattr(owner, name, _MISSING) for name in FIELDS[role]}
        return {name: value for name, value in found.items() if value is not _MISSING}
    given = vars(owner)
    if WRITTEN in given:
        before = Owner(role, owner)
        given = {name: before.own(name) for name in FIELDS[role] if name in given}
    return given

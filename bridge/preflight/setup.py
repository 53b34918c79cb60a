"""`Setup`: a whole run as rules see it, after the recipe has been written into the owners.

    setup = Setup("bf16_mixed", model={"num_layers": 80, "hidden_size": 8192}, target=parse_target("h100x8"))
    setup.scheme, setup.model.num_layers, setup.target.gpu

Owners may be Megatron's own objects, subclasses of them, mappings from YAML, or nothing at all. Nothing heavy is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, PrecisionTypeError, RunConfigError
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.nearest import label_of_owners, nearest_label
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.context import RuleContext, View
from bridge.rules.fields import gradient_dtypes
from bridge.rules.section import Malformed
from bridge.rules.target import Target
from bridge.rules.violation import Violation
from bridge.sync.prediction import Origins, Prediction, predict

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.plan.selection import ModuleSelection
    from bridge.preflight.auto import Choice


class Setup(RuleContext):
    """A run before it is built. Read-only by intent; made again for each check.

    Args:
        precision: A recipe's name, a config, a mapping of stated fields, or None: the owners keep their own settings.
            Or the prediction of the run, which then says all that it holds.
        target: Where it is going to run; None: nothing is known but what is installed.
        environment: Environment variables of the run; None: not known.
        backend: te, emulated or te_cpu: what runs low-precision GEMMs; None: Transformer Engine where the target has a
            GPU.
        is_own: The run is one of scripts/train.py, whose build does not honour every field.
        is_resumed: The run reads a checkpoint.
        is_bridge: Megatron Bridge wrote the run's file.
        origins: Path of a setting -> its source.
        choice: What `auto` was resolved to, for reports.
        sections: model, optimizer, ddp, train, data and peft: Megatron's object, a mapping of its fields, or None.
    """

    def __init__(
        self,
        precision: str | MixedPrecisionConfig | Mapping[str, Any] | Prediction | None = None,
        *,
        target: Target | None = None,
        environment: Mapping[str, str] | None = None,
        backend: str | None = None,
        is_own: bool = False,
        is_resumed: bool = False,
        is_bridge: bool = False,
        origins: Origins | None = None,
        choice: Choice | None = None,
        **sections: Any,
    ) -> None:
        stated = StatedPrecision.of(precision)
        run = precision if isinstance(precision, Prediction) else predict(stated.config, sections, target=target)
        self.prediction: Prediction = run
        self.sections, self.unknown = run.sections, stated.unknown
        self.malformed = [*stated.malformed, *(one for section in run.sections.values() for one in section.malformed)]
        super().__init__(
            run.precision,
            rows=run.rows,
            views={role: View(values) for role, values in run.values.items()},
            given=frozenset(role for role, section in run.sections.items() if section.is_given),
            target=run.target,
            origins=origins,
        )
        self.is_whole = True
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self.backend, self.is_own, self.is_bridge, self.is_resumed = backend, is_own, is_bridge, is_resumed
        self.choice = choice
        self.read_owners()
        self._read_kind()
        self._read_target()

    def _read_kind(self) -> None:
        """Set what kind of run it is."""
        model = self.model
        self.train, self.data, self.peft = self.views["train"], self.views["data"], self.views["peft"]
        self.rank: int | None = self.peft.rank or self.peft.dim
        routes = (model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend)
        self.has_ncclep = routes == ("flex", "ncclep")
        modules = model.recompute_modules
        self.recomputed: tuple[str, ...] = ()
        if model.recompute_granularity == "selective" and isinstance(modules, list | tuple):
            self.recomputed = tuple(map(str, modules))
        self.has_peft = "peft" in self.given

    def _read_target(self) -> None:
        """Set what is known of the GPUs of the run and their libraries."""
        target = self.target
        self.cuda, self.cudnn, self.capability = target.cuda, target.cudnn, target.capability
        self.has_gpu = target.gpu is not None and target.gpu.is_gpu
        self.is_emulated = self.backend in ("emulated", "te_cpu") or (
            self.backend is None and target.gpu is not None and not target.gpu.is_gpu
        )
        self.calls_te = self.backend == "te_cpu" or not self.is_emulated
        self.needs_gpu_formats = self.is_low and self.has_gpu and not self.is_emulated

    @cached_property
    def overflow(self) -> Violation | None:
        """The fullest rank, where it needs more memory than its GPU has.

        Nothing is known of runs without an optimizer, which train nothing, of emulated ones, and of models that cannot
        be planned.
        """
        trains = self.has_model and self.has_optimizer
        if not trains or not self.has_gpu or self.is_emulated:
            return None
        from bridge.plan.run import PlannedRun  # heavy for an import of the config classes

        try:
            found = PlannedRun(prediction=self.prediction).overflow
        except BridgeError:
            return None
        if found is None:
            return None
        sizes = (found.needed_bytes, found.memory_bytes, found.activation_bytes)
        needed, memory, activations = (f"{size / 2**30:,.0f} GiB" for size in sizes)
        but, severity = "", "warning" if found.may_fit else None
        if found.uncounted:
            but = f"; {' and '.join(found.uncounted)} may keep less there than is counted"
        elif found.may_fit:
            but = f" by this count, in which the {activations} of activations may be {found.margin:.0%} too high"
        return Violation(severity=severity, needed=needed, memory=memory, stage=found.stage, but=but)

    @cached_property
    def selection(self) -> ModuleSelection | None:
        """The modules that each row of `modules`, or each matcher of a foreign recipe, takes.

        None without any, and for a model that cannot be planned, which other findings name.
        """
        if self.model.quant_recipe is None:
            return None
        try:
            return self.plan.selection
        except RunConfigError:
            return None

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The precision plan of the run; RunConfigError for a model that cannot be planned."""
        from bridge.plan.precision_plan import plan_of  # most checks do without it

        return plan_of(self.prediction)

    @property
    def label(self) -> str:
        """The precision in a few words; one without a recipe's name is named by the nearest."""
        if self.precision is None:
            return label_of_owners(self.prediction.values["model"])
        return self.precision.label if self.precision.recipe is not None else nearest_label(self.precision)

    @property
    def flow(self) -> str:
        """The dtypes of a gradient, from the weight gradient to the master weight."""
        weights = self.mode
        main, sent = gradient_dtypes(self.prediction.values["ddp"], weights, self.mcore)
        master = self.optimizer.main_params_dtype if self.has_precision_aware else "fp32"
        wgrad = f"{self.scheme} wgrad GEMM" if self.is_low else f"{weights} wgrad GEMM"
        return f"{wgrad} -> accumulated in {main} -> reduced in {sent} -> {master} master weights"


_FIELDS = frozenset(MixedPrecisionConfig.field_names())


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedPrecision:
    """A precision as a run gives it."""

    config: MixedPrecisionConfig | None = None
    malformed: Sequence[Malformed] = ()
    """Values that are of a wrong type."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are no field -> their values."""

    @classmethod
    def of(cls, given: Any) -> StatedPrecision:
        """Return what a name, a config, a mapping of stated fields, or nothing, states."""
        if given is None or isinstance(given, Prediction):
            return cls()
        if not isinstance(given, Mapping):
            return cls(config=get_mixed_precision_config(given))
        stated: dict[str, Any] = {}
        malformed: list[Malformed] = []
        for name, value in given.items():
            if name not in _FIELDS:
                continue
            try:
                stated |= MixedPrecisionConfig.from_dict({name: value}).to_dict()
            except PrecisionTypeError as error:
                malformed.append(Malformed(path=error.path, value=value, why=error.rule))
        unknown = {str(name): value for name, value in given.items() if name not in _FIELDS}
        return cls(config=MixedPrecisionConfig.from_dict(stated), malformed=malformed, unknown=unknown)

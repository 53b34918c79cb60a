"""`Run`: a run before it starts, as every command asks about it.

    run = load_run(config_file="run_config.yaml")      # of a file, by `bridge.front.loader`
    run = Run.from_configs("bf16_mixed", model={"num_layers": 80}, target=parse_target("h100x8"))
    run.prediction.values["model"]["bf16"]             # as the last sync before it leaves it
    run.plan, run.planned.memory                       # what follows from that

A run has the sections as they are stated, the precision, the target and the source of each value.
It is never written to. It is made in one of three ways:

    make_run                 of a file or the config tree, by `bridge.front.loader`, with all faults
    Run.from_configs         of configs in Python, without a file
    Run.from_container       of the container with Megatron's objects, when the run is about to begin

`bridge.preflight.rule_check.check` checks a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.errors import Finding, PrecisionTypeError, RunConfigError
from bridge.model.read_tracking import track_reads
from bridge.model.section import SECTION_NAMES
from bridge.precision.statements import list_field_names
from bridge.preflight.deciders import Deciders
from bridge.preflight.file_reading import (
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    FileReading,
)
from bridge.preflight.origins import UNKNOWN_ORIGIN, Origins
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.peer import PeerConfig
from bridge.registry.registry import get_mixed_precision_config, is_auto
from bridge.rules.context import PRECISION_OWNERS
from bridge.rules.program import Program, ProgramKind
from bridge.sync.prediction import Prediction, predict
from bridge.target.declaration import make_target
from bridge.target.target import Target
from bridge.target.versions import is_at_least

if TYPE_CHECKING:
    from bridge.plan.planned_run import PlannedRun
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.preflight.auto_recipe import Choice
    from bridge.registry.schedule import Phase

BYTE_VOCABULARY_SIZE = 256
"""Vocabulary of text that is tokenised to bytes."""
LAYER_SETTINGS = (
    "model.num_layers",
    "model.hybrid_layer_pattern",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.pipeline_model_parallel_layout",
)
"""Settings that say which layers a model has, and on which pipeline stage each is."""
STATED_BACKENDS = ("te", "emulated", "te_cpu")
"""Values of `precision_backend` that name a backend; with "auto" the machine decides."""
DETERMINISM_VARIABLES = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Variables that Megatron-LM sets at the start of a run with ``--deterministic-mode``.

It leaves a variable that is set. Source: megatron-core 0.19.2 training/determinism.py
apply_determinism_env.
"""
DETERMINISM_RELEASE = "0.19"
"""First release of megatron-core whose training sets these variables.

Source: Megatron-LM core_v0.18.2 training/arguments.py sets none.
"""
RUN_ONLY_KEYS = (
    "mixed_precision",
    "precision_backend",
    "precision_schedule",
    "target",
    "silence",
    "checkpoint",
)
"""Keys of a run besides the sections that a plan is made of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run before it starts."""

    sections: Mapping[str, Any] = field(default_factory=dict)
    """Every key of the run but the precision -> its value.

    A section such as `model` is a mapping of Megatron's fields, an object of Megatron's class, or
    None. The other keys are `target`, `silence`, `precision_backend` and `precision_schedule`.
    """
    precision: MixedPrecisionConfig | None = None
    """The precision, with the origin of each stated field. None: the owners keep their settings."""
    target: Target = field(default_factory=Target)
    """The machines and releases of the run; empty if nothing states them."""
    choice: Choice | None = None
    """The recipe that ``mixed_precision=auto`` was resolved to, with the reason; None without auto."""
    origins: Origins | None = None
    """The sources of each key. None: a finding names no source."""
    reading: FileReading = field(default_factory=FileReading)
    """The facts of the file besides its sections: framework, release, open settings."""
    environment: Mapping[str, str] | None = None
    """Environment variables of the run. None: the variables that the file sets, if any."""
    starting_program: Program | None = None
    """The program that starts the run. None: it is inferred from the sections and the file."""
    name: str = "config"
    """The file, or the primary config, that was read."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the precision that are not fields -> their values."""
    malformed: Sequence[Finding] = ()
    """A finding for each value of the precision that is not of its field's type."""

    @classmethod
    def from_configs(
        cls,
        precision: str | MixedPrecisionConfig | PeerConfig | Mapping[str, Any] | None = None,
        *,
        target: Target | None = None,
        environment: Mapping[str, str] | None = None,
        origins: Origins | None = None,
        program: Program | None = None,
        **sections: Any,
    ) -> Run:
        """Return the run of a precision and of the configs that it is written into.

        Args:
            precision: A recipe's name, ``auto``, a config, a mapping of stated fields, or None.
            target: The machines and releases. None: nothing is known of them.
            environment: Environment variables of the run. None: not known.
            origins: The sources of each key. None: not known.
            program: The program that starts the run. None: it is inferred from the sections.
            **sections: model, optimizer, ddp, train, data, peft, checkpoint and the other keys of
                a run.

        Raises:
            RunConfigError: ``auto`` without a GPU.
            UnknownRecipeError: No such recipe.
        """
        target = target or Target()
        unknown: Mapping[str, Any] = {}
        malformed: Sequence[Finding] = ()
        config, choice = precision, None
        if is_auto(config):
            config, choice = resolve_precision(config, sections.get("model"), target)
        if isinstance(config, Mapping):
            fields = _parse_precision_fields(config)
            config, unknown, malformed = fields.config, fields.unknown, fields.malformed
        if config is not None:
            config = get_mixed_precision_config(config)
        return cls(
            sections=sections,
            precision=config,
            target=target,
            choice=choice,
            origins=origins,
            environment=environment,
            starting_program=program,
            unknown=unknown,
            malformed=malformed,
        )

    @classmethod
    def from_container(cls, container: object, *, target: Target | str | None = None) -> Run:
        """Return the run of a `ConfigContainer`, or of a mapping of its sections.

        Args:
            target: A target's text, "auto" for this machine, or None: the container's own.

        Raises:
            RunConfigError: An unreadable target, or ``auto`` without a GPU.
            UnknownRecipeError: No such recipe.
        """
        sections = {name: get_section(container, name) for name in (*SECTION_NAMES, *RUN_ONLY_KEYS)}
        precision = sections.pop("mixed_precision")
        stated_target = sections.pop("target")
        if target is None:
            target = stated_target
        set_by = get_section(container, "set_by")
        origins = None
        if set_by:
            origins = Origins(values=set_by)
        run = cls.from_configs(precision, target=make_target(target), origins=origins, **sections)
        return replace(run, sections={**sections, "target": stated_target})

    # -- its settings ------------------------------------------------------------------------------

    def section(self, name: str) -> dict[str, Any]:
        """Return the values of a section that is a mapping.

        Empty for an absent section, and for an object of Megatron's class, which a container holds.
        `prediction.values` has the values of both.
        """
        values = self.sections.get(name)
        if isinstance(values, dict):
            return values
        return {}

    @property
    def model(self) -> dict[str, Any]:
        """The model's values."""
        return self.section("model")

    @property
    def states_target(self) -> bool:
        """Whether the run states its target."""
        return self.sections.get("target") is not None

    @property
    def program(self) -> Program:
        """The program that starts the run.

        A run that states a precision backend and a sequence length is one of scripts/train.py.
        """
        if self.starting_program is not None:
            return self.starting_program
        states_backend = self.sections.get("precision_backend") is not None
        states_length = get_section(self.sections.get("model"), "seq_length") is not None
        kind = ProgramKind.OTHER
        if states_backend and states_length:
            kind = ProgramKind.TRAIN_SCRIPT
        elif self.reading.settings_of == MEGATRON_BRIDGE:
            kind = ProgramKind.MEGATRON_BRIDGE
        elif self.reading.settings_of == MEGATRON_CORE:
            kind = ProgramKind.OWN_CONFIGS
        loads = get_section(self.sections.get("checkpoint"), "load") is not None
        faults = self.reading.option_faults
        return Program(
            kind=kind,
            # The variables that a resumed run needs are for Megatron's loader. scripts/train.py
            # reads its checkpoints itself and needs none.
            is_resumed=loads and kind is not ProgramKind.TRAIN_SCRIPT,
            refused_arguments=faults.refused,
            faulty_options=faults.misdirected,
            dropped_fields=faults.dropped_fields,
            added_schemes=self.reading.added_schemes,
        )

    @property
    def stated_environment(self) -> Mapping[str, str]:
        """The environment variables that the caller or the file states."""
        if self.environment is None:
            return self.reading.environment
        return self.environment

    @property
    def environment_at_start(self) -> Mapping[str, str]:
        """The variables of the run, with those that Megatron-LM sets in a deterministic run.

        Without a stated variable nothing is known of the environment, so none is added.
        """
        stated = self.stated_environment
        is_deterministic = (
            self.reading.framework == MEGATRON_LM
            and is_at_least(self.target.mcore, DETERMINISM_RELEASE) is not False
            and bool(self.model.get("deterministic_mode"))
        )
        if stated and is_deterministic:
            return {**DETERMINISM_VARIABLES, **stated}
        return stated

    @property
    def backend(self) -> str | None:
        """The backend of low-precision GEMMs that the run states. None: the machine decides."""
        backend: str | None = self.sections.get("precision_backend")
        if backend in STATED_BACKENDS:
            return backend
        return None

    # -- what follows from them --------------------------------------------------------------------

    @cached_property
    def prediction(self) -> Prediction:
        """The run with the values that its owners have after the last sync."""
        uncertainty = self.reading.uncertainty
        prediction = predict(
            self.precision,
            self._predicted_sections,
            target=self.target,
            no_plan_reason=uncertainty.no_plan_reason,
            unread_options=uncertainty.unread_options,
            environment=self.stated_environment,
        )
        prediction = replace(
            prediction,
            file_gpus=self.reading.training_gpus,
            has_assumed_release=self.reading.release.is_assumed,
        )
        debugger = self.sections.get("tensor_inspect")
        if not isinstance(debugger, Mapping) or not debugger.get("enabled"):
            return prediction
        if uncertainty.no_plan_reason is not None:
            return prediction
        from bridge.precision.debug_features import DebugFeatures  # few runs have a debugger

        return replace(prediction, features=DebugFeatures.from_content(debugger.get("features")))

    @property
    def _predicted_sections(self) -> dict[str, Any]:
        """The sections of the prediction, with the vocabulary of the data.

        Only runs of scripts/train.py state a backend, and their data are text as bytes by default.
        """
        sections = {name: self.sections.get(name) for name in SECTION_NAMES}
        data = self.section("data")
        if data and self.sections.get("precision_backend") is not None:
            vocab_size = data.get("vocab_size") or BYTE_VOCABULARY_SIZE
            sections["data"] = {**data, "vocab_size": vocab_size}
        return sections

    @cached_property
    def planned(self) -> PlannedRun:
        """The planned run, which counts memory and alignment."""
        from bridge.plan.planned_run import PlannedRun  # most checks do not need it

        return PlannedRun(prediction=self.prediction)

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The precision plan of the run.

        Raises:
            RunConfigError: The model cannot be planned.
        """
        from bridge.plan.precision_plan import make_plan  # most checks do not need it

        return make_plan(self.prediction)

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of the precision schedule, the run's own precision first.

        Empty if the run has no schedule.

        Raises:
            RunConfigError: The run has a schedule and does not state its number of steps.
        """
        rows = self.sections.get("precision_schedule")
        if rows is None:
            return ()
        precision: Any = self.precision
        train_iters = self.prediction.sections["train"].get_stated("train_iters")
        if train_iters is None:
            rule = "a precision schedule needs the number of steps"
            raise RunConfigError.of("train.train_iters", rule, None, "State it.")
        from bridge.registry.schedule import plan_phases  # few runs have one

        owner_values = []
        for values in self.prediction.owner_values:
            if values.name in PRECISION_OWNERS:
                owner_values.append(values)
        stated_rows = getattr(rows, "rows", rows)
        return plan_phases(stated_rows, precision, owner_values, train_iters=train_iters)

    def with_precision(self, precision: MixedPrecisionConfig | None) -> Run:
        """Return this run in another precision."""
        return replace(self, precision=precision)

    # -- where its values come from ----------------------------------------------------------------

    def origin_of(self, path: str) -> str:
        """Return who set a setting ("model.hidden_size").

        If nobody set it, the origin is "default", "assumed" or "open".
        """
        if self.find_decider(path) is not None:
            if self._deciders.is_open(path):
                return "open"
            return "assumed"
        origin = UNKNOWN_ORIGIN
        if self.origins is not None:
            origin = self.origins.get_origin(path)
        if origin == UNKNOWN_ORIGIN:
            return "default"
        return origin

    @cached_property
    def _deciders(self) -> Deciders:
        """The deciders of the settings whose values are assumed or open."""
        return Deciders(reading=self.reading, origins=self.origins, model=self.model)

    @property
    def has_any_decider(self) -> bool:
        """Whether a setting of the run has a decider: its value is assumed or open."""
        return self.reading.uncertainty.has_any_decider or self.reading.release.is_assumed

    def find_decider(self, path: str) -> str | None:
        """Return the decider of a setting that is assumed or open; None if its value is known."""
        return self._deciders.find(path)

    def is_value_before_sync_known(self, path: str) -> bool:
        """Return whether a setting's value before the sync is stated, or a known default.

        The switches of the mode in the optimizer's config are not known if the source of that
        config is not read, although a recipe decides the mode.
        """
        if not self.has_any_decider:
            return True
        is_unread = self._deciders.find_unread_source(path) is not None
        return not is_unread and self.find_decider(path) is None

    def find_decider_after_sync(self, path: str) -> str | None:
        """Return the decider of a setting's value after the sync; None if that value is known.

        A setting that a recipe writes is known, with two exceptions: the rows of a recipe about
        modules follow the layers of the model, and a switch of sharding follows another owner.
        """
        section, _, name = path.partition(".")
        if section == "mixed_precision":
            return None
        paths = [path]
        for row in self.prediction.rows:
            if row.owner != section or row.attribute != name or row.by.name == section:
                continue
            if row.by.kind == "owner":
                paths = [path, f"{row.by}.{name}"]
            elif name == "quant_recipe":
                paths = [*LAYER_SETTINGS]
            else:
                return self._deciders.find_unread_source(f"mixed_precision.{name}")
        for deciding_path in paths:
            decider = self.find_decider(deciding_path)
            if decider is not None:
                return decider
        return None

    def rests_on(self, compute: Callable[[], object]) -> dict[str, str]:
        """Return the assumed and open settings that an answer rests on -> the decider of each.

        Args:
            compute: Computes the answer. The settings that it reads are recorded.
        """
        with track_reads() as paths:
            compute()
        if not self.has_any_decider:
            return {}
        deciders = {}
        for path in paths:
            decider = self.find_decider_after_sync(path)
            if decider is not None:
                deciders[path] = decider
        return deciders

    def require_mode(self) -> None:
        """Refuse a run whose mode nothing states.

        Raises:
            RunConfigError: It names the decider of the mode, and the ways to state the mode.
        """
        decider = self.reading.uncertainty.mode_decider
        if decider is None:
            return
        remedies = "; or ".join(self.mode_remedies)
        raise RunConfigError(f"{self.name}: the mode is not stated; {decider} decides. {remedies}.")

    @property
    def mode_remedies(self) -> tuple[str, ...]:
        """The ways to state a mode that the file leaves open, each an imperative clause."""
        launches = self.reading.launches
        remedies = ["Add mixed_precision=bf16_mixed, or another recipe", "add model.bf16=true"]
        for number in launches.branches:
            remedies.append(f"add --launch {number} ({launches.labels[number - 1]})")
        if launches.variables:
            remedies.append(f"add --context variables='{launches.variables[0]}=VALUE'")
        return tuple(remedies)


def get_section(container: object, name: str) -> Any:
    """Return an item of a mapping, or an attribute of an object; None if it has none."""
    if isinstance(container, Mapping):
        return container.get(name)
    return getattr(container, name, None)


def resolve_precision(precision: Any, model: object, target: Target) -> tuple[Any, Choice | None]:
    """Return the precision with `auto` resolved, and the choice of its recipe.

    Args:
        precision: A recipe's name, ``auto``, or any other form of a precision.
        model: The model's config or its values, whose size `auto` may depend on. None: not known.
        target: The machines and releases, which `auto` depends on.

    Returns:
        The recipe's name and the choice for ``auto``; else the precision itself and None.

    Raises:
        RunConfigError: ``auto`` without a GPU.
    """
    if not is_auto(precision):
        return precision, None
    # The module reads shapes of models, and `auto` is a rare request.
    from bridge.preflight.auto_recipe import count_parameters, resolve_auto

    parameters = None
    if model is not None:
        parameters = count_parameters(model)
    choice = resolve_auto(precision, target=target, parameters=parameters)
    return choice.recipe, choice


class _PrecisionFields(NamedTuple):
    """The stated fields of a precision, and the keys and values that are not fields of it."""

    config: MixedPrecisionConfig
    unknown: Mapping[str, Any]
    malformed: Sequence[Finding]


def _parse_precision_fields(fields: Mapping[str, Any]) -> _PrecisionFields:
    """Return the config of plain fields, the unknown keys, and a finding for each wrong type."""
    stated: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    malformed: list[Finding] = []
    for name, value in fields.items():
        if name not in list_field_names(MixedPrecisionConfig):
            unknown[str(name)] = value
            continue
        try:
            stated.update(MixedPrecisionConfig.from_dict({name: value}).to_dict())
        except PrecisionTypeError as error:
            finding = Finding(path=error.path, rule=error.rule, remedy="Correct it.", value=value)
            malformed.append(finding)
    config = MixedPrecisionConfig.from_dict(stated)
    return _PrecisionFields(config=config, unknown=unknown, malformed=malformed)

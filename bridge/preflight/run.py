"""`Run`: a run before it starts, as every command asks about it.

    run = load_run(config_file="run_config.yaml")      # of a file, by `bridge.front.loader`
    run = Run.of("bf16_mixed", model={"num_layers": 80}, target=parse_target("h100x8"))
    run.prediction.values["model"]["bf16"]             # as the last sync before it leaves it
    run.plan, run.planned.memory                       # what follows from that

It has the sections as they are stated, the precision, the target and the source of each value.
Nothing is written into it. Its check is `bridge.preflight.check.check`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionTypeError, RunConfigError
from bridge.model.read_tracking import track_reads
from bridge.model.section import SECTION_NAMES
from bridge.precision.fields import COMMAND_LINE
from bridge.precision.statements import list_field_names
from bridge.preflight.file_reading import (
    DETERMINISM_RELEASE,
    DETERMINISM_VARIABLES,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    DETERMINISM_RELEASE,
    FileReading,
)
from bridge.preflight.origins import UNKNOWN_ORIGIN, Origins
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.peer import PeerConfig
from bridge.registry.registry import get_mixed_precision_config, is_auto
from bridge.rules.context import PRECISION_OWNERS
from bridge.rules.program import Program
from bridge.sync.prediction import Prediction, predict
from bridge.target.declaration import make_target
from bridge.target.target import Target
from bridge.target.versions import is_at_least

if TYPE_CHECKING:
    from bridge.plan.planned_run import PlannedRun
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.plan.planned_run import PlannedRun
    from bridge.preflight.recipe_choice import Choice
    from bridge.registry.schedule import Phase

MODE_SWITCHES = ("model.bf16", "model.fp16", "optimizer.bf16", "optimizer.fp16")
EQUIVALENT_SETTINGS = {
    "model.hybrid_override_pattern": "model.hybrid_layer_pattern",
    "data.vocab_size": "model.vocab_size",
    "data.seq_length": "model.seq_length",
    "ddp.use_custom_fsdp": "ddp.use_megatron_fsdp",
}
"""Setting that has another name of the same meaning -> that name.

Where one of them is stated, both are known.
"""
OUTDOES_THE_FILE = re.compile(r"--[\w-]+-size|DeepSpeed's engine")
"""A source that is not read and decides a setting even where the file states it.

A fork may have an option of a size in the place of a setting that the file states too:
`--moe-expert-parallel-size` of Megatron-DeepSpeed next to `--expert-model-parallel-size`. Under
DeepSpeed's engine its JSON decides, whatever the arguments state. Then the statement decides nothing.
"""
BYTE_VOCABULARY_SIZE = 256
"""Vocabulary of text that is tokenised to bytes."""
LAYER_SETTINGS = (
    "model.num_layers",
    "model.hybrid_layer_pattern",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.pipeline_model_parallel_layout",
)
"""Settings that say which layers there are, and on which stage."""
STATED_BACKENDS = ("te", "emulated", "te_cpu")
"""What runs low-precision GEMMs, where a run states it; with "auto" the place decides."""
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
    """Every key but the precision.

    They are the sections, each a mapping of Megatron's fields, Megatron's object or None, and
    `target`, `silence`, `precision_backend` and `precision_schedule`.
    """
    precision: MixedPrecisionConfig | None = None
    """The precision with what was stated and by whom; None: the owners keep their own settings."""
    target: Target = field(default_factory=Target)
    """The machines and releases of the run; empty where nothing states them."""
    choice: Choice | None = None
    """The choice that ``mixed_precision=auto`` was resolved to."""
    origins: Origins | None = None
    """The sources of each key; None: a finding names no source."""
    reading: FileReading = field(default_factory=FileReading)
    """What a file says besides its sections: its framework, its release, what it leaves open."""
    environment: Mapping[str, str] | None = None
    """Environment variables of the run; None: those of the file, if any."""
    starting_program: Program | None = None
    """The program that starts it; None: what the sections and the file show of it."""
    name: str = "config"
    """The file, or the primary config, that was read."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the precision that are no field -> their values."""
    malformed: Sequence[Finding] = ()
    """Values of the precision that are not of their field's type."""

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
            target: The machines and releases; None: nothing is known of them.
            environment: Environment variables of the run; None: not known.
            origins: The sources of each key; None: not known.
            program: The program that starts it; None: what the sections show of it.
            **sections: model, optimizer, ddp, train, data, peft,
                checkpoint and the other keys of a run.

        Raises:
            RunConfigError: ``auto`` without a GPU.
            UnknownRecipeError: No such recipe.
        """
        place = target or Target()
        unknown: dict[str, Any] = {}
        malformed: list[Finding] = []
        config, choice = precision, None
        if is_auto(config):
            config, choice = resolve_precision(config, sections.get("model"), place)
        if isinstance(config, Mapping):
            config = _make_stated_config(config, unknown, malformed)
        if config is not None:
            config = get_mixed_precision_config(config)
        return cls(
            sections=sections,
            precision=config,
            target=place,
            choice=choice,
            origins=origins,
            environment=environment,
            starting_program=program,
            unknown=unknown,
            malformed=malformed,
        )

    @classmethod
    def from_container(cls, container: Any, *, target: Target | str | None = None) -> Run:
        """Return the run of a `ConfigContainer`, or of a mapping of its sections.

        Args:
            container: Its `target` counts where the argument says nothing.
            target: What `parse_target` reads, "auto" for this machine, or None.

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
        """Return the values of a section that is a mapping; none for an absent one or an object."""
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
        """The program that starts it.

        scripts/train.py is shown by a backend and a length of sequences.
        """
        if self.starting_program is not None:
            return self.starting_program
        states_backend = self.sections.get("precision_backend") is not None
        is_own = (
            states_backend and get_section(self.sections.get("model"), "seq_length") is not None
        )
        loads = get_section(self.sections.get("checkpoint"), "load") is not None
        return Program(
            is_own=is_own,
            is_megatron_bridge=self.reading.settings_of == MEGATRON_BRIDGE,
            has_no_argument_parser=self.reading.settings_of in (MEGATRON_CORE, MEGATRON_BRIDGE),
            # Ours reads its own checkpoints so that no variable is needed.
            is_resumed=loads and not is_own,
            refused=self.reading.refused,
            faulty_options=self.reading.faulty_options,
            dropped_fields=self.reading.dropped_fields,
        )

    @property
    def stated_environment(self) -> Mapping[str, str]:
        """The environment variables of the run, as far as they are stated."""
        if self.environment is None:
            return self.reading.environment
        return self.environment

    @property
    def environment_at_start(self) -> Mapping[str, str]:
        """The variables of the run, with those that Megatron-LM sets where any are stated."""
        stated = self.stated_environment
        is_of_megatron_lm = self.reading.framework == MEGATRON_LM
        sets_them = (
            is_of_megatron_lm and is_at_least(self.target.mcore, DETERMINISM_RELEASE) is not False
        )
        if stated and sets_them and self.model.get("deterministic_mode"):
            return {**DETERMINISM_VARIABLES, **stated}
        return stated

    @property
    def backend(self) -> str | None:
        """The backend of low-precision GEMMs that the run states; None: the place decides."""
        backend: str | None = self.sections.get("precision_backend")
        if backend in STATED_BACKENDS:
            return backend
        return None

    # -- what follows from them --------------------------------------------------------------------

    @cached_property
    def prediction(self) -> Prediction:
        """The run as the last sync before it leaves it."""
        sections = {name: self.sections.get(name) for name in SECTION_NAMES}
        data = self.section("data")
        if data and self.sections.get("precision_backend") is not None:  # text of our own runs
            sections["data"] = {
                **data,
                "vocab_size": data.get("vocab_size") or BYTE_VOCABULARY_SIZE,
            }
        predicted = predict(
            self.precision,
            sections,
            target=self.target,
            no_plan_reason=self.reading.no_plan_reason,
            uncounted=self.reading.uncounted,
            environment=self.stated_environment,
        )
        debugger = self.sections.get("tensor_inspect")
        if not isinstance(debugger, Mapping) or not debugger.get("enabled"):
            return predicted
        if self.reading.no_plan_reason is not None:
            return predicted
        from bridge.precision.debug_features import DebugFeatures  # few runs have a debugger

        return replace(predicted, features=DebugFeatures.from_content(debugger.get("features")))

    @cached_property
    def planned(self) -> PlannedRun:
        """The run as the calculators take it."""
        from bridge.plan.planned_run import PlannedRun  # most checks do without it

        return PlannedRun(prediction=self.prediction)

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The precision plan of the run; RunConfigError for a model that cannot be planned."""
        from bridge.plan.precision_plan import make_plan  # most checks do without it

        return make_plan(self.prediction)

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of the precision schedule; none without one.

        The first phase is the run's own precision.
        """
        rows = self.sections.get("precision_schedule")
        if rows is None:
            return ()
        precision: Any = self.precision
        train_iters = self.prediction.sections["train"].given("train_iters")
        if train_iters is None:
            rule = "a precision schedule needs the number of steps"
            raise RunConfigError.of("train.train_iters", rule, None, "State it.")
        from bridge.registry.schedule import plan_phases  # few runs have one

        owners = [owner for owner in self.prediction.owners if owner.role in PRECISION_OWNERS]
        return plan_phases(getattr(rows, "rows", rows), precision, owners, train_iters=train_iters)

    def with_precision(self, precision: MixedPrecisionConfig | None) -> Run:
        """Return the same run in another precision."""
        return replace(self, precision=precision)

    # -- where its values come from ----------------------------------------------------------------

    def origin_of(self, path: str) -> str:
        """Return who set a setting ("model.hidden_size").

        Where nobody set it, it is "default", "assumed" or "open".
        """
        if self.find_decider(path) is not None:
            if path in self.reading.opened or path in self.reading.open_values:
                return "open"
            return "assumed"
        origin = UNKNOWN_ORIGIN
        if self.origins is not None:
            origin = self.origins.get_origin(path)
        if origin == UNKNOWN_ORIGIN:
            return "default"
        return origin

    @property
    def has_unsettled_values(self) -> bool:
        """Whether values of the run are assumed, or decided when it starts."""
        reading = self.reading
        if reading.unstated_by is not None or reading.mode_decided_by is not None:
            return True
        return bool(reading.open_values) or bool(reading.opened) or reading.is_release_assumed

    def find_decider(self, path: str) -> str | None:
        """Return what decides a setting where its value is assumed or open.

        None where it is stated or known.
        """
        if path == "target.mcore":
            return self._find_release_decider()
        origin = self._get_origins(path)
        is_of_command_line = origin is not None and COMMAND_LINE in origin
        if is_of_command_line or self._is_stated(EQUIVALENT_SETTINGS.get(path, "")):
            return None
        if path in MODE_SWITCHES:
            return self._find_mode_decider()
        return self._find_unread_source(path) or self._find_value_decider(path)

    def _find_release_decider(self) -> str | None:
        """Return why the release of Megatron Core is assumed; None where it is known."""
        if self.reading.is_release_assumed:
            return "the file names no release"
        return None

    def _find_unread_source(self, path: str) -> str | None:
        """Return the source that is not read and may change a setting, where it outdoes the file.

        It does so where the file does not state the setting or cannot be planned, or where the
        source decides whatever the file states.
        """
        opener = self.reading.opened.get(path)
        if opener is None:
            return None
        outdoes = OUTDOES_THE_FILE.fullmatch(opener) is not None
        if outdoes or self.reading.no_plan_reason is not None or not self._is_stated(path):
            return opener
        return None

    def _find_value_decider(self, path: str) -> str | None:
        """Return what decides a value that the file leaves to the start, or does not state."""
        reading = self.reading
        if path in reading.open_values:
            return f"the value {reading.open_values[path]}"
        if path in reading.settled_at_start:
            return self._mode_decider
        if self._is_stated(path):
            return None
        return reading.unstated_by

    @property
    def _mode_decider(self) -> str | None:
        """What decides the mode where nothing states it, as a noun."""
        decider = self.reading.mode_decided_by
        if decider is None:
            return None
        return self.reading.unstated_by or decider.rstrip(",")

    def _find_mode_decider(self) -> str | None:
        """Return what decides a switch of the mode; None where it is known."""
        decider = self._mode_decider
        if decider is not None:
            return decider
        if self.model.get("bf16") is True or self.model.get("fp16") is True:
            return None
        return self.reading.unstated_by

    def find_decider_after_sync(self, path: str) -> str | None:
        """Return what decides the value of a setting after the sync, where it is assumed or open.

        None for a setting that a recipe writes. But a recipe's rows about modules are written as
        the model's layers ask, and a switch of sharding as the other owner has it.
        """
        section, _, name = path.partition(".")
        if section == "mixed_precision":
            return None
        paths = [path]
        for row in self.prediction.rows:
            if row.owner != section or row.attribute != name or row.by == section:
                continue
            if row.by in PRECISION_OWNERS:
                paths = [path, f"{row.by}.{name}"]
            elif name == "quant_recipe":
                paths = [*LAYER_SETTINGS]
            else:
                return self._find_unread_source(f"mixed_precision.{name}")
        for deciding_path in paths:
            decider = self.find_decider(deciding_path)
            if decider is not None:
                return decider
        return None

    def rests_on(self, compute: Callable[[], object]) -> dict[str, str]:
        """Return the assumed and open settings that an answer rests on -> what decides each."""
        with track_reads() as paths:
            compute()
        if not self.has_unsettled_values:
            return {}
        deciders = {}
        for path in paths:
            decider = self.find_decider_after_sync(path)
            if decider is not None:
                deciders[path] = decider
        return deciders

    def require_mode(self) -> None:
        """Raise RunConfigError where nothing states the mode.

        The message says what decides the mode and how to state it.
        """
        decider = self.reading.mode_decided_by
        if decider is None:
            return
        remedies = "; or ".join(self.mode_remedies)
        raise RunConfigError(f"{self.name}: the mode is not stated; {decider} decides. {remedies}.")

    @property
    def mode_remedies(self) -> tuple[str, ...]:
        """How to state the mode that a file leaves open, each an imperative clause."""
        reading = self.reading
        ways = ["Add mixed_precision=bf16_mixed, or another recipe", "add model.bf16=true"]
        for number in reading.branches:
            ways.append(f"add --launch {number} ({reading.runs[number - 1]})")
        if reading.variables:
            ways.append(f"add --context variables='{reading.variables[0]}=VALUE'")
        return tuple(ways)

    def _get_origins(self, path: str) -> Mapping[str, Any] | None:
        if self.origins is None:
            return None
        return self.origins.values.get(path)

    def _is_stated(self, path: str) -> bool:
        """Return whether a file or the command line states a value that is known at once."""
        if self._get_origins(path) is None or path in self.reading.open_values:
            return False
        return not any(derived.path == path for derived in self.reading.derived)


def get_section(run: Any, name: str) -> Any:
    """Return a section of a mapping or an object; None where there is none."""
    if isinstance(run, Mapping):
        return run.get(name)
    return getattr(run, name, None)


def resolve_precision(precision: Any, model: Any, target: Target) -> tuple[Any, Choice | None]:
    """Return the precision, with `auto` resolved, and the choice that was made for it."""
    if not is_auto(precision):
        return precision, None
    # It reads shapes, for a rare request.
    from bridge.preflight.recipe_choice import count_parameters, resolve_auto

    parameters = None
    if model is not None:
        parameters = count_parameters(model)
    choice = resolve_auto(precision, target=target, parameters=parameters)
    return choice.recipe, choice


def _make_stated_config(
    fields: Mapping[str, Any], unknown: dict[str, Any], malformed: list[Finding]
) -> MixedPrecisionConfig:
    """Return the config of plain fields.

    Keys that are no field are added to `unknown`, and values of a wrong type to `malformed`.
    """
    stated: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in list_field_names(MixedPrecisionConfig):
            unknown[str(name)] = value
            continue
        try:
            stated.update(MixedPrecisionConfig.from_dict({name: value}).to_dict())
        except PrecisionTypeError as error:
            finding = Finding(path=error.path, rule=error.rule, remedy="Correct it.", value=value)
            malformed.append(finding)
    return MixedPrecisionConfig.from_dict(stated)

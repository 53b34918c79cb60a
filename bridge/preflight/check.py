"""`check`: every rule asked about one setup, all findings at once.

    setup = Setup("bf16_mixed", model={"num_layers": 80, "hidden_size": 8192}, target=parse_target("h100x8"))
    setup.scheme, setup.model.num_layers, setup.target.gpu
    check(setup).exit_code(strict=False)      # 0, 1 (warnings, where they count) or 2 (errors)

`Setup` is a whole run as rules see it, after the recipe has been written into the owners: Megatron's own objects,
subclasses of them, mappings from YAML, or nothing at all. `check_run` makes the setup of a `ConfigContainer`, or of the
sections of a run that a file was read into. Nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, Finding, PrecisionTypeError, RunConfigError
from bridge.model.layout import Parallel
from bridge.model.reads import View, kept_property, reads
from bridge.model.section import ROLES, Section
from bridge.model.shape import ModelShape
from bridge.precision.statements import field_names
from bridge.preflight.silence import refuse_unknown
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.nearest import label_of_owners, nearest_label
from bridge.registry.registry import get_mixed_precision_config, is_auto
from bridge.rules.context import PRECISION_OWNERS, Weaknesses
from bridge.rules.module_selection import ModuleSelection
from bridge.rules.program import Dropped, Program
from bridge.rules.rule import SEVERITIES, RuleFinding, ask
from bridge.rules.rulebook import RULES
from bridge.rules.run_context import RunContext
from bridge.rules.unknown import settings_text
from bridge.rules.violation import Violation
from bridge.sync.prediction import Prediction, predict
from bridge.target.fields import gradient_dtypes
from bridge.target.target import Target, target_of

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.plan.run import PlannedRun
    from bridge.preflight.auto import Choice
    from bridge.registry.schedule import Phase


OF_LAYERS = frozenset({"model.num_layers"})
"""Settings that say how many layers a language model has; who reads its shape reads them too."""
LAYERS = (
    *("model.num_layers", "model.hybrid_layer_pattern", "model.pipeline_model_parallel_size"),
    *("model.virtual_pipeline_model_parallel_size", "model.pipeline_model_parallel_layout"),
)
"""Settings that say which layers there are, and on which stage."""


class Setup(RunContext):
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
        weaknesses: Path of a setting -> what decides its value where that is assumed or open; None: all are known.
        mode_decided_by: What decides the mode where nothing states it, as a noun.
        other_layers: The kind of the model where its layers are none of a language model's: rules that read them are
            not asked.
        refused: Words of the command line that the program's parser refuses.
        not_forwarded: Settings and options of the file that its framework does not forward, as findings.
        dropped: Fields of Megatron Core that the file states and its framework does not forward.
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
        origins: Callable[[str], str] | None = None,
        choice: Choice | None = None,
        weaknesses: Weaknesses | None = None,
        mode_decided_by: str | None = None,
        other_layers: str | None = None,
        refused: Sequence[Finding] = (),
        not_forwarded: Sequence[Finding] = (),
        dropped: Sequence[Dropped] = (),
        **sections: Any,
    ) -> None:
        unknown: dict[str, Any] = {}
        malformed: list[Finding] = []
        if isinstance(precision, Mapping):
            precision = _stated(precision, unknown, malformed)
        if not isinstance(precision, Prediction):
            config = get_mixed_precision_config(precision) if precision is not None else None
            precision = predict(config, sections, target=target)
        self.prediction = run = precision
        super().__init__(
            run.precision,
            sections=run.sections,
            views={role: View(values) for role, values in run.values.items()},
            rows=run.rows,
            target=run.target,
            program=Program(
                is_own=is_own,
                is_bridge=is_bridge,
                is_resumed=is_resumed,
                refused=refused,
                not_forwarded=not_forwarded,
                dropped=dropped,
            ),
            unknown=unknown,
            malformed=malformed,
            origins=origins,
            weaknesses=self._weakness if weaknesses is not None else None,
            backend=backend,
            environment=environment,
        )
        self.choice = choice
        self._weaknesses = weaknesses
        self.mode_decided_by = mode_decided_by
        self.other_layers = other_layers
        self.not_asked: list[str] = []

    def _weakness(self, path: str) -> str | None:
        """Return what decides a setting where that is assumed or open; None for one that the recipe writes.

        A recipe's rows about modules are written as the model's layers ask, and a switch of sharding as the other
        owner has it.
        """
        section, _, name = path.partition(".")
        if section == "mixed_precision" or self._weaknesses is None:
            return None
        paths = [path]
        for row in self.rows:
            if row.owner != section or row.attribute != name or row.by == section:
                continue
            if row.by in PRECISION_OWNERS:
                paths = [path, f"{row.by}.{name}"]
            elif name == "quant_recipe":
                paths = [*LAYERS]
            else:
                return None
        deciders = filter(None, map(self._weaknesses, paths))
        return next(deciders, None)

    def leaves_out(self, rule: str, paths: Collection[str]) -> bool:
        """Return whether a rule is not asked, as it read the layers of a model that has others; and note that."""
        if self.other_layers is None or OF_LAYERS.isdisjoint(paths):
            return False
        self.not_asked.append(rule)
        return True

    def is_own_known(self, path: str) -> bool:
        """Return whether the value that an owner holds before the sync is stated, or a known default."""
        return self._weaknesses is None or self._weaknesses(path) is None

    @kept_property
    def built_model(self) -> Section:
        """The model that this Megatron Core builds."""
        return self.prediction.model

    @kept_property
    def shape(self) -> ModelShape:
        """The model; a size that is impossible is replaced."""
        return self.prediction.shape_and_faults[0]

    @kept_property
    def parallel(self) -> Parallel:
        """The layout; the parts of it that cannot be read are left out."""
        return self.prediction.layout_and_faults[0]

    @kept_property
    def prediction_schemes(self) -> Sequence[str | None]:
        """The scheme of each linear layer of multi-token prediction; none for a model that cannot be planned."""
        try:
            layers = self.plan.layers
        except RunConfigError:  # PB619 names it
            return ()
        schemes = []
        for layer in layers:
            if layer.is_mtp:
                schemes += [module.scheme for module in layer.modules if module.kind == "linear"]
        return schemes

    @kept_property
    def overflow(self) -> Violation | None:
        """The fullest rank, where it needs more memory than its GPU has.

        Nothing is known of runs without an optimizer, which train nothing, of emulated ones, and of models that cannot
        be planned.
        """
        if self.has_model and self.has_optimizer and self.has_gpu and not self.is_emulated:
            with suppress(BridgeError):
                return self.planned.overflow
        return None

    @kept_property
    def planned(self) -> PlannedRun:
        """The run as the calculators take it."""
        from bridge.plan.run import PlannedRun  # heavy for an import of the config classes

        return PlannedRun(prediction=self.prediction)

    @kept_property
    def selection(self) -> ModuleSelection | None:
        """The modules that each row of `modules`, or each matcher of a foreign recipe, takes.

        None without any, and for a model that cannot be planned, which other findings name.
        """
        if self.model.quant_recipe is not None:
            with suppress(RunConfigError):
                return self.plan.selection
        return None

    @kept_property
    def plan(self) -> PrecisionPlan:
        """The precision plan of the run; RunConfigError for a model that cannot be planned."""
        from bridge.plan.precision_plan import plan_of  # most checks do without it

        return plan_of(self.prediction)

    @property
    def target_text(self) -> str:
        """The target as text, with a release that nothing states as assumed."""
        if self.target.mcore is None or not self.unknown_among(["target.mcore"]):
            return str(self.target)
        rest = replace(self.target, mcore=None)
        assumed = f"megatron-core {self.target.mcore} assumed"
        return assumed if rest == Target() else f"{rest}, {assumed}"

    @property
    def label(self) -> str:
        """The precision in a few words; one without a recipe's name is named by the nearest."""
        if self.mode_decided_by is not None:
            return f"mode not stated ({self.mode_decided_by} decides)"
        if self.precision is None:
            return label_of_owners(self.prediction.values["model"])
        return nearest_label(self.precision)

    @property
    def flow(self) -> str | None:
        """The dtypes of a gradient, from the weight gradient to the master weight; None where no mode is stated."""
        if self.mode_decided_by is not None:
            return None
        with reads() as paths:
            text = self._flow()
        unknown = self.unknown_among(paths)
        if unknown:
            verb = "is" if len(unknown) == 1 else "are"
            text += f" ({settings_text(unknown)} {verb} assumed)"
        return text

    def _flow(self) -> str:
        weights = self.mode
        main, sent = gradient_dtypes(self.prediction.values["ddp"], weights, self.mcore)
        owns_dtype = self.has_precision_aware and not self.optimizer.optimizer_cpu_offload
        master = self.optimizer.main_params_dtype if owns_dtype else "fp32"
        wgrad = f"{self.scheme} wgrad GEMM" if self.is_low else f"{weights} wgrad GEMM"
        return f"{wgrad} -> accumulated in {main} -> reduced in {sent} -> {master} master weights"


def _stated(given: Mapping[str, Any], unknown: dict[str, Any], malformed: list[Finding]) -> MixedPrecisionConfig:
    """Return the config of plain fields; keys that are none, and values of a wrong type, are added to the two."""
    stated: dict[str, Any] = {}
    for name, value in given.items():
        if name not in field_names(MixedPrecisionConfig):
            unknown[str(name)] = value
            continue
        try:
            stated |= MixedPrecisionConfig.from_dict({name: value}).to_dict()
        except PrecisionTypeError as error:
            malformed.append(Finding(path=error.path, rule=error.rule, remedy="Correct it.", value=value))
    return MixedPrecisionConfig.from_dict(stated)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a check."""

    findings: tuple[RuleFinding, ...]
    silenced: tuple[RuleFinding, ...] = ()
    setup: Setup

    @property
    def precision(self) -> str:
        """The precision in a few words."""
        return self.setup.label

    @property
    def target(self) -> str:
        """The target as text, with a release that nothing states as assumed."""
        return self.setup.target_text

    def of(self, severity: str) -> tuple[RuleFinding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def not_asked(self) -> str | None:
        """Which rules were not asked, and why, as a sentence; None where all were."""
        rules = sorted(self.setup.not_asked)
        if self.setup.other_layers is None or not rules:
            return None
        noun = (
            "1 rule that reads its layers was" if len(rules) == 1 else f"{len(rules)} rules that read its layers were"
        )
        return f"The model is {self.setup.other_layers}: {noun} not asked ({', '.join(rules)})."

    @property
    def verdict(self) -> str:
        """The worst severity found, or "ok"."""
        return next((severity for severity in SEVERITIES if self.of(severity)), "ok")

    def with_phase(self, number: int, later: Report) -> Report:
        """Return the report with the findings that a later phase of a precision schedule adds."""
        found = [*self.findings, *self.silenced]
        known = {(one.id, one.path) for one in found}
        new = [one for one in (*later.findings, *later.silenced) if (one.id, one.path) not in known]
        return _report(self.setup, [*found, *(replace(one, where=f"phase {number}") for one in new)])

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 2 with errors, 1 with warnings where they count, else 0."""
        if self.of("error"):
            return 2
        return 1 if strict and self.of("warning") else 0


def check(setup: Setup, silenced: Mapping[str, str] | None = None) -> Report:
    """Ask every rule; `silenced` rules, each with the reason, have their findings kept apart."""
    reasons = silenced or {}
    refuse_unknown(reasons)
    return _report(setup, [replace(finding, silenced=reasons.get(finding.id)) for finding in ask(RULES, setup)])


def _report(setup: Setup, found: Iterable[RuleFinding]) -> Report:
    """Return the findings as a report, the worst first."""
    ordered = sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.id))
    silenced = tuple(one for one in ordered if one.silenced is not None)
    return Report(findings=tuple(one for one in ordered if one.silenced is None), silenced=silenced, setup=setup)


_OTHER = ("mixed_precision", "precision_backend", "precision_schedule", "target", "silence", "checkpoint")
"""Further settings of a run, and the section that no rule has a view of."""


def check_run(
    run: Any,
    *,
    target: Target | str | None = "auto",
    silenced: Mapping[str, str] | None = None,
    backend: str | None = None,
    origins: Callable[[str], str] | None = None,
    choice: Choice | None = None,
    environment: Mapping[str, str] | None = None,
    is_bridge: bool = False,
    prediction: Prediction | None = None,
    weaknesses: Weaknesses | None = None,
    mode_decided_by: str | None = None,
    other_layers: str | None = None,
    refused: Sequence[Finding] = (),
    not_forwarded: Sequence[Finding] = (),
    dropped: Sequence[Dropped] = (),
) -> Report:
    """Check a run, a `ConfigContainer` or a mapping of its sections, before anything of it is built.

    Args:
        run: Its `target` and `silence` count where the arguments say nothing.
        target: What `parse_target` reads, "auto" for this machine, or None for what the run says itself.
        silenced: Id of a rule -> why it is silenced.
        backend: te, emulated or te_cpu: what will run low-precision GEMMs.
        origins: Path of a setting -> its source.
        choice: The choice that `auto` was resolved to, where the caller resolved it.
        environment: Variables that the run sets itself; those of this machine count first where it is the target.
        is_bridge: Megatron Bridge wrote the run's file.
        prediction: The run after the sync, where the caller has made it: its target and its precision count.
        weaknesses: Path of a setting -> what decides its value where that is assumed or open; None: all are known.
        mode_decided_by: What decides the mode where nothing states it, as a noun.
        other_layers: The kind of the model where its layers are none of a language model's.
        refused: Words of the command line that the program's parser refuses.
        not_forwarded: Settings and options of the file that its framework does not forward, as findings.
        dropped: Fields of Megatron Core that the file states and its framework does not forward.

    Raises:
        RunConfigError: An unreadable target, an unknown rule, or `auto` without a GPU or a target.
        UnknownRecipeError: No such recipe.
    """
    sections = {name: section_of(run, name) for name in (*ROLES, *_OTHER)}
    if prediction is None:
        place = target_of(target if target is not None else sections["target"])
        precision, made = resolve_precision(sections["mixed_precision"], sections["model"], place)
        choice = choice or made
        given: dict[str, Any] = {"precision": precision, "target": place, **{role: sections[role] for role in ROLES}}
    else:
        given, place = {"precision": prediction}, prediction.target
    known = {
        **_known_of(sections, backend),
        "environment": {**(environment or {}), **(os.environ if place.is_detected else {})} or None,
        "origins": origins,
        "is_bridge": is_bridge,
        "weaknesses": weaknesses,
        "mode_decided_by": mode_decided_by,
        "other_layers": other_layers,
        "refused": refused,
        "not_forwarded": not_forwarded,
        "dropped": dropped,
    }
    reasons = {**_reasons(sections["silence"]), **(silenced or {})}
    report = check(Setup(**given, **known, choice=choice), reasons)
    first = report.setup.prediction
    for phase in phases_of(sections, first)[1:]:
        report = report.with_phase(phase.number, check(Setup(first.under(phase.precision), **known), reasons))
    return report


def _known_of(sections: Mapping[str, Any], backend: str | None) -> dict[str, Any]:
    """Return what a run's own settings say of it, as arguments of `Setup`."""
    stated = sections["precision_backend"]
    is_own = stated is not None and section_of(sections["model"], "seq_length") is not None
    loads = section_of(sections["checkpoint"], "load") is not None
    return {
        "backend": backend or (stated if stated in ("te", "emulated", "te_cpu") else None),  # "auto": where it runs
        "is_own": is_own,
        "is_resumed": loads and not is_own,  # it reads its own checkpoints so that no variable is needed
    }


def phases_of(run: Mapping[str, Any], prediction: Prediction) -> Sequence[Phase]:
    """Return the phases of a run's precision schedule, the first of them the run's own precision; none without one."""
    rows = run.get("precision_schedule")
    if rows is None:
        return ()
    own: Any = prediction.precision
    train_iters = prediction.sections["train"].given("train_iters")
    if train_iters is None:
        rule = "a precision schedule needs the number of steps"
        raise RunConfigError.of("train.train_iters", rule, None, "State it.")
    from bridge.registry.schedule import planned_phases  # few runs have one

    owners = [owner for owner in prediction.owners if owner.role in PRECISION_OWNERS]
    return planned_phases(getattr(rows, "rows", rows), own, owners, train_iters=train_iters)


def resolve_precision(precision: Any, model: Any, target: Target) -> tuple[Any, Choice | None]:
    """Return the precision, with `auto` resolved, and the choice that was made for it."""
    if not is_auto(precision):
        return precision, None
    from bridge.preflight.auto import count_parameters, resolve_auto  # reads shapes, for a rare request

    choice = resolve_auto(precision, target=target, parameters=count_parameters(model) if model is not None else None)
    return choice.recipe, choice


def section_of(run: Any, name: str) -> Any:
    """Return a section of a mapping or an object; None where there is none."""
    return run.get(name) if isinstance(run, Mapping) else getattr(run, name, None)


def _reasons(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping | None):
        raise RunConfigError(f"silence: must be a mapping of rule to reason, got {given!r}. Write PB306: why.")
    return {str(name): str(reason) for name, reason in (given or {}).items()}

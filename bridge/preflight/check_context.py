"""`CheckContext`: a run as the rules of a check read it.

Its values are those that the owners have after the last sync.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import BridgeError, RunConfigError
from bridge.model.layout import ParallelLayout
from bridge.model.read_tracking import AttributeView, track_reads, tracked_property
from bridge.model.section import Section
from bridge.model.shape import ModelShape
from bridge.preflight.run import Run
from bridge.registry.nearest_recipe import format_nearest_label, format_owner_label
from bridge.rules.module_selection import ModuleSelection
from bridge.rules.run_context import RunContext
from bridge.rules.unknown_settings import format_unknown_settings
from bridge.rules.violation import Violation
from bridge.sync.prediction import Prediction
from bridge.target.fields import get_gradient_dtypes
from bridge.target.target import Target

if TYPE_CHECKING:
    from bridge.plan.planned_run import PlannedRun
    from bridge.plan.precision_plan import PrecisionPlan

LAYER_COUNT_SETTINGS = frozenset({"model.num_layers"})
"""Settings that say how many layers a language model has.

A rule that reads the shape of a model reads them too.
"""


class CheckContext(RunContext):
    """The facts of a run that the rules of one check read.

    Args:
        run: The run.
        prediction: The run after the sync with changed settings. None: the run's own prediction.
        backend: te, emulated or te_cpu, which runs low-precision GEMMs. None: the backend that the
            run states, or else Transformer Engine if the target has a GPU.
    """

    def __init__(
        self, run: Run, *, prediction: Prediction | None = None, backend: str | None = None
    ) -> None:
        self.run = run
        self.prediction = prediction or run.prediction
        origins = None
        if run.origins is not None:
            origins = run.origin_of
        find_decider = None
        if run.has_any_decider:
            find_decider = run.find_decider_after_sync
        views = {}
        for section, values in self.prediction.values.items():
            views[section] = AttributeView(values)
        super().__init__(
            self.prediction.precision,
            sections=self.prediction.sections,
            views=views,
            rows=self.prediction.rows,
            target=self.prediction.target,
            program=run.program,
            unknown=run.unknown,
            malformed=run.malformed,
            origins=origins,
            find_decider=find_decider,
            backend=backend or run.backend,
            environment=_collect_environment(run),
        )
        self.unevaluated_rules: list[str] = []
        """Ids of the rules that read layers of a language model, which this model does not have."""

    def reads_missing_layers(self, paths: Collection[str]) -> bool:
        """Return whether settings are about layers of a language model, and the model has none."""
        is_other_model = self.run.reading.uncertainty.other_model_kind is not None
        return is_other_model and not LAYER_COUNT_SETTINGS.isdisjoint(paths)

    def note_unevaluated(self, rule: str) -> None:
        """Record a rule that reads layers which the model does not have."""
        self.unevaluated_rules.append(rule)

    def is_value_before_sync_known(self, path: str) -> bool:
        """Return whether an owner's value before the sync is stated, or a known default."""
        return self.run.is_value_before_sync_known(path)

    @property
    def is_mode_known(self) -> bool:
        """Whether something states the mode of the run, or a known program sets it."""
        return self.mode_decider is None

    # -- the model ---------------------------------------------------------------------------------

    @tracked_property
    def built_model(self) -> Section:
        """The model that this Megatron Core builds."""
        return self.prediction.model

    @tracked_property
    def shape(self) -> ModelShape:
        """The shape of the model, with each impossible size replaced by a possible one."""
        return self.prediction.shape_and_faults[0]

    @tracked_property
    def parallel(self) -> ParallelLayout:
        """The parallel layout, without the sizes that cannot be read."""
        return self.prediction.layout_and_faults[0]

    @tracked_property
    def plan(self) -> PrecisionPlan:
        """The precision plan of the run.

        Raises:
            RunConfigError: The model cannot be planned.
        """
        from bridge.plan.precision_plan import make_plan  # most checks do not need it

        return make_plan(self.prediction)

    @tracked_property
    def planned(self) -> PlannedRun:
        """The planned run, which counts memory and alignment."""
        from bridge.plan.planned_run import PlannedRun  # heavy for an import of the config classes

        return PlannedRun(prediction=self.prediction)

    @tracked_property
    def mtp_schemes(self) -> Sequence[str | None]:
        """The scheme of each linear layer of multi-token prediction.

        Empty for a model that cannot be planned.
        """
        try:
            layers = self.plan.layers
        except RunConfigError:  # PB619 names it
            return ()
        schemes = []
        for layer in layers:
            if not layer.is_mtp:
                continue
            for module in layer.modules:
                if module.kind == "linear":
                    schemes.append(module.scheme)
        return schemes

    @tracked_property
    def selection(self) -> ModuleSelection | None:
        """The modules that each row of `modules`, or each matcher of a foreign recipe, selects.

        None if there is no such row, or if the model cannot be planned, which other findings name.
        """
        if self.model.quant_recipe is not None:
            with suppress(RunConfigError):
                return self.plan.selection
        return None

    def stored_formats(self, module: str) -> frozenset[str]:
        """Return the formats in which the weights of modules are stored between steps.

        Args:
            module: The name of the modules.

        Returns:
            The formats; empty for a model that cannot be planned.
        """
        try:
            layers = self.plan.layers
        except RunConfigError:  # PB619 names it
            return frozenset()
        formats = set()
        for layer in layers:
            for planned in layer.modules:
                if planned.name != module:
                    continue
                for row in planned.rows:
                    if row.item == "weight":
                        formats.add(row.storage)
        return frozenset(formats)

    @tracked_property
    def memory_overflow(self) -> Violation | None:
        """The violation of the fullest rank if it needs more memory than its GPU has.

        None is computed for a run without an optimizer, which trains nothing, for an emulated run,
        and for a model that cannot be planned.
        """
        if self.has_model and self.has_optimizer and self.has_gpu and not self.is_emulated:
            with suppress(BridgeError):
                return self.planned.memory_overflow
        return None

    # -- texts -------------------------------------------------------------------------------------

    @property
    def mode_decider(self) -> str | None:
        """What decides the mode if nothing states it. None: the mode is known."""
        return self.run.reading.uncertainty.mode_decider

    @property
    def target_text(self) -> str:
        """The target as text; a release that nothing states is marked as assumed."""
        if self.target.mcore is None or not self.find_unknown(["target.mcore"]):
            return str(self.target)
        others = replace(self.target, mcore=None)
        assumed = f"megatron-core {self.target.mcore} assumed"
        if others == Target():
            return assumed
        return f"{others}, {assumed}"

    @property
    def label(self) -> str:
        """The label of the precision: its recipe, or the nearest recipe if it has no name."""
        if self.mode_decider is not None:
            return f"mode not stated ({self.mode_decider} decides)"
        if self.precision is None:
            return format_owner_label(self.prediction.values["model"])
        return format_nearest_label(self.precision)

    @property
    def gradient_flow(self) -> str | None:
        """The dtypes of a gradient, from the weight gradient to the master weight.

        None if no mode is stated, or if the run has no gradients.
        """
        if self.mode_decider is not None or self.run.reading.trains_nothing:
            return None
        with track_reads() as paths:
            text = self._describe_gradient_flow()
        unknown = self.find_unknown(paths)
        if unknown:
            verb = "are"
            if len(unknown) == 1:
                verb = "is"
            text += f" ({format_unknown_settings(unknown)} {verb} assumed)"
        return text

    def _describe_gradient_flow(self) -> str:
        """Return the dtypes of a gradient, without the settings that are assumed."""
        weights = self.mode
        main, sent = get_gradient_dtypes(self.prediction.values["ddp"], weights, self.target.mcore)
        master: str | None = "fp32"
        if self.has_precision_aware_optimizer and not self.optimizer.optimizer_cpu_offload:
            master = self.optimizer.main_params_dtype
        wgrad: str | None = weights
        if self.is_low_precision:
            wgrad = self.scheme
        return (
            f"{wgrad} wgrad GEMM -> accumulated in {main} -> reduced in {sent} "
            f"-> {master} master weights"
        )


def _collect_environment(run: Run) -> Mapping[str, str] | None:
    """Return the environment variables of the run.

    A run on this machine has the machine's variables, which win over those that the run states.

    Returns:
        The variables; None if nothing is known of them.
    """
    variables = dict(run.environment_at_start)
    if run.target.is_detected:
        variables |= os.environ
    if variables or run.environment is not None:
        return variables
    return None

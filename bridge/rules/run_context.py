"""`RunContext`: the facts that a rule reads of a whole run, before the run is built.

A check makes a `RunContext`. `finalize`, a sync and the table of GPUs know less, and make a
`RuleContext`. The function of a rule names in its signature the context that it needs. So mypy
refuses a rule of `finalize` or of a sync that reads more than they know. A rule that a check and a
sync both evaluate tests with `isinstance` whether it has a `RunContext`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.rules.context import DeciderLookup, RuleContext
from bridge.rules.program import Program

if TYPE_CHECKING:
    from bridge.errors import Finding
    from bridge.model.layout import ParallelLayout
    from bridge.model.read_tracking import AttributeView
    from bridge.model.section import Section
    from bridge.model.shape import ModelShape
    from bridge.precision.precision_config import PrecisionConfig
    from bridge.rules.module_selection import ModuleSelection
    from bridge.rules.sync_row import SyncRow
    from bridge.rules.violation import Violation
    from bridge.target.target import Target


class RunContext(RuleContext, ABC):
    """The facts that a rule reads of a whole run.

    Args:
        precision: The precision. None: the configs keep their settings.
        sections: Every section of the run before the sync.
        views: Section -> its values after the sync, as attributes.
        rows: The plan of the sync that made the values.
        target: The GPUs and versions of the run.
        program: The program that starts the run.
        unknown: Keys of the precision that are not fields -> their values.
        malformed: Values of the precision that do not have their field's type.
        origins: Path of a setting -> its source.
        find_decider: As for `RuleContext`.
        backend: As for `ConfigFacts`.
        environment: Environment variables of the run. None: they are not known.
    """

    def __init__(
        self,
        precision: PrecisionConfig | None,
        *,
        sections: Mapping[str, Section],
        views: Mapping[str, AttributeView],
        rows: Sequence[SyncRow],
        target: Target,
        program: Program,
        unknown: Mapping[str, Any],
        malformed: Sequence[Finding],
        origins: Callable[[str], str] | None = None,
        find_decider: DeciderLookup | None = None,
        backend: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            precision,
            views=views,
            present=frozenset(name for name, section in sections.items() if section.is_given),
            rows=rows,
            target=target,
            origins=origins,
            find_decider=find_decider,
            backend=backend,
            environment=environment,
        )
        self.sections = sections
        self.program = program
        self.unknown = unknown
        self.malformed = [*malformed]
        for section in sections.values():
            self.malformed += section.malformed

    @property
    def added_schemes(self) -> Sequence[str]:
        """The scaling schemes that the framework of the run adds to Megatron Core's."""
        return self.program.added_schemes

    @property
    @abstractmethod
    def built_model(self) -> Section:
        """The model that this Megatron Core builds. A field that it lacks counts as not set."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """The shape of the model. An impossible size is replaced by a possible one."""

    @property
    @abstractmethod
    def parallel(self) -> ParallelLayout:
        """The parallel layout. Parts of it that cannot be read are left out."""

    @property
    @abstractmethod
    def selection(self) -> ModuleSelection | None:
        """The modules that each row or matcher selects. None: there are no rows, or there is no plan."""

    @property
    @abstractmethod
    def mtp_schemes(self) -> Sequence[str | None]:
        """The scheme of each linear layer of multi-token prediction. Empty without a plan."""

    @abstractmethod
    def stored_formats(self, module: str) -> frozenset[str]:
        """Return the formats in which the weights of modules are stored between steps.

        Args:
            module: The name of the modules.

        Returns:
            The formats; empty without a plan.
        """

    @property
    @abstractmethod
    def memory_overflow(self) -> Violation | None:
        """The violation of the fullest rank. None: its memory fits the GPU."""

    @property
    def has_experts(self) -> bool:
        """Whether layers of the model have experts."""
        return bool(self.model.num_moe_experts) and self.shape.is_moe

"""`RunContext`: what a rule may ask about a whole run, before anything of it is built.

A check makes it. `finalize`, a sync and the table of GPUs know less: a `RuleContext` alone. The
function of a rule names in its signature the context that it needs, so that mypy refuses a rule of
theirs that reads more than they know. A rule of both asks whether its context is a `RunContext`.
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
    from bridge.precision.config import PrecisionConfig
    from bridge.rules.module_selection import ModuleSelection
    from bridge.rules.sync_row import SyncRow
    from bridge.rules.violation import Violation
    from bridge.target.target import Target


class RunContext(RuleContext, ABC):
    """The facts of a whole run that a rule is asked about.

    Args:
        precision: The config; None: the owners keep their own settings.
        sections: Every section of the run as it was given.
        views: Section -> its values after the sync, as attributes.
        rows: The plan that made the values.
        target: The GPUs and versions of the run.
        program: The program that starts it.
        unknown: Keys of the precision that are no field -> their values.
        malformed: Values of the precision that are not of their field's type.
        origins: Path of a setting -> its source.
        weaknesses: Path of a setting -> what decides its value where that is assumed or open.
        backend: te, emulated or te_cpu: what runs low-precision GEMMs.
        environment: Environment variables of the run; None: not known.
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
        weaknesses: DeciderLookup | None = None,
        backend: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            precision,
            views=views,
            present=frozenset(role for role, section in sections.items() if section.is_given),
            rows=rows,
            target=target,
            origins=origins,
            weaknesses=weaknesses,
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
    @abstractmethod
    def built_model(self) -> Section:
        """The model that this Megatron Core builds: a field that it does not have is not set."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """The model; a size that is impossible is replaced."""

    @property
    @abstractmethod
    def parallel(self) -> ParallelLayout:
        """The layout; the parts of it that cannot be read are left out."""

    @property
    @abstractmethod
    def selection(self) -> ModuleSelection | None:
        """The modules that each row or matcher takes; None without any, and without a plan."""

    @property
    @abstractmethod
    def mtp_schemes(self) -> Sequence[str | None]:
        """The scheme of each linear layer of multi-token prediction; none without a plan."""

    @abstractmethod
    def stored_formats(self, module: str) -> frozenset[str]:
        """Return the formats that the weights of the modules of a name are kept in between steps.

        Without a plan there are none.
        """

    @property
    @abstractmethod
    def memory_overflow(self) -> Violation | None:
        """The fullest rank, where it needs more memory than its GPU has; None elsewhere."""

    @property
    def has_experts(self) -> bool:
        """Whether layers of the model have experts."""
        return bool(self.model.num_moe_experts) and self.shape.is_moe

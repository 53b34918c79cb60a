"""`Rehearsal`: the result of a rehearsal, with a `LaunchResult` for each launch."""

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import Finding
from bridge.rehearse.layout import LaunchLayout
from bridge.rehearse.small_run import SmallRun


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """The result of a launch."""

    layout: LaunchLayout
    seconds: float
    """Time of the launch: training, saving and the resume."""
    planned: int | None = None
    """The number of GEMMs in the plan. None: no step was recorded."""
    equal: int | None = None
    """The number of GEMMs that ran as planned in every recorded step."""
    loss: float | None = None
    """Loss of the step after the checkpoint, in the run without a break. None: an error."""
    resumed_loss: float | None = None
    """Loss of the same step after a resume from the checkpoint. None: an error."""
    parameters: int | None = None
    """Number of parameters of the small model. None: an error."""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result of a rehearsal."""

    label: str
    """The precision of the run: the nearest recipe with the fields stated over it."""
    target: str
    """The target as the run declares it."""
    backend: str
    """The backend that ran: te_cpu or emulated."""
    versions: Mapping[str, str]
    """Product -> the release that ran: mcore, and te if Transformer Engine ran."""
    kept: str
    """How many fields have the values of the run, for a line of the table."""
    layers: int
    """The number of layers of the full run."""
    small_run: SmallRun
    launches: tuple[LaunchResult, ...]
    left_out: tuple[Finding, ...] = ()
    """Settings of the run that the rehearsal does not have, with the reason."""
    unknown: tuple[str, ...] = ()
    """Sentences about what a rehearsal cannot find out."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all launches, without repetitions."""
        by_text: dict[tuple[str, str], Finding] = {}
        for launch in self.launches:
            for finding in launch.findings:
                by_text[finding.path, finding.rule] = finding
        return tuple(by_text.values())

    @property
    def verdict(self) -> str:
        """The outcome as one sentence."""
        errors = sum(finding.severity == "error" for finding in self.findings)
        if errors == 1:
            return "1 error"
        if errors:
            return f"{errors} errors"
        planned = sum(launch.planned or 0 for launch in self.launches)
        launches = f"{len(self.launches)} launches"
        if len(self.launches) == 1:
            launches = "1 launch"
        verdict = f"plan = record in all {planned} GEMMs of {launches}"
        if self.left_out:
            verdict = f"{verdict}, {len(self.left_out)} left out"
        return verdict

    def exit_code(self, *, strict: bool = False) -> int:
        """Return the exit code of the command.

        Args:
            strict: Whether warnings and left-out settings count.

        Returns:
            2 with errors, 1 if `strict` and there are warnings or left-out settings, else 0.
        """
        if any(finding.severity == "error" for finding in self.findings):
            return 2
        if strict and (self.left_out or self.findings):
            return 1
        return 0

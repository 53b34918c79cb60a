"""`Rehearsal`: the answer of a rehearsal, with the result of each launch."""

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.errors import Finding
from bridge.rehearse.layout import LaunchLayout
from bridge.rehearse.small_run import SmallRun


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """The result of a launch."""

    round: LaunchLayout
    seconds: float
    planned: int | None = None
    """The number of GEMMs in the plan; None where no step was recorded."""
    equal: int | None = None
    """The number of GEMMs that ran as planned in every recorded step."""
    loss: float | None = None
    resumed_loss: float | None = None
    parameters: int | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The answer of a rehearsal."""

    label: str
    target: str
    backend: str
    versions: Mapping[str, str]
    """Product -> the release that ran: mcore, and te where Transformer Engine did."""
    kept: str
    """The numbers of fields that have the values of the run, as a clause."""
    layers: int
    """The number of layers of the run."""
    small: SmallRun
    launches: tuple[LaunchResult, ...]
    left_out: tuple[Finding, ...] = ()
    """Settings of the run that the rehearsal does not have, with the reason."""
    unknown: tuple[str, ...] = ()
    """Sentences about what a rehearsal cannot find out."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that went wrong, each once."""
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
        """Return 2 with errors, 1 where something was left out and that counts, else 0."""
        if any(finding.severity == "error" for finding in self.findings):
            return 2
        if strict and (self.left_out or self.findings):
            return 1
        return 0

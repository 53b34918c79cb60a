"""`MixedPrecisionConfig`: every precision decision of a run, and which of them were stated.

config = MixedPrecisionConfig(bf16=True, fp8="hybrid")
config.fp8_recipe            # 'tensorwise': the default, as at Megatron Bridge
config.stated                # frozenset({'bf16', 'fp8'}): what the synchroniser may insist on
config.finalize()            # raises PrecisionConfigError with every fault at once
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionConfigError
from bridge.precision.config import PrecisionConfig
from bridge.rules.context import RuleContext
from bridge.rules.rule import ask, by_gate
from bridge.rules.rulebook import RULES
from bridge.sync.owner import Owner
from bridge.sync.synchroniser import refuse_wrong_objects, run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.errors import Finding
    from bridge.sync.report import SyncReport

__all__ = ["MixedPrecisionConfig"]


log = logging.getLogger(__name__)

_ALONE = by_gate(rule for rule in RULES if rule.needs == "precision" and rule.severity == "error")


@dataclass(kw_only=True, repr=False, eq=False)
class MixedPrecisionConfig(PrecisionConfig):
    """The precision of a training run, written for Megatron Core.

    A field counts as *stated* once it is given to the constructor, assigned, or overridden on a command line; `del`
    takes the statement back. Copies, pickles and `dataclasses.replace` keep what was stated.
    """

    def faults(self) -> list[Finding]:
        """Return everything that can never be right about this config."""
        found = ask(_ALONE, RuleContext.of_precision(self))
        return sorted(found, key=lambda fault: fault.id)

    def finalize(self) -> None:
        """Check the config against itself.

        Raises:
            PrecisionConfigError: It can never be right; all findings, each with the remedy.
        """
        found = self.faults()
        if found:
            name = f" {self.recipe!r}" if self.recipe else ""
            raise PrecisionConfigError(f"The mixed-precision config{name} can never be right:", found)

    def setup(self, model_config: Any, optimizer_config: Any = None, ddp_config: Any = None) -> SyncReport:
        """Write this config into the owners, as Megatron Bridge's method of this name does.

        Args:
            model_config: A TransformerConfig or any object with same-named attributes.
            optimizer_config: An OptimizerConfig or any such object; None: there is none.
            ddp_config: A DistributedDataParallelConfig or any such object; None: there is none.

        Returns:
            What was changed and why.

        Raises:
            PrecisionConfigError: The config can never be right.
            SyncError: The result would not pass Megatron's validation. The owners are as they were.
        """
        report = self.write({"model": model_config, "optimizer": optimizer_config, "ddp": ddp_config})
        report.log_overrides(log)
        return report

    def write(self, given: Mapping[str, Any], *, on_conflict: str = "override", strict: bool = False) -> SyncReport:
        """Do what `bridge.synchronize` does without logging anything, for a caller that logs the report.

        Args:
            given: Role -> owner, or None.
            on_conflict: As for `bridge.synchronize`.
            strict: As for `bridge.synchronize`.
        """
        self.finalize()
        owners = [Owner(role, target) for role, target in given.items() if target is not None]
        refuse_wrong_objects(owners)
        return run(self, owners, on_conflict=on_conflict, strict=strict)

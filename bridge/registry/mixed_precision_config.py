"""`MixedPrecisionConfig`: the precision of a run, with a record of the fields that were stated.

    config = MixedPrecisionConfig(bf16=True, fp8="hybrid")
    config.fp8_recipe            # 'tensorwise': the default, as in Megatron Bridge
    config.stated                # frozenset({'bf16', 'fp8'}): the fields that a sync writes
    config.finalize()            # raises PrecisionConfigError with every fault at once

`to_cfg_dict` returns a config as an entry of a YAML file of Megatron Bridge, with the fields of its class.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionConfigError
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.precision_config import PrecisionConfig
from bridge.precision.statements import get_recipe_name
from bridge.registry.saved_entry import (
    get_values_after_setup,
    make_saved_entry,
    remember_values_after_setup,
)

if TYPE_CHECKING:
    from bridge.sync.report import SyncReport

log = logging.getLogger(__name__)


@dataclass(kw_only=True, repr=False, eq=False)
class MixedPrecisionConfig(PrecisionConfig):
    """The precision of a training run, written for Megatron Core.

    A field is *stated* if it is passed to the constructor, assigned, or overridden on a command line.
    `del` removes the statement. Copies, pickles and `dataclasses.replace` keep the statements.
    """

    def finalize(self) -> None:
        """Check the fields of the config against each other.

        Raises:
            PrecisionConfigError: The config is wrong in any run. The error has every fault.
        """
        faults = find_config_faults(self)
        if not faults:
            return
        subject = "The mixed-precision config"
        if get_recipe_name(self):
            subject = f"{subject} {get_recipe_name(self)!r}"
        raise PrecisionConfigError(f"{subject} can never be right:", faults)

    def setup(
        self,
        model_config: ModelOwner,
        optimizer_config: OptimizerOwner | None = None,
        ddp_config: DdpOwner | None = None,
    ) -> SyncReport:
        """Write this config into Megatron's configs, like Megatron Bridge's method of this name.

        Args:
            model_config: A TransformerConfig, or an object with attributes of these names.
            optimizer_config: An OptimizerConfig, or an object with attributes of these names.
            ddp_config: A DistributedDataParallelConfig, or an object with attributes of these names.

        Returns:
            The changed and the kept values, with the reasons.

        Raises:
            PrecisionConfigError: The config is wrong in any run.
            SyncError: Megatron's validation or a rule refuses the result. The configs are restored.
        """
        # Listing recipes needs this module, and no sync.
        from bridge.sync.synchroniser import write_precision

        self.finalize()
        report = write_precision(
            self, {"model": model_config, "optimizer": optimizer_config, "ddp": ddp_config}
        )
        report.log_warnings(log)
        remember_values_after_setup(self, report.rows)
        return report

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return this config as an entry of the YAML file of a run of Megatron Bridge.

        Megatron's containers call a method of this name on objects that they cannot write. Megatron
        Bridge builds only objects of its classes from a file, so the entry names its class. That
        class states every field, and ours leaves an unstated field to its owner. After `setup` such a
        field is written with the owner's value. Before `setup` it is written as a reference to the
        owner's value, which the reader of the file resolves.

        Returns:
            ``_target_`` and every field of Megatron Bridge's class, with dtypes as `torch.dtype`. Its
            class does not have the fields from `tf32` on. Megatron's configs in the same run have
            them after `setup`.
        """
        return make_saved_entry(self, get_values_after_setup(self))


def find_config_faults(precision: PrecisionConfig) -> Sequence[Finding]:
    """Return every fault of a precision that is wrong in any run, in the order of the rules."""
    # Listing recipes needs this module, and no rules.
    from bridge.rules.context import RuleContext
    from bridge.rules.rule import evaluate_rules
    from bridge.rules.rulebook import FINALIZE_RULES

    return sorted(
        evaluate_rules(FINALIZE_RULES, RuleContext.from_precision(precision)),
        key=lambda fault: fault.id,
    )

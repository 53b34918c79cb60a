"""`MixedPrecisionConfig`: the precision of a run, with a record of the fields that were stated.

config = MixedPrecisionConfig(bf16=True, fp8="hybrid")
config.fp8_recipe            # 'tensorwise': the default, as in Megatron Bridge
config.stated                # frozenset({'bf16', 'fp8'}): the fields that a sync writes
config.finalize()            # raises PrecisionConfigError with every fault at once

`to_cfg_dict` returns a config as an entry of a YAML file of Megatron Bridge, with the fields of its class.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionConfigError
from bridge.precision.coercion import get_torch_dtype
from bridge.precision.config import FIELDS, MEGATRON_BRIDGE_FIELDS, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import FILLED_DTYPE_FIELDS, get_mode, is_family_on
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.statements import (
    get_field_value,
    get_recipe_name,
    is_stated,
    list_field_names,
)
from bridge.precision.subjects import SCALER

if TYPE_CHECKING:
    from bridge.sync.report import SyncReport

log = logging.getLogger(__name__)


@dataclass(kw_only=True, repr=False, eq=False)
class MixedPrecisionConfig(PrecisionConfig):
    """The precision of a training run, written for Megatron Core.

    A field is *stated* if it is given to the constructor, assigned, or overridden on a command line.
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
        vars(self)["_held"] = {row.field: row.new for row in report.rows if row.verdict != "absent"}
        return report

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return this config as an entry of the YAML file of a run of Megatron Bridge.

        Megatron's containers call a method of this name on objects that they cannot write. Megatron
        Bridge builds only objects of its own classes from a file, so the entry names its class. That
        class states every field, and ours leaves an unstated field to its owner. After `setup` such a
        field is written with the owner's value. Before `setup` it is written as a reference to the
        owner's value, which the reader of the file resolves.

        Returns:
            ``_target_`` and every field of Megatron Bridge's class, with dtypes as `torch.dtype`. Its
            class does not have the fields from `tf32` on. Megatron's configs in the same run have
            them after `setup`.
        """
        without_place: list[str] = []
        for name in list_field_names(self):
            if name not in MEGATRON_BRIDGE_FIELDS and is_stated(self, name):
                without_place.append(name)
        if without_place and not vars(self).get("_held"):
            names = ", ".join(without_place)
            log.warning(
                "mixed_precision: a file of Megatron Bridge has no place for %s before setup", names
            )
        saved = {"_target_": PEER_TARGET}
        for name in MEGATRON_BRIDGE_FIELDS:
            saved[name] = self._get_saved_value(name)
        return saved

    def _get_saved_value(self, name: str) -> Any:
        """Return the value for a field of Megatron Bridge's class.

        With these values the sync of Megatron Bridge writes the same settings as ours.
        """
        has_effect = is_family_on(self, FIELDS[name].family)
        if name == "fp8_recipe" and not has_effect:
            return None  # any other value makes the optimizer treat the run as one in FP8
        if name in FILLED_DTYPE_FIELDS and not is_stated(self, name):
            return get_torch_dtype(get_mode(self))
        if is_stated(self, name) or not has_effect or name not in OWNER_BY_FIELD:
            return getattr(self, name)
        values_after_setup: Mapping[str, Any] = vars(self).get("_held", {})
        if name in values_after_setup:
            return values_after_setup[name]
        value = get_field_value(self, name)
        if name in LAYER_COUNTS and self.first_last_layers_bf16:
            value = 1
        return format_reference(OWNER_BY_FIELD[name], name, json.dumps(value).strip('"'))


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


REFERENCE_PREFIX = "${oc.select:"
"""The beginning of a reference to an owner's value in a file."""


def format_reference(owner: str, name: str, otherwise: str) -> str:
    """Return OmegaConf's text for a reference to a field of a section.

    Args:
        owner: The section.
        name: The field. A field of the model may be in its `transformer`.
        otherwise: The value if the section does not have the field.
    """
    if owner == "model":
        otherwise = f"{REFERENCE_PREFIX}model.transformer.{name},{otherwise}}}"
    return f"{REFERENCE_PREFIX}{owner}.{name},{otherwise}}}"


def drop_references(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a saved precision without the references to owners."""
    kept = {}
    for name, value in fields.items():
        is_reference = isinstance(value, str) and value.startswith(REFERENCE_PREFIX)
        if not is_reference:
            kept[name] = value
    return kept


PEER_TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
"""The import path of Megatron Bridge's class of the same name."""


def _build_owner_table() -> dict[str, str]:
    owner_by_field: dict[str, str] = {}
    for name, field in FIELDS.items():
        if field.subject is SCALER:
            owner_by_field[name] = "optimizer"
    for name, field in FIELDS.items():
        if field.family and field.twin is None and "recipe" not in name:
            owner_by_field[name] = "model"
    for name in (*LAYER_COUNTS, "first_last_layers_bf16"):
        owner_by_field[name] = "model"
    for name in ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"):
        owner_by_field[name] = "ddp"
    return owner_by_field


OWNER_BY_FIELD = _build_owner_table()
"""Field whose unstated value is left to an owner -> the name of that owner.

The scheme is not in it: an unstated scheme has the default of Megatron Bridge.
"""

"""`MixedPrecisionConfig`: every precision decision of a run, and which of them were stated.

config = MixedPrecisionConfig(bf16=True, fp8="hybrid")
config.fp8_recipe            # 'tensorwise': the default, as at Megatron Bridge
config.stated                # frozenset({'bf16', 'fp8'}): what the synchroniser may insist on
config.finalize()            # raises PrecisionConfigError with every fault at once

A config can be written into a YAML file of Megatron Bridge: `to_cfg_dict` names that project's class and its fields.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionConfigError
from bridge.precision.coercion import get_torch_dtype
from bridge.precision.config import FIELDS, PEER_FIELDS, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import get_low_precision_format, get_mode
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

    A field counts as *stated* once it is given to the constructor, assigned, or overridden on a command line; `del`
    takes the statement back. Copies, pickles and `dataclasses.replace` keep what was stated.
    """

    def finalize(self) -> None:
        """Check the config against itself; PrecisionConfigError with every fault where it can never be right."""
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
        from bridge.sync.synchroniser import (
            write_precision,  # a list of recipes does without the sync
        )

        self.finalize()
        report = write_precision(
            self, {"model": model_config, "optimizer": optimizer_config, "ddp": ddp_config}
        )
        report.log_overrides(log)
        report.log_others(log)
        vars(self)["_held"] = {row.field: row.new for row in report.rows if row.verdict != "absent"}
        return report

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return this config as Megatron Bridge's container writes its own class into a run's YAML.

        Megatron's containers call a method of this name on what they do not know how to write, and Megatron Bridge
        builds only from targets of its own. Its class states every field, and ours leaves an unstated one to its owner:
        such a field is written as what the owner holds after `setup`, and before it as a reference to the owner's own
        value, which the reader of the YAML resolves.

        Returns:
            ``_target_`` and every field of the peer's class, dtypes as `torch.dtype`. The fields from `tf32` on have no
            place there: Megatron's own configs in the same run hold them once `setup` has written them.
        """
        without_place: list[str] = []
        for name in list_field_names(self):
            if name not in PEER_FIELDS and is_stated(self, name):
                without_place.append(name)
        if without_place and not vars(self).get("_held"):
            names = ", ".join(without_place)
            log.warning(
                "mixed_precision: a file of Megatron Bridge has no place for %s before setup", names
            )
        saved = {"_target_": PEER_TARGET}
        for name in PEER_FIELDS:
            saved[name] = self._get_saved_value(name)
        return saved

    def _get_saved_value(self, name: str) -> Any:
        """Return the value of a field of the peer's class with which the peer writes the values of our sync."""
        switches = {
            None: True,
            "fp8": self.fp8,
            "fp4": self.fp4,
            "low": get_low_precision_format(self),
        }
        acts = bool(switches[FIELDS[name].family])
        if name == "fp8_recipe" and not acts:
            return None  # the optimizer takes any other for a run in FP8
        if name in MODE_DTYPE_FIELDS and not is_stated(self, name):
            return get_torch_dtype(get_mode(self))
        if is_stated(self, name) or not acts or name not in OWNER_BY_FIELD:
            return getattr(self, name)
        held: Mapping[str, Any] = vars(self).get("_held", {})
        if name in held:
            return held[name]
        value = get_field_value(self, name)
        if name in LAYER_COUNTS and self.first_last_layers_bf16:
            value = 1
        return format_reference(OWNER_BY_FIELD[name], name, json.dumps(value).strip('"'))


def find_config_faults(precision: PrecisionConfig) -> Sequence[Finding]:
    """Return everything that can never be right about a precision, in any run, in the order of the rules."""
    from bridge.rules.context import RuleContext  # a list of recipes does without the rules
    from bridge.rules.rule import evaluate_rules
    from bridge.rules.rulebook import FINALIZE_RULES

    return sorted(
        evaluate_rules(FINALIZE_RULES, RuleContext.from_precision(precision)),
        key=lambda fault: fault.id,
    )


REFERENCE_PREFIX = "${oc.select:"
"""How a field that is left to its owner begins in a file."""


def format_reference(owner: str, name: str, otherwise: str) -> str:
    """Return OmegaConf's text for what a field of a section holds; a model's fields may stand in its `transformer`."""
    if owner == "model":
        otherwise = f"{REFERENCE_PREFIX}model.transformer.{name},{otherwise}}}"
    return f"{REFERENCE_PREFIX}{owner}.{name},{otherwise}}}"


def drop_references(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a saved precision without those that are left to their owner."""
    kept = {}
    for name, value in fields.items():
        is_reference = isinstance(value, str) and value.startswith(REFERENCE_PREFIX)
        if not is_reference:
            kept[name] = value
    return kept


PEER_TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
"""Import path of Megatron Bridge's class of the same fields."""
MODE_DTYPE_FIELDS = ("params_dtype", "pipeline_dtype")


def _build_owner_table() -> dict[str, str]:
    owner_of: dict[str, str] = {}
    for name, field in FIELDS.items():
        if field.subject is SCALER:
            owner_of[name] = "optimizer"
    for name, field in FIELDS.items():
        if field.family and field.twin is None and "recipe" not in name:
            owner_of[name] = "model"
    for name in (*LAYER_COUNTS, "first_last_layers_bf16"):
        owner_of[name] = "model"
    for name in ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"):
        owner_of[name] = "ddp"
    return owner_of


OWNER_BY_FIELD = _build_owner_table()
"""Field that an owner keeps where it is unstated -> that owner; an unstated scheme reads as at the peer."""

"""`MixedPrecisionConfig`: every precision decision of a run, and which of them were stated.

config = MixedPrecisionConfig(bf16=True, fp8="hybrid")
config.fp8_recipe            # 'tensorwise': the default, as at Megatron Bridge
config.stated                # frozenset({'bf16', 'fp8'}): what the synchroniser may insist on
config.finalize()            # raises PrecisionConfigError with every fault at once

Recipes and model providers stay with Megatron Bridge, so its `MixedPrecisionConfig` meets ours in one program: its
objects are recognised by their class, and read without importing it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard

from bridge.errors import PrecisionConfigError, UnknownFieldError
from bridge.precision.config import FIELDS, MODE_SWITCHES, PEER_FIELDS, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS, default_of
from bridge.precision.mode import low_format_of, mode_of
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.statements import (
    check_value,
    field_names,
    field_value,
    is_stated,
    mark_untold,
    recipe_name,
    stated_values,
)
from bridge.precision.subjects import SCALER
from bridge.precision.values import torch_dtype
from bridge.registry.faults import faults_of

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
        found = faults_of(self)
        if found:
            name = f" {recipe_name(self)!r}" if recipe_name(self) else ""
            raise PrecisionConfigError(
                f"The mixed-precision config{name} can never be right:", found
            )

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
        from bridge.sync.synchroniser import write  # a list of recipes does without the sync

        self.finalize()
        report = write(
            self, {"model": model_config, "optimizer": optimizer_config, "ddp": ddp_config}
        )
        report.log_overrides(log)
        report.log_others(log)
        vars(self)["_held"] = {row.field: row.new for row in report.rows if row.verdict != "absent"}
        return report

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return what Megatron Bridge's container writes for this config into a run's YAML: its own class, its fields.

        Megatron's containers call a method of this name on what they do not know how to write, and Megatron Bridge
        builds only from targets of its own. Its class states every field, and ours leaves an unstated one to its owner:
        such a field is written as what the owner holds after `setup`, and before it as a reference to the owner's own
        value, which the reader of the YAML resolves.

        Returns:
            ``_target_`` and every field of the peer's class, dtypes as `torch.dtype`. The fields from `tf32` on have no
            place there: Megatron's own configs in the same run hold them once `setup` has written them.
        """
        homeless = [
            name for name in field_names(self) if name not in PEER_FIELDS and is_stated(self, name)
        ]
        if homeless and not vars(self).get("_held"):
            names = ", ".join(homeless)
            log.warning(
                "mixed_precision: a file of Megatron Bridge has no place for %s before setup", names
            )
        return {"_target_": PEER_TARGET, **{name: self._saved(name) for name in PEER_FIELDS}}

    def _saved(self, name: str) -> Any:
        """Return what a field of the peer's class has to be for the peer to write what our sync writes."""
        family = FIELDS[name].family
        acts = {
            None: True,
            "fp8": bool(self.fp8),
            "fp4": bool(self.fp4),
            "low": bool(low_format_of(self)),
        }[family]
        if name == "fp8_recipe" and not acts:
            return None  # the optimizer takes any other for a run in FP8
        if name in DTYPES_OF_THE_MODE and not is_stated(self, name):
            return torch_dtype(mode_of(self))
        if is_stated(self, name) or not acts or name not in OWNER_OF:
            return getattr(self, name)
        held: Mapping[str, Any] = vars(self).get("_held", {})
        if name in held:
            return held[name]
        value = (
            1 if name in LAYER_COUNTS and self.first_last_layers_bf16 else field_value(self, name)
        )
        return reference(OWNER_OF[name], name, json.dumps(value).strip('"'))


REFERENCE = "${oc.select:"
"""How a field that is left to its owner begins in a file."""


def reference(owner: str, name: str, otherwise: str) -> str:
    """Return OmegaConf's text for what a field of a section holds; a model's fields may stand in its `transformer`."""
    if owner == "model":
        otherwise = f"{REFERENCE}model.transformer.{name},{otherwise}}}"
    return f"{REFERENCE}{owner}.{name},{otherwise}}}"


def without_references(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a saved precision without those that are left to their owner."""
    return {
        name: one
        for name, one in fields.items()
        if not (isinstance(one, str) and one.startswith(REFERENCE))
    }


SOURCE = "Megatron Bridge's config"
PEER_TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
"""Import path of Megatron Bridge's class of the same fields."""
DTYPES_OF_THE_MODE = ("params_dtype", "pipeline_dtype")
OWNER_OF = {
    **{name: "optimizer" for name, field in FIELDS.items() if field.subject is SCALER},
    **{
        name: "model"
        for name, field in FIELDS.items()
        if field.family and field.twin is None and "recipe" not in name
    },
    **dict.fromkeys((*LAYER_COUNTS, "first_last_layers_bf16"), "model"),
    **dict.fromkeys(
        ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"), "ddp"
    ),
}
"""Field that an owner keeps where it is unstated -> that owner; an unstated scheme reads as at the peer."""
FOLLOWING = ("fp8_param", "fp4_param")
"""Fields that the peer's class keeps equal to the gather of the same family, and leaves None until `finalize`."""


class PeerConfig(Protocol):
    """An object of Megatron Bridge's `MixedPrecisionConfig`, or of a subclass of it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def is_peer_config(value: object) -> TypeGuard[PeerConfig]:
    """Return whether `value` is an object of a dataclass `MixedPrecisionConfig` of a module of `megatron.bridge`."""
    return dataclasses.is_dataclass(type(value)) and any(
        base.__name__ == "MixedPrecisionConfig"
        and f"{base.__module__}.".startswith("megatron.bridge.")
        for base in type(value).__mro__
    )


def from_peer(config: PeerConfig, recipes: Iterable[PrecisionConfig] = ()) -> MixedPrecisionConfig:
    """Return the config that an object of Megatron Bridge's class describes.

    Stated are the mode switches, the scheme of a format that is on, both counts of kept layers where one was given, and
    every other field away from the peer's default. Of an object that was made from one of `recipes` every field is
    stated that differs from the recipe. In any other object a default may have been given: the field is `untold`.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = {
        field.name
        for field in dataclasses.fields(config)
        if values[field.name] != default_of(field)
    }
    given |= {name for name in MODE_SWITCHES if name in values}
    given |= {f"{family}_recipe" for family in ("fp8", "fp4") if values.get(family)}
    if given.intersection(LAYER_COUNTS):
        given.update(LAYER_COUNTS)
    changed = _changed_in_recipe(values, recipes)
    given.update(changed or ())
    given.difference_update(FOLLOWING)
    known = field_names(MixedPrecisionConfig)
    unknown = given.difference(known)
    if unknown:
        name = min(unknown)
        rule = "is a field of Megatron Bridge's config that has no counterpart here"
        raise UnknownFieldError(
            f"mixed_precision.{name}: {rule}, got {values[name]!r:.80}. Leave it at its default."
        )
    made = MixedPrecisionConfig().override(
        SOURCE, **{name: values[name] for name in known if name in given}
    )
    if changed is None:
        mark_untold(made, frozenset(values) - given - {*FOLLOWING})
    return made


def _changed_in_recipe(
    values: Mapping[str, Any], recipes: Iterable[PrecisionConfig]
) -> list[str] | None:
    """Return the fields that differ from the recipe that an object was made from; None where it is like no recipe.

    It is like a recipe that it differs from in fewer than half as many fields as the recipe states of its own.
    """
    found = []
    for recipe in recipes:
        own = [
            name for name, value in stated_values(recipe).items() if value != FIELDS[name].default
        ]
        held = {
            name: check_value(recipe, name, value)
            for name, value in values.items()
            if name in FIELDS
        }
        changed = [
            name
            for name, value in held.items()
            if name not in FOLLOWING and value != field_value(recipe, name)
        ]
        if 2 * len(changed) < len(own):
            found.append(changed)
    return min(found, key=len, default=None)

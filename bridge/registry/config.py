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
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard

import bridge
from bridge.errors import PrecisionConfigError, UnknownFieldError
from bridge.precision.config import MODE_SWITCHES, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS, default_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.errors import Finding
    from bridge.sync.report import SyncReport

log = logging.getLogger(__name__)


@dataclass(kw_only=True, repr=False, eq=False)
class MixedPrecisionConfig(PrecisionConfig):
    """The precision of a training run, written for Megatron Core.

    A field counts as *stated* once it is given to the constructor, assigned, or overridden on a command line; `del`
    takes the statement back. Copies, pickles and `dataclasses.replace` keep what was stated.
    """

    def faults(self) -> Sequence[Finding]:
        """Return everything that can never be right about this config."""
        from bridge.rules.rulebook import faults_of_precision  # a list of recipes does without the rules

        return faults_of_precision(self)

    def finalize(self) -> None:
        """Check the config against itself; PrecisionConfigError with every fault where it can never be right."""
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
        report = bridge.synchronize(self, model=model_config, optimizer=optimizer_config, ddp=ddp_config)
        report.log_others(log)
        return report


SOURCE = "Megatron Bridge's config"
SCHEMES = {"fp8": "fp8_recipe", "fp4": "fp4_recipe"}
FOLLOWING = ("fp8_param", "fp4_param")
"""Fields that the peer's class keeps equal to the gather of the same family, and leaves None until `finalize`."""


class PeerConfig(Protocol):
    """An object of Megatron Bridge's `MixedPrecisionConfig`, or of a subclass of it."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def is_peer_config(value: object) -> TypeGuard[PeerConfig]:
    """Return whether `value` is an object of a dataclass `MixedPrecisionConfig` of a module of `megatron.bridge`."""
    return dataclasses.is_dataclass(type(value)) and any(
        base.__name__ == "MixedPrecisionConfig" and f"{base.__module__}.".startswith("megatron.bridge.")
        for base in type(value).__mro__
    )


def from_peer(config: PeerConfig) -> MixedPrecisionConfig:
    """Return the config that an object of Megatron Bridge's class describes.

    Stated are the mode switches, the scheme of a format that is on, both counts of kept layers where one was given, and
    every other field away from the peer's default. A value given there that equals its default cannot be told
    from what was not given.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    given = {field.name for field in dataclasses.fields(config) if values[field.name] != default_of(field)}
    given.update(name for name in MODE_SWITCHES if name in values)
    given.update(scheme for family, scheme in SCHEMES.items() if values.get(family))
    if given.intersection(LAYER_COUNTS):
        given.update(LAYER_COUNTS)
    given.difference_update(FOLLOWING)
    known = MixedPrecisionConfig.field_names()
    unknown = given.difference(known)
    if unknown:
        name = min(unknown)
        rule = "is a field of Megatron Bridge's config that has no counterpart here"
        raise UnknownFieldError(f"mixed_precision.{name}: {rule}, got {values[name]!r:.80}. Leave it at its default.")
    return MixedPrecisionConfig().state(SOURCE, **{name: values[name] for name in known if name in given})

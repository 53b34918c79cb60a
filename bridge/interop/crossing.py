"""The books of a crossing for systems of Megatron's own family, which share most fields and many defaults.

book = Inward("Megatron-LM 0.20")
book.carry("--fp8-format", fp8="hybrid")                          # written there, stated here
book.implied("--fp8-recipe", "delayed", fp8_recipe="delayed")     # nobody wrote it, and it decides
book.imported(semantics="megatron_o2")
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError, PrecisionConfigError, PrecisionTypeError
from bridge.interop.ledger import Arrival, Departure
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.validity import legal_format_for_scheme

if TYPE_CHECKING:
    from bridge.interop.contract import Exported, Imported, Loss

__all__ = ["Inward", "Outward"]


class Inward(Arrival):
    """The book of an import, with defaults that nobody wrote.

    Args:
        system: Title and version of the other side, for what is said about its defaults.
    """

    def carry(self, setting: str, /, **fields: Any) -> None:
        """Note that `setting` became these fields; PayloadError names it should a value not be of its field's type."""
        try:
            MixedPrecisionConfig.from_dict(dict(fields))
        except PrecisionTypeError as error:
            rule = str(error).partition(": ")[2]
            raise PayloadError(f"{setting}: {rule} Correct the value there.") from None
        super().carry(setting, **fields)

    @property
    def carried(self) -> dict[str, tuple[str, ...]]:
        """What was carried so far."""
        return self._carried

    def implied(self, setting: str, value: object, why: str = "", /, **fields: Any) -> None:
        """Record a default that nobody wrote and that decides, and state it."""
        said = why or f"nobody wrote it and {self.system} takes this value"
        self.lose(setting, value, "implied default", said, "Write it down if the run depends on it.")
        self.fields.update(fields)

    def imported(self, *, semantics: str, label: str = "", recipe: str | None = None) -> Imported:
        """Return the import, each loss once; the recipe is recovered by meaning unless the caller knows its name."""
        done = self.close(semantics)
        losses: list[Loss] = []
        for loss in done.losses:
            if loss not in losses:
                losses.append(loss)
        return replace(done, losses=tuple(losses), label=label, recipe=recipe or done.recipe)


class Outward(Departure):
    """The book of an export to a system that runs on Megatron Core.

    Megatron Core takes every format under every scheme, so that a format which a scheme does not train well with is no
    reason to refuse: it is what the next system will run too.

    Raises:
        PrecisionTypeError: Not a config.
        PrecisionConfigError: A config that can never be right.
    """

    def __init__(self, config: object, system: str) -> None:
        try:
            super().__init__(config, system)
        except PrecisionConfigError as error:
            if not isinstance(config, MixedPrecisionConfig) or set(error.findings) - set(
                legal_format_for_scheme(config)
            ):
                raise
            super().__init__(MixedPrecisionConfig(), system)
            self.config, self.values, self.arrives_as = config, config.to_dict(full=True), config.mode

    def write(self, field: str, *settings: str) -> None:
        """Note that a field went into these settings, beside those it is already in; none: it holds without one."""
        self.carry(field, *dict.fromkeys((*self._carried.get(field, ()), *settings)))

    def is_booked(self, field: str) -> bool:
        """Return whether something was noted about a field."""
        return field in self._carried or field in self._losses

    def exported(self, payload: Any) -> Exported:
        """Return the export."""
        return self.close(payload)

"""`RuleContext`: the facts that a rule reads, with the path and the source of each setting.

`finalize` makes a context from a precision, with `RuleContext.from_precision`. A sync makes a
context from its owners. A check makes a `RunContext`, which knows the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.model.read_tracking import AttributeView, tracked_property
from bridge.precision.mode import get_mode
from bridge.precision.precision_config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.statements import get_source, is_stated, list_field_names
from bridge.rules.config_facts import ConfigFacts
from bridge.rules.inert_fields import find_inert_fields
from bridge.target.fields import OWNER_DEFAULTS, is_different
from bridge.target.target import Target

if TYPE_CHECKING:
    from bridge.precision.precision_config import PrecisionConfig
    from bridge.rules.sync_row import SyncRow

PRECISION_OWNERS = ("model", "optimizer", "ddp")
FAMILIES = ("fp8", "fp4")

DeciderLookup = Callable[[str], str | None]
"""Path of a setting -> a noun for what decides its value, if the value is assumed or open.

None: the value is stated, or is a known default.
"""


def _find_owner_name(field: str) -> str | None:
    for owner_name in PRECISION_OWNERS:
        if field in OWNER_DEFAULTS[owner_name]:
            return owner_name
    return None


def get_effective_values(config: PrecisionConfig) -> dict[str, Any]:
    """Return the values of all fields of `config`, and of the fields that Megatron derives."""
    values = config.to_dict(full=True)
    values["params_dtype"] = values["params_dtype"] or get_mode(config)
    values["enable_autocast"] = values["autocast_enabled"]
    return values


class RuleContext(ConfigFacts):
    """The facts that a rule reads, with the path and the source of each setting.

    A context is not changed. Each evaluation makes a new context.

    Args:
        precision: As for `ConfigFacts`.
        views: As for `ConfigFacts`.
        present: As for `ConfigFacts`.
        rows: The plan of the sync that made the values.
        scheme: As for `ConfigFacts`.
        target: As for `ConfigFacts`.
        is_last: Whether the run begins after this sync.
        origins: Path of a setting -> its source.
        find_decider: The lookup of the deciders of unknown values. None: every value is known.
        backend: As for `ConfigFacts`.
        environment: As for `ConfigFacts`.
    """

    def __init__(
        self,
        precision: PrecisionConfig | None,
        *,
        views: Mapping[str, AttributeView],
        present: frozenset[str] = frozenset(),
        rows: Sequence[SyncRow] = (),
        scheme: str | None = None,
        target: Target | None = None,
        is_last: bool = False,
        origins: Callable[[str], str] | None = None,
        find_decider: DeciderLookup | None = None,
        backend: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            precision,
            views=views,
            present=present,
            scheme=scheme,
            target=target,
            backend=backend,
            environment=environment,
        )
        self.rows = rows
        self.is_last = is_last
        self._origins = origins
        self._find_decider = find_decider

    @classmethod
    def from_precision(cls, config: PrecisionConfig) -> RuleContext:
        """Return the context of a precision without configs: every owner has its values."""
        return cls(
            config,
            views=dict.fromkeys(PRECISION_OWNERS, AttributeView(get_effective_values(config))),
        )

    def reads_missing_layers(self, paths: Collection[str]) -> bool:  # noqa: ARG002  of a check
        """Return whether these settings are about layers that the model does not have."""
        return False

    def note_unevaluated(self, rule: str) -> None:
        """Record a rule that reads layers which the model does not have."""

    def find_unknown(self, paths: Iterable[str]) -> dict[str, str]:
        """Return each setting whose value is assumed or open -> its decider."""
        if self._find_decider is None:
            return {}
        deciders = {}
        for path in paths:
            decider = self._find_decider(path)
            if decider is not None:
                deciders[path] = decider
        return deciders

    def is_value_before_sync_known(self, path: str) -> bool:  # noqa: ARG002  of a check
        """Return whether an owner's value before the sync is stated or a known default.

        The value can be unknown only in a check.
        """
        return True

    @property
    def is_mode_known(self) -> bool:
        """Whether the mode of the run is known. The mode can be unknown only in a check."""
        return True

    @tracked_property
    def reasons_without_effect(self) -> dict[str, str]:
        """Field of the precision without effect in this run -> the reason."""
        if self.precision is None:
            return {}
        return find_inert_fields(
            self.precision,
            scheme=self.scheme,
            is_autocast=bool(self.model.enable_autocast),
            keeps_layers=bool(self.model.first_last_layers_bf16),
        )

    def differs_from_default(self, field: str) -> bool:
        """Return whether the precision or an owner has another value of a field than its default."""
        if field in self.stated:
            return is_different(self.stated[field], FIELD_DEFAULTS[field])
        owner_name = None
        if field in MEGATRON_FIELDS:
            owner_name = _find_owner_name(field)
        if owner_name is None or owner_name not in self.present:
            return False
        value = getattr(self.views[owner_name], field)
        return value is not None and is_different(value, OWNER_DEFAULTS[owner_name][field])

    def get_path(self, name: str) -> str:
        """Return the full path of a setting.

        Args:
            name: A field of the precision, or section.field.

        Returns:
            ``mixed_precision.field`` if the precision decides the setting, else ``owner.field``.
        """
        section, _, setting = name.rpartition(".")
        if section in PRECISION_OWNERS and setting in MEGATRON_FIELDS and setting in self.stated:
            return f"mixed_precision.{setting}"
        if name not in FIELD_DEFAULTS:
            return name
        is_left_to_owner = name in MEGATRON_FIELDS and name not in self.stated
        if self.precision is not None and not is_left_to_owner:
            return f"mixed_precision.{name}"
        return f"{_find_owner_name(name) or 'model'}.{name}"

    def get_value(self, path: str) -> Any:
        """Return the value of a setting, or None for a path that is not a setting."""
        section, _, name = path.partition(".")
        if section == "mixed_precision":
            if name in self.stated:
                return self.stated[name]
            owner_name = _find_owner_name(name)
            if owner_name is None:
                return FIELD_DEFAULTS.get(name)
            return getattr(self.views[owner_name], name)
        if section == "environment":
            return self.environment.get(name)
        if section == "target":
            return self.target.stated(name)
        if section in self.views:
            return getattr(self.views[section], name, None)
        return None

    def get_setting_value(self, name: str) -> Any:
        """Return the stated value of a field of the precision, or else the value of its owner."""
        return self.get_value(self.get_path(name))

    def get_source(self, path: str) -> str | None:
        """Return the source that set a setting, or None if it is not known."""
        section, _, name = path.partition(".")
        if section == "mixed_precision" and self.precision is not None:
            if name in list_field_names(self.precision) and is_stated(self.precision, name):
                return get_source(self.precision, name)
            return None
        if self._origins is not None and section in self.views:
            return self._origins(path)
        return None

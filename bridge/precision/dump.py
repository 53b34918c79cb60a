"""A config as plain data, and back: dictionaries, JSON, YAML, and the mapping Megatron Bridge saves a run with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from bridge.errors import PrecisionTypeError
from bridge.precision.dtypes import torch_dtype
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.statements import Statements

__all__ = ["PEER_TARGET", "Dumpable"]

PEER_TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
"""Import path of Megatron Bridge's class of the same fields."""


class Dumpable(Statements):
    """Statements that can be written down and read back."""

    def to_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return plain values (dtypes as "bf16", ...): the stated fields, or with `full` every field as it reads."""
        names = self.field_names()
        if full:
            return {name: self.reading(name) for name in names}
        return {name: self._values[name] for name in names if name in self._values}

    @classmethod
    def from_dict(cls, values: Mapping[str, object], *, source: str | None = None) -> Self:
        """Return the config that `to_dict` describes; every key present counts as stated.

        Args:
            values: Fields by name. Numbers and switches may be strings, as YAML and command lines produce them.
            source: Their source, for reports.

        Raises:
            PrecisionTypeError: A value that is not of its field's type, or `values` that are no mapping.
            UnknownFieldError: A key that is no field.
        """
        if not isinstance(values, Mapping):
            raise PrecisionTypeError(f"mixed_precision: must be a mapping of fields, got {values!r}.")
        config = cls()
        config._state({str(key): value for key, value in values.items()}, source=source)
        return config

    def to_json(self, *, full: bool = False, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(full=full), indent=indent)

    @classmethod
    def from_json(cls, text: str, *, source: str | None = None) -> Self:
        """Return the config that `to_json` describes; raises as `from_dict`, also for what is not JSON."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PrecisionTypeError(f"mixed_precision: must be JSON; {error}.") from None
        return cls.from_dict(values, source=source)

    def to_yaml(self, *, full: bool = False) -> str:
        """Return `to_dict` as YAML."""
        import yaml  # only here: listing recipes needs no YAML

        text: str = yaml.safe_dump(self.to_dict(full=full), sort_keys=False)
        return text

    @classmethod
    def from_yaml(cls, text: str, *, source: str | None = None) -> Self:
        """Return the config that `to_yaml` describes; raises as `from_dict`, also for what is not plain YAML."""
        from bridge.precision.strict_yaml import load_all

        (values, *_) = load_all(text, "mixed_precision", error=PrecisionTypeError) or (None,)
        return cls.from_dict(values if values is not None else {}, source=source)

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return what Megatron Bridge's container writes for this config into a run's YAML: its own class, its fields.

        Megatron's containers call a method of this name on what they do not know how to write, and Megatron Bridge
        builds only from targets of its own. Unstated fields that would switch something off there are written out: the
        dtypes of the mode, and one layer at either end under `first_last_layers_bf16`.

        Returns:
            ``_target_`` and every field of the peer's class, dtypes as `torch.dtype`. `tf32` has no field there.
        """
        values = {name: getattr(self, name) for name in self.field_names() if name != "tf32"}
        for name in ("params_dtype", "pipeline_dtype"):
            if values[name] is None:
                values[name] = torch_dtype("bf16" if values["bf16"] else "fp16" if values["fp16"] else "fp32")
        if values["first_last_layers_bf16"]:
            values.update({name: 1 for name in LAYER_COUNTS if not self.is_stated(name)})
        return {"_target_": PEER_TARGET, **values}

"""The sections `model`, `optimizer` and `ddp` of a run: which of their settings are fields of a precision."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bridge.errors import PayloadError, PrecisionTypeError
from bridge.interop.builders import ImportBuilder
from bridge.interop.megatron_bridge.exporter import DTYPES, ELSEWHERE
from bridge.interop.megatron_lm.flags import report_other
from bridge.interop.megatron_lm.te_precision_file import rows_of
from bridge.interop.reading.settings import named_dtype
from bridge.precision.config import FIELD_DEFAULTS, PEER_FIELDS
from bridge.precision.dtypes import SPELLINGS
from bridge.registry.config import MixedPrecisionConfig

OWNERS = ("model", "optimizer", "ddp")
RENAMED = {"enable_autocast": "autocast_enabled"}
MODULES = "modules"
"""The rows of single modules, which the configurations of this project alone have."""


class OwnerSetting(NamedTuple):
    """A setting of precision in the section of an owner."""

    path: str
    field: str
    value: Any


def owned(payload: Mapping[Any, Any], builder: ImportBuilder) -> Iterator[OwnerSetting]:
    """Yield the owners' own settings that have a field; report the others."""
    for owner in OWNERS:
        section = payload.get(owner)
        if not isinstance(section, Mapping):
            continue
        for key, value in section.items():
            where, name = f"{owner}.{key}", RENAMED.get(str(key), str(key))
            if name in PEER_FIELDS:
                yield OwnerSetting(where, name, named_dtype(value, where) if name in DTYPES else value)
            elif ELSEWHERE.get(name) == owner:
                _elsewhere(where, name, value, builder)
            elif name == "quant_recipe" and MODULES in builder.fields:
                builder.map(where)  # a sync wrote it from the rows
            elif name == "quant_recipe" and isinstance(value, Mapping):
                _quant_recipe(where, value, builder)
            elif isinstance(value, Mapping) and "_target_" in value:
                dtype = str(value["_target_"])
                report_other(builder, where, name, SPELLINGS.get(dtype.lower().removeprefix("torch."), dtype))
            else:
                report_other(builder, where, name, value)


def _elsewhere(where: str, name: str, value: Any, builder: ImportBuilder) -> None:
    """Map a field that a section of Megatron's own holds; its default there is what an unstated field leaves."""
    if isinstance(value, Mapping) and "_target_" in value:
        value = named_dtype(value, where)
    read = MixedPrecisionConfig()
    try:
        read.state(**{name: value})
    except PrecisionTypeError as error:
        raise PayloadError.of(where, error.rule, error.value, "Correct the value there.") from None
    builder.map(where, **({} if read.reading(name) == FIELD_DEFAULTS[name] else read.to_dict()))


def _quant_recipe(where: str, value: Mapping[Any, Any], builder: ImportBuilder) -> None:
    is_low = bool(builder.fields.get("fp8") or builder.fields.get("fp4"))
    rows = rows_of(value, is_low=is_low)
    if rows is not None:
        builder.map(where, modules=rows)
        return
    builder.record("megatron_bridge.its-numbers-of-layers-count", where, value)

"""Settings that bear on precision and have no field: rows of `unsupported.yaml`."""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import yaml

from bridge.interop.builders import ImportBuilder
from bridge.interop.optimizers import low_precision_optimizer
from bridge.interop.reading.settings import Settings

BY_HAND = "Set it up by hand where you train next."


class Row(NamedTuple):
    """A setting without a field."""

    detail: str
    remedy: str = BY_HAND
    harmless: tuple[object, ...] = (False,)
    """Values under which there is nothing to report."""
    reason: str = "unsupported"
    is_file: bool = False
    """It names a file that is not read, whatever its name will be."""


@cache
def rows(section: str) -> dict[str, Row]:
    """Return the rows of one section of the file: setting -> row."""
    block = yaml.safe_load(files("bridge.interop").joinpath("unsupported.yaml").read_text("utf-8"))[section]
    details, options = block.pop("rows"), block
    return {
        setting: Row(**(options | (detail if isinstance(detail, dict) else {"detail": detail})))
        for setting, detail in details.items()
    }


def report_rows(builder: ImportBuilder, settings: Settings, section: str) -> None:
    """Map or report every setting of the section that is given."""
    for key, row in rows(section).items():
        if settings.given(key):
            report_row(builder, settings.name(key), settings[key], row)


def report_row(builder: ImportBuilder, name: str, value: object, row: Row) -> None:
    """Report one setting, or map it where its value changes nothing."""
    if any(value == usual and type(value) is type(usual) for usual in row.harmless):
        builder.map(name)
    else:
        builder.report(name, value, row.reason, row.detail, row.remedy)


def report_optimizer(builder: ImportBuilder, setting: str, name: object) -> None:
    """Report the optimizer that `setting` names where it is one of these."""
    detail = low_precision_optimizer(name)
    if detail is not None:
        builder.report(setting, name, "unsupported", detail, "Megatron keeps it in FP32 by default.")

"""`reading_of_arguments`: a framework's settings that are arguments of Megatron-LM, by their names, as a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bridge.errors import RunConfigError
from bridge.preflight.file_reading import MEGATRON_LM, NEWEST, FileReading
from bridge.read.framework.names import own_names, write_own
from bridge.read.framework.table import FrameworkTable
from bridge.read.megatron_lm.argument_values import values_of
from bridge.read.megatron_lm.arguments import Arguments
from bridge.read.megatron_lm.elsewhere import elsewhere
from bridge.read.megatron_lm.flags import fields_of
from bridge.read.megatron_lm.importer import imported
from bridge.read.megatron_lm.sections import (
    fields_of_no_config,
    late_fields,
    put_malformed,
    sections_of,
)
from bridge.target.fields import known_releases
from bridge.target.versions import parse_version


def reading_of_arguments(
    written: Arguments,
    table: FrameworkTable,
    path: str,
    *,
    origins: Mapping[str, str],
    read_too: Sequence[str] = (),
    unknown: Sequence[str] = (),
    variables: Sequence[str] = (),
) -> FileReading:
    """Return what the arguments of a framework's run say.

    Args:
        written: The arguments; `decided_by` of them is what else may state some, empty where nothing does.
        table: The framework.
        path: Path of the file.
        origins: Name of an argument -> the file that states it.
        read_too: Other files that were read, as sentences.
        unknown: What the files leave open, as sentences.
        variables: Variables in the files.
    """
    values = values_of(written.options)
    report = imported(written)
    sections = sections_of(values)
    put_malformed(sections, values)
    if not any(sections.values()):
        raise RunConfigError.of(
            path, "must hold arguments of Megatron-LM's training", {}, "Give a file of its runs."
        )
    other = elsewhere(written, values, path)
    for role, fields in other.sections.items():
        sections[role] = {**sections.get(role, {}), **fields}
    own = own_names(table, values.all, {}, path)
    write_own(sections, own)
    release, reason = known_releases()[-1], NEWEST
    if table.release:
        release, reason = parse_version(table.release["megatron_core"]), table.release["because"]
    return FileReading(
        framework=table.title,
        base=MEGATRON_LM,
        sections=sections,
        origins={place: file for name, file in origins.items() for place in fields_of(name)},
        own_fields=fields_of_no_config(values),
        unknown=(*unknown, *_open(values.late), *other.unknown, *own.unknown),
        unplanned=own.unplanned or other.unplanned,
        uncounted=(*other.uncounted, *own.uncounted),
        opened={**other.opened, **own.opened},
        generation=own.generation,
        read_too=(
            f"Read as a run of {table.title}, by its code ({table.code}).",
            *read_too,
            *other.read_too,
        ),
        release=release,
        release_reason=reason,
        mode_decided_by=report.decided_by if written.decided_by else None,
        unstated_by=written.decided_by or None,
        open_values=late_fields(values),
        variables=tuple(variables),
        faulty_options=own.faulty_options,
    )


def _open(late: Mapping[str, str]) -> list[str]:
    """Return what is said of arguments whose value only the run decides, as sentences."""
    found = []
    for name, text in late.items():
        if fields_of(name):
            place = fields_of(name)[0]
            found.append(
                f"{place}: the value {text} is decided when the run starts; the default counts here."
            )
    return found

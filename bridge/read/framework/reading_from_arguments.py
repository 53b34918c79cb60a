"""`build_reading_from_arguments`: a run whose settings are arguments of Megatron-LM by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.preflight.file_reading import MEGATRON_LM, FileReading, OptionFaults
from bridge.preflight.launches import Launches
from bridge.preflight.uncertainty import Uncertainty
from bridge.read.framework.framework_options import read_framework_options, write_framework_effects
from bridge.read.framework.framework_table import FrameworkTable
from bridge.read.megatron_lm.argument_values import parse_argument_values
from bridge.read.megatron_lm.flags import get_argument_fields
from bridge.read.megatron_lm.importer import import_arguments
from bridge.read.megatron_lm.other_sources import read_other_sources
from bridge.read.megatron_lm.sections import (
    add_malformed_values,
    build_sections,
    collect_fields_of_no_config,
    collect_open_fields,
)
from bridge.read.megatron_lm.written_arguments import WrittenArguments
from bridge.target.fields import OWNER_FIELDS


def build_reading_from_arguments(
    written: WrittenArguments,
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
        written: The arguments; `mode_decider` of them is the other source that may state some, or empty.
        path: Path of the file.
        origins: Name of an argument -> the file that states it.
        read_too: Other files that were read, as sentences.
        unknown: What the files leave open, as sentences.
        variables: Variables in the files.
    """
    values = parse_argument_values(written.options)
    report = import_arguments(written)
    sections = build_sections(values)
    add_malformed_values(sections, values)
    if not any(sections.values()):
        raise RunConfigError.of(
            path, "must hold arguments of Megatron-LM's training", {}, "Give a file of its runs."
        )
    other = read_other_sources(written, values, path)
    for owner_name, fields in other.sections.items():
        sections[owner_name] = {**sections.get(owner_name, {}), **fields}
    own = read_framework_options(table, values.all, {}, path)
    write_framework_effects(sections, own)
    _drop_framework_fields(sections, table, values.all)
    return FileReading(
        framework=table.title,
        underlying_framework=MEGATRON_LM,
        sections=sections,
        origins={
            setting: file for name, file in origins.items() for setting in get_argument_fields(name)
        },
        own_fields=collect_fields_of_no_config(values),
        generation=own.generation,
        notes=(
            f"Read as a run of {table.title}, by its code ({table.code}).",
            *read_too,
            *other.notes,
        ),
        release=table.megatron_release,
        uncertainty=Uncertainty(
            open_points=(
                *unknown,
                *_describe_open_arguments(values.open_values),
                *other.open_points,
                *own.open_points,
            ),
            mode_decider=report.decided_by if written.mode_decider else None,
            default_decider=written.mode_decider or None,
            open_values=collect_open_fields(values),
            unread_sources={**other.unread_sources, **own.unread_sources},
            unread_options=(*other.unread_options, *own.unread_options),
            no_plan_reason=own.no_plan_reason or other.no_plan_reason,
        ),
        launches=Launches(variables=tuple(variables)),
        option_faults=OptionFaults(misdirected=own.faulty_options),
        added_schemes=tuple(table.schemes),
    )


def _drop_framework_fields(
    sections: Mapping[str, dict[str, Any]],
    table: FrameworkTable,
    arguments: Mapping[str, object],
) -> None:
    """Remove the fields that Megatron Core lacks, and that the framework itself reads.

    They are not without effect: the row of the framework says what they do.
    """
    release = table.megatron_release.version
    for name in arguments:
        if table.find_option(name) is None:
            continue
        for setting in get_argument_fields(name):
            owner_name, _, attribute = setting.partition(".")
            row = OWNER_FIELDS[owner_name].get(attribute)
            if row is not None and row.has is not None and not row.has.holds(release):
                sections.get(owner_name, {}).pop(attribute, None)


def _describe_open_arguments(open_values: Mapping[str, str]) -> list[str]:
    """Return what is said of arguments whose value only the run decides, as sentences."""
    sentences = []
    for name, text in open_values.items():
        if get_argument_fields(name):
            setting = get_argument_fields(name)[0]
            sentences.append(
                f"{setting}: the value {text} is decided when the run starts; the default counts here."
            )
    return sentences

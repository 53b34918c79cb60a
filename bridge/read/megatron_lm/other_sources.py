"""`OtherSources`: the settings of a run of Megatron-LM that its arguments do not decide.

Files, modules, DeepSpeed's engine and options of other programs decide them. Each source is read or
named. Where a source that is not read would change the plan or the bytes, there is no plan or no
verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import bounded
from bridge.read.layer_source import (
    find_layer_implementation,
    find_layers_no_plan_reason,
    get_layer_settings,
)
from bridge.read.megatron_lm.argument_values import ArgumentValues
from bridge.read.megatron_lm.deepspeed_engine import (
    DEEPSPEED_OPTION,
    EngineSettings,
    describe_ineffective_arguments,
    read_engine_settings,
    uses_deepspeed_engine,
)
from bridge.read.megatron_lm.deepspeed_file import DEEPSPEED_FILE_ARGUMENT
from bridge.read.megatron_lm.flags import (
    find_misspelt,
    format_option,
    get_argument_fields,
    get_dest,
)
from bridge.read.megatron_lm.precision_file import (
    QUANT_RECIPE_FIELD,
    PrecisionFile,
    find_precision_file,
)
from bridge.read.megatron_lm.unread_options import find_unread_options
from bridge.read.megatron_lm.written_arguments import WrittenArguments

PRECISION_FILE_ARGUMENT = "te_precision_config_file"
READ_FILE_ARGUMENTS = frozenset({PRECISION_FILE_ARGUMENT, DEEPSPEED_FILE_ARGUMENT})
"""Arguments that name a file, which is read or named here."""
SPLIT_OPTION = "--pp-partition-method"
OPTIONS_NOT_READ = (
    "{options}: not read here; "
    "the layout, the layers or the bytes may be others than those that are counted."
)
SPLIT_NOT_READ = (
    f"{SPLIT_OPTION}: DeepSpeed splits the layers by it; Megatron-LM's even split counts here."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherSources:
    """Settings that the arguments of a run do not decide; the fields are as in `FileReading`."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section -> fields that it sets, `mixed_precision` among them."""
    unknown: tuple[str, ...] = ()
    no_plan_reason: str | None = None
    uncounted: tuple[str, ...] = ()
    opened: Mapping[str, str] = field(default_factory=dict)
    read_too: tuple[str, ...] = ()


def read_other_sources(run: WrittenArguments, values: ArgumentValues, path: str) -> OtherSources:
    """Return the settings of a run that its arguments do not decide.

    Args:
        run: The arguments as they are written.
        values: The arguments by their names.
        path: Path of the run's file.
    """
    arguments = values.all
    engine = EngineSettings()
    if uses_deepspeed_engine(run):
        engine = read_engine_settings(run, values.known, values.mode, path)
    layers = find_layers_no_plan_reason(arguments)
    file = _read_precision_file(arguments, path)
    unread = _find_unread_options(run, arguments, engine)
    no_plan_reason = layers or engine.no_plan_reason
    opened = dict(engine.opened)
    read_too = list(engine.read_too)
    if layers is not None:
        opened.update(dict.fromkeys(get_layer_settings(), layers.partition(":")[0]))
    if file is not None and file.content is not None:
        read_too.append(file.sentence)
    elif file is not None:
        opened[QUANT_RECIPE_FIELD] = (
            f"{format_option(PRECISION_FILE_ARGUMENT)} {arguments[PRECISION_FILE_ARGUMENT]}"
        )
        no_plan_reason = no_plan_reason or file.sentence
    for option, settings in unread.all.items():
        for setting in settings:
            opened.setdefault(setting, option)
    unknown = [*engine.unknown, *_describe_ineffective_arguments(run)]
    if no_plan_reason is not None:
        no_plan_reason = bounded(no_plan_reason)
    uncounted = list(unread.all)
    if uses_deepspeed_engine(run):
        uncounted.insert(0, DEEPSPEED_OPTION)
    return OtherSources(
        sections=_build_sections(engine, arguments, file),
        unknown=(*map(bounded, unknown), *_describe_unread_options(unread)),
        no_plan_reason=no_plan_reason,
        uncounted=tuple(uncounted),
        opened=opened,
        read_too=tuple(map(bounded, read_too)),
    )


def _describe_ineffective_arguments(run: WrittenArguments) -> Iterator[str]:
    """Yield a sentence about the arguments that an engine leaves unread."""
    if not uses_deepspeed_engine(run):
        return
    sentence = describe_ineffective_arguments(run)
    if sentence is not None:
        yield sentence


def _read_precision_file(arguments: Mapping[str, Any], path: str) -> PrecisionFile | None:
    """Return the per-module recipe that arguments name by its path; None where they name none."""
    name = arguments.get(PRECISION_FILE_ARGUMENT)
    if not name:
        return None
    return find_precision_file(format_option(PRECISION_FILE_ARGUMENT), str(name), path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnreadOptions:
    """Options that are not read and bear on bytes: option -> the settings that it may change."""

    options: Mapping[str, tuple[str, ...]]
    """Options whose words bear on them."""
    misspelt: Mapping[str, tuple[str, ...]]
    """Options that are an argument's name but for a letter or two; `open_points.py` names them."""

    @property
    def all(self) -> dict[str, tuple[str, ...]]:
        """The options of either kind that may change a setting."""
        slips = {option: settings for option, settings in self.misspelt.items() if settings}
        return {**self.options, **slips}


def _find_unread_options(
    run: WrittenArguments, arguments: Mapping[str, Any], engine: EngineSettings
) -> _UnreadOptions:
    """Return the options that are not read here, nor by the table of the run's framework."""
    of_megatron = _drop_framework_options(run, arguments)
    options: dict[str, tuple[str, ...]] = {}
    for name, settings in find_unread_options(of_megatron).items():
        if name not in engine.read:
            options[format_option(name)] = settings
    slips: dict[str, tuple[str, ...]] = {}
    if not run.has_every_default:
        for name, meant in find_misspelt(arguments).items():
            if name in of_megatron:
                slips[format_option(name)] = get_argument_fields(meant)
    return _UnreadOptions(options=options, misspelt=slips)


def _drop_framework_options(
    run: WrittenArguments, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return arguments without those that the table of the run's framework reads."""
    if run.framework is None:
        return arguments
    find_option = run.framework.find_option
    return {name: value for name, value in arguments.items() if find_option(name) is None}


def _build_sections(
    engine: EngineSettings, arguments: Mapping[str, Any], file: PrecisionFile | None
) -> dict[str, dict[str, Any]]:
    """Return section -> fields that an engine, a spec and a per-module recipe set."""
    sections: dict[str, dict[str, Any]] = {}
    for owner_name, fields in engine.sections.items():
        sections[owner_name] = dict(fields)
    model = sections.setdefault("model", {})
    layers = find_layer_implementation(arguments)
    if engine.precision is not None:
        sections["mixed_precision"] = dict(engine.precision)
    if layers is not None:
        model["transformer_impl"] = layers
    if file is not None and file.content is not None:
        model["quant_recipe"] = file.content
    return sections


def _describe_unread_options(unread: _UnreadOptions) -> Iterator[str]:
    """Yield the sentences about options that are not read, but for misspelt ones."""
    options: list[str] = []
    for option in unread.options:
        if option not in unread.misspelt and option != SPLIT_OPTION:
            options.append(option)
    if options:
        yield OPTIONS_NOT_READ.format(options=", ".join(options))
    if SPLIT_OPTION in unread.all:
        yield SPLIT_NOT_READ


def is_handled_source(source: str) -> bool:
    """Return whether a source of arguments is read or named here ("--deepspeed_config ds.json")."""
    return get_dest(source.partition(" ")[0]) in READ_FILE_ARGUMENTS

"""`Elsewhere`: the settings of a run of Megatron-LM that its arguments do not decide.

Files, modules, DeepSpeed's engine and options of other programs decide them. Each source is read or
named. Where a source that is not read would change the plan or the bytes, there is no plan or no
verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import bounded
from bridge.read.layer_source import implementation, layer_settings, unplanned_layers
from bridge.read.megatron_lm.argument_values import ArgumentValues
from bridge.read.megatron_lm.arguments import Arguments
from bridge.read.megatron_lm.engine import (
    NAME,
    Engine,
    engine_of,
    is_engine,
    sentence_without_effect,
)
from bridge.read.megatron_lm.engine_file import DEEPSPEED_FILE
from bridge.read.megatron_lm.flags import dest, fields_of, misspelt, option_of
from bridge.read.megatron_lm.precision_file import FIELD, PrecisionFile, precision_file
from bridge.read.megatron_lm.unread import unread_options

PRECISION_FILE = "te_precision_config_file"
NAMED = frozenset({PRECISION_FILE, DEEPSPEED_FILE})
"""Arguments that name a file, which is read or named here."""
SPLIT = "--pp-partition-method"
UNREAD = (
    "{options}: not read here; "
    "the layout, the layers or the bytes may be others than those that are counted."
)
UNREAD_SPLIT = f"{SPLIT}: DeepSpeed splits the layers by it; Megatron-LM's even split counts here."


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """Settings that the arguments of a run do not decide; the fields are as in `FileReading`."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section -> fields that it sets, `mixed_precision` among them."""
    unknown: tuple[str, ...] = ()
    unplanned: str | None = None
    uncounted: tuple[str, ...] = ()
    opened: Mapping[str, str] = field(default_factory=dict)
    read_too: tuple[str, ...] = ()


def elsewhere(run: Arguments, values: ArgumentValues, path: str) -> Elsewhere:
    """Return the settings of a run that its arguments do not decide.

    Args:
        run: The arguments as they are written.
        values: The arguments by their names.
        path: Path of the run's file.
    """
    arguments = values.all
    engine = Engine()
    if is_engine(run):
        engine = engine_of(run, values.known, values.mode, path)
    layers = unplanned_layers(arguments)
    file = _precision_file(arguments, path)
    unread = _unread(run, arguments, engine)
    unplanned = layers or engine.unplanned
    opened = dict(engine.opened)
    read_too = list(engine.read_too)
    if layers is not None:
        opened.update(dict.fromkeys(layer_settings(), layers.partition(":")[0]))
    if file is not None and file.content is not None:
        read_too.append(file.sentence)
    elif file is not None:
        opened[FIELD] = f"{option_of(PRECISION_FILE)} {arguments[PRECISION_FILE]}"
        unplanned = unplanned or file.sentence
    for option, settings in unread.all.items():
        for setting in settings:
            opened.setdefault(setting, option)
    unknown = [*engine.unknown, *_without_effect(run)]
    if unplanned is not None:
        unplanned = bounded(unplanned)
    uncounted = list(unread.all)
    if is_engine(run):
        uncounted.insert(0, NAME)
    return Elsewhere(
        sections=_sections(engine, arguments, file),
        unknown=(*map(bounded, unknown), *_sentences(unread)),
        unplanned=unplanned,
        uncounted=tuple(uncounted),
        opened=opened,
        read_too=tuple(map(bounded, read_too)),
    )


def _without_effect(run: Arguments) -> Iterator[str]:
    """Yield a sentence about the arguments that an engine leaves unread."""
    if not is_engine(run):
        return
    sentence = sentence_without_effect(run)
    if sentence is not None:
        yield sentence


def _precision_file(arguments: Mapping[str, Any], path: str) -> PrecisionFile | None:
    """Return the per-module recipe that arguments name by its path; None where they name none."""
    name = arguments.get(PRECISION_FILE)
    if not name:
        return None
    return precision_file(option_of(PRECISION_FILE), str(name), path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unread:
    """Options that are not read and bear on bytes: option -> the settings that it may change."""

    options: Mapping[str, tuple[str, ...]]
    """Options whose words bear on them."""
    slips: Mapping[str, tuple[str, ...]]
    """Options that are an argument's name but for a letter or two; `open_points.py` names them."""

    @property
    def all(self) -> dict[str, tuple[str, ...]]:
        """The options of either kind that may change a setting."""
        slips = {option: settings for option, settings in self.slips.items() if settings}
        return {**self.options, **slips}


def _unread(run: Arguments, arguments: Mapping[str, Any], engine: Engine) -> _Unread:
    """Return the options that are not read here, nor by the table of the run's framework."""
    of_megatron = _without_framework_options(run, arguments)
    options: dict[str, tuple[str, ...]] = {}
    for name, settings in unread_options(of_megatron).items():
        if name not in engine.read:
            options[option_of(name)] = settings
    slips: dict[str, tuple[str, ...]] = {}
    if not run.has_every_default:
        for name, meant in misspelt(arguments).items():
            if name in of_megatron:
                slips[option_of(name)] = fields_of(meant)
    return _Unread(options=options, slips=slips)


def _without_framework_options(run: Arguments, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return arguments without those that the table of the run's framework reads."""
    if run.framework is None:
        return arguments
    own_names = run.framework.own_names
    return {name: value for name, value in arguments.items() if own_names(name) is None}


def _sections(
    engine: Engine, arguments: Mapping[str, Any], file: PrecisionFile | None
) -> dict[str, dict[str, Any]]:
    """Return section -> fields that an engine, a spec and a per-module recipe set."""
    sections: dict[str, dict[str, Any]] = {}
    for role, fields in engine.sections.items():
        sections[role] = dict(fields)
    model = sections.setdefault("model", {})
    layers = implementation(arguments)
    if engine.precision is not None:
        sections["mixed_precision"] = dict(engine.precision)
    if layers is not None:
        model["transformer_impl"] = layers
    if file is not None and file.content is not None:
        model["quant_recipe"] = file.content
    return sections


def _sentences(unread: _Unread) -> Iterator[str]:
    """Yield the sentences about options that are not read, but for misspelt ones."""
    options: list[str] = []
    for option in unread.options:
        if option not in unread.slips and option != SPLIT:
            options.append(option)
    if options:
        yield UNREAD.format(options=", ".join(options))
    if SPLIT in unread.all:
        yield UNREAD_SPLIT


def is_named(source: str) -> bool:
    """Return whether a source of arguments is read or named here ("--deepspeed_config ds.json")."""
    return dest(source.partition(" ")[0]) in NAMED

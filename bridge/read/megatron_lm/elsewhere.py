"""`Elsewhere`: what decides about a run of Megatron-LM besides its arguments.

Files, modules, an engine and other options do. Each is read, or named; where a source that is not
read would change the plan or the bytes, there is no plan or no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import bounded
from bridge.read.layer_source import implementation, layer_settings, unplanned_layers
from bridge.read.megatron_lm.arguments import Arguments
from bridge.read.megatron_lm.effects import is_engine
from bridge.read.megatron_lm.engine import NAME, Engine, engine_of, without_effect
from bridge.read.megatron_lm.engine_file import DEEPSPEED_FILE
from bridge.read.megatron_lm.flags import dest, fields_of, misspelt
from bridge.read.megatron_lm.precision_file import FIELD, PrecisionFile, precision_file
from bridge.read.megatron_lm.sections import Values
from bridge.read.megatron_lm.unread import unread_options

PRECISION_FILE = "te_precision_config_file"
NAMED = frozenset({PRECISION_FILE, DEEPSPEED_FILE})
"""Arguments that name a file, which is read or named here."""
SPLIT = "--pp-partition-method"
UNREAD = (
    "{options}: not read here; "
    "the layout, the layers or the bytes may be others than those that are counted."
)
OF_THE_SPLIT = (
    "--pp-partition-method: DeepSpeed splits the layers by it; "
    "Megatron-LM's even split counts here."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """What decides besides the arguments."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section -> fields that it sets, `mixed_precision` among them."""
    unknown: tuple[str, ...] = ()
    unplanned: str | None = None
    uncounted: tuple[str, ...] = ()
    opened: Mapping[str, str] = field(default_factory=dict)
    read_too: tuple[str, ...] = ()
    """As in `FileReading`."""


def elsewhere(run: Arguments, given: Values, path: str, *, mode: str) -> Elsewhere:
    """Return what decides about a run besides its arguments.

    Args:
        run: The arguments as they are written.
        given: The arguments by their names.
        path: Path of the run's file.
        mode: bf16, fp16 or fp32, as the arguments say.
    """
    arguments = given.values | given.unread
    engine = Engine()
    if is_engine(run):
        engine = engine_of(run, given.values, mode, path)
    layers = unplanned_layers(arguments)
    file = _precision_file(arguments, path)
    of_megatron = _without_those_of_the_framework(run, arguments)
    slips: dict[str, str] = {}
    if not run.has_end:
        slips = misspelt(arguments)
    slips = {name: meant for name, meant in slips.items() if name in of_megatron}
    unread = _unread(of_megatron, engine, slips)
    opened = dict(engine.opened)
    read_too = list(engine.read_too)
    unplanned = layers or engine.unplanned
    if layers is not None:
        opened |= dict.fromkeys(layer_settings(), layers.partition(":")[0])
    if file is not None and file.content is not None:
        read_too.append(file.sentence)
    elif file is not None:
        opened[FIELD] = f"{_option(PRECISION_FILE)} {arguments[PRECISION_FILE]}"
        unplanned = unplanned or file.sentence
    for option, settings in unread.items():
        for setting in settings:
            opened.setdefault(setting, option)
    unknown = [bounded(sentence) for sentence in (*engine.unknown, *_dead(run))]
    unknown += _sentences(unread, [_option(name) for name in slips])
    uncounted = list(unread)
    if is_engine(run):
        uncounted.insert(0, NAME)
    return Elsewhere(
        sections=_sections(engine, arguments, file),
        unknown=tuple(unknown),
        unplanned=None if unplanned is None else bounded(unplanned),
        uncounted=tuple(uncounted),
        opened=opened,
        read_too=tuple(map(bounded, read_too)),
    )


def _without_those_of_the_framework(
    run: Arguments, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return arguments without those that a framework's table reads."""
    if run.framework is None:
        return arguments
    own_names = run.framework.own_names
    return {name: value for name, value in arguments.items() if own_names(name) is None}


def _dead(run: Arguments) -> Iterator[str]:
    """Yield which arguments an engine leaves unread, as a sentence."""
    if not is_engine(run):
        return
    sentence = without_effect(run)
    if sentence is not None:
        yield sentence


def _precision_file(arguments: Mapping[str, Any], path: str) -> PrecisionFile | None:
    """Return the per-module recipe that arguments name by its path; None where they name none."""
    name = arguments.get(PRECISION_FILE)
    if not name:
        return None
    return precision_file(_option(PRECISION_FILE), str(name), path)


def _unread(
    arguments: Mapping[str, Any], engine: Engine, slips: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return each option that is not read -> the settings that it may change, which bear on bytes."""
    unread: dict[str, tuple[str, ...]] = {}
    for name, paths in unread_options(arguments).items():
        if name not in engine.read:
            unread[_option(name)] = paths
    for name, meant in slips.items():
        paths = fields_of(meant)
        if paths:
            unread[_option(name)] = paths
    return unread


def _sections(
    engine: Engine, arguments: Mapping[str, Any], file: PrecisionFile | None
) -> dict[str, dict[str, Any]]:
    """Return section -> fields that an engine, a spec and a per-module recipe set."""
    sections = {role: dict(fields) for role, fields in engine.sections.items()}
    model = sections.setdefault("model", {})
    layers = implementation(arguments)
    if engine.precision is not None:
        sections["mixed_precision"] = dict(engine.precision)
    if layers is not None:
        model["transformer_impl"] = layers
    if file is not None and file.content is not None:
        model["quant_recipe"] = file.content
    return sections


def _sentences(unread: Mapping[str, tuple[str, ...]], named: Sequence[str]) -> Iterator[str]:
    """Yield the sentences about options that are not read, but for those that are `named` already."""
    options = [option for option in unread if option not in named and option != SPLIT]
    if options:
        yield UNREAD.format(options=", ".join(options))
    if SPLIT in unread:
        yield OF_THE_SPLIT


def is_named(source: str) -> bool:
    """Return whether a source of arguments is read or named here ("--deepspeed_config ds.json")."""
    return dest(source.partition(" ")[0]) in NAMED


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

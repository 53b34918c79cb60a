"""`Elsewhere`: what decides about a run of Megatron-LM besides its arguments: files, modules, an engine, other options.

Each is read, or named; where one that is not read would change the plan or the bytes, there is no plan or no verdict.
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
UNREAD = "{options}: not read here; the layout, the layers or the bytes may be others than those that are counted."
OF_THE_SPLIT = "--pp-partition-method: DeepSpeed splits the layers by it; Megatron-LM's even split counts here."


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
    engine = engine_of(run, given.values, mode, path) if is_engine(run) else Engine()
    layers, file = unplanned_layers(arguments), _precision_file(arguments, path)
    slips = {} if run.has_end else misspelt(arguments)
    foreign = arguments
    if run.framework is not None:  # its names are read by its table
        foreign = {
            name: value
            for name, value in arguments.items()
            if run.framework.own_names(name) is None
        }
        slips = {name: meant for name, meant in slips.items() if name in foreign}
    unread = _unread(foreign, engine, slips)
    opened, read_too = dict(engine.opened), list(engine.read_too)
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
    return Elsewhere(
        sections=_sections(engine, arguments, file),
        unknown=(
            *map(bounded, [*engine.unknown, *_dead(run)]),
            *_sentences(unread, [_option(name) for name in slips]),
        ),
        unplanned=bounded(unplanned) if unplanned is not None else None,
        uncounted=(*([NAME] if is_engine(run) else []), *unread),
        opened=opened,
        read_too=tuple(map(bounded, read_too)),
    )


def _dead(run: Arguments) -> Iterator[str]:
    """Yield which arguments an engine leaves unread, as a sentence."""
    sentence = without_effect(run) if is_engine(run) else None
    if sentence is not None:
        yield sentence


def _precision_file(arguments: Mapping[str, Any], path: str) -> PrecisionFile | None:
    """Return the per-module recipe that arguments name by its path; None where they name none."""
    name = arguments.get(PRECISION_FILE)
    return precision_file(_option(PRECISION_FILE), str(name), path) if name else None


def _unread(
    arguments: Mapping[str, Any], engine: Engine, slips: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return each option that is not read and may bear on the bytes -> the settings that it may change."""
    found = {
        name: paths for name, paths in unread_options(arguments).items() if name not in engine.read
    }
    for name, meant in slips.items():
        if fields_of(meant):
            found[name] = fields_of(meant)
    return {_option(name): paths for name, paths in found.items()}


def _sections(
    engine: Engine, arguments: Mapping[str, Any], file: PrecisionFile | None
) -> dict[str, dict[str, Any]]:
    """Return section -> fields that an engine, a spec and a per-module recipe set."""
    sections = {role: dict(fields) for role, fields in engine.sections.items()}
    model, layers = sections.setdefault("model", {}), implementation(arguments)
    if engine.precision is not None:
        sections["mixed_precision"] = dict(engine.precision)
    if layers is not None:
        model["transformer_impl"] = layers
    if file is not None and file.content is not None:
        model["quant_recipe"] = file.content
    return sections


def _sentences(unread: Mapping[str, tuple[str, ...]], named: Sequence[str]) -> Iterator[str]:
    """Yield what is said of options that are not read, but for those that are `named` already."""
    options = [option for option in unread if option not in named and option != SPLIT]
    if options:
        yield UNREAD.format(options=", ".join(options))
    if SPLIT in unread:
        yield OF_THE_SPLIT


def is_named(source: str) -> bool:
    """Return whether another source of arguments ("--deepspeed_config ds.json") is one that is read or named here."""
    return dest(source.partition(" ")[0]) in NAMED


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

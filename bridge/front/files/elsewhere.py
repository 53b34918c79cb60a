"""`Elsewhere`: what decides about a run of Megatron-LM besides its arguments: files, modules, an engine, other options.

Each is read, or named; where one that is not read would change the plan or the bytes, there is no plan or no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import bounded
from bridge.front.files.deepspeed_engine import NAME, Engine, engine_of
from bridge.front.files.layer_source import implementation, layer_settings, unplanned_layers
from bridge.front.files.precision_file import FIELD, precision_file
from bridge.interop.megatron_lm.arguments import Arguments
from bridge.interop.megatron_lm.effects import DEEPSPEED_FILE, is_engine
from bridge.interop.megatron_lm.flags import dest, fields_of, misspelt
from bridge.interop.megatron_lm.sections import Values
from bridge.interop.megatron_lm.unread import unread_options

PRECISION_FILE = "te_precision_config_file"
NAMED = frozenset({PRECISION_FILE, DEEPSPEED_FILE})
"""Arguments that name a file, which is read or named here."""
SPLIT = "pp_partition_method"
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
    sections = {role: dict(fields) for role, fields in engine.sections.items()}
    model = sections.setdefault("model", {})
    if engine.precision is not None:
        sections["mixed_precision"] = dict(engine.precision)
    layers = implementation(arguments)
    if layers is not None:
        model["transformer_impl"] = layers
    unplanned, opened, read_too = unplanned_layers(arguments), dict(engine.opened), engine.read_too
    if unplanned is not None:
        opened |= dict.fromkeys(layer_settings(), unplanned.partition(":")[0])
    unplanned = unplanned or engine.unplanned
    file = arguments.get(PRECISION_FILE)
    if file:
        found = precision_file(f"--{_written(PRECISION_FILE)}", str(file), path)
        if found.content is None:
            unplanned = unplanned or found.sentence
            opened[FIELD] = f"--{_written(PRECISION_FILE)} {file}"
        else:
            model["quant_recipe"] = found.content
            read_too += (found.sentence,)
    unread = {name: paths for name, paths in unread_options(arguments).items() if name not in engine.read}
    slips = {} if run.has_end else misspelt(arguments)
    unread |= {name: fields_of(meant) for name, meant in slips.items() if fields_of(meant)}
    for name, paths in unread.items():
        for one in paths:
            opened.setdefault(one, f"--{_written(name)}")
    named = [f"--{_written(name)}" for name in unread if name != SPLIT and name not in slips]
    unknown = [*map(bounded, engine.unknown), *([UNREAD.format(options=", ".join(named))] if named else [])]
    if SPLIT in unread:
        unknown.append(OF_THE_SPLIT)
    uncounted = [f"--{_written(name)}" for name in unread]
    if is_engine(run):
        uncounted.insert(0, NAME)
    return Elsewhere(
        sections=sections,
        unknown=tuple(unknown),
        unplanned=bounded(unplanned) if unplanned is not None else None,
        uncounted=tuple(uncounted),
        opened=opened,
        read_too=tuple(map(bounded, read_too)),
    )


def is_named(source: str) -> bool:
    """Return whether another source of arguments ("--deepspeed_config ds.json") is one that is read or named here."""
    return dest(source.partition(" ")[0]) in NAMED


def _written(name: str) -> str:
    return name.replace("_", "-")

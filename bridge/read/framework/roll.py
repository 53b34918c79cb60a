"""ROLL's files of a run: YAML with a section for each worker, and launch scripts of its pipelines.

The strategy of `actor_train` chooses the engine: `megatron_train` trains on Megatron Core by mcore_adapter, which is a
part of ROLL. It makes the model's config of the checkpoint, and writes `strategy_config` over it.

Source: alibaba/ROLL 8eb27cc2 roll/distributed/strategy/megatron_strategy.py; roll/configs/worker_config.py;
mcore_adapter/src/mcore_adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from bridge.errors import PayloadError, UnreadFileError
from bridge.preflight.file_reading import MEGATRON_CORE, FileReading, RunChoice
from bridge.read import framework_signs
from bridge.read.framework.checkpoint import CONFIG_FILE, UNNAMED_CHECKPOINT, Checkpoint
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.tree import TreeReading, is_late, read_tree
from bridge.read.framework.reading_from_tree import build_reading_from_tree
from bridge.read.launch.launch import Launch
from bridge.read.text.inherited_config import ConfigTree, resolve_interpolations
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.repository_files import find_repository_file

TABLE_NAME = "roll"

# Keys of its files.
ACTOR = "actor_train"
STRATEGY = f"{ACTOR}.strategy_args.strategy_name"
SETTINGS = f"{ACTOR}.strategy_args.strategy_config"
DTYPE = f"{ACTOR}.model_args.dtype"
MODEL_NAMES = (f"{ACTOR}.model_args.model_name_or_path", "pretrain")
GPUS = f"{ACTOR}.device_mapping"

# Values.
MEGATRON = "megatron_train"
DEFAULT_DTYPE = "bf16"
MAPPED_RANGE = re.compile(r"list\(range\((\d+),\s*(\d+)\)\)")
"""Devices of a worker, as its files list them."""
HERE = re.compile(r"(?P<name>.+?)(?:@_here_)?")
"""A file that `defaults` names, whose content is laid below the top of the file."""
BRIDGE = "mcore_adapter"

# Sentences.
NUMBER_OF_GPUS = (
    "The number of GPUs: {key} has {count} of them. Add --target h100x{count}, for example."
)
BASE_NOT_READ = "defaults: {name} may state settings of the actor, and is not read."
OTHER_STRATEGY = (
    "{path}: states {key}={strategy}, which trains without Megatron Core. Give a run of the strategy "
    f"{MEGATRON}."
)
NO_STRATEGY = "{path}: does not state {key}, and describes no training that is read. Give a file that states it."
NO_FILE = "{path}: starts {name} with the file {file}, which is not found from here. Give that YAML file itself."


def read(whole: Mapping[str, object], path: Path, choice: RunChoice) -> FileReading:
    """Return what a file says of a run.

    Raises:
        UnreadFileError: Its actor trains without Megatron Core.
    """
    choice.refuse_checkpoint(path)
    values = resolve_interpolations(dict(whole))
    _refuse_other_trainers(whole, values, path)
    table = load_framework_table(TABLE_NAME)
    found = read_tree(table, values)
    _read_mode(found, values)
    _read_batch(found, values)
    for role in ("model", "optimizer", "ddp"):
        found.sections.setdefault(role, {})
    reading = build_reading_from_tree(table, found, _checkpoint(values))
    return replace(
        reading,
        base=MEGATRON_CORE,
        is_of_checkpoint=False,
        unknown=(*_unknown(values), *_unread_bases(whole, path), *reading.unknown),
    )


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: the YAML file that its two options name.

    Raises:
        UnreadFileError: The file is not found, or its actor trains without Megatron Core.
    """
    options = {str(word): str(value) for word, value in pairwise(launch.arguments)}
    folder, stem = options.get("--config_path", ""), options.get("--config_name", "")
    file = f"{folder}/{stem.removesuffix('.yaml')}.yaml"
    path = find_repository_file(file, script)
    if path is None:
        sentence = NO_FILE.format(path=script, name=launch.name, file=file)
        raise UnreadFileError(sentence, kind="its file is not found")
    try:
        whole = Document.load(path).mapping
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    reading = read(whole, path, choice)
    exported = {
        name: str(value) for name, value in launch.environment.items() if not value.is_unknown
    }
    return replace(
        reading,
        environment=exported,
        read_too=(*reading.read_too, f"--config_name {stem}: read from {path}."),
    )


def _refuse_other_trainers(whole: Mapping[str, object], values: ConfigTree, path: Path) -> None:
    """Raise UnreadFileError where the actor does not train on Megatron Core, or another worker trains."""
    strategy = get_dotted_value(values, STRATEGY)
    if strategy == MEGATRON:
        return
    if strategy is not None:
        sentence = OTHER_STRATEGY.format(path=path, key=STRATEGY, strategy=strategy)
        raise UnreadFileError(sentence, kind="ROLL without Megatron Core")
    document = Document(path=str(path), text="", kind="yaml", of=whole)
    found = framework_signs.recognise_file(document)
    if found is not None:
        sentence = replace(found, tree="").refusal(str(path))
        raise UnreadFileError(sentence, kind=f"looks like {found.name}")
    raise UnreadFileError(NO_STRATEGY.format(path=path, key=STRATEGY), kind="states no strategy")


def _read_mode(found: TreeReading, values: ConfigTree) -> None:
    """Write the switches of the mode: those of the strategy, or the dtype of the actor's model."""
    stated = {name: get_dotted_value(values, f"{SETTINGS}.{name}") for name in ("bf16", "fp16")}
    dtype = get_dotted_value(values, DTYPE) or DEFAULT_DTYPE
    for name, value in stated.items():
        if value is not None:
            found.put(f"model.{name}", value, f"{SETTINGS}.{name}")
        elif is_late(dtype):
            found.put(f"model.{name}", dtype, DTYPE)
        else:
            found.put(f"model.{name}", dtype == name, DTYPE)


def _read_batch(found: TreeReading, values: ConfigTree) -> None:
    """Write the tokens of a micro-batch: samples of the greatest length, or samples up to a number of tokens."""
    tokens = get_dotted_value(values, f"{ACTOR}.max_tokens_per_microbatch_in_train")
    if (
        get_dotted_value(values, f"{ACTOR}.use_dynamic_batching_in_train") is True
        and tokens is not None
    ):
        found.put("model.seq_length", tokens)
        found.put("train.micro_batch_size", 1)
        return
    length = get_dotted_value(values, "sequence_length")
    if length is not None:
        found.put("model.seq_length", length)


def _checkpoint(values: ConfigTree) -> Checkpoint:
    """Return the checkpoint of the actor, whose config.json mcore_adapter reads by rules that are not known here."""
    for key in MODEL_NAMES:
        name = get_dotted_value(values, key)
        if name is not None:
            return Checkpoint(source=f"{CONFIG_FILE} of {name}", bridge=BRIDGE)
    return Checkpoint(source=f"{CONFIG_FILE} of {UNNAMED_CHECKPOINT}", bridge=BRIDGE)


def _unknown(values: ConfigTree) -> Iterator[str]:
    """Yield what the file leaves open, as sentences."""
    mapped = MAPPED_RANGE.fullmatch(str(get_dotted_value(values, GPUS)))
    if mapped is not None:
        yield NUMBER_OF_GPUS.format(key=GPUS, count=int(mapped[2]) - int(mapped[1]))


def _unread_bases(whole: Mapping[str, object], path: Path) -> Iterator[str]:
    """Yield a sentence for each file that `defaults` names and that may state settings of the actor."""
    names = whole.get("defaults")
    if not isinstance(names, list):
        return
    for entry in names:
        name = HERE.fullmatch(str(entry))
        if name is None or name["name"] == "_self_":
            continue
        try:
            base = Document.load(path.parent / f"{name['name']}.yaml").mapping
        except PayloadError:
            yield BASE_NOT_READ.format(name=entry)
            continue
        if ACTOR in base:
            yield BASE_NOT_READ.format(name=entry)

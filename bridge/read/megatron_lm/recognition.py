"""How a document is recognised as Megatron-LM's: a script, a log, a checkpoint, or a file of arguments."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bridge.read import framework_signs
from bridge.read.foreign.document_signs import Recognition
from bridge.read.launch.command_line_rows import MEGATRON_ARGUMENTS
from bridge.read.launch.launch import Launch
from bridge.read.launch.syntax_tree import MODE_OPTIONS
from bridge.read.megatron_lm.flags import FLAG_OF_NAME, OTHER_SETTINGS, TABLE, get_dest
from bridge.read.megatron_lm.printed_arguments import BLOCK_START, LOG_EVIDENCE
from bridge.read.megatron_lm.written_arguments import MEGATRON_PROGRAMS, find_argument_groups
from bridge.read.text.checkpoint_arguments import CHECKPOINT_SUFFIX
from bridge.read.text.document import Document

STRONG_FLAGS = re.compile(TABLE.data["strong"])
"""Flags that Megatron-LM's parser alone has."""
ARGUMENT_NAMES = frozenset(TABLE.data["arguments"].split())
"""Names of arguments that a bare mapping is recognised by, where it has several."""
FOREIGN_KEYS = frozenset(TABLE.data["others"].split())
"""Keys that the files of other systems have."""
MIN_NAMES_WITH_PRECISION = 4
"""Names that a bare mapping needs where a name bears on precision."""
MIN_NAMES = 12
"""Names that it needs where no name does: four names of a model's sizes are in any system's file."""
FLAGSCALE_NAME = "FlagScale"
"""Fork of Megatron-LM that makes its arguments of every key in `system`, `model` and `data`."""
DISTINCTIVE_ARGUMENTS = (
    "tensor_model_parallel_size",
    "micro_batch_size",
    "accumulate_allreduce_grads_in_fp32",
    "fp8_format",
    "num_layers",
)
"""Arguments of which two recognise a mapping."""


def is_per_module_recipe(content: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is the content of a file for `--te-precision-config-file`."""
    return all(isinstance(content.get(key), Mapping) for key in ("configs", "matchers"))


def is_megatron_launch(launch: Launch) -> bool:
    """Return whether a launch starts a program of Megatron-LM's, or has several flags that its parser knows.

    A single flag that programs of other systems have too is no evidence: `--seq-length`, and
    `--bf16` or `--fp16` without a value.
    """
    framework = framework_signs.recognise_launch(launch)
    if framework is not None and framework.table:
        return True
    if framework is not None and not framework.is_fallback:
        return False
    if MEGATRON_PROGRAMS.search(launch.program) is not None or "Megatron-LM" in launch.program:
        return True
    count = len(MEGATRON_ARGUMENTS & launch.flags)
    if count > 1:
        return True
    is_switched = _has_mode(launch)
    if not launch.line:
        return count > 0 or is_switched
    if not is_switched:
        return False
    return count > 0 or any(get_dest(flag) in ARGUMENT_NAMES for flag in launch.flags)


def _has_mode(launch: Launch) -> bool:
    """Return whether a launch has `--bf16` or `--fp16` without a value."""
    for word, value in pairwise((*launch.arguments, "")):
        if word in MODE_OPTIONS and value.lower() not in ("true", "false"):
            return True
    return False


def recognise(document: Document) -> Recognition | None:
    """Return why a document is taken for Megatron-LM's; None for another system's."""
    if document.kind in ("shell", "text", "env"):
        return _recognise_text(document)
    return _recognise_mapping(document)


def _recognise_text(document: Document) -> Recognition | None:
    if BLOCK_START.search(document.text):
        if document.path.endswith(CHECKPOINT_SUFFIX):
            return Recognition(0.97, "is a checkpoint with the arguments of Megatron-LM")
        return Recognition(0.97, LOG_EVIDENCE)
    flags = sorted(set(STRONG_FLAGS.findall(document.text)))
    if flags:
        evidence = f"has {', '.join(flags[:3])}, which Megatron-LM's parser reads"
        return Recognition(min(0.95, 0.5 + 0.15 * len(flags)), evidence)
    is_switched = re.search(r"\s--(bf16|fp16)\b(?! +(?:(?i:true|false)))", document.text)
    if document.kind == "shell" and is_switched:
        return Recognition(
            0.35, "is a shell script with --bf16 or --fp16 as Megatron-LM takes them"
        )
    return None


def _recognise_mapping(document: Document) -> Recognition | None:
    """Return why a mapping is taken for Megatron-LM's, by its form or by the names of its keys."""
    return _recognise_by_form(document) or _recognise_by_names(document.mapping)


def _recognise_by_form(document: Document) -> Recognition | None:
    top = document.mapping
    if is_per_module_recipe(top):
        evidence = "has `configs` and `matchers`, as files for --te-precision-config-file do"
        return Recognition(0.95, evidence)
    if {"language_model", "model_parallel"} <= top.keys():
        evidence = "has `language_model` and `model_parallel`, as files for --yaml-cfg do"
        return Recognition(0.95, evidence)
    framework = framework_signs.recognise_file(document)
    if framework is not None and framework.name == FLAGSCALE_NAME and framework.is_converted:
        return Recognition(0.9, framework.evidence)
    groups = find_argument_groups(top)
    if groups:
        return Recognition(0.9, f"has `{groups[0].name}`, a mapping of Megatron-LM's arguments")
    if top and all(str(key).startswith("--") for key in top):
        return Recognition(0.8, "every key is a command-line flag")
    return None


def _recognise_by_names(top: Mapping[Any, Any]) -> Recognition | None:
    sure = [f"`{key}`" for key in DISTINCTIVE_ARGUMENTS if key in top]
    if len(sure) > 1:
        return Recognition(0.7, f"has {' and '.join(sure[:2])}, Megatron-LM's arguments")
    if any(isinstance(value, dict) for value in top.values()):
        return None
    keys = list(map(str, top))
    arguments = [f"`{key}`" for key in keys if key in ARGUMENT_NAMES]
    is_enough = len(arguments) >= _get_min_names(keys) and 2 * len(arguments) > len(top)
    if is_enough and FOREIGN_KEYS.isdisjoint(keys):
        evidence = f"has {', '.join(arguments[:3])} and more of Megatron-LM's arguments, bare"
        return Recognition(0.6, evidence)
    return None


def _get_min_names(keys: Sequence[str]) -> int:
    """Return how many names of arguments a mapping needs, by whether one bears on precision."""
    for key in keys:
        if get_dest(key) in FLAG_OF_NAME or get_dest(key) in OTHER_SETTINGS:
            return MIN_NAMES_WITH_PRECISION
    return MIN_NAMES

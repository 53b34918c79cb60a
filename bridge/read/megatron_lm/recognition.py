"""How a document is recognised as Megatron-LM's: a script, a log, a checkpoint, or a file of arguments."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bridge.read import framework_signs
from bridge.read.foreign.document_signs import Recognised
from bridge.read.launch.launches import Launch
from bridge.read.launch.script import MODES
from bridge.read.launch.signs import MEGATRON_ARGUMENTS
from bridge.read.megatron_lm.arguments import PROGRAMS, argument_groups
from bridge.read.megatron_lm.flags import BY_NAME, OTHER_SETTINGS, TABLE, dest
from bridge.read.megatron_lm.printed import EVIDENCE, START
from bridge.read.text.checkpoint_arguments import CHECKPOINT_SUFFIX
from bridge.read.text.document import Document

STRONG = re.compile(TABLE.data["strong"])
"""Flags that Megatron-LM's parser alone has."""
ARGUMENTS = frozenset(TABLE.data["arguments"].split())
"""Names of arguments that a bare mapping is recognised by, where it has several."""
OTHERS = frozenset(TABLE.data["others"].split())
"""Keys that the files of other systems have."""
FEW = 4
"""Names that a bare mapping needs where a name bears on precision."""
MANY = 12
"""Names that it needs where no name does: four names of a model's sizes are in any system's file."""
FLAGSCALE = "FlagScale"
"""Fork of Megatron-LM that makes its arguments of every key in `system`, `model` and `data`."""
SURE = (
    "tensor_model_parallel_size",
    "micro_batch_size",
    "accumulate_allreduce_grads_in_fp32",
    "fp8_format",
    "num_layers",
)
"""Arguments of which two recognise a mapping."""


def is_per_module(content: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is the content of a file for `--te-precision-config-file`."""
    return all(isinstance(content.get(key), Mapping) for key in ("configs", "matchers"))


def is_megatron(launch: Launch) -> bool:
    """Return whether a launch starts a program of Megatron-LM's, or has several flags that its parser knows.

    A single flag that programs of other systems have too is no evidence: `--seq-length`, and
    `--bf16` or `--fp16` without a value.
    """
    framework = framework_signs.recognise_launch(launch)
    if framework is not None and framework.table:
        return True
    if framework is not None and not framework.is_fallback:
        return False
    if PROGRAMS.search(launch.program) is not None or "Megatron-LM" in launch.program:
        return True
    count = len(MEGATRON_ARGUMENTS & launch.flags)
    if count > 1:
        return True
    is_switched = _has_a_mode(launch)
    if not launch.line:
        return count > 0 or is_switched
    if not is_switched:
        return False
    return count > 0 or any(dest(flag) in ARGUMENTS for flag in launch.flags)


def _has_a_mode(launch: Launch) -> bool:
    """Return whether a launch has `--bf16` or `--fp16` without a value."""
    for word, value in pairwise((*launch.arguments, "")):
        if word in MODES and value.lower() not in ("true", "false"):
            return True
    return False


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for Megatron-LM's; None for another system's."""
    if document.kind in ("shell", "text", "env"):
        return _of_text(document)
    return _of_mapping(document)


def _of_text(document: Document) -> Recognised | None:
    if START.search(document.text):
        if document.path.endswith(CHECKPOINT_SUFFIX):
            return Recognised(0.97, "is a checkpoint with the arguments of Megatron-LM")
        return Recognised(0.97, EVIDENCE)
    flags = sorted(set(STRONG.findall(document.text)))
    if flags:
        evidence = f"has {', '.join(flags[:3])}, which Megatron-LM's parser reads"
        return Recognised(min(0.95, 0.5 + 0.15 * len(flags)), evidence)
    is_switched = re.search(r"\s--(bf16|fp16)\b(?! +(?:(?i:true|false)))", document.text)
    if document.kind == "shell" and is_switched:
        return Recognised(0.35, "is a shell script with --bf16 or --fp16 as Megatron-LM takes them")
    return None


def _of_mapping(document: Document) -> Recognised | None:
    """Return why a mapping is taken for Megatron-LM's, by its form or by the names of its keys."""
    return _by_form(document) or _by_names(document.mapping)


def _by_form(document: Document) -> Recognised | None:
    top = document.mapping
    if is_per_module(top):
        evidence = "has `configs` and `matchers`, as files for --te-precision-config-file do"
        return Recognised(0.95, evidence)
    if {"language_model", "model_parallel"} <= top.keys():
        evidence = "has `language_model` and `model_parallel`, as files for --yaml-cfg do"
        return Recognised(0.95, evidence)
    framework = framework_signs.recognise_file(document)
    if framework is not None and framework.name == FLAGSCALE and framework.is_converted:
        return Recognised(0.9, framework.evidence)
    groups = argument_groups(top)
    if groups:
        return Recognised(0.9, f"has `{groups[0].name}`, a mapping of Megatron-LM's arguments")
    if top and all(str(key).startswith("--") for key in top):
        return Recognised(0.8, "every key is a command-line flag")
    return None


def _by_names(top: Mapping[Any, Any]) -> Recognised | None:
    sure = [f"`{key}`" for key in SURE if key in top]
    if len(sure) > 1:
        return Recognised(0.7, f"has {' and '.join(sure[:2])}, Megatron-LM's arguments")
    if any(isinstance(value, dict) for value in top.values()):
        return None
    keys = list(map(str, top))
    arguments = [f"`{key}`" for key in keys if key in ARGUMENTS]
    is_enough = len(arguments) >= _fewest(keys) and 2 * len(arguments) > len(top)
    if is_enough and OTHERS.isdisjoint(keys):
        evidence = f"has {', '.join(arguments[:3])} and more of Megatron-LM's arguments, bare"
        return Recognised(0.6, evidence)
    return None


def _fewest(keys: Sequence[str]) -> int:
    """Return how many names of arguments a mapping needs, by whether one bears on precision."""
    for key in keys:
        if dest(key) in BY_NAME or dest(key) in OTHER_SETTINGS:
            return FEW
    return MANY

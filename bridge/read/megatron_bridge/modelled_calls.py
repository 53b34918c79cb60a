"""`evaluate_modelled_call`: the calls that are modelled here, so that their source is not needed.

They make precisions and models of checkpoints, start a run, or write a command line over one.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.read.foreign.table import load_table
from bridge.read.megatron_bridge.source_library import PACKAGE
from bridge.read.megatron_bridge.values import (
    Class,
    FieldValue,
    Function,
    ImportedName,
    Method,
    Object,
    Value,
    is_open,
    is_plain,
)
from bridge.read.text.python_calls import format_source
from bridge.registry.registry import REGISTRY

PRECISION_MODULES = (
    f"{PACKAGE}.training.mixed_precision",
    "bridge.training.mixed_precision",
    "bridge",
)
"""The module of its precisions, and those of this project, which have the same functions."""
PRECISION_CLASS = f"{PRECISION_MODULES[0]}.MixedPrecisionConfig"
BENCHMARK_PRECISION_FUNCTION = "_perf_precision"
"""Function of its benchmarks that makes a precision of a word; `BENCHMARK_PRECISIONS` has the precisions."""
BENCHMARK_PRECISIONS: Mapping[str, Mapping[str, Any]] = load_table("megatron_bridge").data[
    "precisions of benchmarks"
]
RECIPE_ORIGIN = "recipe {name}"
"""Origin of a field that a recipe states."""
CONVERTER_CLASS = "AutoBridge"
"""Class that makes a model of a checkpoint of Hugging Face."""
CHECKPOINT_LOADERS = ("from_hf_pretrained", "from_hf_config", "from_auto_config")
"""Its functions that take one."""
CONFIG_LOADERS = CHECKPOINT_LOADERS[1:]
"""Those that take a config, which the program may have changed."""
MODEL_METHODS = ("to_megatron_provider", "get_model_config", "to_text_provider", "provider_bridge")
"""Methods that return the config of such a model."""
CHECKPOINT_NOUN = "the checkpoint "
"""Beginning of the noun for a checkpoint that decides a model."""
OF_CONFIG = "of the config "
"""What stands behind it where the program hands over a config."""
CHECKPOINT_MODEL_DEFAULTS: Mapping[str, Value] = {
    "cuda_graph_impl": "none",
    "cuda_graph_scope": None,
    "use_te_rng_tracker": False,
    "use_transformer_engine_op_fuser": False,
}
"""Fields of a checkpoint's model that no converter sets, with their defaults.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987d src/megatron/bridge/models; gpt_provider.py: GPTModelProvider.
"""
MODULE_ROWS_FUNCTION = "RecipeConfig.from_config_dict"
"""Function of Megatron Core that makes the rows of single modules of a mapping."""
START_FUNCTIONS = (f"{PACKAGE}.training.pretrain.pretrain", f"{PACKAGE}.training.finetune.finetune")
"""Functions that start a run with a container."""
OVERRIDES_MODULE = f"{PACKAGE}.training.utils.omegaconf_utils"
"""Module whose functions write a command line over a container."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call with the values of its arguments."""

    node: ast.Call
    called: Value
    arguments: Sequence[Value]
    options: Mapping[str, Value]
    """Its keyword arguments."""
    origin: str
    """Where it stands."""

    @property
    def path(self) -> str:
        """Import path of the function or class that is called; empty for others."""
        if isinstance(self.called, Function):
            return f"{self.called.module.name}.{self.called.node.name}"
        if isinstance(self.called, Class | ImportedName):
            return self.called.path
        return ""

    @property
    def first(self) -> Value:
        """The first argument, or the one of the name `config`."""
        if self.arguments:
            return self.arguments[0]
        return self.options.get("config", Object(decider=f"`{format_source(self.node)}`"))

    @property
    def stated(self) -> dict[str, FieldValue]:
        """The keyword arguments as the fields of an object."""
        fields: dict[str, FieldValue] = {}
        for name, value in self.options.items():
            fields[name] = FieldValue(value=value, origin=self.origin)
        return fields


@dataclass(kw_only=True, slots=True)
class Starts:
    """What a program does with its containers in the end."""

    containers: list[Value] = field(default_factory=list)
    """Those with which it starts a run."""
    is_overridden: bool = False
    """It writes its command line over one."""


NOT_MODELLED = object()
"""The answer about any other call."""


def evaluate_modelled_call(call: Call, starts: Starts) -> Value:
    """Return what a modelled call makes; `NOT_MODELLED` for any other."""
    path = call.path
    if path in START_FUNCTIONS:
        starts.containers.append(call.first)
        return None
    if path.startswith(OVERRIDES_MODULE):
        starts.is_overridden = True
        return call.first
    if path.endswith(MODULE_ROWS_FUNCTION) and is_plain(call.first):
        return call.first
    module, _, name = path.rpartition(".")
    if module in PRECISION_MODULES:
        return _make_precision(call, name)
    if (
        name == BENCHMARK_PRECISION_FUNCTION
        and path.startswith(PACKAGE)
        and isinstance(call.called, ImportedName)
    ):
        return _make_benchmark_precision(call)
    *_, holder, name = ("", *path.split("."))
    if holder == CONVERTER_CLASS and name in CHECKPOINT_LOADERS:
        return Object(
            kind=CONVERTER_CLASS, decider=f"{CHECKPOINT_NOUN}{_describe_checkpoint(call)}"
        )
    if isinstance(call.called, Method) and isinstance(call.called.holder, Object):
        converter = call.called.holder
        if converter.kind == CONVERTER_CLASS or call.called.name in MODEL_METHODS:
            return Object(decider=converter.decider or f"`{format_source(call.node)}`")
    return NOT_MODELLED


def is_checkpoint_model(holder: Object) -> bool:
    """Return whether an object is the config of a model that a checkpoint decides."""
    return not holder.kind and holder.decider.startswith(CHECKPOINT_NOUN)


def is_config_model(holder: Object) -> bool:
    """Return whether a model is made of a config that the program hands over, and may have changed."""
    return holder.decider.startswith(f"{CHECKPOINT_NOUN}{OF_CONFIG}")


def _describe_checkpoint(call: Call) -> str:
    """Return the checkpoint that a converter takes, as a noun behind "the checkpoint"."""
    if isinstance(call.first, str):
        return call.first
    if call.path.rpartition(".")[2] in CONFIG_LOADERS:
        return f"{OF_CONFIG}in `{format_source(call.node)}`"
    if is_open(call.first):
        return f"that {call.first.decider.removesuffix(', which only the run knows,')} names"
    return "of the run"


def _make_precision(call: Call, name: str) -> Value:
    """Return the precision that a function or the class of the module makes."""
    if name == "MixedPrecisionConfig":
        return Object(kind=PRECISION_CLASS, fields=call.stated)
    if name == "get_mixed_precision_config":
        if not isinstance(call.first, str):
            return call.first
        name = call.first
    elif call.arguments or call.options:
        return NOT_MODELLED
    if name not in REGISTRY:
        return Object(decider=f"the recipe {name!r}, which is not registered here,")
    return _make_recipe_precision(name)


def _make_benchmark_precision(call: Call) -> Value:
    """Return the precision that the function of the benchmarks makes."""
    word = call.first
    if not isinstance(word, str) or word not in BENCHMARK_PRECISIONS:
        return NOT_MODELLED
    row = BENCHMARK_PRECISIONS[word]
    precision = _make_recipe_precision(row["recipe"])
    for name, value in row["fields"].items():
        precision.fields[name] = FieldValue(value=value, origin=call.origin)
    return precision


def _make_recipe_precision(name: str) -> Object:
    """Return the precision of a registered recipe."""
    origin = RECIPE_ORIGIN.format(name=name)
    fields: dict[str, FieldValue] = {}
    for field_name, value in REGISTRY.get(name).to_dict().items():
        fields[field_name] = FieldValue(value=value, origin=origin)
    return Object(kind=PRECISION_CLASS, recipe=name, fields=fields)

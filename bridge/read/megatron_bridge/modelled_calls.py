"""`evaluate_modelled_call`: calls whose result is known without the source of the function.

They make precisions and models of checkpoints, start a run, or write a command line over a
container.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    strip_late_clause,
)
from bridge.read.text.python_calls import format_source
from bridge.registry.registry import REGISTRY

PRECISION_MODULES = (
    f"{PACKAGE}.training.mixed_precision",
    "bridge.training.mixed_precision",
    "bridge",
)
"""Megatron Bridge's module of precisions, and those of this project, which have the same functions."""
PRECISION_CLASS = f"{PRECISION_MODULES[0]}.MixedPrecisionConfig"
BENCHMARK_PRECISION_FUNCTION = "_perf_precision"
"""Function of Megatron Bridge's benchmarks that makes a precision of a word."""
RECIPE_ORIGIN = "recipe {name}"
"""Origin of a field that a recipe states, in the place of a statement."""
CONVERTER_CLASS = "AutoBridge"
"""Class that makes a model of a Hugging Face checkpoint."""
CONFIG_LOADER = "from_hf_config"
"""Function of the class that takes a config, which the program may have changed."""
CHECKPOINT_LOADERS = ("from_hf_pretrained", CONFIG_LOADER)
"""Functions of the class that take a checkpoint or its config."""
TEXT_MODEL_METHOD = "to_text_provider"
"""Method of such a model that returns the config of its language model."""
CHECKPOINT_PREFIX = "the checkpoint "
"""Beginning of the decider of a model that a checkpoint makes."""
CONFIG_PREFIX = "of the config "
"""Text after `CHECKPOINT_PREFIX` if the program passes a config."""
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
"""Function of Megatron Core that makes a per-module recipe of a mapping. The mapping stands for its result."""
START_FUNCTIONS = (f"{PACKAGE}.training.pretrain.pretrain", f"{PACKAGE}.training.finetune.finetune")
"""Functions that start a run with a container."""
OVERRIDES_MODULE = f"{PACKAGE}.training.utils.omegaconf_utils"
"""Module whose functions write a command line over a container."""


class _BenchmarkPrecision(NamedTuple):
    """A precision of Megatron Bridge's benchmarks."""

    recipe: str
    """Name of the recipe that it starts from."""
    fields: Mapping[str, object]
    """Fields that are set on the recipe."""


BENCHMARK_PRECISIONS = {
    word: _BenchmarkPrecision(**row)
    for word, row in load_table("megatron_bridge").data["precisions of benchmarks"].items()
}
"""Word of a benchmark -> its precision."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call with the values of its arguments."""

    node: ast.Call
    called: Value
    arguments: Sequence[Value]
    options: Mapping[str, Value]
    """The keyword arguments."""
    origin: str
    """The place of the call, as in `FieldValue.origin`."""

    @property
    def path(self) -> str:
        """Import path of the function or class that is called; empty for any other value."""
        if isinstance(self.called, Function | Class | ImportedName):
            return self.called.path
        return ""

    @property
    def first(self) -> Value:
        """The first argument, or the keyword argument `config`; an open value without both."""
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
    """The containers with which a program starts a run."""

    containers: list[Value] = field(default_factory=list)
    is_overridden: bool = False
    """Whether the program writes its command line over a container."""


NOT_MODELLED = object()
"""The result of a call that is not modelled here."""


def evaluate_modelled_call(call: Call, starts: Starts) -> Value:
    """Return the result of a call; `NOT_MODELLED` for a call that is not modelled here.

    Args:
        starts: The containers with which the program starts a run, to which a start is added.
    """
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
    is_benchmark = name == BENCHMARK_PRECISION_FUNCTION and path.startswith(PACKAGE)
    if is_benchmark and isinstance(call.called, ImportedName):
        return _make_benchmark_precision(call)
    return _evaluate_converter_call(call)


def _evaluate_converter_call(call: Call) -> Value:
    """Return the result of a call that makes the model of a checkpoint; `NOT_MODELLED` for another call."""
    holder_path, _, name = call.path.rpartition(".")
    holder = holder_path.rpartition(".")[2]
    if holder == CONVERTER_CLASS and name in CHECKPOINT_LOADERS:
        decider = f"{CHECKPOINT_PREFIX}{_describe_checkpoint(call)}"
        return Object(kind=CONVERTER_CLASS, decider=decider)
    if isinstance(call.called, Method) and isinstance(call.called.holder, Object):
        converter = call.called.holder
        if converter.kind == CONVERTER_CLASS or call.called.name == TEXT_MODEL_METHOD:
            return Object(decider=converter.decider or f"`{format_source(call.node)}`")
    return NOT_MODELLED


def is_checkpoint_model(holder: Object) -> bool:
    """Return whether an object is the config of a model that a checkpoint makes."""
    return not holder.kind and holder.decider.startswith(CHECKPOINT_PREFIX)


def is_config_model(holder: Object) -> bool:
    """Return whether a model is made of a config that the program passes, and may have changed."""
    return holder.decider.startswith(f"{CHECKPOINT_PREFIX}{CONFIG_PREFIX}")


def _describe_checkpoint(call: Call) -> str:
    """Return the text after `CHECKPOINT_PREFIX` for the checkpoint that a converter takes."""
    if isinstance(call.first, str):
        return call.first
    if call.path.rpartition(".")[2] == CONFIG_LOADER:
        return f"{CONFIG_PREFIX}in `{format_source(call.node)}`"
    if is_open(call.first):
        return f"that {strip_late_clause(call.first.decider)} names"
    return "of the run"


def _make_precision(call: Call, name: str) -> Value:
    """Return the precision that the class or a function of a precision module makes.

    A function of a registered recipe has no arguments.
    """
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
    """Return the precision that the function of the benchmarks makes of a word."""
    word = call.first
    if not isinstance(word, str) or word not in BENCHMARK_PRECISIONS:
        return NOT_MODELLED
    row = BENCHMARK_PRECISIONS[word]
    precision = _make_recipe_precision(row.recipe)
    for name, value in row.fields.items():
        precision.fields[name] = FieldValue(value=value, origin=call.origin)
    return precision


def _make_recipe_precision(name: str) -> Object:
    """Return the precision of a registered recipe."""
    origin = RECIPE_ORIGIN.format(name=name)
    fields: dict[str, FieldValue] = {}
    for field_name, value in REGISTRY.get(name).to_dict().items():
        fields[field_name] = FieldValue(value=value, origin=origin)
    return Object(kind=PRECISION_CLASS, recipe=name, fields=fields)

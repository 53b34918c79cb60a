"""`OtherSources`: the settings of a run of Megatron-LM that its arguments do not decide.

Files, modules, DeepSpeed's engine and options of other programs decide them. Each source is read, or
named in a message. If a source that is not read would change the plan, the run has no plan. If it
would change the bytes, the memory has no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bridge.errors import bounded
from bridge.read.layer_source import (
    UnplannedLayers,
    find_layer_implementation,
    find_unplanned_layers,
    get_layer_settings,
)
from bridge.read.megatron_lm.argument_values import ArgumentValues
from bridge.read.megatron_lm.deepspeed.engine import (
    DEEPSPEED_OPTION,
    EngineSettings,
    describe_ineffective_arguments,
    read_engine_settings,
    uses_deepspeed_engine,
)
from bridge.read.megatron_lm.deepspeed.engine_file import DEEPSPEED_FILE_ARGUMENT
from bridge.read.megatron_lm.flags import (
    format_option,
    get_argument_fields,
    get_dest,
)
from bridge.read.megatron_lm.module_recipe.precision_file import (
    QUANT_RECIPE_FIELD,
    PrecisionFile,
    find_precision_file,
)
from bridge.read.megatron_lm.unread_options import find_misspelt_options, find_unread_options
from bridge.read.megatron_lm.written_arguments import WrittenArguments
from bridge.target.fields import parse_integer

PRECISION_FILE_ARGUMENT = "te_precision_config_file"
READ_FILE_ARGUMENTS = frozenset({PRECISION_FILE_ARGUMENT, DEEPSPEED_FILE_ARGUMENT})
"""Arguments that name a file which is read, or named in a message, here."""
SPLIT_OPTION = "--pp-partition-method"
SPLITS = {"type:transformer": 0, "type:transformer|embedding": 2}
"""Method by which DeepSpeed splits layers -> the parts of the model that count like layers.

They are the embedding and the output layer, which is a second embedding in the fork.

Source: DeepSpeed 0.17 runtime/pipe/module.py PipelineModule._partition_layers; BigScience's
Megatron-DeepSpeed megatron/model/gpt_model.py GPTModelPipe.
"""
PARTS_AS_LAYERS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
OPTIONS_NOT_READ = (
    "{options}: not read here; "
    "the layout, the layers or the bytes may be others than those that are counted."
)
SPLIT_NOT_READ = (
    f"{SPLIT_OPTION}: DeepSpeed splits the layers by it; Megatron-LM's even split counts here."
)
UNEVEN_SPLIT = (
    f"{SPLIT_OPTION} {{method}}: DeepSpeed splits {{layers}} layers unevenly over {{stages}} "
    "stages, and the plan does not follow it."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherSources:
    """Settings that the arguments of a run do not decide.

    A field of the same name in `Uncertainty` or `FileReading` has the same meaning.
    """

    sections: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Section -> fields that the sources set in it, also of `mixed_precision`."""
    open_points: tuple[str, ...] = ()
    no_plan_reason: str | None = None
    unread_options: tuple[str, ...] = ()
    unread_sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_other_sources(
    written: WrittenArguments, values: ArgumentValues, path: str
) -> OtherSources:
    """Return the settings of a run that its arguments do not decide.

    Args:
        written: The arguments as they are written.
        values: The arguments by their names.
        path: Path of the run's file.
    """
    arguments = values.all
    has_engine = uses_deepspeed_engine(written)
    engine = EngineSettings()
    if has_engine:
        engine = read_engine_settings(written, values.known, values.mode, path)
    layers = find_unplanned_layers(arguments)
    file = _read_precision_file(arguments, path)
    unread = _find_unread_options(written, arguments, engine)
    split = _read_split(values.known)
    no_plan_reason = engine.no_plan_reason or _get_missing_file_reason(file) or split.no_plan_reason
    if layers is not None:
        no_plan_reason = layers.sentence
    if no_plan_reason is not None:
        no_plan_reason = bounded(no_plan_reason)
    notes = list(engine.notes)
    if file is not None and file.content is not None:
        notes.append(file.sentence)
    open_points = list(engine.open_points)
    unread_options = list(unread.all)
    if has_engine:
        open_points.extend(describe_ineffective_arguments(written))
        unread_options.insert(0, DEEPSPEED_OPTION)
    return OtherSources(
        sections=_build_sections(engine, arguments, file, split),
        open_points=(*map(bounded, open_points), *_describe_unread_options(unread)),
        no_plan_reason=no_plan_reason,
        unread_options=tuple(unread_options),
        unread_sources=_collect_unread_sources(engine, layers, file, unread),
        notes=tuple(map(bounded, notes)),
    )


def _collect_unread_sources(
    engine: EngineSettings,
    layers: UnplannedLayers | None,
    file: PrecisionFile | None,
    unread: _UnreadOptions,
) -> dict[str, str]:
    """Return each setting whose value is not known -> the source that decides it.

    Args:
        engine: The settings of DeepSpeed's engine.
        layers: The source of layers that cannot be planned.
        file: The per-module recipe that the run names.
        unread: The options that are not read.
    """
    unread_sources = dict(engine.unread_sources)
    if layers is not None:
        unread_sources.update(dict.fromkeys(get_layer_settings(), layers.option))
    if file is not None and file.content is None:
        unread_sources[QUANT_RECIPE_FIELD] = file.setting
    for option, settings in unread.all.items():
        for setting in settings:
            unread_sources.setdefault(setting, option)
    return unread_sources


def _read_precision_file(arguments: Mapping[str, object], path: str) -> PrecisionFile | None:
    """Return the per-module recipe that the arguments name; None if they name none."""
    name = arguments.get(PRECISION_FILE_ARGUMENT)
    if not name:
        return None
    return find_precision_file(format_option(PRECISION_FILE_ARGUMENT), str(name), path)


def _get_missing_file_reason(file: PrecisionFile | None) -> str | None:
    """Return the sentence about a per-module recipe that is not found; None if none is missing."""
    if file is None or file.content is not None:
        return None
    return file.sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnreadOptions:
    """Options that are not read and may change the bytes: option -> the settings that it may change."""

    recognised: Mapping[str, tuple[str, ...]]
    """Options that are recognised by the words in their names."""
    misspelt: Mapping[str, tuple[str, ...]]
    """Options whose name differs from an argument's name by a letter or two.

    `open_points.py` has the sentences about them."""

    @property
    def all(self) -> dict[str, tuple[str, ...]]:
        """The options of either kind that may change a setting."""
        misspelt = {option: settings for option, settings in self.misspelt.items() if settings}
        return {**self.recognised, **misspelt}


def _find_unread_options(
    written: WrittenArguments, arguments: Mapping[str, object], engine: EngineSettings
) -> _UnreadOptions:
    """Return the options that neither this reader nor the table of the run's framework reads."""
    own_arguments = _drop_framework_options(written, arguments)
    recognised: dict[str, tuple[str, ...]] = {}
    read_arguments = set(engine.read_arguments)
    if _read_split(arguments).is_even:
        read_arguments.add(get_dest(SPLIT_OPTION))
    for name, settings in find_unread_options(own_arguments).items():
        if name not in read_arguments:
            recognised[format_option(name)] = settings
    misspelt: dict[str, tuple[str, ...]] = {}
    for name, argument in find_misspelt_options(written, arguments).items():
        if name in own_arguments:
            misspelt[format_option(name)] = get_argument_fields(argument)
    return _UnreadOptions(recognised=recognised, misspelt=misspelt)


def _drop_framework_options(
    written: WrittenArguments, arguments: Mapping[str, object]
) -> Mapping[str, object]:
    """Return arguments without those that the table of the run's framework reads."""
    if written.framework is None:
        return arguments
    find_option = written.framework.find_option
    return {name: value for name, value in arguments.items() if find_option(name) is None}


class _LayerSplit(NamedTuple):
    """The split of layers over stages by DeepSpeed."""

    fields: Mapping[str, object] = {}
    """Fields of Megatron Core's model with which it splits the layers alike."""
    is_even: bool = False
    """Whether the method is known and gives each stage the same number of layers."""
    no_plan_reason: str | None = None
    """Why the run has no plan; None if its stages are known."""


def _read_split(arguments: Mapping[str, object]) -> _LayerSplit:
    """Return how DeepSpeed splits the layers of a run."""
    method = arguments.get(get_dest(SPLIT_OPTION))
    layers = parse_integer(arguments.get("num_layers"))
    stages = parse_integer(arguments.get("pipeline_model_parallel_size")) or 1
    if method is None or layers is None:
        return _LayerSplit()
    if stages == 1:
        return _LayerSplit(is_even=True)
    parts = SPLITS.get(str(method))
    if (layers + (parts or 0)) % stages:
        reason = UNEVEN_SPLIT.format(method=method, layers=layers, stages=stages)
        return _LayerSplit(no_plan_reason=reason)
    fields = {}
    if parts:
        fields = dict.fromkeys(PARTS_AS_LAYERS, True)
    return _LayerSplit(fields=fields, is_even=parts is not None)


def _build_sections(
    engine: EngineSettings,
    arguments: Mapping[str, object],
    file: PrecisionFile | None,
    split: _LayerSplit,
) -> dict[str, dict[str, object]]:
    """Return section -> fields that an engine, a layer spec and a per-module recipe set."""
    sections: dict[str, dict[str, object]] = {}
    for section, fields in engine.sections.items():
        sections[section] = dict(fields)
    model = sections.setdefault("model", {})
    model.update(split.fields)
    layer_implementation = find_layer_implementation(arguments)
    if engine.precision is not None:
        sections["mixed_precision"] = dict(engine.precision)
    if layer_implementation is not None:
        model["transformer_impl"] = layer_implementation
    if file is not None and file.content is not None:
        model["quant_recipe"] = file.content
    return sections


def _describe_unread_options(unread: _UnreadOptions) -> Iterator[str]:
    """Yield the sentences about options that are not read, without the misspelt ones."""
    options: list[str] = []
    for option in unread.recognised:
        if option not in unread.misspelt and option != SPLIT_OPTION:
            options.append(option)
    if options:
        yield OPTIONS_NOT_READ.format(options=", ".join(options))
    if SPLIT_OPTION in unread.all:
        yield SPLIT_NOT_READ

"""`build_reading_from_container`: a run from the container that a program of Megatron Bridge makes.

A field that a statement sets is stated, with the statement as its origin. A field that no statement
sets has the default of its class, if the source of the class is found. A field that a checkpoint, a
function without source or a condition decides is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge.errors import RunConfigError
from bridge.preflight.file_reading import CheckpointModel, FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework.checkpoint import Checkpoint, read_checkpoint
from bridge.read.framework.hf_config import MEGATRON_BRIDGE
from bridge.read.megatron_bridge import saved_container
from bridge.read.megatron_bridge.core_release import find_core_release
from bridge.read.megatron_bridge.evaluator import Evaluator
from bridge.read.megatron_bridge.importer import import_
from bridge.read.megatron_bridge.modelled_calls import (
    CHECKPOINT_PREFIX,
    is_checkpoint_model,
    is_config_model,
)
from bridge.read.megatron_bridge.plain_data import convert_to_plain, get_decider, has_open
from bridge.read.megatron_bridge.source_library import BENCHMARK_NAME, CHECKPOINT_CLASS, PACKAGE
from bridge.read.megatron_bridge.stated_precision import StatedPrecision, read_stated_precision
from bridge.read.megatron_bridge.values import Class, FieldValue, Object, Value, is_open
from bridge.read.run_keys import OWNER_SECTIONS, PRECISION_KEY
from bridge.read.tokenizers import find_vocab_size
from bridge.registry.registry import REGISTRY
from bridge.target.fields import OWNER_FIELDS

CONTAINER_CLASS = f"{PACKAGE}.training.config.ConfigContainer"
CONVERTER_FIELDS = (
    "attention_backend",
    "bias_activation_fusion",
    "cross_entropy_fusion_impl",
    "gradient_accumulation_fusion",
    "init_method_std",
    "moe_flex_dispatcher_backend",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "mtp_loss_scaling_factor",
    "seq_length",
)
"""Fields of Megatron that Megatron Bridge's converters of checkpoints set, besides those that every converter sets.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987d src/megatron/bridge/models.
"""
NUMBER_KINDS = ("int", "float")
"""Kinds of Megatron's fields for which a class of Megatron Bridge may have a list of values."""
CLASS_DEFAULT = "default of {name}"
NUMBER_OF_GPUS = "The number of GPUs: the recipe's name has {gpus} of them. Add --target {gpu}x{gpus}, for example."
OVERRIDES_NOT_READ = (
    "The program writes its command line over the recipe, and the YAML file that it reads by default if it has one: "
    "add their overrides here."
)
MAY_BE_CHANGED = (
    "{path}: {function} gets it afterwards and may change it, and its source is not at hand."
)
HUB_FIELD = "hf_model_id"
"""Field of a model's class with the name of its checkpoint."""
MODULE_ROWS = "model.quant_recipe"
UNREAD_ROWS = "{path}: {decider} makes the rows of single modules, which are not read, and they cannot be planned."
REPORTED_SECTIONS = (
    *OWNER_SECTIONS,
    PRECISION_KEY,
    "train",
    "dataset",
    "data",
    "tokenizer",
    "comm_overlap",
    "peft",
)
"""Sections whose open values are reported, since a plan or a finding may depend on them."""
NO_PRECISION = "{decider}, as no mixed_precision is set,"
RUN_TOKENIZER = "the tokenizer of the run"
NOT_OF_CHECKPOINT = (
    "is the checkpoint that makes a model, and {path} is not known to make its model of one"
)
WITHOUT_CHECKPOINT = (
    "Drop it, and add the sizes that are not known, such as model.num_layers=VALUE."
)


@dataclass(kw_only=True, slots=True)
class ContainerSections:
    """The sections of a container while they are built.

    A field of the same name in `FileReading` has the same meaning. Its keys are those of the program.
    """

    checkpoint: Checkpoint | None = None
    """The checkpoint that makes the model; None if none does, or its name is not known."""
    uses_tokenizer_vocabulary: bool = False
    """Whether the model has the vocabulary of the run's tokenizer, and not that of its checkpoint."""
    has_known_tokenizer: bool = False
    """Whether the vocabulary of the run's tokenizer is known. Then a row of `start_rows.py` sets it."""
    container: dict[str, object] = field(
        default_factory=lambda: {saved_container.TARGET_KEY: CONTAINER_CLASS}
    )
    """The container as plain data, in the form of a saved one."""
    origins: dict[str, str] = field(default_factory=dict)
    open_values: dict[str, str] = field(default_factory=dict)
    opened: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, object] = field(default_factory=dict)
    """Dotted key -> the default of the owner's class, or the value of the checkpoint's model."""
    mode_decided_by: str | None = None


def build_reading_from_container(
    container: Object, evaluator: Evaluator, path: Path, name: str, choice: RunChoice
) -> FileReading:
    """Return the run of a container.

    Args:
        evaluator: The evaluator that made it.
        path: The file that is read.
        name: Name of the function that makes the container.
        choice: The choices of the command line, among them the folder of the checkpoint.

    Raises:
        RunConfigError: The command line states a checkpoint, and no checkpoint makes the model.
    """
    model = _find_checkpoint_model(container)
    if model is None:
        refuse_checkpoint(choice, path)
    sections = _build_sections(container, evaluator, _read_model_checkpoint(model, path, choice))
    reading = saved_container.read_saved_container(sections.container, path)
    release = find_core_release(evaluator.library)
    if release is not None:
        reading = replace(reading, release=release)
    reading = _apply_defaults(reading, sections.defaults)
    no_plan_reason = reading.uncertainty.no_plan_reason
    if MODULE_ROWS in sections.open_values:
        decider = sections.open_values[MODULE_ROWS]
        no_plan_reason = UNREAD_ROWS.format(path=MODULE_ROWS, decider=decider)
    origins = {reading.translate_key(key): origin for key, origin in sections.origins.items()}
    open_values = {reading.translate_key(key): text for key, text in sections.open_values.items()}
    open_settings = _describe_open_settings(container, evaluator, name)
    uncertainty = replace(
        reading.uncertainty,
        open_points=(*open_settings, *reading.uncertainty.open_points),
        mode_decider=sections.mode_decided_by,
        default_decider=container.decider or None,
        open_values=open_values,
        unread_sources={**sections.opened, **reading.uncertainty.unread_sources},
        no_plan_reason=no_plan_reason,
    )
    checkpoint_model = CheckpointModel(may_be_stated=model is not None)
    reading = replace(
        reading, origins=origins, uncertainty=uncertainty, checkpoint_model=checkpoint_model
    )
    if sections.checkpoint is None:
        return reading
    return _add_checkpoint_notes(reading, sections.checkpoint)


def _build_sections(
    container: Object, evaluator: Evaluator, checkpoint: Checkpoint | None
) -> ContainerSections:
    """Return the sections of a container, the precision as the last one."""
    vocabulary_switch = _get_tokenizer_value(container, "use_tokenizer_vocab_size")
    sections = ContainerSections(
        checkpoint=checkpoint,
        uses_tokenizer_vocabulary=vocabulary_switch is True,
        has_known_tokenizer=_has_known_tokenizer(container),
    )
    for key, stated in container.fields.items():
        if key != PRECISION_KEY:
            _add_section(sections, key, stated, evaluator)
    _add_precision(sections, container)
    return sections


def _add_checkpoint_notes(reading: FileReading, checkpoint: Checkpoint) -> FileReading:
    """Return a reading with the sentences and the uncounted options of its model's checkpoint."""
    uncertainty = reading.uncertainty
    uncertainty = replace(
        uncertainty,
        open_points=(*uncertainty.open_points, *checkpoint.unknown),
        unread_options=(*uncertainty.unread_options, *checkpoint.uncounted),
    )
    checkpoint_model = replace(reading.checkpoint_model, no_sizes_reason=checkpoint.not_followed)
    reading = replace(reading, uncertainty=uncertainty, checkpoint_model=checkpoint_model)
    return reading.with_notes(*checkpoint.read_too)


def refuse_checkpoint(choice: RunChoice, path: Path) -> None:
    """Refuse the checkpoint of the command line for a model that no checkpoint makes.

    Raises:
        RunConfigError: The command line states a checkpoint.
    """
    if choice.checkpoint is not None:
        rule = NOT_OF_CHECKPOINT.format(path=path)
        raise RunConfigError.of("--context checkpoint", rule, choice.checkpoint, WITHOUT_CHECKPOINT)


def _find_checkpoint_model(container: Object) -> Object | None:
    """Return the model of a container if the `config.json` of a checkpoint makes it; None for any other model.

    A config that the program may have changed does not count.
    """
    stated = container.fields.get("model")
    if stated is None or not isinstance(stated.value, Object):
        return None
    model = stated.value
    if not is_checkpoint_model(model) or is_config_model(model):
        return None
    return model


def _get_tokenizer_value(container: Object, name: str) -> object:
    """Return a value of the container's tokenizer as plain data; None if it is not known.

    With `use_tokenizer_vocab_size` the model has the vocabulary of the tokenizer, which is padded.

    Source: Megatron Bridge 067f987d training/setup.py: _validate_and_set_vocab_size.
    """
    tokenizer = container.fields.get("tokenizer")
    if tokenizer is None or not isinstance(tokenizer.value, Object):
        return None
    stated = tokenizer.value.fields.get(name)
    if stated is None or has_open(stated.value):
        return None
    return convert_to_plain(stated.value)


def _has_known_tokenizer(container: Object) -> bool:
    """Return whether the vocabulary of the container's tokenizer is known."""
    if _get_tokenizer_value(container, "tokenizer_type") == "NullTokenizer":
        return isinstance(_get_tokenizer_value(container, "vocab_size"), int)
    return find_vocab_size(_get_tokenizer_value(container, "tokenizer_model")) is not None


def _read_model_checkpoint(
    model: Object | None, path: Path, choice: RunChoice
) -> Checkpoint | None:
    """Return the checkpoint that makes a model; None if neither its name nor its folder is known."""
    if model is None:
        return None
    name = model.decider.removeprefix(CHECKPOINT_PREFIX)
    if " " in name:  # a description of an open value, and no name
        if choice.checkpoint is None:
            return None
        name = model.decider
    return read_checkpoint(name, path, choice, MEGATRON_BRIDGE)


def _describe_open_settings(container: Object, evaluator: Evaluator, name: str) -> list[str]:
    """Return sentences about everything that the program does not decide.

    Args:
        evaluator: The evaluator that made it.
        name: Name of the function that makes the container.
    """
    sentences: list[str] = []
    holders = {"cfg": container}
    for key, stated in container.fields.items():
        if isinstance(stated.value, Object):
            holders[f"cfg.{key}"] = stated.value
    for path, holder in holders.items():
        for function in dict.fromkeys(holder.unknown_functions):
            sentences.append(MAY_BE_CHANGED.format(path=path, function=function))
    if evaluator.starts.is_overridden:
        sentences.append(OVERRIDES_NOT_READ)
    benchmark = BENCHMARK_NAME.search(name)
    if benchmark is not None:
        sentences.append(NUMBER_OF_GPUS.format(gpus=benchmark["gpus"], gpu=benchmark["gpu"]))
    return sentences


def _add_section(
    sections: ContainerSections, key: str, stated: FieldValue, evaluator: Evaluator
) -> None:
    """Add a section: an object, or a mapping without its open values. Other values are ignored."""
    value = stated.value
    if isinstance(value, dict):
        known: dict[str, object] = {}
        for name, inner in value.items():
            if not has_open(inner):
                known[name] = convert_to_plain(inner)
        sections.container[key] = known
    elif isinstance(value, Object):
        sections.container[key] = _build_section(sections, key, value, evaluator)


def _build_section(
    sections: ContainerSections, key: str, holder: Object, evaluator: Evaluator
) -> dict[str, object]:
    """Return the fields of a section, with its class.

    Open fields, origins and defaults are added to `sections`.

    Args:
        sections: The sections that are built.
        key: Name of the section.
        holder: The object of the section.
        evaluator: The evaluator that made it.
    """
    fields: dict[str, object] = {}
    if holder.kind:
        fields[saved_container.TARGET_KEY] = holder.kind
    elif key == "model":
        # The class of a checkpoint's model is not known, and that of its converter stands for it.
        fields[saved_container.TARGET_KEY] = CHECKPOINT_CLASS
    if key in OWNER_SECTIONS and holder.kind:
        _add_defaults(sections, key, holder, evaluator)
    for name, stated in holder.fields.items():
        path = f"{key}.{name}"
        if not stated.origin and is_open(stated.value):
            continue  # a field that was only read
        if has_open(stated.value):
            if key in REPORTED_SECTIONS:
                sections.open_values[path] = get_decider(stated.value)
            continue
        fields[name] = convert_to_plain(stated.value)
        sections.origins[path] = stated.origin
    known_fields = dict(fields)
    if key == "model" and sections.checkpoint is not None:
        known_fields |= _add_checkpoint_fields(sections, sections.checkpoint, holder)
    if key in OWNER_SECTIONS and holder.decider:
        opened = _collect_open_settings(key, holder.decider, known_fields, sections.checkpoint)
        sections.opened.update(opened)
    if key == "model" and is_checkpoint_model(holder):
        fields.setdefault(HUB_FIELD, holder.decider.removeprefix(CHECKPOINT_PREFIX))
    return fields


def _add_checkpoint_fields(
    sections: ContainerSections, checkpoint: Checkpoint, holder: Object
) -> dict[str, object]:
    """Add the fields of the checkpoint's model that the program does not state to the defaults.

    Returns:
        The added fields.
    """
    stated_names = [name for name, stated in holder.fields.items() if stated.origin]
    fields = checkpoint.get_unstated_fields(dict.fromkeys(stated_names))
    if sections.uses_tokenizer_vocabulary and "vocab_size" in fields:
        del fields["vocab_size"]
        if not sections.has_known_tokenizer:
            sections.opened["model.vocab_size"] = RUN_TOKENIZER
        if "make_vocab_size_divisible_by" in fields:
            fields["make_vocab_size_divisible_by"] = checkpoint.model.vocab_divisor
    for name, value in fields.items():
        path = f"model.{name}"
        sections.defaults[path] = value
        sections.origins[path] = checkpoint.get_origin(name)
    return fields


def _add_defaults(
    sections: ContainerSections, key: str, holder: Object, evaluator: Evaluator
) -> None:
    """Add the defaults of an owner's class to the defaults, or to the open settings.

    A class of Megatron Bridge without source becomes the decider of the fields that are not stated. A
    class of another package has no known default.
    """
    class_name = holder.kind.rpartition(".")[2]
    has_source = isinstance(evaluator.library.find(holder.kind), Class)
    if holder.kind.startswith(PACKAGE) and not has_source:
        holder.decider = f"the class {class_name}, whose source is not at hand,"
        return
    origin = CLASS_DEFAULT.format(name=class_name)
    for name, default in evaluator.defaults(holder.kind).items():
        if name in holder.fields or name.startswith("_"):
            continue
        path = f"{key}.{name}"
        if has_open(default) or _has_several_numbers(key, name, default):
            sections.opened[path] = f"the {origin}"
        else:
            sections.defaults[path] = convert_to_plain(default)
            sections.origins[path] = origin


def _has_several_numbers(key: str, name: str, default: Value) -> bool:
    """Return whether a default is a list for a field that is a number in Megatron's own class."""
    if name not in OWNER_FIELDS[key]:
        return False
    return OWNER_FIELDS[key][name].kind in NUMBER_KINDS and isinstance(default, list | tuple)


def _apply_defaults(reading: FileReading, defaults: Mapping[str, object]) -> FileReading:
    """Return a reading with the defaults of its owners' classes. Fields that the file states stay.

    Args:
        defaults: Dotted key -> the default. Megatron Core does not have the fields of some keys.
    """
    sections = dict(reading.sections)
    own_fields = dict(reading.own_fields)
    for path, value in defaults.items():
        owner_name, _, name = path.partition(".")
        if name not in OWNER_FIELDS[owner_name]:
            own_fields.setdefault(path, value)
        elif value is not None:
            sections[owner_name] = {name: value, **sections[owner_name]}
    return replace(reading, sections=sections, own_fields=own_fields)


def _collect_open_settings(
    key: str, decider: str, fields: Mapping[str, object], checkpoint: Checkpoint | None
) -> dict[str, str]:
    """Return the settings of a section that are not known, each with the source that decides it.

    Args:
        key: Name of the section.
        decider: The source that decides the fields which no statement sets.
        fields: The fields that are known.
        checkpoint: The checkpoint that makes the model; None if it is not known.
    """
    if key == "model" and decider.startswith(CHECKPOINT_PREFIX):
        deciding_checkpoint = Checkpoint(source=decider)
        if checkpoint is not None:
            deciding_checkpoint = replace(checkpoint, source=decider)
        opened = dict(deciding_checkpoint.opened(fields))
        for name in CONVERTER_FIELDS:
            if name not in fields:
                opened[f"model.{name}"] = decider
        return opened
    return {f"{key}.{name}": decider for name in OWNER_FIELDS[key] if name not in fields}


def _add_precision(sections: ContainerSections, container: Object) -> None:
    """Add the precision of the container, or the source that decides it."""
    precision = read_stated_precision(container)
    stated = container.fields.get(PRECISION_KEY)
    if precision.is_absent:
        sections.mode_decided_by = _find_mode_decider(container)
    elif stated is not None and isinstance(stated.value, Object):
        _add_precision_fields(sections, precision, stated.value)
    elif precision.name:
        sections.container[PRECISION_KEY] = precision.name
    else:
        sections.mode_decided_by = precision.decider
    if precision.unknown_functions:
        function = precision.unknown_functions[0]
        sections.mode_decided_by = f"the function {function}, whose source is not at hand,"
        name = sections.container.get(PRECISION_KEY)
        if isinstance(name, str):  # the name of a recipe would state the mode, which is open
            sections.container[PRECISION_KEY] = REGISTRY.get(name).to_dict()


def _find_mode_decider(container: Object) -> str | None:
    """Return the source that decides the mode of a container without precision; None if the model states it."""
    model = container.fields.get("model")
    if model is None or not isinstance(model.value, Object) or not model.value.decider:
        return None
    for mode in ("bf16", "fp16"):
        stated = model.value.fields.get(mode)
        if stated is not None and stated.value is True:
            return None
    return NO_PRECISION.format(decider=model.value.decider)


def _add_precision_fields(
    sections: ContainerSections, precision: StatedPrecision, holder: Object
) -> None:
    """Add the fields of a precision, as the class of Megatron Bridge reads them.

    Args:
        sections: The sections that are built.
        holder: The object of the precision, whose fields have the statements that set them.
    """
    for name, decider in precision.open_fields.items():
        sections.open_values[f"{PRECISION_KEY}.{name}"] = decider
    values = precision.values
    if precision.name:
        values = REGISTRY.get(precision.name).to_dict()
    imported = import_({PRECISION_KEY: values}, base=precision.decider or None)
    fields = imported.config.to_dict()
    sections.container[PRECISION_KEY] = fields
    for name in fields:
        path = f"{PRECISION_KEY}.{name}"
        stated = holder.fields.get(name)
        if stated is None:
            sections.origins[path] = CLASS_DEFAULT.format(name="MixedPrecisionConfig")
        else:
            sections.origins[path] = stated.origin
    if precision.decider and not (values.get("bf16") is True or values.get("fp16") is True):
        sections.mode_decided_by = precision.decider

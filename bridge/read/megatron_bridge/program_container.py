"""`build_reading_from_container`: a run from the container that a program of Megatron Bridge makes.

A field that a statement sets is stated, with the statement as its origin. A field that none sets has the default of its
class, where the source of the class is at hand. What a checkpoint, a function that is not at hand or a condition
decides is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bridge.errors import RunConfigError
from bridge.preflight.file_reading import FileReading, RunChoice
from bridge.read.framework.checkpoint import Checkpoint, read_checkpoint
from bridge.read.framework.hf_config import MEGATRON_BRIDGE
from bridge.read.megatron_bridge import saved_container
from bridge.read.megatron_bridge.evaluator import Evaluator
from bridge.read.megatron_bridge.importer import import_
from bridge.read.megatron_bridge.modelled_calls import (
    CHECKPOINT_NOUN,
    is_checkpoint_model,
    is_config_model,
)
from bridge.read.megatron_bridge.plain_data import convert_to_plain, get_decider, has_open
from bridge.read.megatron_bridge.source_library import BENCHMARK_NAME, PACKAGE
from bridge.read.megatron_bridge.stated_precision import StatedPrecision, read_stated_precision
from bridge.read.megatron_bridge.values import Class, FieldValue, Object, is_open
from bridge.read.run_keys import OWNER_SECTIONS, PRECISION_KEY
from bridge.read.tokenizers import find_vocab_size
from bridge.registry.registry import REGISTRY
from bridge.target.fields import OWNER_FIELDS

CONTAINER_CLASS = f"{PACKAGE}.training.config.ConfigContainer"
CHECKPOINT_CLASS = f"{PACKAGE}.models.conversion.auto_bridge.AutoBridge"
"""The class that stands for that of a checkpoint's model, which nobody knows here."""
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
"""Fields of Megatron that the converters of checkpoints set, besides those of a framework with a converter of its own.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987d src/megatron/bridge/models.
"""
NUMBER_KINDS = ("int", "float")
"""Kinds of fields of Megatron of which a class of Megatron Bridge may hold several."""
CLASS_DEFAULT = "default of {name}"
NUMBER_OF_GPUS = "The number of GPUs: the recipe's name has {gpus} of them. Add --target {gpu}x{gpus}, for example."
OVERRIDES_NOT_READ = "The program writes its command line over the recipe: add its overrides here."
MAY_BE_CHANGED = (
    "{path}: {function} gets it afterwards and may change it, and its source is not at hand."
)
HUB_FIELD = "hf_model_id"
"""Field of a model's class with the name of its checkpoint."""
MODULE_ROWS = "model.quant_recipe"
UNREAD_ROWS = "{path}: {decider} makes the rows of single modules, which are not read, and they cannot be planned."
BEARING_SECTIONS = (
    *OWNER_SECTIONS,
    PRECISION_KEY,
    "train",
    "dataset",
    "data",
    "tokenizer",
    "comm_overlap",
    "peft",
)
"""Sections whose open values bear on an answer."""
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
    """The sections of a container while they are made."""

    checkpoint: Checkpoint | None = None
    """The checkpoint that the model is made of; None where it is made of none, or its name is not known."""
    uses_tokenizer_vocabulary: bool = False
    """Whether the model has the vocabulary of the run's tokenizer, and not that of its checkpoint."""
    has_known_tokenizer: bool = False
    """Whether the vocabulary of that tokenizer is known: Megatron Bridge's start sets it."""
    whole: dict[str, object] = field(
        default_factory=lambda: {saved_container.TARGET_KEY: CONTAINER_CLASS}
    )
    origins: dict[str, str] = field(default_factory=dict)
    open_values: dict[str, str] = field(default_factory=dict)
    opened: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, object] = field(default_factory=dict)
    """Defaults of the owners' classes, and the fields of the checkpoint's model."""
    mode_decided_by: str | None = None
    """As in `FileReading`, but `whole`, which has the form of a saved container."""


def build_reading_from_container(
    container: Object, evaluator: Evaluator, path: Path, name: str, choice: RunChoice
) -> FileReading:
    """Return what a container says of a run.

    Args:
        container: The container.
        evaluator: The evaluator that made it.
        path: The file that is read.
        name: Name of the function that makes the container.
        choice: The folder of the checkpoint that the command line states is in it.
    """
    model = _find_checkpoint_model(container)
    if model is None:
        refuse_checkpoint(choice, path)
    sections = ContainerSections(
        checkpoint=_read_model_checkpoint(model, path, choice),
        uses_tokenizer_vocabulary=_get_tokenizer_value(container, "use_tokenizer_vocab_size")
        is True,
        has_known_tokenizer=_has_known_tokenizer(container),
    )
    for key, stated in container.fields.items():
        if key != PRECISION_KEY:
            _add_section(sections, key, stated, evaluator)
    _add_precision(sections, container)
    reading = _apply_defaults(
        saved_container.read_saved_container(sections.whole, path), sections.defaults
    )
    no_plan_reason = reading.no_plan_reason
    if MODULE_ROWS in sections.open_values:
        no_plan_reason = UNREAD_ROWS.format(
            path=MODULE_ROWS, decider=sections.open_values[MODULE_ROWS]
        )
    origins = {reading.translate_key(key): origin for key, origin in sections.origins.items()}
    open_values = {reading.translate_key(key): text for key, text in sections.open_values.items()}
    reading = replace(
        reading,
        origins=origins,
        open_values=open_values,
        opened={**sections.opened, **reading.opened},
        unknown=(*_describe_open_settings(container, evaluator, name), *reading.unknown),
        no_plan_reason=no_plan_reason,
        is_of_checkpoint=model is not None,
        mode_decided_by=sections.mode_decided_by,
        unstated_by=container.decider or None,
    )
    checkpoint = sections.checkpoint
    if checkpoint is None:
        return reading
    return replace(
        reading,
        unknown=(*reading.unknown, *checkpoint.unknown),
        uncounted=(*reading.uncounted, *checkpoint.uncounted),
        not_followed=checkpoint.not_followed,
        read_too=(*reading.read_too, *checkpoint.read_too),
    )


def refuse_checkpoint(choice: RunChoice, path: Path) -> None:
    """Refuse the checkpoint of the command line for a model that is made of none, as far as it is known."""
    if choice.checkpoint is not None:
        rule = NOT_OF_CHECKPOINT.format(path=path)
        raise RunConfigError.of("--context checkpoint", rule, choice.checkpoint, WITHOUT_CHECKPOINT)


def _find_checkpoint_model(container: Object) -> Object | None:
    """Return the model of a container where a checkpoint's own `config.json` makes it; None of any other."""
    stated = container.fields.get("model")
    if stated is None or not isinstance(stated.value, Object):
        return None
    model = stated.value
    if not is_checkpoint_model(model) or is_config_model(model):
        return None
    return model


def _get_tokenizer_value(container: Object, name: str) -> object:
    """Return a plain value of the container's tokenizer; None where it states none.

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
    """Return what is known of the checkpoint of a model; None where neither its name nor its folder is known."""
    if model is None:
        return None
    name = model.decider.removeprefix(CHECKPOINT_NOUN)
    if " " in name:  # it says which value is the name
        if choice.checkpoint is None:
            return None
        name = model.decider
    return read_checkpoint(name, path, choice, MEGATRON_BRIDGE)


def _describe_open_settings(container: Object, evaluator: Evaluator, name: str) -> list[str]:
    """Return what the program leaves open, as sentences."""
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
    """Add a section, or a value of the container itself."""
    value = stated.value
    if isinstance(value, dict):
        sections.whole[key] = {
            name: convert_to_plain(inner) for name, inner in value.items() if not has_open(inner)
        }
    elif isinstance(value, Object):
        sections.whole[key] = _build_section(sections, key, value, evaluator)


def _build_section(
    sections: ContainerSections, key: str, holder: Object, evaluator: Evaluator
) -> dict[str, object]:
    """Return the fields of a section, with the class that they are of."""
    fields: dict[str, object] = {}
    if holder.kind:
        fields[saved_container.TARGET_KEY] = holder.kind
    elif key == "model":
        fields[saved_container.TARGET_KEY] = CHECKPOINT_CLASS
    if key in OWNER_SECTIONS and holder.kind:
        _add_defaults(sections, key, holder, evaluator)
    for name, stated in holder.fields.items():
        path = f"{key}.{name}"
        if not stated.origin and is_open(stated.value):
            continue
        if has_open(stated.value):
            if key in BEARING_SECTIONS:
                sections.open_values[path] = get_decider(stated.value)
            continue
        fields[name] = convert_to_plain(stated.value)
        sections.origins[path] = stated.origin
    known = dict(fields)
    if key == "model" and sections.checkpoint is not None:
        known |= _add_checkpoint_fields(sections, sections.checkpoint, holder)
    if key in OWNER_SECTIONS and holder.decider:
        sections.opened.update(
            _collect_open_settings(key, holder.decider, known, sections.checkpoint)
        )
    if key == "model" and is_checkpoint_model(holder):
        fields.setdefault(HUB_FIELD, holder.decider.removeprefix(CHECKPOINT_NOUN))
    return fields


def _add_checkpoint_fields(
    sections: ContainerSections, checkpoint: Checkpoint, holder: Object
) -> dict[str, object]:
    """Note the fields of the checkpoint's model below those that the program states; return them."""
    stated = [name for name, value in holder.fields.items() if value.origin]
    added = checkpoint.get_unstated_fields(dict.fromkeys(stated))
    if sections.uses_tokenizer_vocabulary and "vocab_size" in added:
        del added["vocab_size"]
        if not sections.has_known_tokenizer:
            sections.opened["model.vocab_size"] = RUN_TOKENIZER
        if "make_vocab_size_divisible_by" in added:
            added["make_vocab_size_divisible_by"] = checkpoint.model.vocab_divisor
    for name, value in added.items():
        path = f"model.{name}"
        sections.defaults[path] = value
        sections.origins[path] = checkpoint.source
    return added


def _add_defaults(
    sections: ContainerSections, key: str, holder: Object, evaluator: Evaluator
) -> None:
    """Note the defaults that the source of an owner's class states, where it is a class of Megatron Bridge."""
    class_name = holder.kind.rpartition(".")[2]
    if holder.kind.startswith(PACKAGE) and not isinstance(
        evaluator.library.find(holder.kind), Class
    ):
        holder.decider = f"the class {class_name}, whose source is not at hand,"
        return
    for name, default in evaluator.defaults(holder.kind).items():
        path = f"{key}.{name}"
        kind = OWNER_FIELDS[key][name].kind if name in OWNER_FIELDS[key] else ""
        if name in holder.fields or name.startswith("_"):
            continue
        if has_open(default) or (kind in NUMBER_KINDS and isinstance(default, list | tuple)):
            sections.opened[path] = f"the {CLASS_DEFAULT.format(name=class_name)}"
        else:
            sections.defaults[path] = convert_to_plain(default)
            sections.origins[path] = CLASS_DEFAULT.format(name=class_name)


def _apply_defaults(reading: FileReading, defaults: Mapping[str, object]) -> FileReading:
    """Return a reading with the defaults of its owners' classes below what the file states."""
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
    """Return the settings that something else decides than the file, each with what decides it."""
    if key == "model" and decider.startswith(CHECKPOINT_NOUN):
        names = [name for name in CONVERTER_FIELDS if name not in fields]
        deciding = Checkpoint(source=decider)
        if checkpoint is not None:
            deciding = replace(checkpoint, source=decider)
        opened = deciding.opened(fields)
        return opened | {f"model.{name}": decider for name in names}
    return {f"{key}.{name}": decider for name in OWNER_FIELDS[key] if name not in fields}


def _add_precision(sections: ContainerSections, container: Object) -> None:
    """Add the precision of the container, or what decides it."""
    precision = read_stated_precision(container)
    stated = container.fields.get(PRECISION_KEY)
    if precision.is_absent:
        sections.mode_decided_by = _find_mode_decider(container)
    elif stated is not None and isinstance(stated.value, Object):
        _add_precision_fields(sections, precision, stated.value)
    elif precision.name:
        sections.whole[PRECISION_KEY] = precision.name
    else:
        sections.mode_decided_by = precision.decider
    if precision.unknown_functions:
        stranger = precision.unknown_functions[0]
        sections.mode_decided_by = f"the function {stranger}, whose source is not at hand,"
        name = sections.whole.get(PRECISION_KEY)
        if isinstance(name, str):  # a name alone states the mode
            sections.whole[PRECISION_KEY] = REGISTRY.get(name).to_dict()


def _find_mode_decider(container: Object) -> str | None:
    """Return what decides the mode where no precision is set; None where the model states it."""
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

    `holder` is the object whose fields they are, with the statements that set them.
    """
    for name, decider in precision.open_fields.items():
        sections.open_values[f"{PRECISION_KEY}.{name}"] = decider
    values = precision.values
    if precision.name:
        values = REGISTRY.get(precision.name).to_dict()
    imported = import_({PRECISION_KEY: values}, base=precision.decider or None)
    sections.whole[PRECISION_KEY] = imported.config.to_dict()
    for name in imported.config.to_dict():
        path = f"{PRECISION_KEY}.{name}"
        of_field = holder.fields.get(name)
        if of_field is None:
            sections.origins[path] = CLASS_DEFAULT.format(name="MixedPrecisionConfig")
        else:
            sections.origins[path] = of_field.origin
    if precision.decider and not (values.get("bf16") is True or values.get("fp16") is True):
        sections.mode_decided_by = precision.decider

"""`build_container`: a run as a `ConfigContainer`, each value decoded by its field's annotation.

The rules for scalars are those of the precision fields (`bridge.precision.fields.coerce`): what
YAML and a command line make of a value is taken where it can only mean one thing, and refused where
it cannot.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from bridge.errors import (
    BridgeError,
    RunConfigError,
    WrongValueError,
    close_matches,
    did_you_mean,
    listed,
)
from bridge.extras import require_extra
from bridge.model.shape_reader import find_impossible_sizes
from bridge.precision.coercion import coerce, get_torch_dtype
from bridge.precision.fields import get_field_default
from bridge.precision.matchers import convert_to_file_content
from bridge.precision.mode import get_mode
from bridge.precision.statements import get_field_value
from bridge.preflight import declared_gpu
from bridge.preflight.file_reading import PRECISION_BRIDGE
from bridge.preflight.origins import Origins
from bridge.preflight.problems import Problems
from bridge.preflight.run import Run
from bridge.read.run_keys import NON_SECTION_KEYS, SECTION_CLASSES
from bridge.training.config import ConfigContainer

if typing.TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

PADDING_FIELDS = frozenset({"moe_router_padding_for_quantization", "moe_router_padding_for_fp8"})
"""Fields of the model that Megatron takes together with FP8 or FP4 alone."""


def build_container(run: Run, problems: Problems | None = None) -> ConfigContainer:
    """Return the configs of a run as objects, before the precision is written into them.

    The precision is finalized, and Megatron Core is imported. Afterwards `require_startable` checks
    whether the run can begin.

    Args:
        run: The run.
        problems: The faults found before, which are raised together with those found here.

    Raises:
        RunConfigError: A value does not fit its field, or Megatron Core refuses the settings.
        PrecisionConfigError: The precision can never be right.
    """
    problems = problems or Problems(run.origins)
    _refuse_other_framework(run)
    require_extra("train", "A training run")
    _declare_gpu_for_te_cpu(run)
    from bridge.runtime.megatron.deferred_configs import (
        MegatronDistributedDataParallelConfig,
        MegatronOptimizerConfig,
    )  # heavy
    from bridge.runtime.megatron.model.gpt import ACTIVATIONS, GPTConfig

    owner_classes = {
        "model": GPTConfig,
        "optimizer": MegatronOptimizerConfig,
        "ddp": MegatronDistributedDataParallelConfig,
    }
    own_arguments = decode_sections(run, SECTION_CLASSES, problems)
    functions = {"activation_func": ACTIVATIONS}
    owner_arguments = decode_sections(run, owner_classes, problems, functions)
    problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
    needed = _collect_constructor_fields(run.precision, owner_arguments["model"])
    owners = {}
    try:
        for name, owner_class in owner_classes.items():
            owners[name] = _build_config(
                name, owner_class, owner_arguments[name], needed.get(name, {})
            )
    except RunConfigError:
        # An impossible size explains the error of Megatron better than its own message.
        refuse_impossible_sizes(run, problems)
        raise
    sections = {}
    for name, section_class in SECTION_CLASSES.items():
        sections[name] = section_class(**own_arguments[name])
    return ConfigContainer(
        **owners,
        **sections,
        **_collect_run_values(run),
        mixed_precision=run.precision,
        precision_choice=_choice_to_dict(run),
        set_by=_origins_to_dict(run),
    )


def _refuse_other_framework(run: Run) -> None:
    """Refuse a run of another framework, which only a rehearsal can start here.

    Raises:
        RunConfigError: The file of the run is another framework's.
    """
    if run.reading.framework != PRECISION_BRIDGE:
        rule = f"describes a run of {run.reading.framework}, which cannot be started here"
        raise RunConfigError(
            f"{run.name}: {rule}. Rehearse it: precision-bridge rehearse --config {run.name}."
        )


def _collect_run_values(run: Run) -> dict[str, Any]:
    """Return the stated values of a run that are not sections, such as its target and backend."""
    values = {}
    for key in NON_SECTION_KEYS:
        value = run.sections.get(key)
        if value is not None:
            values[key] = value
    return values


def _choice_to_dict(run: Run) -> dict[str, object] | None:
    """Return the choice of a recipe for `auto` as plain data; None without `auto`."""
    if run.choice is None:
        return None
    return run.choice.to_dict()


def _origins_to_dict(run: Run) -> dict[str, dict[str, Any]]:
    """Return key -> origin -> the value that the origin set."""
    origins = run.origins or Origins()
    return {key: dict(setters) for key, setters in origins.values.items()}


def require_startable(config: ConfigContainer, run: Run, problems: Problems | None = None) -> None:
    """Refuse a run whose faults show before its data and model are built.

    Args:
        config: The container of the run.
        run: The run, for the origins of its values.
        problems: The faults found before, which are raised together with those found here.

    Raises:
        RunConfigError: All faults.
    """
    from bridge.training.early_faults import find_early_faults  # heavy

    problems = problems or Problems(run.origins)
    refuse_impossible_sizes(run, problems)
    problems.add_all(find_early_faults(config, run.origin_of))
    problems.raise_any()


def refuse_impossible_sizes(run: Run, problems: Problems) -> None:
    """Refuse sizes with which no model can be built, together with the problems found before.

    Raises:
        RunConfigError: All faults.
    """
    problems.add_all(find_impossible_sizes(run.model))
    problems.raise_any()


def _declare_gpu_for_te_cpu(run: Run) -> None:
    """Declare the GPU of a run whose backend is te_cpu, before Megatron Core is imported."""
    if run.sections.get("precision_backend") != declared_gpu.TE_CPU_BACKEND:
        return
    fields = run.model
    if run.precision is not None:
        fields = run.precision.to_dict(full=True)
    declared_gpu.declare_for_run(run.sections.get("target"), fields)


def decode_sections(
    run: Run,
    classes: Mapping[str, type[Any]],
    problems: Problems,
    functions: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of each section's class.

    Args:
        run: The run.
        classes: Section -> its class.
        problems: It gets the values that do not fit their fields.
        functions: Field -> name -> function, for fields that hold a function.
    """
    decoded = {}
    for name, section_class in classes.items():
        values = run.section(name)
        decoded[name] = decode_fields(
            values, section_class, section=name, problems=problems, functions=functions
        )
    return decoded


def add_decoding_faults(run: Run, classes: Mapping[str, type[Any]], problems: Problems) -> None:
    """Add a fault for each value of some sections that does not fit its field."""
    decode_sections(run, classes, problems)


def _collect_constructor_fields(
    precision: MixedPrecisionConfig | None, model: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return section -> the fields of the precision without which Megatron refuses the config.

    Megatron checks a config in its constructor, before the sync writes the precision. It requires
    a dtype for pipeline stages, FP8 or FP4 for padding, and FP8 weights for reused gradient
    buffers.
    """
    if precision is None:
        return {}
    stated = precision.to_dict()
    model_fields: dict[str, Any] = {}
    if model.get("pipeline_model_parallel_size", 1) > 1 and model.get("pipeline_dtype") is None:
        dtype = stated.get("pipeline_dtype") or get_mode(precision)
        model_fields["pipeline_dtype"] = get_torch_dtype(dtype)
    if PADDING_FIELDS & model.keys():
        for name in ("fp8", "fp8_recipe", "fp4", "fp4_recipe"):
            if stated.get(name):
                model_fields[name] = stated[name]
    ddp_fields: dict[str, Any] = {}
    if get_field_value(precision, "fp8_param_gather"):
        ddp_fields["fp8_param_gather"] = True
    return {"model": model_fields, "ddp": ddp_fields}


def _build_config(
    name: str, owner_class: type[Any], arguments: dict[str, Any], needed: Mapping[str, Any]
) -> Any:
    """Return the config of a class of Megatron's, with the stated values.

    Megatron checks it with the fields `needed`, which get their stated values afterwards: the sync
    compares its own values with the stated ones.

    Args:
        name: The section of the config.
        owner_class: The class of Megatron's.
        arguments: The stated fields -> their values.
        needed: The fields of the precision that the check of the constructor requires.

    Raises:
        RunConfigError: Megatron Core refuses the settings.
    """
    try:
        config = owner_class(**{**arguments, **needed})
    except BridgeError:
        raise
    except Exception as error:  # Megatron's checks raise exceptions of any class
        reason = f"{type(error).__name__}: {error}".rstrip(": .")
        remedy = "Correct the fields it is about."
        rule = f"Megatron Core refuses these settings ({reason})"
        raise RunConfigError(f"{name}: {rule}. {remedy}") from error
    defaults = {field.name: get_field_default(field) for field in dataclasses.fields(owner_class)}
    for field in needed:
        setattr(config, field, arguments.get(field, defaults[field]))
    return config


class _NotDataError(WrongValueError):
    """The annotation is a type whose values plain data cannot describe, such as a function."""


def decode_fields(
    values: Mapping[str, Any],
    owner: type[Any],
    *,
    section: str,
    problems: Problems,
    functions: Mapping[str, Mapping[str, Callable[..., Any]]] | None = None,
) -> dict[str, Any]:
    """Return the constructor arguments of a dataclass, decoded by its annotations.

    Args:
        values: Field -> its value as plain data.
        owner: The dataclass.
        section: The section, in messages.
        problems: It gets the keys that are not fields and the values that do not fit.
        functions: Field -> name -> function, for fields that hold a function.
    """
    hints = typing.get_type_hints(owner)
    fields = {}
    for field in dataclasses.fields(owner):
        if field.init and field.name[0] != "_":
            fields[field.name] = field
    decoded: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{section}.{name}"
        if name not in fields:
            problems.unknown(path, value, f"no such field of {owner.__name__}", fields)
            continue
        if value is None and fields[name].default is None:
            decoded[name] = None
            continue
        try:
            if functions and name in functions and isinstance(value, str):
                named = functions[name]
                short = value.rpartition(".")[2]  # Megatron Bridge writes torch.nn.functional.silu
                decoded[name] = named[_decode_choice(short, tuple(named))]
            else:
                decoded[name] = decode_value(value, hints[name])
        except WrongValueError as error:
            problems.add(path, error.rule, value, error.remedy)
    return decoded


def decode_value(value: Any, annotation: Any, *, optional: bool = False) -> Any:
    """Return plain data as a value of the annotated type.

    Args:
        value: The plain data.
        annotation: bool, int, float, str, torch.dtype, an Enum, Literal, list, tuple, or an
            Optional or Union of these.
        optional: Whether None is legal. Then an unquoted ``off`` or ``no``, which YAML reads as
            False, means None for a field that holds a name.

    Raises:
        WrongValueError: The value does not fit the annotation.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _decode_union(value, arguments)
    if origin is Literal:
        return _decode_choice(value, arguments, optional=optional)
    if annotation in (bool, int, float):
        return coerce(value, annotation.__name__)
    if annotation is str:
        return _decode_text(value, optional=optional)
    if origin in (list, tuple) or annotation in (list, tuple):
        return _decode_sequence(value, origin or annotation, arguments)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _decode_enum(value, annotation)
    if getattr(annotation, "__module__", "") == "torch" and annotation.__name__ == "dtype":
        return get_torch_dtype(coerce(value, "dtype"))
    if annotation is Any:
        return value
    if isinstance(value, Mapping | str) and hasattr(annotation, "from_config_dict"):
        return _decode_recipe(value, annotation)
    rule = f"holds {_describe_annotation(annotation)}, which a configuration cannot describe"
    raise _NotDataError(rule, value, "Set it in Python.")


def _decode_recipe(value: Mapping[str, Any] | str, annotation: Any) -> Any:
    """Return Megatron's object of a per-module recipe: the content of a file of matchers."""
    if isinstance(value, str):
        rule = "is the content of a file of configs and matchers, not its path"
        raise WrongValueError(rule, value, "Write the content.")
    try:
        return annotation.from_config_dict(convert_to_file_content(value))
    except Exception as error:  # noqa: BLE001  Megatron raises exceptions of any class
        why = " ".join(str(error).split()) or type(error).__name__
        rule = f"is refused by Megatron's RecipeConfig ({why})"
        raise WrongValueError(rule, dict(value), "Correct it.") from None


def _decode_union(value: Any, members: tuple[Any, ...]) -> Any:
    """Return the value as the first member of a union that it fits.

    Members of the value's own type are tried before members that it can be converted to.
    """
    optional = type(None) in members
    if value is None and optional:
        return None
    same_type, other_types = [], []
    for member in members:
        if type(value) in (member, typing.get_origin(member)):
            same_type.append(member)
        elif member is not type(None):
            other_types.append(member)
    refusals: list[WrongValueError] = []
    for member in (*same_type, *other_types):
        try:
            return decode_value(value, member, optional=optional)
        except WrongValueError as error:
            refusals.append(error)
    # A refusal of plain data tells the user more than a type that no data can describe.
    for refusal in refusals:
        if not isinstance(refusal, _NotDataError):
            raise refusal
    raise refusals[0]


def _decode_choice(value: Any, known: tuple[Any, ...], *, optional: bool = False) -> Any:
    """Return the known value that equals a value, or is written like it."""
    for name in known:
        if name == value and isinstance(name, bool) == isinstance(value, bool):
            return name
    is_none = value is False or (isinstance(value, str) and value.lower() in ("none", "null"))
    if optional and is_none:
        return None
    names = list(map(str, known))
    if str(value) in names and not isinstance(value, bool):  # "2" for 2
        return known[names.index(str(value))]
    raise _make_choice_error(value, names)


def _decode_text(value: Any, *, optional: bool) -> str | None:
    """Return a name. A number or a switch is refused: YAML may have misread the text."""
    if isinstance(value, str) or (optional and value is False):
        return coerce(value, "name", switch=optional)  # type: ignore[no-any-return]
    remedy = "Give a single value"
    if isinstance(value, bool):
        remedy = "YAML reads an unquoted yes, no, on or off as a switch; quote it"
    elif isinstance(value, int | float):
        remedy = "Quote it"
    raise WrongValueError("must be text", value, f"{remedy}.")


def _decode_sequence(value: Any, kind: type[Any], arguments: tuple[Any, ...]) -> Any:
    """Return a list or a tuple with each item decoded by its annotation."""
    if not isinstance(value, list | tuple):
        raise WrongValueError("must be a list", value, "Write [a, b].")
    is_fixed = kind is tuple and arguments and Ellipsis not in arguments
    if is_fixed and len(value) != len(arguments):
        raise WrongValueError(f"must have {len(arguments)} items", list(value), "Give all of them.")
    annotations: Sequence[Any] = arguments
    if not is_fixed:
        item: Any = Any
        if arguments:
            item = arguments[0]
        annotations = [item] * len(value)
    try:
        return kind(map(decode_value, value, annotations))
    except WrongValueError as error:
        raise WrongValueError(f"each item {error.rule}", list(value), error.remedy) from None


def _decode_enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    """Return the member with a name or a value. A YAML of Megatron Bridge may have either."""
    is_plain = isinstance(value, str | int) and not isinstance(value, bool)
    for member in kind:
        if is_plain and str(value).lower() in (member.name.lower(), str(member.value).lower()):
            return member
    raise _make_choice_error(value, list(kind.__members__))


def _make_choice_error(value: Any, names: list[str]) -> WrongValueError:
    """Return the error of a value that is none of some names, with the nearest names."""
    hint = did_you_mean(close_matches(str(value), names)) or f"Use {listed(names)}."
    return WrongValueError(f"must be one of {', '.join(names)}", value, hint)


def _describe_annotation(annotation: Any) -> str:
    """Return a type that plain data cannot describe, with its article."""
    if typing.get_origin(annotation) is Callable or annotation in (Callable, typing.Callable):
        return "a function"
    return f"a {getattr(annotation, '__name__', str(annotation))} object"

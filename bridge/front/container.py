"""`build_container`: the `ConfigContainer` of a run, with Megatron's config objects.

The values of each section are decoded by the annotations of its class (`decode.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, RunConfigError
from bridge.extras import require_extra
from bridge.front.decode import decode_fields
from bridge.model.shape_reader import find_impossible_sizes
from bridge.precision.coercion import get_torch_dtype
from bridge.precision.mode import get_mode
from bridge.precision.stated_field import get_field_default
from bridge.precision.statements import get_field_value
from bridge.preflight import gpu_for_te_cpu
from bridge.preflight.file_reading import PRECISION_BRIDGE
from bridge.preflight.origins import Origins
from bridge.preflight.problems import Problems
from bridge.preflight.run import Run
from bridge.read.run_keys import NON_SECTION_KEYS, SECTION_CLASSES
from bridge.training.config import ConfigContainer

if TYPE_CHECKING:
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig

PADDING_FIELDS = frozenset({"moe_router_padding_for_quantization", "moe_router_padding_for_fp8"})
"""Fields of the model that Megatron takes together with FP8 or FP4 alone."""


def build_container(run: Run, problems: Problems | None = None) -> ConfigContainer:
    """Return the configs of a run as objects, before the precision is written into them.

    The precision is finalized, and Megatron Core is imported. Afterwards `require_startable` checks
    whether the run can begin.

    Args:
        problems: The faults found before, which are raised together with those found here.

    Raises:
        RunConfigError: A value does not fit its field, or Megatron Core refuses the settings.
        PrecisionConfigError: The precision is wrong in any run.
    """
    problems = problems or Problems(run.origins)
    _refuse_other_framework(run)
    require_extra("train", "A training run")
    _declare_gpu_for_te_cpu(run)
    # Megatron Core is heavy, and `--help` does not need it.
    from bridge.runtime.megatron.deferred_configs import (
        MegatronDistributedDataParallelConfig,
        MegatronOptimizerConfig,
    )
    from bridge.runtime.megatron.model.gpt import ACTIVATIONS, GPTConfig

    config_classes = {
        "model": GPTConfig,
        "optimizer": MegatronOptimizerConfig,
        "ddp": MegatronDistributedDataParallelConfig,
    }
    own_arguments = decode_sections(run, SECTION_CLASSES, problems)
    functions = {"activation_func": ACTIVATIONS}
    config_arguments = decode_sections(run, config_classes, problems, functions)
    problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
    megatron_configs = _build_megatron_configs(run, config_classes, config_arguments, problems)
    sections = {}
    for name, section_class in SECTION_CLASSES.items():
        sections[name] = section_class(**own_arguments[name])
    return ConfigContainer(
        **megatron_configs,
        **sections,
        **_collect_run_values(run),
        mixed_precision=run.precision,
        precision_choice=_choice_to_dict(run),
        set_by=_origins_to_dict(run),
    )


def _build_megatron_configs(
    run: Run,
    config_classes: Mapping[str, type[Any]],
    arguments: Mapping[str, dict[str, Any]],
    problems: Problems,
) -> dict[str, Any]:
    """Return Megatron's configs of a run by section. Each field has its stated value or its default.

    Args:
        config_classes: Section -> class of its config.
        arguments: Section -> arguments that the run states.
        problems: The faults found before, which are raised together with those found here.

    Raises:
        RunConfigError: Megatron Core refuses the settings.
    """
    placeholders = _choose_placeholders(run.precision, arguments["model"])
    configs = {}
    try:
        for name, config_class in config_classes.items():
            configs[name] = _construct_with_placeholders(
                name, config_class, arguments[name], placeholders.get(name, {})
            )
    except RunConfigError:
        # An impossible size explains the error of Megatron better than its message.
        refuse_impossible_sizes(run, problems)
        raise
    return configs


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
    """Return the choice of a recipe for `auto` as plain data, or None without `auto`."""
    if run.choice is None:
        return None
    return run.choice.to_dict()


def _origins_to_dict(run: Run) -> dict[str, dict[str, Any]]:
    """Return key -> origin -> the value that the origin set."""
    origins = run.origins or Origins()
    return {key: dict(setters) for key, setters in origins.values.items()}


def require_startable(
    container: ConfigContainer, run: Run, problems: Problems | None = None
) -> None:
    """Refuse a run with faults that are known before its data and model are built.

    Args:
        container: The configs of the run.
        run: The run, for the origins of its values.
        problems: The faults found before, which are raised together with those found here.

    Raises:
        RunConfigError: All faults.
    """
    from bridge.training.early_faults import find_early_faults  # heavy

    problems = problems or Problems(run.origins)
    refuse_impossible_sizes(run, problems)
    problems.add_all(find_early_faults(container, run.origin_of))
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
    if run.sections.get("precision_backend") != gpu_for_te_cpu.TE_CPU_BACKEND:
        return
    fields = run.model
    if run.precision is not None:
        fields = run.precision.to_dict(full=True)
    gpu_for_te_cpu.declare_for_run(run.sections.get("target"), fields)


def decode_sections(
    run: Run,
    classes: Mapping[str, type[Any]],
    problems: Problems,
    functions: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of each section's class.

    Args:
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


def _choose_placeholders(
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


def _construct_with_placeholders(
    name: str,
    config_class: type[Any],
    arguments: dict[str, Any],
    placeholders: Mapping[str, Any],
) -> Any:
    """Return the config of a class of Megatron, with the stated values.

    The constructor gets the placeholders, because Megatron checks the config there. Afterwards
    their fields get the stated values or the defaults again, because the sync compares its values
    with these. Values that Megatron derived in the constructor stay. The sync computes those of
    `DERIVED_ATTRIBUTES` (bridge/sync/trial.py) again.

    Args:
        name: The section of the config.
        config_class: The class of Megatron.
        arguments: The stated fields -> their values.
        placeholders: The fields of the precision that the check of the constructor requires.

    Raises:
        RunConfigError: Megatron Core refuses the settings.
    """
    try:
        config = config_class(**{**arguments, **placeholders})
    except BridgeError:
        raise
    except Exception as error:  # Megatron's checks raise exceptions of any class
        reason = f"{type(error).__name__}: {error}".rstrip(": .")
        remedy = "Correct the fields it is about."
        rule = f"Megatron Core refuses these settings ({reason})"
        raise RunConfigError(f"{name}: {rule}. {remedy}") from error
    defaults = {field.name: get_field_default(field) for field in dataclasses.fields(config_class)}
    for field in placeholders:
        setattr(config, field, arguments.get(field, defaults[field]))
    return config

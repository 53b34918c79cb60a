"""Primus: the YAML of an experiment, with the module and model files of its clone, as arguments of Megatron-LM.

    modules:
      pre_trainer: {framework: megatron, config: pre_trainer.yaml, model: llama3.1_8B.yaml, overrides: {fp8: hybrid}}

Its keys are the names that Megatron-LM's parsed arguments have. The module file comes first, then what the model file
has that it has not, then `overrides`. primus_presets.py reads the files. An experiment on Megatron Bridge is read by
primus_bridge.py.

Source: AMD-AGI/Primus fd1eeabb of 2026-08-22, primus/core/launcher/parser.py parse_trainer_module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.preflight.file_reading import FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.primus_presets import (
    TRAINER_KEYS,
    PrimusPresets,
    add_suffix,
    find_trainer,
    merge,
    replace_null_texts,
)
from bridge.read.framework.reading_from_arguments import build_reading_from_arguments
from bridge.read.megatron_lm.written_arguments import parse_runs

MEGATRON_FRAMEWORK = "megatron"
FP32_REDUCTION_KEY = "accumulate_allreduce_grads_in_fp32"
ADAPTER_KEY = "lora"
"""Key of the adapters that train in the place of the model's weights."""
STAGE_KEY = "stage"
FINE_TUNING_STAGE = "sft"
"""Stage of the only trainer that reads `ADAPTER_KEY`."""
ADAPTER_FIELDS = ("dim", "target_modules", "exclude_modules", "dropout")
"""Keys of the adapters that decide their layers and widths."""


def is_of(config: Mapping[str, Any]) -> bool:
    """Return whether a file of these contents is an experiment of Primus that trains on Megatron-LM."""
    return find_trainer(config, MEGATRON_FRAMEWORK) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedOverrides:
    """Settings of a command line, which count over those of the experiment."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """Place of the command line in messages."""


def read(
    config: Mapping[str, Any],
    path: Path,
    choice: RunChoice,
    stated: StatedOverrides | None = None,
) -> FileReading:
    """Return what an experiment says of its run.

    Args:
        config: The contents of the file.
        path: Path of the file.
        choice: The choices of the command line of this tool.
        stated: The settings of the command line that starts the experiment. None: it has none.

    Raises:
        RunConfigError: The experiment cannot be read.
    """
    choice.refuse_checkpoint(path)
    files = PrimusPresets(path, MEGATRON_FRAMEWORK, choice.variables)
    trainer: Mapping[str, Any] = files.resolve_variables(find_trainer(config, MEGATRON_FRAMEWORK))
    module = files.load("modules", str(trainer.get("config")))
    model = files.load("models", str(trainer.get("model")))
    arguments = {**model, **module}
    written_directly = {key: value for key, value in trainer.items() if key not in TRAINER_KEYS}
    overrides = {**written_directly, **(trainer.get("overrides") or {})}
    origins = dict.fromkeys(model, add_suffix(trainer.get("model")))
    origins |= dict.fromkeys(module, add_suffix(trainer.get("config")))
    origins |= dict.fromkeys(overrides, path.name)
    settings = replace_null_texts(merge(arguments, overrides))
    if stated is not None:
        settings = merge(settings, stated.values)
        origins |= dict.fromkeys(stated.values, stated.origin)
    arguments = dict(_flatten(settings))
    written = {}
    for name, value in arguments.items():
        is_default = (
            name == FP32_REDUCTION_KEY and value is False
        )  # Megatron-LM's checks turn it on under bf16
        if value is not None and not is_default:
            written[name] = value
    written["moe_layer_freq"] = str(written.get("moe_layer_freq", 1)).strip("()")
    (run,) = parse_runs(written)
    table = load_framework_table("primus")
    run.framework, run.label = table, ""
    run.mode_decider = run.used_by = ""
    if files.absent:
        run.mode_decider = f"{', '.join(files.absent)} of Primus"
    reading = build_reading_from_arguments(
        run,
        table,
        str(path),
        origins={name: origins.get(name.partition(".")[0], path.name) for name in written},
        read_too=tuple(files.read_too),
        unknown=tuple(files.unknown),
        variables=tuple(files.variables),
    )
    adapter = _read_adapter(settings)
    if adapter is None:
        return reading
    return replace(reading, sections={**reading.sections, "peft": adapter})


def _read_adapter(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the adapter of a fine-tuning run; None where all weights are trained.

    The classes are ports of Megatron Bridge's: the same layers have the same adapters, and the
    experts of a rank share theirs.

    Source: primus/backends/megatron/megatron_sft_trainer.py _init_lora; peft/lora.py LoRA.
    """
    stated = settings.get(ADAPTER_KEY)
    if not isinstance(stated, Mapping) or stated.get("enabled") is not True:
        return None
    if settings.get(STAGE_KEY, FINE_TUNING_STAGE) != FINE_TUNING_STAGE:
        return None
    adapter: dict[str, Any] = {"type": "LoRA"}
    for name in ADAPTER_FIELDS:
        if stated.get(name) is not None:
            adapter[name] = stated[name]
    return adapter


def _flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key with a plain value or a list, a key within a mapping with the keys before it."""
    for key, value in values.items():
        name = str(key)
        if above:
            name = f"{above}.{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, name)
        else:
            yield name, value

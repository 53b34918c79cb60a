"""Primus: the YAML of an experiment on Megatron Bridge, whose container a function of a recipe makes.

    modules:
      post_trainer:
        framework: megatron_bridge
        config: sft_trainer.yaml
        model: qwen3_8b.yaml                   # recipe: qwen.qwen3, flavor: qwen3_8b_finetune_config
        overrides: {peft: lora, precision_config: bf16_mixed}

The model file names the function by its module (`recipe`) and its name (`flavor`). Primus calls it with every key of
the module file, the model file and `overrides`. If the function does not take a key, Primus drops it and calls again.
At last it writes the keys with the name of a section over the container.

The function is followed by its syntax. Its source lies in the clone of Primus, or in Megatron Bridge, which is a
submodule of the clone. If neither has it, every setting is open, with the recipe as its decider.

Source: AMD-AGI/Primus fd1eeabb of 2026-08-22, primus/backends/megatron_bridge/config_utils.py load_recipe_config,
primus/core/launcher/parser.py parse_trainer_module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.errors import Finding
from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading, OptionFaults
from bridge.preflight.launches import Launches
from bridge.preflight.run_choice import RunChoice
from bridge.preflight.uncertainty import Uncertainty
from bridge.read.framework.framework_options import read_framework_options
from bridge.read.framework.framework_table import FrameworkTable, load_framework_table
from bridge.read.framework.primus_presets import (
    TRAINER_KEYS,
    PrimusPresets,
    add_suffix,
    find_trainer,
    merge,
    replace_null_texts,
)
from bridge.read.megatron_bridge.evaluator import Evaluator
from bridge.read.megatron_bridge.program_file import read_result
from bridge.read.megatron_bridge.source_library import (
    RECIPES_PACKAGE,
    Library,
    find_installed_root,
    has_package,
)
from bridge.read.megatron_bridge.values import Function, Object, Value, is_open
from bridge.read.run_keys import OWNER_SECTIONS
from bridge.rules.program import DroppedField
from bridge.target.fields import OWNER_DEFAULTS, OWNER_FIELDS

BRIDGE_FRAMEWORK = "megatron_bridge"
TABLE_NAME = "primus_bridge"
SUBMODULE = Path("third_party", "Megatron-Bridge", "src")
"""Folder of a clone of Primus with the source of Megatron Bridge."""
PRIMUS_PACKAGE = "primus"
PRIMUS_RECIPES = "primus.backends.megatron_bridge.recipes"
RECIPE_KEY, FUNCTION_KEY, PRECISION_ARGUMENT = "recipe", "flavor", "precision_config"
EXPERIMENT_SECTIONS = (*OWNER_SECTIONS, "peft")
"""Sections of a container that some experiments write at their top, next to `modules`."""

SUBMODULE_READ = f"Megatron Bridge: its source is read from {SUBMODULE} of the clone."
INSTALLED_READ = (
    "Megatron Bridge: the installed package is read, which may be another version than the "
    "submodule of Primus."
)
RECIPE_NOT_NAMED = "The recipe is not known: no file that was read states `recipe` and `flavor`."
RECIPE_NOT_FOUND = (
    "The recipe {name} is looked up in the clone of Primus, in its submodule third_party/Megatron-Bridge and in the "
    "installed package of Megatron Bridge, and found in none of them."
)
SUBMODULE_ABSENT = (
    "`git submodule update --init third_party/Megatron-Bridge` in the clone of Primus checks out the "
    "source of the recipes."
)
RECIPE_DECIDER = "the recipe {name}, which is not at hand,"
PRECISION_PASSED = "The recipe gets precision_config={value}, and decides what it makes of it."
TYPE_DECIDES = "{key}={value} of the experiment, which Primus writes only over a value of its type,"
STOPS_AT_START = (
    "is an argument that {function} passes on a second time, so that Primus stops at the start "
    "with a TypeError"
)
STOPS_REMEDY = "Remove it from the model file"
NOT_TAKEN = "{function} does not take this argument, and Primus calls it without it"
DECIDED_BY_RECIPE = "{function} sets another value itself"
NOT_OF_MODULE = (
    "the key stands outside of `modules`, and Primus passes on the keys of the trainer alone"
)
RECIPE_SOURCE = "primus/backends/megatron_bridge/config_utils.py auto_filter_and_call"
MODULE_SOURCE = "primus/core/config/primus_config.py load_primus_config"


def is_of(config: Mapping[str, Any]) -> bool:
    """Return whether a file of these contents is an experiment of Primus that trains on Megatron Bridge."""
    return find_trainer(config, BRIDGE_FRAMEWORK) is not None


def read(config: Mapping[str, Any], path: Path, choice: RunChoice) -> FileReading:
    """Return the run of an experiment.

    Args:
        config: The contents of the file.
        path: Path of the file.
        choice: The choices of the command line: variables, and the folder of the checkpoint.

    Raises:
        RunConfigError: A module or model file cannot be read.
        UnreadFileError: The container of the recipe is known only when the program runs.
    """
    replace(choice, variables={}).refuse_for(path)
    presets = PrimusPresets(path, BRIDGE_FRAMEWORK, choice.variables)
    trainer: Mapping[str, Any] = presets.resolve_variables(find_trainer(config, BRIDGE_FRAMEWORK))
    arguments = _load_arguments(trainer, presets)
    library = _find_library(presets.clone)
    recipe = _find_recipe(library, arguments)
    if recipe is None:
        reading = _build_reading_without_recipe(arguments, library)
    else:
        reading = _read_recipe(recipe, library, path, choice)
        reading = _add_dropped_fields(reading, recipe, config)
        reading = _add_source_notes(reading, library, presets.clone)
    return _add_experiment(reading, arguments, presets, path)


# -- the arguments of the recipe -------------------------------------------------------------------


def _load_arguments(trainer: Mapping[str, Any], presets: PrimusPresets) -> dict[str, Any]:
    """Return the keys with which Primus calls the recipe.

    A key of the module file counts over one of the model file, and a key of `overrides` over both.
    """
    module = presets.load("modules", str(trainer.get("config")))
    model = presets.load("models", str(trainer.get("model")))
    written_directly = {key: value for key, value in trainer.items() if key not in TRAINER_KEYS}
    presets_together = {
        "model": add_suffix(trainer.get("model")),
        **model,
        **written_directly,
        **module,
    }
    return replace_null_texts(merge(presets_together, trainer.get("overrides") or {}))


# -- the function of the recipe --------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Recipe:
    """The function of an experiment's recipe, with its arguments."""

    function: Function
    arguments: dict[str, Any]
    not_taken: tuple[str, ...] = ()
    """Arguments that the function does not take."""
    repeated: tuple[str, ...] = ()
    """Arguments that the function passes on a second time, which is an error of Python."""

    @property
    def name(self) -> str:
        """Name of the function with its module."""
        return f"{self.function.module.name}.{self.function.node.name}"


def _find_library(clone: Path | None) -> Library:
    """Return the source of Megatron Bridge and of Primus: that of the clone, or the installed one."""
    if clone is None:
        return Library(find_installed_root())
    root = find_installed_root()
    if has_package(clone / SUBMODULE):
        root = clone / SUBMODULE
    return Library(root, {PRIMUS_PACKAGE: clone})


def _find_recipe(library: Library, arguments: dict[str, Any]) -> _Recipe | None:
    """Return the function that an experiment names; None if its source is not found.

    Source: primus/backends/megatron_bridge/config_utils.py _resolve_recipe.
    """
    module, name = arguments.get(RECIPE_KEY), arguments.get(FUNCTION_KEY)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    candidates = [f"{PRIMUS_RECIPES}.{module}", f"{RECIPES_PACKAGE}.{module}", module]
    if module.startswith(f"{PRIMUS_PACKAGE}."):
        candidates = [module]
    for candidate in candidates:
        function = library.find(f"{candidate}.{name}")
        if isinstance(function, Function):
            return _Recipe(function=function, arguments=arguments)
    return None


def _build_reading_without_recipe(arguments: Mapping[str, Any], library: Library) -> FileReading:
    """Return the reading of a run whose recipe is not found: the recipe decides every setting."""
    module, name = arguments.get(RECIPE_KEY), arguments.get(FUNCTION_KEY)
    sentences = [RECIPE_NOT_NAMED]
    decider = RECIPE_DECIDER.format(name="of the run")
    if module is not None and name is not None:
        sentences = [RECIPE_NOT_FOUND.format(name=f"{module}.{name}")]
        decider = RECIPE_DECIDER.format(name=f"{module}.{name}")
        if library.root is None:
            sentences.append(SUBMODULE_ABSENT)
    if arguments.get(PRECISION_ARGUMENT) is not None:
        sentences.append(PRECISION_PASSED.format(value=arguments[PRECISION_ARGUMENT]))
    uncertainty = Uncertainty(
        open_points=tuple(sentences), mode_decider=decider, default_decider=decider
    )
    sections: dict[str, Any] = {owner: {} for owner in OWNER_SECTIONS}
    return FileReading(sections=sections, uncertainty=uncertainty)


def _read_recipe(recipe: _Recipe, library: Library, path: Path, choice: RunChoice) -> FileReading:
    """Return the run of the container that a recipe makes, with the sections of the experiment over it.

    The arguments that the function does not take are recorded in the recipe.
    """
    evaluator = Evaluator(library)
    evaluator.evaluate_function(recipe.function, recipe.arguments)
    taken: dict[str, Value] = {}
    not_taken: list[str] = []
    for name, value in recipe.arguments.items():
        if name in evaluator.refused_arguments:
            not_taken.append(name)
        else:
            taken[name] = value
    evaluator = Evaluator(library)
    container = evaluator.evaluate_function(recipe.function, taken)
    recipe.not_taken = tuple(not_taken)
    recipe.repeated = tuple(name for name in taken if name in evaluator.repeated_arguments)
    if isinstance(container, Object):
        _write_sections(evaluator, container, recipe.arguments, path.name)
    return read_result(evaluator, container, recipe.function, path, choice)


def _write_sections(
    evaluator: Evaluator, container: Object, arguments: Mapping[str, Any], file_name: str
) -> None:
    """Write the mappings among the arguments over the sections of the same name.

    Primus writes a value over one of the same type only. If the value below is not known, the field
    is open.

    Source: primus/backends/megatron_bridge/config_utils.py _merge_dict_to_dataclass.
    """
    for key, values in arguments.items():
        stated = container.fields.get(key)
        if not isinstance(values, Mapping) or stated is None:
            continue
        if not isinstance(stated.value, Object):
            continue
        defaults = evaluator.defaults(stated.value.kind)
        for name, value in values.items():
            below: Value = Object(decider=key)
            if name in stated.value.fields:
                below = stated.value.fields[name].value
            elif name in defaults:
                below = defaults[name]
            written: Value = value
            if is_open(below):
                decider = TYPE_DECIDES.format(key=f"{key}.{name}", value=value)
                written = Object(decider=decider)
            if value is not None and (is_open(below) or type(below) is type(value)):
                evaluator.state(stated.value, name, written, f"{file_name}, {key}.{name}")


def _add_source_notes(reading: FileReading, library: Library, clone: Path | None) -> FileReading:
    """Return a reading with the sentence about the source of Megatron Bridge that was read."""
    if library.root is None:
        return reading
    if clone is None or library.root != clone / SUBMODULE:
        return reading.with_notes(INSTALLED_READ)
    return reading.with_notes(SUBMODULE_READ)


# -- what does not reach Megatron Core -------------------------------------------------------------


def _add_dropped_fields(
    reading: FileReading, recipe: _Recipe, config: Mapping[str, Any]
) -> FileReading:
    """Return a reading with the settings of the experiment that do not reach the run."""
    table = load_framework_table(TABLE_NAME)
    dropped = [
        *_iterate_dropped_arguments(reading, recipe, table),
        *_iterate_misplaced_fields(config, table),
    ]
    refused: list[Finding] = []
    for name in recipe.repeated:
        refused.append(
            Finding(
                path=name,
                rule=STOPS_AT_START.format(function=recipe.name),
                remedy=STOPS_REMEDY,
                value=recipe.arguments[name],
                severity="error",
            )
        )
    faults = OptionFaults(refused=tuple(refused), dropped_fields=tuple(dropped))
    return replace(reading, option_faults=faults)


def _iterate_dropped_arguments(
    reading: FileReading, recipe: _Recipe, table: FrameworkTable
) -> Iterator[DroppedField]:
    """Yield the arguments with the name of a field of Megatron Core whose value the field does not get."""
    for name, value in recipe.arguments.items():
        for owner_name in OWNER_SECTIONS:
            path = f"{owner_name}.{name}"
            if value is None or name not in OWNER_FIELDS[owner_name]:
                continue
            if (
                path in reading.uncertainty.open_values
                or path in reading.uncertainty.unread_sources
            ):
                continue
            fields = reading.sections.get(owner_name) or {}
            if fields.get(name, OWNER_DEFAULTS[owner_name].get(name)) == value:
                continue
            because = DECIDED_BY_RECIPE
            if name in recipe.not_taken:
                because = NOT_TAKEN
            because = because.format(function=recipe.name)
            yield DroppedField(
                key=name,
                path=path,
                value=value,
                framework=table.title,
                code=table.code,
                because=because,
                source=RECIPE_SOURCE,
            )


def _iterate_misplaced_fields(
    config: Mapping[str, Any], table: FrameworkTable
) -> Iterator[DroppedField]:
    """Yield the fields of sections at the top of an experiment, which Primus passes to no program."""
    for section in EXPERIMENT_SECTIONS:
        fields = config.get(section)
        if not isinstance(fields, Mapping):
            continue
        for name, value in fields.items():
            if name in OWNER_FIELDS[section]:
                yield DroppedField(
                    key=f"{section}.{name}",
                    path=f"{section}.{name}",
                    value=value,
                    framework=table.title,
                    code=table.code,
                    because=NOT_OF_MODULE,
                    source=MODULE_SOURCE,
                )


# -- the reading of the experiment -----------------------------------------------------------------


def _add_experiment(
    reading: FileReading, arguments: Mapping[str, Any], presets: PrimusPresets, path: Path
) -> FileReading:
    """Return a reading as one of Primus, with its files, its variables and the effects of its keys."""
    table = load_framework_table(TABLE_NAME)
    effects = read_framework_options(table, arguments, {}, str(path))
    uncertainty = reading.uncertainty
    uncertainty = replace(
        uncertainty,
        open_points=(*presets.unknown, *uncertainty.open_points, *effects.open_points),
        unread_sources={**uncertainty.unread_sources, **effects.unread_sources},
        unread_options=(*uncertainty.unread_options, *effects.unread_options),
        no_plan_reason=effects.no_plan_reason or uncertainty.no_plan_reason,
    )
    read_as = f"Read as a run of {table.title}, by its code ({table.code})."
    return replace(
        reading,
        framework=table.title,
        underlying_framework=MEGATRON_BRIDGE,
        names={"dataset": "data", **reading.names},
        notes=(read_as, *presets.read_too, *reading.notes),
        uncertainty=uncertainty,
        launches=Launches(variables=tuple(presets.variables)),
        added_schemes=tuple(table.schemes),
    )

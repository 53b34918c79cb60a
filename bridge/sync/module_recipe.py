"""`build_module_recipe`: the rows of `modules` as `model.quant_recipe`.

A run has one recipe, or one recipe for each model chunk if rows name layers by number. An owner of
Megatron's class gets an object of `RecipeConfig`, the class in the annotation of the field. A
mapping, or an object of another class, gets plain data.

All ranks hold the same object. If pipeline stages need different recipes, the object asks Megatron
for the stage when the model is built. At that time Megatron has made its process groups. Megatron's
matcher cannot tell the chunks of a stage apart, so the trainer asks for the recipe of each chunk.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.layout import ParallelLayout
from bridge.precision.matchers import TRAINING, QuantRecipe, parse_quant_recipes
from bridge.precision.mode import get_low_precision_format
from bridge.precision.module_row import ModuleRow, parse_module_rows
from bridge.precision.module_schemes import make_chunk_recipes, make_stage_recipes
from bridge.precision.owners import ConfigObject
from bridge.precision.precision_config import PrecisionConfig
from bridge.precision.statements import get_field_value
from bridge.sync.owner import OwnerValues
from bridge.target.fields import parse_integer, read_field

PARALLEL_STATE = "megatron.core.parallel_state"


def build_module_recipe(config: PrecisionConfig, owner: OwnerValues) -> Any:
    """Return the value of an owner's `quant_recipe` for the rows of `modules`, as plain data.

    If the owner's value has the same effect, it is returned instead.

    Raises:
        RunConfigError: A row names layers by number, and the number of layers or the layout of the
            model is not known.
    """
    rows = parse_module_rows(get_field_value(config, "modules"))
    chunks: list[tuple[int, ...]] = [()]
    if any(row.layer_numbers for row in rows):
        chunks = _compute_chunk_layers(owner, rows)
    files = make_chunk_recipes(rows, chunks, run=get_low_precision_format(config))
    recipe: Any = files
    if all(file == files[0] for file in files):
        recipe = files[0]
    owner_value = owner.value("quant_recipe")
    if _have_same_effect(parse_quant_recipes(recipe), parse_quant_recipes(owner_value)):
        return owner_value
    return recipe


def _have_same_effect(ours: Sequence[QuantRecipe], theirs: Sequence[QuantRecipe]) -> bool:
    """Return whether the matchers of each chunk have the same effect."""
    if len(ours) != len(theirs):
        return False
    return all(their.has_same_effect(our) for their, our in zip(theirs, ours, strict=True))


def build_recipe_object(kind: type, recipe: Any, model: ConfigObject) -> Any:
    """Return the plain data of `build_module_recipe` as an object of a class of Megatron.

    Args:
        kind: Megatron's class, `RecipeConfig`.
        recipe: A file, or a file for each model chunk.
        model: The model config, with the layout.
    """
    if isinstance(recipe, dict):
        return make_module_recipe(kind, [recipe], 1)
    return make_module_recipe(kind, recipe, ParallelLayout.from_model(model).pipeline)


def _compute_chunk_layers(owner: OwnerValues, rows: Sequence[ModuleRow]) -> list[tuple[int, ...]]:
    """Return the numbers of the layers of each model chunk, in order of execution.

    A partial description of a run may lack the number of layers. It gets one chunk, with as many
    layers as the rows need.
    """
    model = owner.section.values
    num_layers = parse_integer(read_field(model, "num_layers", 0)) or 0
    try:
        if num_layers < 1:
            rule = "a row names layers by number, and the model's number of layers is not known"
            remedy = "State model.num_layers before the recipe is written."
            raise RunConfigError.of("mixed_precision.modules", rule, num_layers, remedy)
        chunks = ParallelLayout.from_model(model).split_layers(num_layers)
        return [chunk.layers for chunk in chunks]
    except RunConfigError:
        if not owner.is_partial:
            raise
        named: list[int] = []
        for row in rows:
            named.extend(row.layer_numbers)
        fewest_layers = max(max(named) + 1, -min(named))
        return [tuple(range(fewest_layers))]


class _ModuleRecipe:
    """A recipe with different matchers for each pipeline stage.

    `_make_recipe_class` makes a class that derives from this class and from Megatron's
    `RecipeConfig`.

    Args:
        files: A file for each model chunk, in order of execution, or a single file for all chunks.
        stages: The number of pipeline stages.
    """

    kind: Any
    """Megatron's class."""

    def __init__(self, files: Sequence[dict[str, Any]], stages: int) -> None:
        self.files = tuple(files)
        self.stages = stages

    @property
    def configs(self) -> dict[str, Any]:
        """Name -> payload. It is the same in every stage."""
        return dict(self.files[0]["configs"])

    @property
    def matchers(self) -> list[Any]:
        """Megatron's matchers of the stage that this process runs."""
        files = make_stage_recipes(self.files, self.stages)
        stage = 0
        if len(files) > 1:
            stage = _get_pipeline_stage()
        file = files[stage]
        if file is None:
            raise RunConfigError(
                "mixed_precision.modules: the model chunks of this stage need different recipes, "
                "and Megatron gives them one. Build chunk N with model.quant_recipe.of_chunk(N) as "
                "its quant_recipe, use virtual_pipeline_model_parallel_size=None, or rows without "
                "layers."
            )
        return list(self.kind.from_config_dict(file).matchers)

    def of_chunk(self, number: int) -> Any:
        """Return the recipe of one model chunk of every stage.

        Args:
            number: The number of the chunk within its stage, from 0.
        """
        files = self.files
        if len(files) > 1:
            first = number * self.stages
            files = files[first : first + self.stages]
        return type(self)(files, len(files))

    def to_cfg_dict(self) -> dict[str, Any]:
        """Return the mapping that Megatron Bridge's container writes into the YAML of a run.

        Megatron Bridge refuses a subclass of `RecipeConfig` without this method. A single recipe is
        written as `RecipeConfig` itself. Several recipes are written as a call of `make_module_recipe`. The
        loader of Megatron Bridge accepts that call if the prefix ``bridge.`` is allowed.
        """
        kind = _get_import_path(self.kind)
        if len(self.files) > 1:
            return {
                "_target_": _get_import_path(make_module_recipe),
                "kind": {"_target_": kind, "_call_": False},
                "files": list(self.files),
                "stages": self.stages,
            }
        matchers = []
        for matcher in self.matchers:
            matchers.append({"_target_": _get_import_path(type(matcher)), **vars(matcher)})
        return {"_target_": kind, "matchers": matchers, "config_dict": self.configs}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.stages)

    def __reduce__(self) -> tuple[Any, ...]:
        return make_module_recipe, (self.kind, self.files, self.stages)

    def __repr__(self) -> str:
        configs = []
        for name, payload in self.configs.items():
            configs.append(f"{name}: {payload[TRAINING]}")
        files = []
        for file in self.files:
            rows = file["matchers"].values()
            files.append(", ".join(f"{row['pattern']} -> {row['config']}" for row in rows))
        # Chunks are separated by a bar: "*fc1 -> mxfp8 | *fc1 -> bf16; mxfp8: ..., bf16: ...".
        return f"ModuleRecipe({' | '.join(files)}; {', '.join(configs)})"


def _get_import_path(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


@functools.cache
def _make_recipe_class(kind: Any) -> Any:
    return type("ModuleRecipe", (_ModuleRecipe, kind), {"kind": kind})


def make_module_recipe(kind: Any, files: Sequence[dict[str, Any]], stages: int) -> Any:
    """Return a recipe that is an object of a class of Megatron.

    YAML files and pickles name this function.

    Args:
        kind: Megatron's class, `RecipeConfig`.
        files: As for `_ModuleRecipe`.
        stages: As for `_ModuleRecipe`.
    """
    return _make_recipe_class(kind)(files, stages)


def _get_pipeline_stage() -> int:
    """Return the pipeline stage of this process, from Megatron's state."""
    # The code that builds the model has imported Megatron. This room does not import it.
    state: Any = sys.modules.get(PARALLEL_STATE)
    if state is None or not state.model_parallel_is_initialized():
        raise RunConfigError(
            "mixed_precision.modules: the rows name layers, so each pipeline stage has a recipe of "
            "its own, and the stage is not known yet. Build the model after Megatron's "
            "initialize_model_parallel."
        )
    stage: int = state.get_pipeline_model_parallel_rank()
    return stage

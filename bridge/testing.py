"""`RecipeConformance`: the tests that every recipe of a team has to pass, a base class for pytest.

    class TestOurRecipes(RecipeConformance):
        package = "acme_recipes"
        target = "h100x8,te2.9,cuda12.9,mcore0.16"

Each test runs once for each recipe. Megatron Core must be installed. Neither a GPU nor Transformer
Engine is needed.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from bridge.errors import RunConfigError
from bridge.front.folders import find_shipped_folder
from bridge.front.loader import load_run
from bridge.front.python_check import check
from bridge.precision.yaml_text import from_yaml, to_yaml
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY, get_mixed_precision_config, load_recipes_from
from bridge.registry.synchronize import synchronize

MODEL_SHAPE = MappingProxyType({"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32})
DISTRIBUTED_OPTIMIZER = MappingProxyType({"use_distributed_optimizer": True})


class RecipeConformance:
    """Tests of recipes. A subclass sets `target`, and `package`, `recipes` or `config_dir`."""

    package: ClassVar[str] = ""
    """The module or package that registers recipes. Every recipe that it defines is tested."""
    recipes: ClassVar[Sequence[str]] = ()
    """Further registered recipes, by name."""
    config_dir: ClassVar[Path | str | None] = None
    """A folder with YAML recipes in its folder `mixed_precision/`. They are tested too."""
    target: ClassVar[str] = ""
    """The GPUs and versions that every recipe has to run on: "h100x8,te2.9,cuda12.9,mcore0.16"."""
    model: ClassVar[Mapping[str, Any]] = MODEL_SHAPE
    """Fields of the model config that the recipes are written into."""
    optimizer: ClassVar[Mapping[str, Any]] = DISTRIBUTED_OPTIMIZER
    """Fields of the optimizer config."""
    ddp: ClassVar[Mapping[str, Any]] = DISTRIBUTED_OPTIMIZER
    """Fields of the DDP config."""
    silence: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Id of a rule -> the reason why the recipes may break it."""

    @classmethod
    def recipe_names(cls) -> list[str]:
        """Return the names of the tested recipes of the package, of `recipes` and of files.

        Raises:
            RecipeSourceError: The package does not exist or cannot be loaded.
            RunConfigError: No recipe is named.
        """
        names = []
        if cls.package:
            load_recipes_from(cls.package, key="package")
            for recipe in REGISTRY.recipes():
                if f"{recipe.function.__module__}.".startswith(f"{cls.package}."):
                    names.append(recipe.name)
        names += [name for name in cls.recipes if name not in names]
        if cls.config_dir is not None:
            files = Path(cls.config_dir, "mixed_precision").glob("*.yaml")
            names += sorted(file.stem for file in files)
        if not names:
            rule = "has no recipe to test"
            remedy = "Set package, recipes or config_dir."
            raise RunConfigError.of(cls.__name__, rule, cls.package or None, remedy)
        return names

    @classmethod
    def precision(cls, recipe: str) -> MixedPrecisionConfig:
        """Return a new config of a recipe, which is registered or a YAML file."""
        if recipe in REGISTRY:
            return get_mixed_precision_config(recipe)
        run = load_run(
            [f"mixed_precision={recipe}"],
            find_shipped_folder(),
            config_dir=cls.config_dir,
            strict=False,
        )
        return run.precision or MixedPrecisionConfig()

    @classmethod
    def owners(cls) -> dict[str, Any]:
        """Return new configs of the installed Megatron Core: model, optimizer and ddp."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns about packages that are not installed
            from megatron.core.distributed import DistributedDataParallelConfig
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.transformer import TransformerConfig

            return {
                "model": TransformerConfig(**cls.model),
                "optimizer": OptimizerConfig(**cls.optimizer),
                "ddp": DistributedDataParallelConfig(**cls.ddp),
            }

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Run each test once per recipe; a hook of pytest."""
        if "recipe" in metafunc.fixturenames:
            metafunc.parametrize("recipe", self.recipe_names())

    def test_can_be_right(self, recipe: str) -> None:
        """The recipe does not contradict itself."""
        self.precision(recipe).finalize()

    def test_returns_from_yaml(self, recipe: str) -> None:
        """The recipe states the same fields after it is written as YAML and read."""
        stated = self.precision(recipe).to_dict()
        returned = from_yaml(MixedPrecisionConfig, to_yaml(self.precision(recipe))).to_dict()
        if returned != stated:
            raise AssertionError(
                f"{recipe}: YAML returns {returned}, and the recipe states {stated}."
            )

    def test_every_stated_field_reaches_megatron(self, recipe: str) -> None:
        """The sync into the installed Megatron Core succeeds, and every stated field acts there."""
        report = synchronize(self.precision(recipe), **self.owners(), strict=True)
        lines = []
        for finding in report.findings:
            if finding.id not in self.silence:
                lines.append(f"  {finding}")
        if lines:
            raise AssertionError("\n".join([f"{recipe}:", *lines]))

    def test_a_second_sync_changes_nothing(self, recipe: str) -> None:
        """A second sync of the recipe changes no config."""
        owners = self.owners()
        synchronize(self.precision(recipe), **owners, strict=True)
        report = synchronize(self.precision(recipe), **owners, strict=True)
        if report.changes:
            lines = [f"  {row}" for row in report.changes]
            raise AssertionError("\n".join([f"{recipe}: a second sync changes", *lines]))

    def test_passes_the_check(self, recipe: str) -> None:
        """No rule of `precision-bridge check` finds an error for the declared target."""
        if not self.target:
            path = f"{type(self).__name__}.target"
            remedy = "Set h100x8,te2.9,cuda12.9, for example."
            raise RunConfigError.of(path, "needs GPUs and versions", self.target, remedy)
        run = {
            "mixed_precision": self.precision(recipe),
            "model": dict(self.model),
            "optimizer": dict(self.optimizer),
            "ddp": dict(self.ddp),
        }
        errors = check(run, target=self.target, silenced=self.silence).of("error")
        if errors:
            lines = [f"  {error.id} {error}" for error in errors]
            raise AssertionError("\n".join([f"{recipe}:", *lines]))

"""The registry: the names of recipes, and their functions.

    @register
    def my_recipe() -> MixedPrecisionConfig:
        \"\"\"BF16 with gradients reduced in BF16.\"\"\"
        return MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)

    get_mixed_precision_config("my_recipe")

A recipe is registered when its module is imported. The registry imports the modules of installed
plugins (entry-point group `bridge.recipes`, which the built-in recipes use too) and the modules and
files that `BRIDGE_RECIPES` or a run's `recipes_from` names.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast, overload

from bridge.errors import (
    BridgeError,
    DuplicateRecipeError,
    PrecisionTypeError,
    RecipeSourceError,
    UnknownRecipeError,
    close_matches,
    did_you_mean,
)
from bridge.precision.statements import mark_recipe
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.peer import PeerConfig, from_peer, is_peer_config
from bridge.registry.source_location import (
    RecipeFunction,
    SourceLocation,
    is_same_definition,
    require_no_arguments,
)

RECIPES_VARIABLE = "BRIDGE_RECIPES"
"""The variable with modules and files of recipes, separated like PATH (``:``; ``;`` on Windows)."""

GROUP = "mixed_precision"
"""Hydra's group of recipes, and the key of its node in a composed config."""
REFUSED_ALIASES = {
    "fp8_cs": "Megatron Bridge's performance scripts mean bf16_with_fp8_current_scaling_mixed with "
    "first_last_layers_bf16=False by it. Choose that recipe, and state that field."
}
"""Short name of Megatron Bridge's performance scripts that is not an alias here -> the remedy.

The scripts change a field of the recipe that the name stands for. Their other short names are
aliases here.

Source: scripts/performance/utils/precision.py, 2026-08-22.
"""

log = logging.getLogger(__name__)

RecipeFunctionT = TypeVar("RecipeFunctionT", bound=RecipeFunction)
NameOrNames: TypeAlias = str | Iterable[str]
"""One name, or several names."""

_recipes_in_progress: ContextVar[tuple[str, ...]] = ContextVar("recipes_in_progress", default=())
"""Names of the recipes whose functions are running, the outermost first."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A registered recipe."""

    name: str
    function: RecipeFunction
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def place(self) -> str:
        """The location of the function, ``file:line``."""
        return str(SourceLocation.from_function(self.function))


def load_recipes_from(names: str | Iterable[str], *, key: str = "recipes_from") -> None:
    """Import modules or files, which register recipes.

    Args:
        names: Dotted names of modules, or paths of ``.py`` files.
        key: The setting that names them, for messages.

    Raises:
        RecipeSourceError: There is no such module or file, or it failed to load.
    """
    for name in _to_tuple(names):
        try:
            if name.endswith(".py") or os.sep in name:
                _import_file(Path(name).expanduser())
            else:
                importlib.import_module(name)
        except FileNotFoundError:
            remedy = "Give the path of an existing .py file."
            raise RecipeSourceError(f"{key}: there is no file {name!r}. {remedy}") from None
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise RecipeSourceError(
                    f"{key}: {name!r} failed to load: {error}. Correct it there."
                ) from error
            remedy = "Give a module that can be imported, or the path of a .py file."
            raise RecipeSourceError(f"{key}: there is no module {name!r}. {remedy}") from None
        except BridgeError:
            raise  # its message already names the fault and the location
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
            raise RecipeSourceError(
                f"{key}: {name!r} failed to load: {why}. Correct it there."
            ) from error


def _import_file(path: Path) -> None:
    """Import a file under a unique module name, unless the file is imported already."""
    path = path.resolve()
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


class Registry:
    """Recipes by their names. Every lookup makes a fresh config.

    Installed plugins and the entries of `BRIDGE_RECIPES` are loaded once, on first use. A plugin or
    entry that fails is logged, and the others are loaded.
    """

    def __init__(self, *, plugins: bool = True) -> None:
        self.broken: dict[str, str] = {}
        """Plugin or entry of `BRIDGE_RECIPES` -> the reason why it was not loaded."""
        self._recipes: dict[str, Recipe] = {}
        self._aliases: dict[str, str] = {}
        self._is_loaded = not plugins
        self._lock = threading.RLock()

    def _load(self) -> None:
        # Other threads wait for the first. The lock is reentrant, because a source may look up
        # recipes while it is loaded.
        with self._lock:
            if self._is_loaded:
                return
            self._is_loaded = True
            for point in entry_points(group="bridge.recipes"):
                self._load_source(f"plugin {point.name!r} ({point.value})", point.load)
            for name in os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep):
                if name:
                    load = functools.partial(load_recipes_from, name, key=RECIPES_VARIABLE)
                    self._load_source(f"{RECIPES_VARIABLE} entry {name!r}", load)

    def _load_source(self, source: str, load: Callable[[], object]) -> None:
        """Load the recipes of a plugin or of an entry of `BRIDGE_RECIPES`.

        After an error none of its recipes is registered.
        """
        recipes, aliases = dict(self._recipes), dict(self._aliases)
        try:
            load()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a plugin may fail in any way
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, BridgeError):
                why = str(error)
            self.broken[source] = why
            # A recipe of the plugin may need another one that was not registered.
            self._recipes, self._aliases = recipes, aliases
            log.warning("Recipes not loaded: %s: %s", source, why)

    @overload
    def register(self, function: RecipeFunctionT, /) -> RecipeFunctionT: ...
    @overload
    def register(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        tags: NameOrNames = (),
        aliases: NameOrNames = (),
    ) -> Callable[[RecipeFunctionT], RecipeFunctionT]: ...
    def register(
        self,
        function: RecipeFunctionT | None = None,
        /,
        *,
        name: str | None = None,
        tags: NameOrNames = (),
        aliases: NameOrNames = (),
    ) -> RecipeFunctionT | Callable[[RecipeFunctionT], RecipeFunctionT]:
        """Register a function that returns a `MixedPrecisionConfig`, as a decorator.

        The decorator can be used with and without arguments.

        Args:
            function: The function. The recipe gets its name.
            name: Another name for the recipe.
            tags: Labels by which recipes are grouped.
            aliases: Further names.

        Raises:
            DuplicateRecipeError: Another function already has the name. The same definition that is
                run again, as in a notebook, replaces the earlier function.
            RecipeSourceError: The object is not a function with a name, or needs arguments.
        """
        if function is None:
            return functools.partial(self.register, name=name, tags=tags, aliases=aliases)
        self._load()  # so that a duplicate is an error of the new recipe
        if name is None:
            name = getattr(function, "__name__", None)
        if not callable(function) or not isinstance(name, str):
            raise RecipeSourceError(
                f"@register: takes a function with a name, got {function!r}. Use @register(name='...')."
            )
        require_no_arguments(function, name)
        recipe = Recipe(
            name=canonicalise_name(name),
            function=_wrap_recipe_function(function, canonicalise_name(name)),
            tags=_to_tuple(tags),
            aliases=tuple(canonicalise_name(alias) for alias in _to_tuple(aliases)),
        )
        self.add(recipe)
        return cast("RecipeFunctionT", recipe.function)

    def add(self, recipe: Recipe) -> None:
        """Add a recipe under its name and all of its aliases.

        Raises:
            DuplicateRecipeError: Another function has one of the names. Nothing is added.
            RecipeSourceError: A name has a forbidden character. Nothing is added.
        """
        with self._lock:
            for name in (recipe.name, *recipe.aliases):
                if not name.replace("_", "a").isidentifier():
                    rule = "a name is made of letters, digits and underscores"
                    raise RecipeSourceError(f"Recipe {name!r} ({recipe.place}): {rule}. Rename it.")
                other = self._recipes.get(self._aliases.get(name, name))
                if other is not None and not is_same_definition(other.function, recipe.function):
                    raise DuplicateRecipeError(name, (other.place, recipe.place))
            self._recipes[recipe.name] = recipe
            self._aliases = self._aliases_without(recipe.name)
            for alias in recipe.aliases:
                self._aliases[alias] = recipe.name

    def remove(self, name: str) -> None:
        """Remove a recipe and its aliases.

        Raises:
            UnknownRecipeError: There is no such recipe.
        """
        with self._lock:
            recipe = self.recipe(name)
            del self._recipes[recipe.name]
            self._aliases = self._aliases_without(recipe.name)

    def _aliases_without(self, name: str) -> dict[str, str]:
        return {alias: target for alias, target in self._aliases.items() if target != name}

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of a name or alias, with underscores or hyphens.

        Raises:
            UnknownRecipeError: There is no such recipe.
        """
        self._load()
        wanted = canonicalise_name(name)
        recipe = self._recipes.get(self._aliases.get(wanted, wanted))
        if recipe is None:
            raise self._unknown(name)
        return recipe

    def _unknown(self, name: str) -> UnknownRecipeError:
        """Return the error about an unknown name, with a remedy or close matches."""
        sentence = f"Unknown mixed-precision recipe {name!r}."
        remedy = REFUSED_ALIASES.get(canonicalise_name(name))
        if remedy is not None:
            return UnknownRecipeError(f"{sentence} {remedy}")
        matches = close_matches(name, [*self._recipes, *self._aliases])
        sentences = [sentence, did_you_mean(matches), self.listing_hint]
        return UnknownRecipeError(" ".join(filter(None, sentences)), matches)

    def get(self, name: str) -> MixedPrecisionConfig:
        """Return a fresh config of a recipe.

        Raises:
            UnknownRecipeError: There is no such recipe.
            RecipeSourceError: The recipe is built on itself, or its function returns no config.
        """
        recipe = self.recipe(name)
        in_progress = _recipes_in_progress.get()
        if recipe.name in in_progress:
            between = in_progress[in_progress.index(recipe.name) + 1 :]
            rule = "asks for itself"
            if between:
                rule = f"asks for itself through {', '.join(map(repr, between))}"
            raise RecipeSourceError(
                f"Recipe {recipe.name!r} ({recipe.place}): {rule}. "
                "Build it on another recipe, or return a MixedPrecisionConfig."
            )
        token = _recipes_in_progress.set((*in_progress, recipe.name))
        try:
            config = recipe.function()
        finally:
            _recipes_in_progress.reset(token)
        if not isinstance(config, MixedPrecisionConfig):
            raise RecipeSourceError(
                f"Recipe {recipe.name!r} ({recipe.place}): must return a MixedPrecisionConfig, "
                f"got {config!r}. Return one from the decorated function."
            )
        # A function that was set through `MIXED_PRECISION_RECIPES` does not name its recipe itself.
        return _copy_with_recipe_name(config, recipe.name)

    def recipes(self) -> list[Recipe]:
        """Return every recipe, in order of registration."""
        self._load()
        with self._lock:
            return list(self._recipes.values())

    def names(self) -> list[str]:
        """Return the canonical names, in order of registration."""
        return [recipe.name for recipe in self.recipes()]

    def aliases(self) -> dict[str, str]:
        """Return alias -> canonical name."""
        self._load()
        with self._lock:
            return dict(self._aliases)

    @property
    def listing_hint(self) -> str:
        """A sentence about how to list the recipes, and how to add a recipe."""
        count = len(self.names())
        return (
            f"`precision-bridge recipes` lists all {count}; {RECIPES_VARIABLE}=FILE.py adds yours."
        )

    def __contains__(self, name: object) -> bool:
        self._load()
        if not isinstance(name, str):
            return False
        wanted = canonicalise_name(name)
        return wanted in self._recipes or wanted in self._aliases


class RecipeMapping(MutableMapping[str, RecipeFunction]):
    """The registry as a mapping from name to function, like the module variable of Megatron Bridge.

    As in Megatron Bridge, iteration yields every name twice: with underscores and with hyphens.
    Aliases can be looked up too, but iteration does not yield them.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> RecipeFunction:
        if name not in self._registry:
            raise KeyError(name)
        return self._registry.recipe(name).function

    def __setitem__(self, name: str, function: RecipeFunction) -> None:
        self._registry.add(Recipe(name=canonicalise_name(name), function=function))

    def __delitem__(self, name: str) -> None:
        if name not in self._registry:
            raise KeyError(name)
        self._registry.remove(name)

    def __iter__(self) -> Iterator[str]:
        for name in self._registry.names():
            yield name
            if "_" in name:
                yield name.replace("_", "-")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._registry.names())})"

    def copy(self) -> dict[str, RecipeFunction]:
        """Return the registered functions as a dictionary, under both spellings of each name."""
        return dict(self)


def canonicalise_name(name: str) -> str:
    """Return the canonical spelling of a recipe's name: lower case, with underscores."""
    return name.strip().lower().replace("-", "_")


def get_recipe_flag(name: str) -> str:
    """Return the flag that marks a node of OmegaConf as the node of a recipe.

    The flag is kept when nodes are merged or pickled.
    """
    return f"recipe:{name}"


def _to_tuple(names: NameOrNames) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def _wrap_recipe_function(function: RecipeFunction, name: str) -> RecipeFunction:
    """Return a function whose configs are fresh copies and have the recipe's name as their source."""

    @functools.wraps(function)
    def recipe(*args: Any, **options: Any) -> Any:
        result: Any = function(*args, **options)
        if isinstance(result, MixedPrecisionConfig):
            return _copy_with_recipe_name(result, name)
        return result  # `Registry.get` refuses it

    return recipe


def _copy_with_recipe_name(config: MixedPrecisionConfig, name: str) -> MixedPrecisionConfig:
    """Return a copy with the recipe as its source. A function may return the same object twice."""
    named = copy.copy(config)
    mark_recipe(named, name)
    return named


BUILT_IN_PREFIX = "precision_bridge_recipes."
"""Prefix of the modules with the built-in recipes, which Megatron Bridge has too."""
REGISTRY = Registry()
MIXED_PRECISION_RECIPES = RecipeMapping(REGISTRY)
register = REGISTRY.register


def get_mixed_precision_config(
    name: str | MixedPrecisionConfig | PeerConfig,
) -> MixedPrecisionConfig:
    """Return the precision config of a recipe's name, or of a config.

    Args:
        name: A recipe's name, for which a fresh config is made. A `MixedPrecisionConfig`, which is
            returned as it is. Or an object of Megatron Bridge's class, which is read into a new
            config.

    Raises:
        UnknownRecipeError: There is no such recipe. The error is also a ValueError.
        PrecisionTypeError: The argument is neither a name nor a config.
    """
    if isinstance(name, MixedPrecisionConfig):
        return name
    if is_peer_config(name):
        built_in = []
        for recipe in REGISTRY.recipes():
            if recipe.function.__module__.startswith(BUILT_IN_PREFIX):
                built_in.append(recipe.function())
        return from_peer(name, built_in)
    if not isinstance(name, str):
        raise PrecisionTypeError(
            f"mixed_precision: must be a recipe's name or a MixedPrecisionConfig, got {name!r:.80}. "
            "MixedPrecisionConfig.from_dict makes one of plain data."
        )
    return REGISTRY.get(name)


def is_auto(name: object) -> bool:
    """Return whether a name is a request to choose a recipe: auto, auto:fp8, auto:fastest, auto:stable."""
    return isinstance(name, str) and name.partition(":")[0].strip().lower() == "auto"

"""Where recipes are loaded from: installed plugins, and modules or files that are named."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import BridgeError, RecipeSourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ENTRY_POINT_GROUP", "ENVIRONMENT_VARIABLE", "Sources", "load_recipes_from"]

ENTRY_POINT_GROUP = "bridge.recipes"
ENVIRONMENT_VARIABLE = "BRIDGE_RECIPES"
"""Modules and files of recipes, separated like PATH (``:``; ``;`` on Windows)."""

log = logging.getLogger(__name__)


class Sources:
    """Loads every source once, on first use. A source that fails is logged and does not stop the others."""

    def __init__(self, *, plugins: bool = True) -> None:
        self.broken: dict[str, str] = {}
        """Plugin, or entry of the variable -> why it was not loaded."""
        self._plugins = plugins
        self._loaded = False
        self._lock = threading.RLock()

    def load(self) -> None:
        """Load plugins and what `BRIDGE_RECIPES` names, unless that was done before."""
        if not self._plugins:
            return
        with self._lock:  # other threads wait for the first; what it loads may itself look recipes up
            if self._loaded:
                return
            self._loaded = True
            for point in entry_points(group=ENTRY_POINT_GROUP):
                try:
                    point.load()
                except (Exception, SystemExit) as error:  # noqa: BLE001  a plugin may fail in any way
                    self._report(f"plugin {point.name!r} ({point.value})", error)
            for name in filter(None, os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep)):
                try:
                    load_recipes_from([name], key=ENVIRONMENT_VARIABLE)
                except (Exception, SystemExit) as error:  # noqa: BLE001  likewise
                    self._report(f"{ENVIRONMENT_VARIABLE} entry {name!r}", error)

    def _report(self, what: str, error: BaseException) -> None:
        why = str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}"
        self.broken[what] = why
        log.warning("Recipes not loaded: %s: %s", what, why)


def load_recipes_from(names: str | Iterable[str], *, key: str = "recipes_from") -> None:
    """Import modules or files so that the recipes they register are known.

    Args:
        names: Dotted modules, or paths of ``.py`` files; one or several.
        key: What named them, for the message.

    Raises:
        RecipeSourceError: There is no such module or file, or it failed while it was loaded.
        BridgeError: What the module itself raised, a duplicate name say.
    """
    for name in [names] if isinstance(names, str) else list(names):
        is_file = name.endswith(".py") or os.sep in name
        try:
            _import_file(Path(name).expanduser()) if is_file else importlib.import_module(name)
        except FileNotFoundError:
            raise RecipeSourceError(
                f"{key}: there is no file {name!r}. Give the path of an existing .py file."
            ) from None
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise RecipeSourceError(f"{key}: {name!r} failed to load: {error}. Correct it there.") from error
            remedy = "Give a module that can be imported, or the path of a .py file."
            raise RecipeSourceError(f"{key}: there is no module {name!r}. {remedy}") from None
        except BridgeError:
            raise  # says by itself what is wrong and where
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
            raise RecipeSourceError(f"{key}: {name!r} failed to load: {why}. Correct it there.") from error


def _import_file(path: Path) -> None:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(path)
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return  # the file is a module that is already there
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise

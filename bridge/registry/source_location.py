"""Functions of recipes: their source location, and whether two come from the same definition.

A definition may run more than once: a notebook cell is run again, or an edited file is loaded again.
Then the later function replaces the earlier one. It is not a second recipe of the same name.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bridge.errors import RecipeSourceError
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

RecipeFunction = Callable[[], MixedPrecisionConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLocation:
    """The source location of a function."""

    function: RecipeFunction
    file: Path | None
    """The file. None: the callable has no file."""
    line: int | None
    """The first line. None: there is no source text, as for a function of an interactive prompt."""

    @classmethod
    def from_function(cls, function: RecipeFunction) -> Self:
        """Return the source location of a function."""
        original = inspect.unwrap(function)
        file = line = None
        try:
            file = Path(inspect.getfile(original))
            line = inspect.getsourcelines(original)[1]
        except (OSError, SyntaxError, TypeError):
            pass  # no source text; TypeError: a callable that is not a function
        return cls(function=function, file=file, line=line)

    def __str__(self) -> str:
        if self.file is None:
            return repr(self.function)
        if self.line is None:
            return str(self.file)
        return f"{self.file}:{self.line}"


def is_same_definition(first: RecipeFunction, second: RecipeFunction) -> bool:
    """Return whether two functions come from the same `def`, which ran more than once."""
    first, second = inspect.unwrap(first), inspect.unwrap(second)
    if first is second:
        return True
    first_location = SourceLocation.from_function(first)
    second_location = SourceLocation.from_function(second)
    if first_location.file is None or second_location.file is None:
        return False
    if not _is_alike(first, second):
        return False
    is_same_module = first.__module__ == second.__module__
    if not second_location.file.is_file():  # a notebook cell or an interactive prompt
        return is_same_module
    if first_location.file.resolve() != second_location.file.resolve():
        return is_same_module and not first_location.file.is_file()
    if second_location.line is not None and first_location.line == second_location.line:
        return True
    # The line differs: the file was edited and loaded again, or it has two functions of this name.
    source_text = second_location.file.read_text(encoding="utf-8")
    definitions = re.findall(rf"^[ \t]*def {second.__name__}\b", source_text, re.MULTILINE)
    return len(definitions) < 2


def _is_alike(first: RecipeFunction, second: RecipeFunction) -> bool:
    """Return whether two functions have the same name, defaults and captured values.

    Defaults or captured values differ if a `def` in a loop or in a factory makes several functions.
    """
    if first.__qualname__ != second.__qualname__ or "<lambda>" in first.__qualname__:
        return False
    if first.__defaults__ != second.__defaults__:
        return False
    return _get_captured_values(first) == _get_captured_values(second)


def _get_captured_values(function: Any) -> list[object]:
    """Return the values that a function captured from the enclosing function."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


def require_no_arguments(function: RecipeFunction, name: str) -> None:
    """Refuse a function that cannot be called without arguments.

    Args:
        name: The recipe's name, for the message.

    Raises:
        RecipeSourceError: The function needs arguments.
    """
    needed: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            needed.append(parameter.name)
    if needed:
        rule = f"is called without arguments, and needs {', '.join(needed)}"
        raise RecipeSourceError(f"Recipe {name!r}: {rule}. Give them defaults.")

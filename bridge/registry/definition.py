"""Functions of recipes: where they are defined, and whether two come from one definition.

A definition may be run more than once: a cell of a notebook, or a file that was edited and loaded
again. Then the later function replaces the earlier, and is no second recipe of the same name.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bridge.errors import RecipeSourceError
from bridge.registry.config import MixedPrecisionConfig

RecipeFunction = Callable[[], MixedPrecisionConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLocation:
    """The place of a function."""

    function: RecipeFunction
    file: Path | None
    """The file; None for a callable without a file."""
    line: int | None
    """The first line; None where the lines of the file are not there, as for a prompt."""

    @classmethod
    def from_function(cls, function: RecipeFunction) -> Self:
        """Return the place of a function."""
        original = inspect.unwrap(function)
        file = line = None
        try:
            file = Path(inspect.getfile(original))
            line = inspect.getsourcelines(original)[1]
        except (OSError, SyntaxError, TypeError):  # TypeError: a callable that is no function
            pass
        return cls(function=function, file=file, line=line)

    def __str__(self) -> str:
        if self.file is None:
            return repr(self.function)
        if self.line is None:
            return str(self.file)
        return f"{self.file}:{self.line}"


def is_same_definition(first: RecipeFunction, second: RecipeFunction) -> bool:
    """Return whether two functions come from one `def` that was run more than once."""
    first, second = inspect.unwrap(first), inspect.unwrap(second)
    if first is second:
        return True
    first_place, second_place = (
        SourceLocation.from_function(first),
        SourceLocation.from_function(second),
    )
    if first_place.file is None or second_place.file is None:
        return False
    if not _is_alike(first, second):
        return False
    is_same_module = first.__module__ == second.__module__
    if not second_place.file.is_file():  # a notebook cell or an interactive prompt
        return is_same_module
    if first_place.file.resolve() != second_place.file.resolve():
        return is_same_module and not first_place.file.is_file()
    if second_place.line is not None and first_place.line == second_place.line:
        return True
    # The file was edited and loaded again, unless the function is there twice.
    text = second_place.file.read_text(encoding="utf-8")
    definitions = re.findall(rf"^[ \t]*def {second.__name__}\b", text, re.MULTILINE)
    return len(definitions) < 2


def _is_alike(first: RecipeFunction, second: RecipeFunction) -> bool:
    """Return whether two functions have one name, and equal defaults and captured values.

    They differ in functions that one `def` makes in a loop or a factory.
    """
    if first.__qualname__ != second.__qualname__ or "<lambda>" in first.__qualname__:
        return False
    return first.__defaults__ == second.__defaults__ and _get_captured_values(
        first
    ) == _get_captured_values(second)


def _get_captured_values(function: Any) -> list[object]:
    """Return the values that a function took from the function around it."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


def require_no_arguments(function: RecipeFunction, name: str) -> None:
    """Refuse a function that cannot be called without arguments; RecipeSourceError.

    Args:
        function: The function of a recipe.
        name: The recipe's name, for the message.
    """
    needed: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            needed.append(parameter.name)
    if needed:
        rule = f"is called without arguments, and needs {', '.join(needed)}"
        raise RecipeSourceError(f"Recipe {name!r}: {rule}. Give them defaults.")

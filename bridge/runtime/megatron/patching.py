"""Attributes of torch, TE and Megatron that are replaced, for a block of code or for good.

`device` and `te_cpu.patches` have rows of dotted path -> (original -> replacement), and the
YAML file next to each says who needs a row and what happens without it. Imports neither
Megatron nor Transformer Engine.

Most of the callables are private, and a later release may change them. So a replacement passes on
the arguments that it does not know. It is left out, with one line in the log, where the callable is
gone or no longer has the parameters that the replacement names.
"""

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

PatchTable = Mapping[str, Callable[[Any], Any]]
"""Dotted path of a callable -> original -> replacement."""
Patch = tuple[Any, str, Any]
"""Owner, name of an attribute, and its new value."""
logger = logging.getLogger(__name__)
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def resolve_patches(rows: PatchTable) -> Iterator[Patch]:
    """Yield the change of each callable.

    A replacement is made of the callable that is there when its turn comes. A callable that is not
    there, or that its replacement does not fit, is left out.
    """
    for path, replace in rows.items():
        place, _, name = path.rpartition(".")
        try:
            owner = pkgutil.resolve_name(place)
            original = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            log_skipped_patch(path, str(error))
            continue
        value = replace(original)
        if _is_compatible(path, original, value):
            yield owner, name, value


@contextmanager
def apply_patches(changes: Iterable[Patch]) -> Iterator[None]:
    """Set attributes for a ``with`` block, whose end restores them in reverse order."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value, create=True))
        yield


def keep_compatible(changes: Iterable[Patch]) -> Iterator[Patch]:
    """Yield the changes whose value can take the place of the present value."""
    for owner, name, value in changes:
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        if _is_compatible(f"{owner_name}.{name}", getattr(owner, name, None), value):
            yield owner, name, value


def find_incompatibility(original: object, replacement: object) -> str | None:
    """Return why a function cannot take the place of another, as a clause, or None.

    Each parameter that the replacement names must be a parameter of the original, and the
    replacement must accept all parameters of the original. Classes fit, and so do functions of
    compiled extensions, whose parameters have no names.
    """
    if isinstance(original, type) or isinstance(replacement, type):
        return None
    if not (callable(original) and callable(replacement)):
        return None
    try:
        theirs = inspect.signature(original).parameters
        ours = inspect.signature(replacement, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in theirs.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    only_by_name = set()
    for name, parameter in ours.parameters.items():
        if parameter.kind in _KEYWORD_KINDS and name not in theirs and not takes_any_name:
            return f"it has no parameter {name!r}"
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            only_by_name.add(name)
    by_place: list[inspect.Parameter] = []
    by_name: dict[str, inspect.Parameter] = {}
    for name, parameter in theirs.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or name in only_by_name:
            by_name[name] = parameter
        elif parameter.kind in _POSITIONAL_KINDS:
            by_place.append(parameter)
    try:
        ours.bind(*by_place, **by_name)
    except TypeError as error:
        return f"its replacement has {error}"
    return None


def _is_compatible(path: str, original: object, replacement: object) -> bool:
    """Return whether a replacement fits its original; a misfit is logged."""
    reason = find_incompatibility(original, replacement)
    if reason is not None:
        log_skipped_patch(path, reason)
    return reason is None


@functools.cache
def log_skipped_patch(path: str, reason: str) -> None:
    """Log once in a process that a callable stays as it is."""
    logger.warning(
        "%s is left as it is: %s. Its replacement was written for another release.", path, reason
    )


def _replace_cuda_device(argument: Any) -> Any:
    """Return "cpu" for an argument that names a CUDA device, any other argument as it is."""
    if isinstance(argument, (str, torch.device)) and str(argument).startswith("cuda"):
        return "cpu"
    return argument


def redirect_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function by a function for which a CUDA device is the CPU.

    The replacement pins no memory for the device.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        named = {name: _replace_cuda_device(value) for name, value in kwargs.items()}
        return function(*map(_replace_cuda_device, args), **named)

    return called


def get_first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, by position or by name; None without arguments."""
    if args:
        return args[0]
    for value in kwargs.values():
        return value
    return None


def replace_by_constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return the replacement by a function that returns a constant, whatever its arguments are."""
    return lambda _original: lambda *_args, **_kwargs: value


def replace_rng_getter(_original: object) -> Callable[..., torch.Tensor]:
    """Replace the getter of CUDA's random state by the getter of the CPU's."""
    return lambda *_args, **_kwargs: torch.get_rng_state()


def replace_rng_setter(_original: object) -> Callable[..., None]:
    """Replace the setter of CUDA's random state by the setter of the CPU's."""
    return lambda *args, **kwargs: torch.set_rng_state(get_first_argument(args, kwargs))

"""`make_launches`: the runs of a file of Megatron-LM, and which of them a reading is about."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.preflight.launches import Launches
from bridge.read.framework.framework_options import refuses_arguments
from bridge.read.launch.shell_word import get_variable_name
from bridge.read.megatron_lm.argument_values import parse_argument_values
from bridge.read.megatron_lm.written_arguments import WrittenArguments

ARRAY_PATTERN = re.compile(r"\$\{(\w+)\[[@*]\]\}")
"""A word that is a whole array: ${MODEL_ARGS[@]}."""
VARIABLE_PATTERN = re.compile(r"\$\{?(\w+)")
"""A variable in the condition of a branch."""


def make_launches(runs: Sequence[WrittenArguments], number: int) -> Launches:
    """Return the runs of a file.

    Args:
        number: The number of the run that is read, from 1.
    """
    refused_numbers = _list_refused(runs)
    branches = [other for other in _list_branches(runs, number) if other not in refused_numbers]
    return Launches(
        labels=_list_labels(runs),
        number=number,
        branches=tuple(branches),
        refused_numbers=refused_numbers,
        variables=_list_mode_variables(runs, runs[number - 1]),
    )


def _list_labels(runs: Sequence[WrittenArguments]) -> tuple[str, ...]:
    """Return the labels of the runs of a file; none for a single run."""
    if len(runs) == 1:
        return ()
    return tuple(written.label for written in runs)


def _list_refused(runs: Sequence[WrittenArguments]) -> tuple[int, ...]:
    """Return the numbers of the runs whose framework trains nothing on Megatron Core with them."""
    numbers: list[int] = []
    for number, written in enumerate(runs, 1):
        if len(runs) == 1 or written.framework is None:
            continue
        if refuses_arguments(written.framework, parse_argument_values(written.options).all):
            numbers.append(number)
    return tuple(numbers)


def _list_branches(runs: Sequence[WrittenArguments], number: int) -> tuple[int, ...]:
    """Return the numbers of the runs that are the same launch on other branches of the script."""
    launch = runs[number - 1].launch
    if not launch.line:
        return ()
    numbers: list[int] = []
    for other_number, written in enumerate(runs, 1):
        is_same = written.launch.line == launch.line and written.launch.name == launch.name
        if is_same and other_number != number:
            numbers.append(other_number)
    return tuple(numbers)


def _list_mode_variables(
    runs: Sequence[WrittenArguments], chosen: WrittenArguments
) -> tuple[str, ...]:
    """Return the variables that may state the mode, each once.

    Variables that choose a branch come first, then those that hold arguments.

    Args:
        runs: The runs of the file, of which some are the same launch on other branches.
        chosen: The run that is read.
    """
    names: list[str] = []
    for written in runs:
        if written.launch.line == chosen.launch.line:
            for decision in written.launch.decisions:
                names += VARIABLE_PATTERN.findall(decision)
    for word in chosen.open_words:
        array = ARRAY_PATTERN.fullmatch(word)
        if array is None:
            names.append(get_variable_name(word))
        else:
            names.append(array[1])
    return tuple(dict.fromkeys(filter(None, names)))

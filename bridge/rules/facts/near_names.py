"""`find_near_names`: the names that a misspelt name may be meant for, one or two edits away."""

import functools
from collections.abc import Iterable

from bridge.errors import close_matches
from bridge.target.fields import OWNER_FIELD_NAMES

MAX_EDITS = 2


@functools.lru_cache(maxsize=1024)
def find_near_fields(role: str, name: str) -> tuple[str, ...]:
    """Return the fields of Megatron's that `name` may be a misspelling of.

    A field of a model provider's own looks like none of them.
    """
    return find_near_names(name, OWNER_FIELD_NAMES[role])


def find_near_names(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that one or two edits turn `name` into, nearest first."""
    by_length = _group_by_length(frozenset(names))
    letters = set(name)
    near = []
    for length in range(len(name) - MAX_EDITS, len(name) + MAX_EDITS + 1):
        for known, known_letters in by_length.get(length, ()):
            # One edit changes two letters at most; without this a file of 20,000 fields takes 9 s.
            if len(letters ^ known_letters) <= 2 * MAX_EDITS:
                near.append(known)
    found = []
    for known in close_matches(name, near):
        if _compute_edit_distance(known, name) <= MAX_EDITS:
            found.append(known)
    return tuple(found)


@functools.lru_cache(maxsize=16)
def _group_by_length(names: frozenset[str]) -> dict[int, list[tuple[str, frozenset[str]]]]:
    """Return length -> the names of that length, each with its letters."""
    found: dict[int, list[tuple[str, frozenset[str]]]] = {}
    for name in sorted(names):
        found.setdefault(len(name), []).append((name, frozenset(name)))
    return found


def _compute_edit_distance(first: str, second: str) -> int:
    """Return how many letters are inserted, deleted, replaced or swapped between two names."""
    rows = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]

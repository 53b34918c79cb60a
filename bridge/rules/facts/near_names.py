"""`find_near_names`: the names that are one or two edits away from a misspelt name."""

import functools
from collections.abc import Iterable

from bridge.errors import close_matches
from bridge.target.fields import OWNER_FIELD_NAMES

MAX_EDITS = 2


@functools.lru_cache(maxsize=1024)
def find_near_fields(owner_name: str, name: str) -> tuple[str, ...]:
    """Return the fields of Megatron's config that `name` may be a misspelling of."""
    return find_near_names(name, OWNER_FIELD_NAMES[owner_name])


def find_near_names(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are at most two edits away from `name`, the nearest first."""
    by_length = _group_by_length(frozenset(names))
    letters = set(name)
    near = []
    for length in range(len(name) - MAX_EDITS, len(name) + MAX_EDITS + 1):
        for known, known_letters in by_length.get(length, ()):
            # One edit changes at most two letters. Without this test a file of 20,000 fields takes
            # 9 s.
            if len(letters ^ known_letters) <= 2 * MAX_EDITS:
                near.append(known)
    near_enough = []
    for known in close_matches(name, near):
        if _compute_edit_distance(known, name) <= MAX_EDITS:
            near_enough.append(known)
    return tuple(near_enough)


@functools.lru_cache(maxsize=16)
def _group_by_length(names: frozenset[str]) -> dict[int, list[tuple[str, frozenset[str]]]]:
    """Return length -> the names of that length, each with its set of letters."""
    by_length: dict[int, list[tuple[str, frozenset[str]]]] = {}
    for name in sorted(names):
        by_length.setdefault(len(name), []).append((name, frozenset(name)))
    return by_length


def _compute_edit_distance(first: str, second: str) -> int:
    """Return the number of inserted, deleted, replaced or swapped letters between two names."""
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

"""`precision-bridge sources DIR`: every source of precision in a project, and which one wins."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bridge.cli.arguments import add_command, print_json
from bridge.precision.grouping import grouped

if TYPE_CHECKING:
    from bridge.convert.survey.source import Source
    from bridge.convert.survey.survey import Survey

WIDTH = 100
SHOWN = 4
"""Of files that say the same; a number stands for the rest."""
MANY = 12
"""Files that say what a run trains in: with more, they are not those of one run."""
LISTED = 12
"""Of things that say nothing of a whole run, and of files that were not read."""


def add_parsers(commands: Any) -> None:
    """Add the command."""
    text = "list every source of precision in a project, and which one wins"
    parser = add_command(commands, "sources", _sources, text)
    parser.add_argument("folder", help="folder of the project")
    parser.add_argument("--all", action="store_true", help="list every file, also where many say the same")


def _sources(chosen: argparse.Namespace) -> None:
    from bridge.convert.survey.survey import survey

    found = survey(chosen.folder)
    if chosen.json:
        winner = dataclasses.asdict(found.winner) if found.winner else None
        print_json(dataclasses.asdict(found) | {"agree": found.agree, "winner": winner})
        return
    print(*_lines(found, everything=chosen.all), sep="\n")


def _lines(found: Survey, *, everything: bool) -> Iterator[str]:
    from bridge.convert.survey.source import ORDER

    if not found.sources and found.unread:
        yield "No source of precision was read."
    elif not found.sources:
        yield "No source of precision was found."
    width = max((len(_head(source)) for source in found.ranked), default=0)
    for kind, members in grouped((source.kind, source) for source in found.ranked).items():
        yield f"{kind}:"
        for head, same in grouped((_head(source), source) for source in members).items():
            entries = [_line(source, named=len(same) == 1) for source in same]
            yield from _under(head, width, _capped(entries, SHOWN, everything))
    if found.partial:
        yield "these do not decide the precision of a whole run:"
        groups = grouped(((source.system, source.says), source) for source in found.partial)
        by_system = grouped((one[0], _together(same, everything=everything)) for one, same in groups.items())
        for head, lines in by_system.items():
            yield from _under(head, max(map(len, by_system)), _capped(lines, LISTED, everything))
    if found.sources:
        yield ""
        yield from (line for sentence in _verdict(found, ORDER) for line in _wrapped(sentence))
    unread = [f"not read: {line}" for line in _unread(found, everything=everything)]
    for sentence in (*_capped(unread, LISTED, everything), *(f"not complete: {limit}" for limit in found.limits)):
        yield from _wrapped(sentence)


def _capped(lines: list[str], most: int, everything: bool) -> list[str]:
    """Return the lines, the last ones as a number where there are many."""
    if everything or len(lines) <= most + 1:
        return lines
    return [*lines[:most], f"and {len(lines) - most} more (--all lists them)"]


def _under(head: str, width: int, lines: list[str]) -> Iterator[str]:
    """Lay lines out in a column next to their head."""
    for place, line in enumerate(lines):
        yield from _wrapped(f"  {'' if place else head:<{width}}  " + line, " " * (width + 6))


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _head(source: Source) -> str:
    return f"{source.precision} ({source.system})" if source.precision else source.system


def _place(source: Source) -> str:
    return f"{source.path}, {source.run}" if source.run else source.path


def _line(source: Source, *, named: bool) -> str:
    """Return where a source stands and what it says beyond its precision; where asked, the recipe it amounts to."""
    says = "" if source.says == source.precision else f": {source.says}"
    recipe = f" [{source.recipe}]" if named and source.recipe not in (None, source.precision) else ""
    return f"{_place(source)}{says}{recipe}"


def _together(same: list[Source], *, everything: bool) -> str:
    more = 0 if everything else max(0, len(same) - 2)
    places = [_place(source) for source in same[: len(same) - more]]
    return f"{'; '.join(places)}{f' and {more} more' if more else ''}: {same[0].says}"


def _unread(found: Survey, *, everything: bool) -> list[str]:
    """Return the files that were not read, those with the same reason in one line, each reason whole."""
    lines = []
    reasons = grouped((why.partition(": ")[2] or why, name) for name, why in found.unread.items())
    for reason, names in reasons.items():
        if len(names) == 1 or everything:
            lines += [found.unread[name] for name in names]
        else:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{len(names)} files ({', '.join(names[:SHOWN])}{more}): {reason}")
    return lines


def _verdict(found: Survey, reasons: Mapping[str, str]) -> list[str]:
    ranked, winner = found.ranked, found.winner
    if not ranked and found.unread:
        return ["None of those that were read says what a whole run trains in; the others are named below."]
    if not ranked:
        return ["None of them says what a whole run trains in."]
    if found.agree is None:
        return [_stated_by_some(found)]
    meanings = grouped((one.semantics, one) for one in ranked if one.semantics)
    if found.agree and len(meanings) > 1:
        kinds = ", ".join(f"{kind} ({_place(members[0])})" for kind, members in meanings.items())
        return [f"All agree on {ranked[0].precision}, under different semantics: {kinds}."]
    if found.agree:
        return [f"All agree: {ranked[0].precision}."]
    files = len({source.path for source in ranked})
    first = "Of those that one run uses, the one that stands first above wins"
    if files > MANY:
        return [f"They disagree. {first}; {files} files are more than one run uses, so give the folder of one."]
    top = found.top
    if winner is None and found.above:
        places = ", ".join(dict.fromkeys(_place(source) for source in found.above[:SHOWN]))
        which = f"No winner is known: {places} may stand above them, and does not say what it trains in."
    elif winner is None:
        values = " or ".join(dict.fromkeys(str(source.precision) for source in top))
        which = f"No single winner: those of the kind '{top[0].kind}' differ ({values}), and a run uses one of them."
    else:
        others = len({source.path for source in top}) - 1
        who = f"{winner.path} and {others} more that say the same win" if others else f"{winner.path} wins"
        which = f"{who} ({winner.kind}): {reasons[winner.kind]}."
    lines = [f"They disagree. {first}.", which]
    rest = dataclasses.replace(found, sources=tuple(source for source in ranked if source.kind != top[0].kind))
    if top[0].kind == "unnamed deepspeed" and rest.winner is not None:
        lines.append(f"Without it, {rest.winner.path} wins ({rest.winner.kind}).")
    if found.unread:
        lines.append("This is about the files that were read; those that were not are named below.")
    return lines


def _stated_by_some(found: Survey) -> str:
    """Return the verdict where those that state a precision agree, and others were not judged."""
    stating = {source.path for source in found.ranked}
    open_ = sorted({source.path for source in found.undecided} - stating)
    total = len(stating) + len(open_) + len(found.unread)
    verb = "states" if len(stating) == 1 else "state"
    left = []
    if open_:
        more = f" and {len(open_) - SHOWN} more" if len(open_) > SHOWN else ""
        left.append(f"left open by {', '.join(open_[:SHOWN])}{more}")
    if found.unread:
        left.append(f"not read: {len(found.unread)}")
    if total == len(stating):
        left.append("some of their runs leave it open")
    return f"{len(stating)} of {total} {verb} it: {found.ranked[0].precision} ({'; '.join(left)})."

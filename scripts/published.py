"""Check published recipes: how many are read, planned and fit, and the findings of all of them by rule.

    python scripts/published.py FOLDER                                               the tables
    python scripts/published.py FOLDER --write docs/explain/published.md             into a page as well
    python scripts/published.py FOLDER --rehearse --results FILE --write PAGE        rehearse one recipe of each class

`make published PUBLISHED=FOLDER` is the second line, `make published-rehearse PUBLISHED=FOLDER` the third: a class is
the kinds of layers, the scaling scheme and the kinds of parallelism, and FILE keeps the answers of an earlier run.
FOLDER holds the YAML files, or is an archive of them. A file's name says where it runs, as the performance recipes of
Megatron Bridge are named: ``..._256gpu_b200_...yaml``. All are asked in one process, as `precision-bridge check`,
`plan` and `memory` ask each.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import resource
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError
from bridge.front.loader import load_run
from bridge.model.shape import ModelShape
from bridge.plan.run import PlannedRun
from bridge.precision.mode import scheme_of
from bridge.preflight.check import report_of
from bridge.rehearse.rehearse import rehearse
from bridge.rehearse.shrink import shrink
from bridge.rules.rule import SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bridge.preflight.run import Run
    from bridge.rules.rule import RuleFinding

MARKS = "<!-- {part}: begin -->", "<!-- {part}: end -->"
PLACE = re.compile(r"_(\d+)gpu_([a-z]+\d+)_")
"""The GPUs in the name of a recipe."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """The answers about one recipe."""

    name: str
    refused: str = ""
    """Why it cannot be planned, without the value."""
    findings: tuple[RuleFinding, ...] = ()
    fit: str = ""
    """Whether it fits into its GPUs."""


def answers(folder: Path) -> list[Answer]:
    """Return the answers about every recipe of a folder."""
    return [asked(path) for path in sorted(folder.rglob("*.yaml"))]


def place_of(path: Path) -> list[str]:
    """Return the override by which a recipe runs on the GPUs in its name, none where it names none."""
    place = PLACE.search(path.stem)
    return [f"target={place[2]}x{place[1]}"] if place else []


def asked(path: Path) -> Answer:
    """Return the answers about one recipe."""
    answer = Answer(name=path.stem)
    try:
        run = load_run(place_of(path), config_file=path, strict=False)
        answer.findings = report_of(run).findings
        planned = PlannedRun(prediction=run.prediction)
        answer.fit = fit_of(planned)
    except BridgeError as error:
        answer.refused = str(error).partition(", got")[0].removeprefix(f"{path}: ")
    return answer


def fit_of(run: PlannedRun) -> str:
    """Return whether a run fits into its GPUs."""
    if not run.memory.largest.total or run.memory_bytes is None:
        return "not known"
    if run.overflow is None:
        return "not known" if run.missing else "fits"
    return "may fit" if run.overflow.severity == "warning" else "does not fit"


def tables(found: Sequence[Answer]) -> str:
    """Return the answers in Markdown."""
    return f"{summary(found)}\n\n{table(found)}"


def summary(found: Sequence[Answer]) -> str:
    """Return how many recipes are read, planned and fit."""
    planned = [one for one in found if not one.refused]
    fits = Counter(one.fit for one in planned)
    clean = sum(not {"error", "warning"} & {finding.severity for finding in one.findings} for one in planned)
    refused = Counter(one.refused for one in found if one.refused)
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    lines = [
        f"{len(found)} recipes, asked on {date}: {len(planned)} are planned, and {clean} of them have neither an error "
        f"nor a warning. Memory: {', '.join(f'{count} {name}' for name, count in fits.most_common())}.",
        *(["", "Those that are not planned:", ""] if refused else []),
        *(f"- {count}: {sentence}" for sentence, count in refused.most_common()),
    ]
    return "\n".join(lines)


def rows(found: Iterable[Answer]) -> dict[tuple[str, str], dict[str, RuleFinding]]:
    """Return (severity, rule) -> recipe -> its first finding, the worst and the most frequent rules first."""
    table: dict[tuple[str, str], dict[str, RuleFinding]] = {}
    for answer in found:
        for finding in answer.findings:
            table.setdefault((finding.severity, finding.id), {}).setdefault(answer.name, finding)
    return dict(sorted(table.items(), key=lambda row: (SEVERITIES.index(row[0][0]), -len(row[1]))))


def table(found: Sequence[Answer]) -> str:
    """Return the findings as a Markdown table, each with its first example and the changes that mend it."""
    lines = ["| Rule | Recipes | Finding, of the first of them | Ways out |", "|---|---|---|---|"]
    for (severity, rule), recipes in rows(found).items():
        one = next(iter(recipes.values()))
        cells = [f"{one.path}: {one.rule}", "; ".join(one.remedies)]
        said, ways = (cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {severity} {rule}, {one.title} | {len(recipes)} | {said} | {ways} |")
    return "\n".join(lines)


def class_of(run: Run) -> str:
    """Return the class of a run that a rehearsal stands for: its layers, its scheme and its parallelism."""
    shape = ModelShape.of(run.model)
    small = shrink(run.sections, run.precision, target=run.prediction.target, processes=8)
    marks = {"latent attention": shape.latent, "softmax offset": shape.has_softmax_offset, "prediction": shape.has_mtp}
    layers = ", ".join([*dict.fromkeys(shape.kinds), *(name for name, has in marks.items() if has)])
    scheme = scheme_of(run.prediction.precision) if run.prediction.precision is not None else None
    return f"{layers} | {scheme or 'bf16'} | {'; '.join(map(str, small.rounds))}"


def classes(folder: Path) -> dict[str, list[Path]]:
    """Return class -> its recipes, the largest class first; a recipe that cannot be shrunk is in none."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        with contextlib.suppress(BridgeError):
            found.setdefault(class_of(load_run(place_of(path), config_file=path)), []).append(path)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def rehearsed(path: Path) -> dict[str, Any]:
    """Return the answer of the rehearsal of a recipe, with the CPU seconds of its processes."""
    run = load_run(place_of(path), config_file=path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        answer = rehearse(run)
    except BridgeError as error:
        return {"recipe": path.stem, "refused": str(error)}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "recipe": path.stem,
        "mcore": answer.versions.get("mcore", ""),
        "te": answer.versions.get("te", ""),
        "planned": sum(one.planned or 0 for one in answer.launches),
        "equal": sum(one.equal or 0 for one in answer.launches),
        "resumed": all(one.loss is not None and one.loss == one.resumed_loss for one in answer.launches),
        "seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "replaced": [one.field for one in answer.small.changes if REPLACED.search(one.reason)],
        "left_out": [one.path for one in answer.left_out],
        "findings": [f"{one.path}: {one.rule}" for one in answer.findings],
    }


REPLACED = re.compile("GPU|CPU|stands for|resume|no package")
"""In the reason of a change: the setting is one that no CPU has, not a size."""


def row_of(name: str, count: int, one: Mapping[str, Any]) -> str:
    """Return the row of a class in the table; one that was not rehearsed says so."""
    if not one:
        return f"| {name} | {count} | - | - | - | - | was not rehearsed |"
    notes = [one.get("refused", ""), *one.get("findings", ())]
    for what in ("replaced", "left_out"):
        names = ", ".join(f"`{path}`" for path in one.get(what, ()))
        notes.append(f"{what.replace('_', ' ')}: {names}" if names else "")
    equal = f"{one['equal']} of {one['planned']}" if one.get("planned") else "-"
    resumed = "yes" if one.get("resumed") else "no"
    if "refused" in one:
        resumed = "-"
    found = "; ".join(filter(None, notes)) or "-"
    cells = (name, count, one.get("mcore", "-"), equal, resumed, one.get("seconds", "-"), found)
    return f"| {' | '.join(map(str, cells))} |"


def rehearsals(folder: Path, results: Path | None) -> str:
    """Rehearse a recipe of each class that is not in the results; return the Markdown table."""
    known = json.loads(results.read_text(encoding="utf-8")) if results is not None and results.is_file() else {}
    found = classes(folder)
    for name, paths in found.items():
        if name not in known:
            known[name] = rehearsed(paths[0])
            print(name, known[name], flush=True)
            if results is not None:
                results.write_text(json.dumps(known, indent=1), encoding="utf-8")
    return rehearsal_table(found, known)


def rehearsal_table(found: Mapping[str, Sequence[Path]], known: Mapping[str, Any]) -> str:
    """Return the rehearsals as a Markdown table, with a line that counts them for each release that ran."""
    heads = (
        "Layers | Scheme | Parallelism | Recipes | megatron-core | Plan = record | Resumed | CPU seconds | "
        "Replaced or left out"
    )
    rows = [row_of(name, len(paths), known.get(name, {})) for name, paths in found.items()]
    recipes = sum(map(len, found.values()))
    by_release: dict[str, list[Mapping[str, Any]]] = {}
    refused = 0
    for name in found:
        one = known.get(name, {})
        if "refused" in one:
            refused += 1
        elif one:
            by_release.setdefault(f"megatron-core {one['mcore']}", []).append(one)
    counts = [f"{len(found)} classes of {recipes} recipes."]
    for release, ran in sorted(by_release.items(), reverse=True):
        green = sum(map(is_green, ran))
        counts.append(f"With {release} {len(ran)} ran, {green} of them as planned and resumed with the same loss.")
    if refused:
        counts.append(f"{refused} {'was' if refused == 1 else 'were'} refused.")
    missing = len(found) - refused - sum(map(len, by_release.values()))
    if missing:
        counts.append(f"{missing} {'was' if missing == 1 else 'were'} not rehearsed.")
    return "\n".join([" ".join(counts), "", f"| {heads} |", f"|{'---|' * (heads.count('|') + 1)}", *rows])


def is_green(one: Mapping[str, Any]) -> bool:
    """Return whether a rehearsal ran as planned, without a finding, and resumed."""
    return bool(one.get("resumed") and one["planned"] == one["equal"] and not one["findings"])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder or archive of the recipes")
    parser.add_argument("--rehearse", action="store_true", help="rehearse one recipe of each class")
    parser.add_argument("--results", type=Path, help="JSON file of the rehearsals that were made")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the tables")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as unpacked:
        if given.folder.is_file():
            shutil.unpack_archive(given.folder, unpacked, filter="data")
        folder = Path(unpacked) if given.folder.is_file() else given.folder
        if not any(folder.rglob("*.yaml")):
            parser.error(f"{given.folder}: must hold recipes as .yaml files. Name their folder, or one archive of them")
        text = rehearsals(folder, given.results) if given.rehearse else tables(answers(folder))
    print(text)
    if given.write is not None:
        begin, end = (mark.format(part="rehearsals" if given.rehearse else "findings") for mark in MARKS)
        before, _, rest = given.write.read_text(encoding="utf-8").partition(begin)
        given.write.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()

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
from bridge.model.shape_reader import require_shape
from bridge.plan.planned_run import PlannedRun
from bridge.precision.mode import get_scheme
from bridge.preflight.rule_check import get_report
from bridge.rehearse.rehearse import rehearse
from bridge.rehearse.shrink import shrink
from bridge.rules.rule import SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bridge.preflight.run import Run
    from bridge.rules.rule import RuleFinding

BEGIN, END = "<!-- {part}: begin -->", "<!-- {part}: end -->"
"""Lines of a page around the tables of a part."""
PLACE = re.compile(r"_(\d+)gpu_([a-z]+\d+)_")
"""The GPUs in the name of a recipe."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """The answers about one recipe."""

    name: str
    refused: str = ""
    """Why the run cannot be planned, without the value at fault; empty where it is planned."""
    findings: tuple[RuleFinding, ...] = ()
    fit: str = ""
    """Whether the run fits into its GPUs, empty where it was refused."""


def answers(folder: Path) -> list[Answer]:
    """Return the answers about every recipe of a folder."""
    return [asked(path) for path in sorted(folder.rglob("*.yaml"))]


def place_of(path: Path) -> list[str]:
    """Return the override of the target by the GPUs in a recipe's name, an empty list for a name without GPUs."""
    place = PLACE.search(path.stem)
    if place is None:
        return []
    count, gpu = place.groups()
    return [f"target={gpu}x{count}"]


def asked(path: Path) -> Answer:
    """Return the answers about one recipe."""
    answer = Answer(name=path.stem)
    try:
        run = load_run(place_of(path), config_file=path, strict=False)
        answer.findings = get_report(run).findings
        planned = PlannedRun(prediction=run.prediction)
        answer.fit = fit_of(planned)
    except BridgeError as error:
        answer.refused = str(error).partition(", got")[0].removeprefix(f"{path}: ")
    return answer


def fit_of(run: PlannedRun) -> str:
    """Return whether a run fits into its GPUs: fits, may fit, does not fit or not known."""
    if not run.memory.largest.total or run.memory_bytes is None:
        return "not known"
    if run.memory_overflow is None and run.missing:
        return "not known"
    if run.memory_overflow is None:
        return "fits"
    if run.memory_overflow.severity == "warning":
        return "may fit"
    return "does not fit"


def tables(found: Sequence[Answer]) -> str:
    """Return the answers in Markdown."""
    return f"{summary(found)}\n\n{table(found)}"


def summary(found: Sequence[Answer]) -> str:
    """Return how many recipes are read, planned and fit."""
    planned = 0
    clean = 0
    fits: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for answer in found:
        if answer.refused:
            refused[answer.refused] += 1
            continue
        planned += 1
        fits[answer.fit] += 1
        severities = {finding.severity for finding in answer.findings}
        clean += severities.isdisjoint({"error", "warning"})
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    memory = ", ".join(f"{count} {name}" for name, count in fits.most_common())
    lines = [
        f"{len(found)} recipes, asked on {date}: {planned} are planned, and {clean} of them have neither an error "
        f"nor a warning. Memory: {memory}.",
    ]
    if refused:
        lines += ["", "Those that are not planned:", ""]
    for sentence, count in refused.most_common():
        lines.append(f"- {count}: {sentence}")
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
        example = next(iter(recipes.values()))
        sentence = f"{example.path}: {example.rule}".replace("|", "\\|")
        remedies = "; ".join(example.remedies).replace("|", "\\|")
        lines.append(f"| {severity} {rule}, {example.title} | {len(recipes)} | {sentence} | {remedies} |")
    return "\n".join(lines)


def class_of(run: Run) -> str:
    """Return the class of a run that a rehearsal stands for: its layers, its scheme and its parallelism."""
    shape = require_shape(run.model)
    small = shrink(run.sections, run.precision, target=run.prediction.target, processes=8)
    layers = list(dict.fromkeys(shape.kinds))
    if shape.latent:
        layers.append("latent attention")
    if shape.has_softmax_offset:
        layers.append("softmax offset")
    if shape.has_mtp:
        layers.append("prediction")
    scheme = None
    if run.prediction.precision is not None:
        scheme = get_scheme(run.prediction.precision)
    return f"{', '.join(layers)} | {scheme or 'bf16'} | {'; '.join(map(str, small.launches))}"


def classes(folder: Path) -> dict[str, list[Path]]:
    """Return class -> its recipes, the largest class first; a recipe that cannot be shrunk is in none."""
    recipes: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        with contextlib.suppress(BridgeError):
            name = class_of(load_run(place_of(path), config_file=path))
            recipes.setdefault(name, []).append(path)
    return dict(sorted(recipes.items(), key=lambda item: -len(item[1])))


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
        "planned": sum(launch.planned or 0 for launch in answer.launches),
        "equal": sum(launch.equal or 0 for launch in answer.launches),
        "resumed": all(launch.loss is not None and launch.loss == launch.resumed_loss for launch in answer.launches),
        "seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "replaced": [change.field for change in answer.small_run.changes if REPLACED.search(change.reason)],
        "left_out": [finding.path for finding in answer.left_out],
        "findings": [f"{finding.path}: {finding.rule}" for finding in answer.findings],
    }


REPLACED = re.compile("GPU|CPU|stands for|resume|no package")
"""In the reason of a change: the setting is one that no CPU has, not a size."""


def row_of(name: str, count: int, result: Mapping[str, Any]) -> str:
    """Return the row of a class in the table, from its number of recipes and the result of its rehearsal."""
    if not result:
        return f"| {name} | {count} | - | - | - | - | was not rehearsed |"
    notes = []
    if "refused" in result:
        notes.append(result["refused"])
    notes += result.get("findings", ())
    for key, title in (("replaced", "replaced"), ("left_out", "left out")):
        names = ", ".join(f"`{path}`" for path in result.get(key, ()))
        if names:
            notes.append(f"{title}: {names}")
    equal = "-"
    if result.get("planned"):
        equal = f"{result['equal']} of {result['planned']}"
    resumed = "no"
    if "refused" in result:
        resumed = "-"
    elif result.get("resumed"):
        resumed = "yes"
    cells = (name, count, result.get("mcore", "-"), equal, resumed, result.get("seconds", "-"), "; ".join(notes) or "-")
    return f"| {' | '.join(map(str, cells))} |"


def rehearsals(folder: Path, results: Path | None) -> str:
    """Rehearse a recipe of each class that is not in the results; return the Markdown table."""
    known = {}
    if results is not None and results.is_file():
        known = json.loads(results.read_text(encoding="utf-8"))
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
        result = known.get(name, {})
        if "refused" in result:
            refused += 1
        elif result:
            by_release.setdefault(f"megatron-core {result['mcore']}", []).append(result)
    counts = [f"{len(found)} classes of {recipes} recipes."]
    for release, ran in sorted(by_release.items(), reverse=True):
        green = sum(map(is_green, ran))
        counts.append(f"With {release} {len(ran)} ran, {green} of them as planned and resumed with the same loss.")
    if refused:
        counts.append(f"{refused} {_was(refused)} refused.")
    missing = len(found) - refused - sum(map(len, by_release.values()))
    if missing:
        counts.append(f"{missing} {_was(missing)} not rehearsed.")
    return "\n".join([" ".join(counts), "", f"| {heads} |", f"|{'---|' * (heads.count('|') + 1)}", *rows])


def _was(count: int) -> str:
    if count == 1:
        return "was"
    return "were"


def is_green(result: Mapping[str, Any]) -> bool:
    """Return whether a rehearsal ran as planned, without a finding, and resumed."""
    return bool(result.get("resumed") and result["planned"] == result["equal"] and not result["findings"])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder or archive of the recipes")
    parser.add_argument("--rehearse", action="store_true", help="rehearse one recipe of each class")
    parser.add_argument("--results", type=Path, help="JSON file of the rehearsals that were made")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as unpacked:
        folder = options.folder
        if folder.is_file():
            shutil.unpack_archive(folder, unpacked, filter="data")
            folder = Path(unpacked)
        if not any(folder.rglob("*.yaml")):
            parser.error(
                f"{options.folder}: must hold recipes as .yaml files. Name their folder, or one archive of them"
            )
        if options.rehearse:
            part, text = "rehearsals", rehearsals(folder, options.results)
        else:
            part, text = "findings", tables(answers(folder))
    print(text)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(written(page, text, part), encoding="utf-8")


def written(page: str, text: str, part: str) -> str:
    """Return a page with the tables of a part between its marks."""
    begin, end = BEGIN.format(part=part), END.format(part=part)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


if __name__ == "__main__":
    main()

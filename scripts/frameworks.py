"""Count what the files of frameworks are answered, and write docs/explain/where-megatron-core-runs.md.

    python scripts/frameworks.py slime=../slime miles=../miles primus=../Primus      # each a clone with its work tree
    python scripts/frameworks.py                                                     # the page, with the last counts
    python scripts/frameworks.py --check                                             # whether the page is up to date

A file is *answered* where `plan` answers it, *checked* where `check` answers it and `plan` does not, *refused* where it
is a run of the framework and a reason is given, and *named* where it is no run of Megatron Core, or a part of one. The
counts stand next to the page, in a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import BridgeError, UnreadFileError
from bridge.front.loader import load_run
from bridge.preflight.file_reading import MEGATRON_BRIDGE
from bridge.preflight.rule_check import check
from bridge.read.framework.framework_table import (
    FrameworkOption,
    FrameworkTable,
    StartRow,
    list_table_names,
    load_framework_table,
)
from bridge.read.megatron_bridge.start_rows import START_ROWS
from bridge.read.run_file import load_file_reading

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explain" / "where-megatron-core-runs.md"
COUNTS = PAGE.with_suffix(".json")
NOTE = "<!-- Written by scripts/frameworks.py from bridge/read/framework/tables; change those, not this page. -->\n"
MOST_REASONS = 8
"""Reasons that the page has for a framework; the files of the others are one line."""
OTHER = "other reasons"
NO_DOWNLOADS = "HF_HUB_CACHE"
"""Variable with the folder of downloaded checkpoints: none counts, so that the counts are those of any machine."""
HEAD = """# Where Megatron Core runs

Frameworks on top of Megatron Core have files of their own. A framework is a table here: how its files are recognised,
where Megatron's settings stand in them, what it sets at the start of a run, and what it does not forward. Each fact
names the file of the framework that it was read in, at one commit. `check`, `plan` and `memory` answer its files like
those of Megatron-LM, with the framework as the origin of what it sets ("slime at start").

A file is *answered* where `plan` answers it, *checked* where `check` answers it and `plan` does not, *refused* where it
is a run and a reason is given, and *named* where it is no run of Megatron Core, or a part of one.

NeMo-RL, verl, ms-swift, ROLL and most recipes of Megatron Bridge make the model of a checkpoint of Hugging Face: their
files do not state its sizes. Where its `config.json` is at hand, by the name in the file, among the downloads of
Hugging Face or as `--context checkpoint=FOLDER`, `plan` and `memory` answer with its sizes, for the families of
`bridge/read/foreign/tables/hf_config.yaml`. They are counted here without it.

In a checkout of Megatron Bridge its version decides the release of Megatron Core
(`bridge/read/foreign/tables/megatron_bridge.yaml`), unless a target states one.

The files of Primus on Megatron Bridge are counted with its submodule Megatron Bridge, which has the recipes. Without it
`check` names the recipe that decides, and `plan` answers none of them.

Scripts of Megatron-DeepSpeed, that of BigScience among them, are read as Megatron-LM's: their program is a fork whose
layers are its own and not Megatron Core's, so that each answer names what its parser and DeepSpeed's JSON may decide
otherwise. No table has its defaults: a script does not say which of several forks it starts. GPT-NeoX, nanotron, OLMo,
lingua, LLM Foundry, NeMo Automodel and torchtitan do not run Megatron Core: one sentence says so.
"""
KINDS = ("answered", "checked", "refused", "named")
OF_A_RUN = (
    "its file is not found",
    "names no file of the run",
    "only the run knows its container",
    "starts no run with nothing overridden",
)
"""Kinds of refusals of launches whose run stands in a file that only the run knows."""


def main(words: Sequence[str] | None = None) -> int:
    """Count, where clones are given; then write or check the page. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", nargs="*", metavar="NAME=CLONE", help="a table's name and a clone of its repository")
    parser.add_argument("--check", action="store_true", help="only compare the page with the tables and the counts")
    options = parser.parse_args(words)
    counts: dict[str, Any] = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.is_file() else {}
    for word in options.clones:
        name, _, folder = word.partition("=")
        counts[name] = counted(load_framework_table(name), Path(folder))
    page = page_of(counts)
    if options.check:
        if PAGE.read_text(encoding="utf-8") == page:
            return 0
        print(f"{PAGE} is not what scripts/frameworks.py writes. Run it.", file=sys.stderr)
        return 1
    COUNTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page, encoding="utf-8")
    return 0


def counted(table: FrameworkTable, clone: Path) -> dict[str, Any]:
    """Return how many files of a clone are answered, refused and named, and why."""
    verdicts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    slowest = 0.0
    os.environ[NO_DOWNLOADS] = os.devnull
    files = list(files_of(table, clone))
    for file in files[:1]:
        verdict_of(table, file)
    for file in files:
        verdict, reason, seconds = verdict_of(table, file)
        slowest = max(slowest, seconds)
        verdicts[verdict] += 1
        if reason:
            reasons[f"{verdict}: {_general(reason, file, clone)}"] += 1
    commit = _git(clone, "log", "-1", "--format=%H")
    return {
        "commit": commit.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "verdicts": dict(verdicts),
        "reasons": _most_common(reasons),
        "slowest_seconds": round(slowest, 2),
    }


def _most_common(reasons: Counter[str]) -> dict[str, int]:
    """Return the most common reasons, and how many files have another one."""
    shown = dict(reasons.most_common(MOST_REASONS))
    others = reasons.total() - sum(shown.values())
    if others:
        shown[OTHER] = others
    return shown


def files_of(table: FrameworkTable, clone: Path) -> Iterator[Path]:
    """Yield the files of a clone that are counted: files with the line of `having`, programs with that of `calling`."""
    for column, pattern_column in (("files", "having"), ("programs", "calling")):
        if column not in table.counted:
            continue
        pattern = table.counted.get(pattern_column)
        for name in _git(clone, "ls-files", *table.counted[column].split()).splitlines():
            file = clone / name
            if file.is_file() and (
                pattern is None or re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
            ):
                yield file


class Verdict(NamedTuple):
    """What a file is answered."""

    kind: str
    reason: str
    """Why it is not planned; empty where it is."""
    seconds: float
    """Processor time of the first answer: of the plan, or of its refusal."""


def verdict_of(table: FrameworkTable, file: Path) -> Verdict:
    """Return what a file is answered, and why it is not planned."""
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run = load_run(config_file=file)
            run.plan  # noqa: B018  made when it is asked
        except BridgeError as error:
            seconds = time.process_time() - begun
            kind = _kind_of(table, file)
            if kind == "refused" and _is_checked(file):
                kind = "checked"
            return Verdict(kind, str(error), seconds)
    kind = "answered" if run.reading.framework == table.title else "named"
    return Verdict(kind, "", time.process_time() - begun)


def _is_checked(file: Path) -> bool:
    """Return whether `check` answers a file."""
    try:
        check(load_run(config_file=file, strict=False))
    except BridgeError:
        return False
    return True


def _kind_of(table: FrameworkTable, file: Path) -> str:
    """Return whether a file that is not planned is a run of the framework."""
    try:
        reading = load_file_reading(file)
    except UnreadFileError as error:
        return "refused" if error.kind in OF_A_RUN else "named"
    except BridgeError:
        return "named"
    is_part = reading.uncertainty.mode_decider == "the script that uses these arguments"
    return "refused" if reading.framework == table.title and not is_part else "named"


def _general(reason: str, file: Path, clone: Path) -> str:
    """Return a reason without what is of one file alone."""
    text = reason.replace(str(file), "FILE").replace(f"{clone}/", "")
    text = re.sub(r"line \d+", "line N", text)
    text = re.sub(r"(--spec) \S+ \S+", r"\1 MODULE FUNCTION", text)
    text = re.sub(
        r"the mode is not stated; (?!the torch).*? decides\.",
        "the mode is not stated; WORDS OF THE SCRIPT decide.",
        text,
    )
    text = re.sub(r"config.json of .*? decides", "config.json of the checkpoint decides", text)
    text = re.sub(r"starts \S+ with the file .*?, which", "starts PROGRAM with the file NAME, which", text)
    text = re.sub(r"the torch_dtype of .*? decides\.", "the torch_dtype of the checkpoint decides.", text)
    text = re.sub(r"^(?:named: )?\S+\.yaml: looks", "FILE: looks", text)
    text = re.sub(r"got .*?\. Give", "got PROGRAM. Give", text)
    sentence = text.partition("\n")[0].partition(" Add ")[0].partition(" Give ")[0]
    return sentence.replace("|", "\\|")


def page_of(counts: Mapping[str, Any]) -> str:
    """Return the page."""
    lines = [
        NOTE,
        HEAD,
        "| framework | what is read | its settings are those of | files | answered | checked | refused | named |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name in list_table_names():
        lines.append(_line_of(load_framework_table(name), counts.get(name, {})))
    for name in list_table_names():
        lines += ["", *_section_of(load_framework_table(name), counts.get(name, {}))]
    return "\n".join(lines) + "\n"


def _line_of(table: FrameworkTable, count: Mapping[str, Any]) -> str:
    verdicts = count.get("verdicts", {})
    numbers = [str(verdicts.get(kind, 0)) if verdicts else "" for kind in KINDS]
    total = str(sum(verdicts.values())) if verdicts else ""
    return f"| {table.title} | {table.reads} | {table.settings} | {total} | {' | '.join(numbers)} |"


def _section_of(table: FrameworkTable, count: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about one framework."""
    yield f"## {table.title}"
    yield ""
    yield f"Read in [{table.repository}](https://github.com/{table.repository}) at `{table.commit}` ({table.date})."
    if table.release:
        yield f"Megatron Core counts as {table.release['megatron_core']}: {table.release['because']}."
    for scheme, source in table.schemes.items():
        yield f"It adds the scheme `{scheme}` to those of Megatron Core ({source})."
    if count:
        yield f"Its files were counted on {count['date']} at `{count['commit']}`; the slowest answer took"
        yield f"{count['slowest_seconds']} seconds of processor time."
    yield ""
    yield "| it sets at start | value | when | source |"
    yield "|---|---|---|---|"
    if table.title == MEGATRON_BRIDGE:
        yield from _lines_of_code()
    for row in table.start:
        yield from _start_lines(row)
    for variable, given in table.environment.items():
        when = "always" if given.replaces else "nothing sets it"
        below = f", below compute capability {given.below}" if given.below is not None else ""
        yield f"| `{variable}` | `{given.value}` | {when}{below} | {given.source} |"
    dropped = list(table.dropped_options)
    if dropped:
        yield ""
        yield "| it does not forward | because | source | mended in |"
        yield "|---|---|---|---|"
        for drop in dropped:
            yield f"| {_names(drop.names.pattern)} | {drop.because} | {drop.source} | {drop.fixed_in or 'not known'} |"
    told = [row for row in (*table.own, *table.variables) if row.sentence]
    if told:
        yield ""
        yield "| a name of its own | what is said of it | source |"
        yield "|---|---|---|"
        for own in told:
            yield f"| {_names(own.names.pattern)} | {_sentence(own)} | {own.source} |"
    if count.get("reasons"):
        yield ""
        yield "| files | why they are not planned |"
        yield "|---|---|"
        reasons = count["reasons"].items()
        for reason, number in sorted(reasons, key=lambda row: (row[0] == OTHER, -row[1], row[0])):
            yield f"| {number} | {reason} |"


def _lines_of_code() -> Iterator[str]:
    """Yield a line for each value that Megatron Bridge sets at start, whose rows are code."""
    for row in START_ROWS:
        value = "computed" if callable(row.value) else f"`{row.value}`"
        when = row.because + (", where nothing states it" if row.is_default else "")
        yield f"| `{row.path}` | {value} | {when} | src/megatron/bridge/{row.source} |"


def _start_lines(row: StartRow) -> Iterator[str]:
    when = row.because + (", where nothing states it" if row.is_default else "")
    for path, value in row.sets.items():
        yield f"| `{path}` | `{value}` | {when} | {row.source} |"
    for path, other in row.copies.items():
        yield f"| `{path}` | that of `{other}` | {when} | {row.source} |"


def _names(pattern: str) -> str:
    """Return a pattern of names as a cell of a table."""
    text = " ".join(pattern.split()).replace("|", "\\|")
    return f"`{text}`"


def _sentence(row: FrameworkOption) -> str:
    return row.sentence.format(option="the option", value="VALUE").replace("|", "\\|")


def _git(clone: Path, *words: str) -> str:
    command = ["git", "-C", str(clone), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())

"""The arguments that several commands take, and the run that they describe.

Hydra is imported when a run is read, not before: commands about recipes do without it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.front.loader import RunValues
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.precision.config import PrecisionConfig
    from bridge.read.file_reading import RunChoice
    from bridge.rules.rule import RuleFinding


def add_command(
    commands: Any, name: str, run: Callable[..., Any], text: str, *, json: str = "print JSON", epilog: str | None = None
) -> Any:
    """Add a command that can print JSON, and return its parser; the epilog ends its help, line by line as it is."""
    parser = commands.add_parser(name, help=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=json)
    parser.set_defaults(run=run)
    return parser


def add_run_command(commands: Any, name: str, run: Callable[..., Any], text: str, *, json: str = "print JSON") -> Any:
    """Add a command about a run, with the arguments that say which run is meant, and return its parser."""
    parser = add_command(commands, name, run, text, json=json)
    text = "as for scripts/train.py, mixed_precision=NAME or model.num_layers=8 say; a bare NAME is the recipe"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=text)
    parser.add_argument("--config-path", metavar="FOLDER", help="folder of the config tree (default: conf)")
    parser.add_argument("--config-name", default="config", metavar="NAME", help="the primary config in it")
    parser.add_argument("--config-dir", metavar="FOLDER", help="another folder, of a team's own groups and recipes")
    text = "a run's file or folder instead: ours, Megatron Bridge's or Megatron-LM's"
    parser.add_argument("--config", metavar="FILE", help=text)
    text = "the run that is meant, by its number, where --config is a script that starts several"
    parser.add_argument("--launch", type=int, dest="number", metavar="N", help=text)
    text = "what a launch script leaves to its environment: variables='NAME=value NAME=value'"
    parser.add_argument("--context", action="append", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument("--trust", action="store_true", help="run the Python that recipes_from names in a config")
    text = "where it runs: h100x8,te2.8,cuda12.9,mcore0.16, or auto for this machine"
    parser.add_argument("--target", metavar="TARGET", help=text)
    return parser


def read_run(
    chosen: argparse.Namespace,
    *,
    recipe: str | None = None,
    file: str | None = None,
    strict: bool = True,
    number: int | None = None,
) -> RunValues:
    """Return the run that the arguments describe; a word without ``=`` or ``~`` that is no key is a recipe's name.

    `number` chooses another run of the file than the one that the arguments choose.
    """
    from bridge.front.loader import load_run
    from bridge.read.problems import KEYS

    if file is not None:
        return load_run((), config_file=file, trust=chosen.trust, strict=strict)
    words = [
        word if "=" in word or word.startswith("~") or word.partition(".")[0] in KEYS else f"mixed_precision={word}"
        for word in chosen.overrides
    ]
    if recipe is not None:
        words = [word for word in words if not word.lstrip("+~").startswith("mixed_precision")]
        words.append(f"mixed_precision={recipe}")
    if chosen.target is not None:
        words.append(f"target={chosen.target}")
    return load_run(
        [_quoted(word) for word in words],
        chosen.config_path,
        chosen.config,
        config_name=chosen.config_name,
        config_dir=chosen.config_dir,
        strict=strict,
        trust=chosen.trust,
        choice=_run_choice(chosen, number),
    )


def read_branches(chosen: argparse.Namespace, *, strict: bool = True) -> list[RunValues]:
    """Return the run that the arguments describe, and the same launch on other branches of its script.

    The command line may choose one of them with ``--launch``, or state the mode, which is one for all.

    Raises:
        RunConfigError: A strict reading of a run that cannot be planned, or of a script none of whose branches states
            a mode.
    """
    first = read_run(chosen, strict=False)
    numbers = first.reading.branches if chosen.number is None else ()
    runs = [first]
    for number in numbers:
        runs.append(read_run(chosen, strict=False, number=number))
    if strict:
        stated = [run for run in runs if run.reading.mode_decided_by is None]
        for run in stated or runs[:1]:
            run.require_strict()
    answered = (first.reading.number, *numbers)
    return [replace(run, reading=replace(run.reading, answered=answered)) for run in runs]


def _run_choice(chosen: argparse.Namespace, number: int | None) -> RunChoice | None:
    """Return the run that is meant and the variables of its script; None where the command line says neither."""
    number = chosen.number if number is None else number
    if number is None and not chosen.context:
        return None
    from bridge.read.file_reading import RunChoice
    from bridge.read.megatron_lm.importer import variables_of  # few command lines have any

    if chosen.config is None:
        option = "--launch" if number is not None else "--context"
        given = number if number is not None else " ".join(chosen.context)
        raise RunConfigError.of(option, "is about a launch script", given, "Add --config FILE.")
    words = []
    for word in chosen.context:
        key, _, value = word.partition("=")
        if key != "variables":
            remedy = "Write --context variables='NAME=value'."
            raise RunConfigError.of("--context", "must be variables='NAME=value'", word, remedy)
        words.append(value)
    return RunChoice(number=number, variables=variables_of(" ".join(words)))


def _quoted(word: str) -> str:
    """Return ``target=h100x8,te2.8`` with quotes: Hydra takes a comma for a sweep."""
    key, _, value = word.partition("=")
    return f"{key}='{value}'" if key == "target" and "," in value and value[0] not in "['\"" else word


def plan_of(run: RunValues, precision: PrecisionConfig | None = None) -> PrecisionPlan:
    """Return the precision plan of a run, or of the same run in another precision, whatever the number of its GPUs."""
    from bridge.plan.precision_plan import plan_of

    return plan_of(run.prediction if precision is None else run.prediction.under(precision))


def decisive_findings(run: RunValues) -> list[RuleFinding]:
    """Return the findings of the check that every answer about a run has: errors, and those of overrides."""
    from bridge.precision.fields import COMMAND_LINE

    return [one for one in run.report.findings if one.severity == "error" or one.where == COMMAND_LINE]


def planned_code(run: RunValues) -> int:
    """Return the exit code of an answer that shows a run's decisive findings: 2 with an error, as `check`, else 0."""
    if any(one.severity == "error" for one in decisive_findings(run)):
        return 2
    return 0


def answer(chosen: argparse.Namespace, content: Any, table: RenderableType, run: RunValues | None = None) -> None:
    """Print an answer as JSON or as a table; one that foresees a run, with what has to be said of that."""
    if chosen.json and run is not None:
        print_planned(run, content)
    elif chosen.json:
        print_json(content)
    else:
        show(table)
        if run is not None:
            show_planned(run)


def print_answer(run: RunValues, content: Mapping[str, Any]) -> None:
    """Print an answer about a run as JSON, with what has to be said of its file and its release."""
    print_json(answer_dict(run, content))


def answer_dict(run: RunValues, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer about a run as plain data, with what has to be said of its file and its release."""
    return {**content, "read": run.reading.to_dict()}


def print_branch(run: RunValues) -> None:
    """Print which run of its file the following answer is about."""
    print(f"run {run.reading.number}: {run.reading.runs[run.reading.number - 1]}")


def print_planned(run: RunValues, content: Mapping[str, Any]) -> None:
    """Print an answer that foresees a run as JSON, with the decisive findings of its check too."""
    print_json(planned_dict(run, content))


def planned_dict(run: RunValues, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer that foresees a run as plain data, with the decisive findings of its check too."""
    from bridge.report.findings import finding_dict

    return answer_dict(run, {**content, "check": [finding_dict(one) for one in decisive_findings(run)]})


def answer_runs(
    chosen: argparse.Namespace,
    answer_of: Callable[[RunValues], Mapping[str, Any]],
    show_run: Callable[[RunValues], None],
) -> int:
    """Print the answer about a run and about its other branches, as JSON or for people, and return the exit code.

    A branch whose mode is not stated has the refusal in the place of its answer. The other branches stand below
    `branches` in the JSON of the first.
    """
    answers, codes = [], [0]
    runs = read_branches(chosen)
    for run in runs:
        if len(runs) > 1 and not chosen.json:
            print_branch(run)
        try:
            run.require_mode()
            if chosen.json:
                answers.append(planned_dict(run, answer_of(run)))
            else:
                show_run(run)
            codes.append(planned_code(run))
        except RunConfigError as error:
            if len(runs) == 1:
                raise
            answers.append(answer_dict(run, {"refused": str(error)}))
            if not chosen.json:
                print(f"  {error}")
    if chosen.json:
        first, *branches = answers
        print_json({**first, "branches": branches} if branches else first)
    return max(codes)


def show_planned(run: RunValues, shown: Collection[str] = ()) -> None:
    """Print the decisive findings of a run's check, and what has to be said of its file, a sentence on each line.

    Findings of the rules `shown` stand in the answer already.
    """
    for one in decisive_findings(run):
        if one.id not in shown:
            print(f"  {one.severity} {one.id} {one}")
    show_reading(run)


def show_assumed(unknown: Mapping[str, str]) -> None:
    """Print the settings that an answer rests on and that nothing states; nothing where all of them are known."""
    if unknown:
        from bridge.rules.unknown import deciders_text, settings_text

        print(
            f"  Rests on values that nothing states: {settings_text(unknown)}; {deciders_text(unknown)} may set them."
        )


def show_reading(run: RunValues) -> None:
    """Print what has to be said of a run's file and its release, a sentence on each line."""
    for line in run.reading.lines:
        print(f"  {line}")
    if run.reading.mode_decided_by is not None:
        print(f"  The mode is not stated. {'; or '.join(run.ways_to_state_the_mode)}.")


def show(content: RenderableType) -> None:
    """Print what a report renders."""
    from bridge.report import table  # rich is heavy

    table.show(content)


def print_json(content: object) -> None:
    """Print plain data as JSON."""
    print(json.dumps(content, indent=2))


def text_of(value: object) -> str:
    """Return a setting's value as text: a string as it is."""
    return value if isinstance(value, str) else repr(value)


def write_file(path: Path | str, text: str, option: str) -> None:
    """Write a file that an option names; RunConfigError where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, option, error) from None


def unwritable(path: Path | str, option: str, error: OSError) -> RunConfigError:
    """Return the error for a file that an option names and that cannot be written."""
    why = (error.strerror or "an error").lower()
    return RunConfigError(f"{option}: cannot be written ({why}), got {str(path)!r}. Give another file.")

"""`precision-bridge memory [FILE ...] [OVERRIDES]`: the bytes of a rank, and changes that fit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.cli.many_runs import (
    RunAnswer,
    add_brief_option,
    answer_many_runs,
    format_precision,
    get_many_paths,
    precision_to_dict,
)
from bridge.cli.output import print_report
from bridge.cli.parser import add_json_option
from bridge.cli.run_answer import (
    answer_branches,
    compute_exit_code,
    print_assumptions,
    print_check_notes,
)
from bridge.cli.run_arguments import add_debug_features_option, add_run_arguments
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from bridge.plan.planned_run import PlannedRun
    from bridge.preflight.run import Run
    from bridge.sync.prediction import Prediction

RECOMPUTE_KINDS = {
    "none": ("none", ()),
    "selective (mlp)": ("selective", ("mlp",)),
    "full": ("full", ()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_debug_features_option(parser)
    add_brief_option(parser)
    add_json_option(parser, "print JSON, in bytes")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="list the changes with which the run fits, cheapest first",
    )


def run(args: argparse.Namespace) -> int:
    """Print the bytes of a rank; return 2 where the check of the run finds an error, else 0."""
    paths = get_many_paths(args)
    if paths and args.fit:
        raise RunConfigError(
            "--fit: is about one run, got several. Give one file, without --brief."
        )
    if paths:
        return answer_many_runs(args, paths, _answer_briefly)
    return answer_branches(
        args, partial(_memory_to_dict, fits=args.fit), partial(_print_memory, fits=args.fit)
    )


def _answer_briefly(values: Run) -> RunAnswer:
    """Return the bytes of the fullest rank of a run, and whether they fit its GPU."""
    from bridge.front.loader import require_plannable
    from bridge.preflight.check import get_report
    from bridge.report.plan.memory_table import describe_fit

    require_plannable(values)
    setup = get_report(values).context
    run = values.planned
    unknown = values.rests_on(lambda: run.memory)
    may_change = _list_open_settings(run, unknown)
    sentence = describe_fit(run.memory.largest, run.memory_bytes, run.missing, may_change)
    content = {
        **precision_to_dict(setup),
        "stage": run.memory.largest.stage,
        "bytes": run.memory.largest.total,
        "gpu_bytes": run.memory_bytes,
        "not_counted": list(run.missing),
        "rests_on_unknown": unknown,
        "verdict": sentence,
    }
    return RunAnswer(
        text=f"{format_precision(setup)}; {sentence}",
        content=content,
        code=compute_exit_code(values),
    )


def _list_open_settings(run: PlannedRun, unknown: Mapping[str, str]) -> tuple[str, ...]:
    """Return what may change the count of a run, and is not read or not known."""
    return tuple(dict.fromkeys((*run.prediction.uncounted, *unknown.values())))


def _memory_to_dict(values: Run, *, fits: bool) -> dict[str, Any]:
    """Return the bytes of a run as plain data, with the changes that make it fit if asked for."""
    from bridge.plan.fit import find_fit, get_memory_to_fit

    run = values.planned
    if fits:
        get_memory_to_fit(run)
    content = {
        **run.memory.to_dict(),
        "gpu_bytes": run.memory_bytes,
        "activations_by_recompute": _count_activations(run),
        "not_counted": list(run.missing),
        "may_keep_less": list(run.uncounted),
        "rests_on_unknown": values.rests_on(lambda: run.memory),
    }
    if fits:
        content["fit"] = find_fit(run, is_sound=_make_soundness_check(values, run)).to_dict()
    return content


def _print_memory(values: Run, *, fits: bool) -> None:
    """Print the bytes of a run for people, with the changes that make it fit if asked for."""
    from bridge.plan.fit import find_fit, get_memory_to_fit
    from bridge.report.plan.fit_table import make_fit_table
    from bridge.report.plan.memory_table import make_memory_table

    run = values.planned
    if fits:
        get_memory_to_fit(run)
    activations = _count_activations(run)
    unknown = values.rests_on(lambda: run.memory)
    gpu = ""
    if run.target.gpu is not None:
        gpu = run.target.gpu.title
    print_report(
        make_memory_table(
            run.memory,
            activations,
            gpu=gpu,
            memory_bytes=run.memory_bytes,
            uncounted=run.uncounted,
            missing=run.missing,
            unread=_list_open_settings(run, unknown),
        )
    )
    counted = run.parallel.world_size
    if run.target.count is None:
        print(
            f"  No target states the number of GPUs; counted as {counted}, "
            "the least that this layout needs."
        )
    elif run.target.count != counted:
        print(
            f"  Counted as {counted} GPUs: "
            f"{run.target.count} do not hold this layout a whole number of times."
        )
    print_assumptions(unknown)
    print_check_notes(values)
    if fits:
        sys.stdout.flush()  # the search takes a while
        print_report(
            make_fit_table(find_fit(run, is_sound=_make_soundness_check(values, run)), run.missing)
        )


def _make_soundness_check(values: Run, run: PlannedRun) -> Callable[[PlannedRun], bool]:
    """Return whether a changed run is as sound as the run itself.

    It is where `check` finds no error or warning that it does not find in the run.
    """
    from bridge.preflight.check import check

    def broken_rules(prediction: Prediction) -> set[str]:
        ids = set()
        for finding in check(values, prediction=prediction).findings:
            if finding.severity != "info":
                ids.add(finding.id)
        return ids

    known = broken_rules(run.prediction)
    return lambda changed: broken_rules(changed.prediction) <= known


def _count_activations(run: PlannedRun) -> dict[str, tuple[int, ...]]:
    from bridge.plan.memory_activations import keeps_scores
    from bridge.plan.memory_schedule import count_activation_bytes

    if not run.workload.seq_length:
        return {}
    plan, kinds = run.plan, dict(RECOMPUTE_KINDS)
    if keeps_scores(plan, run.workload):
        kinds["selective (core_attn)"] = ("selective", ("core_attn",))
    activations = {}
    for name, (kind, parts) in kinds.items():
        load = replace(run.workload, recompute=kind, modules=parts)
        activations[name] = tuple(
            count_activation_bytes(plan, stage, load) for stage in plan.stages
        )
    return activations

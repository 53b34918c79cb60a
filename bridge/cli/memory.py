"""`precision-bridge memory [FILE ...] [OVERRIDES]`: the memory of a rank, and changes that fit."""

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

RECOMPUTE_CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("none", ()),
    "selective (mlp)": ("selective", ("mlp",)),
    "full": ("full", ()),
}
"""Name of a choice -> recompute_granularity and recompute_modules."""


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
    """Print the memory of a rank of a run, or a line for each of several runs.

    Returns:
        2 if the check of a run has an error, else 0.
    """
    paths = get_many_paths(args)
    if paths and args.fit:
        raise RunConfigError(
            "--fit: is about one run, got several. Give one file, without --brief."
        )
    if paths:
        return answer_many_runs(args, paths, _answer_briefly)
    make_content = partial(_memory_to_dict, with_fit=args.fit)
    print_text = partial(_print_memory, with_fit=args.fit)
    return answer_branches(args, make_content, print_text)


def _require_training(run: Run) -> None:
    """Refuse a run without optimizer and gradients, whose memory is not counted.

    Raises:
        RunConfigError: The run evaluates a checkpoint or generates text.
    """
    if run.reading.trains_nothing:
        raise RunConfigError(
            f"{run.name}: trains nothing, and the memory of a run without optimizer and gradients "
            "is not counted. Give a run of training."
        )


def _answer_briefly(run: Run) -> RunAnswer:
    """Return the bytes of the fullest rank of a run, and whether they fit into its GPU."""
    from bridge.front.loader import require_plannable
    from bridge.preflight.rule_check import get_report
    from bridge.report.plan.memory_table import describe_fit

    require_plannable(run)
    _require_training(run)
    context = get_report(run).context
    planned = run.planned
    unknown = run.rests_on(lambda: planned.memory)
    largest = planned.memory.largest
    open_settings = _list_open_settings(planned, unknown)
    sentence = describe_fit(largest, planned.memory_bytes, planned.missing, open_settings)
    content = {
        **precision_to_dict(context),
        "stage": largest.stage,
        "bytes": largest.total,
        "gpu_bytes": planned.memory_bytes,
        "not_counted": list(planned.missing),
        "rests_on_unknown": unknown,
        "verdict": sentence,
    }
    return RunAnswer(
        text=f"{format_precision(context)}; {sentence}",
        content=content,
        code=compute_exit_code(run),
    )


def _list_open_settings(planned: PlannedRun, unknown: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that may change the count, since they are not read or not known.

    Args:
        unknown: Setting without a known value -> the source that decides it.
    """
    return tuple(dict.fromkeys((*planned.prediction.unread_options, *unknown.values())))


def _memory_to_dict(run: Run, *, with_fit: bool) -> dict[str, Any]:
    """Return the memory of a run as plain data, with the changes that fit if asked for."""
    from bridge.plan.fit import find_fit, get_memory_to_fit

    _require_training(run)
    planned = run.planned
    if with_fit:
        get_memory_to_fit(planned)  # raises for an unknown GPU, before the count
    content = {
        **planned.memory.to_dict(),
        "gpu_bytes": planned.memory_bytes,
        "activations_by_recompute": _count_activations(planned),
        "not_counted": list(planned.missing),
        "may_keep_less": list(planned.uncounted),
        "rests_on_unknown": run.rests_on(lambda: planned.memory),
    }
    if with_fit:
        fit = find_fit(planned, is_sound=_make_soundness_check(run, planned))
        content["fit"] = fit.to_dict()
    return content


def _print_memory(run: Run, *, with_fit: bool) -> None:
    """Print the memory of a run as a table, with the changes that fit if asked for."""
    from bridge.plan.fit import find_fit, get_memory_to_fit
    from bridge.report.plan.fit_table import make_fit_table

    _require_training(run)
    planned = run.planned
    if with_fit:
        get_memory_to_fit(planned)  # as in `_memory_to_dict`
    unknown = run.rests_on(lambda: planned.memory)
    _print_memory_table(planned, unknown)
    _print_counted_ranks(planned)
    print_assumptions(unknown)
    print_check_notes(run)
    if with_fit:
        sys.stdout.flush()  # the search takes seconds
        fit = find_fit(planned, is_sound=_make_soundness_check(run, planned))
        print_report(make_fit_table(fit, planned.missing))


def _print_memory_table(planned: PlannedRun, unknown: Mapping[str, str]) -> None:
    """Print the table of a run's memory."""
    from bridge.report.plan.memory_table import make_memory_table

    gpu = ""
    if planned.target.gpu is not None:
        gpu = planned.target.gpu.title
    table = make_memory_table(
        planned.memory,
        _count_activations(planned),
        gpu=gpu,
        memory_bytes=planned.memory_bytes,
        uncounted=planned.uncounted,
        missing=planned.missing,
        unread=_list_open_settings(planned, unknown),
    )
    print_report(table)


def _print_counted_ranks(planned: PlannedRun) -> None:
    """Print the number of GPUs that the count assumes, if the target does not state it."""
    counted = planned.parallel.world_size
    stated = planned.prediction.gpus
    if planned.target.count is None and stated == counted:
        print(f"  No target states the number of GPUs; counted as {counted}, as the file states.")
    elif stated is None:
        print(
            f"  No target states the number of GPUs; counted as {counted}, "
            "the least that this layout needs."
        )
    elif stated != counted:
        print(
            f"  Counted as {counted} GPUs: "
            f"{stated} do not hold this layout a whole number of times."
        )


def _make_soundness_check(run: Run, planned: PlannedRun) -> Callable[[PlannedRun], bool]:
    """Return a function that returns whether a changed run is as sound as the run itself.

    It is as sound if `check` finds no new error or warning in the changed run.
    """
    from bridge.preflight.rule_check import check

    def collect_broken_rules(prediction: Prediction) -> set[str]:
        ids = set()
        for finding in check(run, prediction=prediction).findings:
            if finding.severity != "info":
                ids.add(finding.id)
        return ids

    broken_now = collect_broken_rules(planned.prediction)
    return lambda changed: collect_broken_rules(changed.prediction) <= broken_now


def _count_activations(planned: PlannedRun) -> dict[str, tuple[int, ...]]:
    """Return the bytes of activations of each stage, for each choice of recomputed parts.

    Empty if the length of a sequence is not known.
    """
    from bridge.plan.memory_activations import keeps_scores
    from bridge.plan.memory_schedule import count_activation_bytes

    if not planned.workload.seq_length:
        return {}
    plan, choices = planned.plan, dict(RECOMPUTE_CHOICES)
    if keeps_scores(plan, planned.workload):
        choices["selective (core_attn)"] = ("selective", ("core_attn",))
    bytes_of = {}
    for name, (granularity, modules) in choices.items():
        workload = replace(planned.workload, recompute=granularity, modules=modules)
        counts = [count_activation_bytes(plan, stage, workload) for stage in plan.stages]
        bytes_of[name] = tuple(counts)
    return bytes_of

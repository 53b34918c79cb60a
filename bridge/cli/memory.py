"""`precision-bridge memory [FILE ...] [OVERRIDES]`: the bytes of a rank, and changes that fit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.cli.output import show
from bridge.cli.parser import add_json
from bridge.cli.planned_answer import answer_runs, planned_code, show_assumed, show_planned
from bridge.cli.run_arguments import add_debug_features, add_run_arguments
from bridge.cli.several import (
    RunAnswer,
    add_several_arguments,
    answer_several,
    paths_of_several,
    precision_dict,
    precision_text,
)
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from bridge.plan.run import PlannedRun
    from bridge.preflight.run import Run
    from bridge.sync.prediction import Prediction

RECOMPUTE = {"none": ("none", ()), "selective (mlp)": ("selective", ("mlp",)), "full": ("full", ())}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_debug_features(parser)
    add_several_arguments(parser)
    add_json(parser, "print JSON, in bytes")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="list the changes with which the run fits, cheapest first",
    )


def run(args: argparse.Namespace) -> int:
    """Print the bytes of a rank; return 2 where the check of the run finds an error, else 0."""
    paths = paths_of_several(args)
    if paths and args.fit:
        raise RunConfigError(
            "--fit: is about one run, got several. Give one file, without --brief."
        )
    if paths:
        return answer_several(args, paths, _brief)
    return answer_runs(args, partial(_answer, fits=args.fit), partial(_show, fits=args.fit))


def _brief(values: Run) -> RunAnswer:
    """Return the bytes of the fullest rank of a run, and whether they fit its GPU."""
    from bridge.front.loader import require_strict
    from bridge.preflight.check import report_of
    from bridge.report.memory_table import fit_sentence

    require_strict(values)
    setup = report_of(values).context
    run = values.planned
    unknown = values.rests_on(lambda: run.memory)
    may_change = _may_change(run, unknown)
    sentence = fit_sentence(run.memory.largest, run.memory_bytes, run.missing, may_change)
    content = {
        **precision_dict(setup),
        "stage": run.memory.largest.stage,
        "bytes": run.memory.largest.total,
        "gpu_bytes": run.memory_bytes,
        "not_counted": list(run.missing),
        "rests_on_unknown": unknown,
        "verdict": sentence,
    }
    return RunAnswer(
        text=f"{precision_text(setup)}; {sentence}", content=content, code=planned_code(values)
    )


def _may_change(run: PlannedRun, unknown: Mapping[str, str]) -> tuple[str, ...]:
    """Return what may change the count of a run, and is not read or not known."""
    return tuple(dict.fromkeys((*run.prediction.uncounted, *unknown.values())))


def _answer(values: Run, *, fits: bool) -> dict[str, Any]:
    """Return the bytes of a run as plain data, with the changes that make it fit if asked for."""
    from bridge.plan.fit import fit, memory_to_fit

    run = values.planned
    if fits:
        memory_to_fit(run)
    content = {
        **run.memory.to_dict(),
        "gpu_bytes": run.memory_bytes,
        "activations_by_recompute": _activations(run),
        "not_counted": list(run.missing),
        "may_keep_less": list(run.uncounted),
        "rests_on_unknown": values.rests_on(lambda: run.memory),
    }
    if fits:
        content["fit"] = fit(run, is_sound=_soundness(values, run)).to_dict()
    return content


def _show(values: Run, *, fits: bool) -> None:
    """Print the bytes of a run for people, with the changes that make it fit if asked for."""
    from bridge.plan.fit import fit, memory_to_fit
    from bridge.report.memory_table import fit_table, memory_table

    run = values.planned
    if fits:
        memory_to_fit(run)
    activations = _activations(run)
    unknown = values.rests_on(lambda: run.memory)
    gpu = ""
    if run.target.gpu is not None:
        gpu = run.target.gpu.title
    show(
        memory_table(
            run.memory,
            activations,
            gpu=gpu,
            memory_bytes=run.memory_bytes,
            uncounted=run.uncounted,
            missing=run.missing,
            unread=_may_change(run, unknown),
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
    show_assumed(unknown)
    show_planned(values)
    if fits:
        sys.stdout.flush()  # the search takes a while
        show(fit_table(fit(run, is_sound=_soundness(values, run)), run.missing))


def _soundness(values: Run, run: PlannedRun) -> Callable[[PlannedRun], bool]:
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


def _activations(run: PlannedRun) -> dict[str, tuple[int, ...]]:
    from bridge.plan.memory_activations import keeps_scores
    from bridge.plan.memory_schedule import activation_bytes

    if not run.workload.seq_length:
        return {}
    plan, kinds = run.plan, dict(RECOMPUTE)
    if keeps_scores(plan, run.workload):
        kinds["selective (core_attn)"] = ("selective", ("core_attn",))
    activations = {}
    for name, (kind, parts) in kinds.items():
        load = replace(run.workload, recompute=kind, modules=parts)
        activations[name] = tuple(activation_bytes(plan, stage, load) for stage in plan.stages)
    return activations

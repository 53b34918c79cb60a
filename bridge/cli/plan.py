"""`precision-bridge plan`, `memory` and `align`: a run's formats per layer, bytes per rank, dimensions per GEMM."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.arguments import add_run_command, plan_of, print_json, read_run, unwritable
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    import argparse

    from bridge.front.loader import RunValues
    from bridge.plan.memory_activations import Workload
    from bridge.plan.precision_plan import PrecisionPlan

PICTURES = (".png", ".svg", ".pdf")
RECOMPUTE = {"none": ("none", ()), "selective (core_attn)": ("selective", ("core_attn",)), "full": ("full", ())}
BYTES = 256
"""Vocabulary of text that is tokenised to bytes."""


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    text = "show what each layer computes, keeps and sends, in which format"
    plan = add_run_command(commands, "plan", _plan, text, json="print JSON, equal layers folded")
    plan.add_argument("--against", metavar="NAME", help="compare with another recipe, or with a YAML file")
    plan.add_argument("--csv", action="store_true", help="print CSV, one line per layer, module and GEMM or tensor")
    plan.add_argument("--picture", metavar="FILE", help="draw it: layers down, tensors across (png, svg or pdf)")
    text = "show what weights, gradients, states and activations take on a rank"
    add_run_command(commands, "memory", _memory, text, json="print JSON, in bytes")
    add_run_command(commands, "align", _align, "check every GEMM's dimensions, and say what to pad tokens to")


def _plan(chosen: argparse.Namespace) -> None:
    """Print the plan, or how it differs from another."""
    plan = plan_of(read_run(chosen))
    if chosen.picture:
        _draw(plan, Path(chosen.picture))
        return
    if chosen.against:
        is_file = chosen.against.endswith((".yaml", ".yml"))
        other = read_run(chosen, file=chosen.against) if is_file else read_run(chosen, recipe=chosen.against)
        _compare(plan, plan_of(other), as_json=chosen.json)
        return
    if chosen.json:
        print_json(plan.to_dict())
        return
    from bridge.report.plan_table import plan_csv, plan_table
    from bridge.report.table import show  # rich is heavy

    if chosen.csv:
        print(plan_csv(plan), end="")
    else:
        show(plan_table(plan))


def _compare(plan: PrecisionPlan, other: PrecisionPlan, *, as_json: bool) -> None:
    differences = plan.diff(other)
    if as_json:
        print_json({"a": plan.label, "b": other.label, "differences": [asdict(row) for row in differences]})
        return
    from bridge.report.plan_table import difference_table
    from bridge.report.table import show  # rich is heavy

    show(difference_table(plan.label, other.label, differences))


def _draw(plan: PrecisionPlan, path: Path) -> None:
    if path.suffix not in PICTURES:
        raise RunConfigError(f"--picture: must end in {', '.join(PICTURES)}, got {str(path)!r}. Choose one of them.")
    from bridge.report.plan_picture import draw_plan  # matplotlib takes a second to import

    try:
        draw_plan(plan, path)
    except OSError as error:
        raise unwritable(path, "--picture", error) from None
    print(f"{path}: {len(plan.layers)} rows.")


@dataclass(frozen=True, kw_only=True)
class _Described:
    """A run as the calculators take it."""

    values: RunValues
    plan: PrecisionPlan
    workload: Workload
    capability: tuple[int, int] | None
    """Compute capability of the target's GPU, None where no target is declared."""

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> _Described:
        """Return the plan, layout and workload of a run.

        The number of GPUs is the target's, or else the least that the parallel sizes need. The vocabulary is the
        model's, or else that of the data.
        """
        from bridge.plan.memory_activations import Workload
        from bridge.plan.precision_plan import precision_plan
        from bridge.plan.stages import Parallel
        from bridge.preflight.target import parse_target

        run = read_run(chosen)
        target = parse_target(run.target) if run.target is not None else None
        model, data = dict(run.model), run.section("data")
        if model.get("vocab_size") is None and data:
            model["vocab_size"] = data.get("vocab_size") or BYTES
        parallel = Parallel.of(model, world_size=target.count if target is not None else None)
        return cls(
            values=run,
            plan=precision_plan(run.precision, model, parallel, optimizer=run.optimizer, ddp=run.ddp),
            workload=Workload.of(model, run.section("train"), data_parallel=parallel.data),
            capability=target.capability if target is not None else None,
        )


def _memory(chosen: argparse.Namespace) -> None:
    """Print the memory of a rank of each pipeline stage, and the activations under each kind of recomputation."""
    from bridge.plan.memory import memory_report

    this = _Described.of(chosen)
    report = memory_report(this.plan, workload=this.workload, ddp=this.values.ddp, capability=this.capability)
    activations = {}
    for name, (recompute, modules) in RECOMPUTE.items() if this.workload.seq_length else ():
        load = replace(this.workload, recompute=recompute, modules=modules)
        ranks = memory_report(this.plan, workload=load, ddp=this.values.ddp).ranks
        activations[name] = tuple(rank.bytes_of["activations"] for rank in ranks)
    if chosen.json:
        print_json({**report.to_dict(), "activations_by_recompute": activations})
        return
    from bridge.report.plan_table import memory_table
    from bridge.report.table import show  # rich is heavy

    show(memory_table(report, activations))


def _align(chosen: argparse.Namespace) -> None:
    """Print the dimensions and token counts that the scaling scheme takes, for the GEMMs of a rank."""
    from bridge.plan.alignment import align_report

    this = _Described.of(chosen)
    report = align_report(this.plan, this.workload)
    if chosen.json:
        print_json(report.to_dict())
        return
    from bridge.report.plan_table import align_table
    from bridge.report.table import show  # rich is heavy

    show(align_table(report))

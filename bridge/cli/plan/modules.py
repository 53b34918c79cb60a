"""`precision-bridge plan --modules`: the modules that each row or matcher selects."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_report, write_file
from bridge.cli.run_answer import compute_exit_code, print_check_notes, print_checked_json
from bridge.cli.run_arguments import read_run
from bridge.errors import RunConfigError
from bridge.precision.module_row import ModuleRow, parse_module_rows
from bridge.precision.module_schemes import make_stage_recipes
from bridge.precision.statements import get_field_value
from bridge.rules.topics.precision import modules as module_rules

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.preflight.run import Run
    from bridge.rules.rule import RuleFinding

MODULE_RULE_IDS = frozenset(rule.id for rule in module_rules.RULES)


def print_modules(args: argparse.Namespace) -> int:
    """Print the modules that each row or matcher selects, and the findings about the selection.

    ``--write`` writes Megatron's file of the run instead.

    Returns:
        2 if the check of the run has an error, else 0. A written file returns 0.
    """
    run = read_run(args)
    if args.file:
        run = _replace_recipe(run, args.file)
    if not run.plan.selection.rows:
        _print_module_names(run, as_json=args.json)
        return compute_exit_code(run)
    if args.write:
        _write_recipe_files(run.plan, Path(args.write))
        return 0
    _print_selection(run, as_json=args.json)
    return compute_exit_code(run)


def _print_selection(run: Run, *, as_json: bool) -> None:
    """Print the modules that each row or matcher selects."""
    from bridge.report.plan.module_table import (  # rich is heavy
        make_module_table,
        selection_to_dict,
    )

    plan = run.plan
    findings = _collect_module_findings(run)
    layout, mode = _format_layout(plan), plan.settings.mode
    if as_json:
        content = {"precision": plan.label, "layout": layout}
        print_checked_json(run, {**content, **selection_to_dict(plan.selection, findings)})
        return
    scheme = plan.settings.scheme or mode
    print_report(
        make_module_table(plan.selection, findings, layout=layout, scheme=scheme, mode=mode)
    )
    print_check_notes(run, shown=MODULE_RULE_IDS)


def _print_module_names(run: Run, *, as_json: bool) -> None:
    """Print the names of the linear layers of a run without rows, as rows would select them."""
    plan = run.plan
    findings = _collect_module_findings(run)
    names = [module.path for module in plan.selection.unselected]
    if as_json:
        from bridge.report.plan.module_table import findings_to_dicts  # rich is heavy

        content = {
            "precision": plan.label,
            "layout": _format_layout(plan),
            "rows": [],
            "left": names,
            "findings": findings_to_dicts(findings),
        }
        print_checked_json(run, content)
        return
    for finding in findings:
        print(f"{finding.severity} {finding.id} {finding}")
    print(
        f"{plan.label}: nothing is chosen per module. "
        "Megatron's names of the linear layers (layers.0 is layer 1):"
    )
    for name in names:
        print(f"  {name}")
    print_check_notes(run, shown=MODULE_RULE_IDS)


def _collect_module_findings(run: Run) -> list[RuleFinding]:
    """Return the findings of a run's check about single modules."""
    from bridge.preflight.rule_check import get_report

    findings = []
    for finding in get_report(run).findings:
        if finding.id in MODULE_RULE_IDS:
            findings.append(finding)
    return findings


def _replace_recipe(run: Run, path: str) -> Run:
    """Return the run with the per-module recipe of a file, as Megatron would read the file.

    Raises:
        RunConfigError: The run has rows of `modules`, which the file would replace.
    """
    from bridge.read.megatron_lm.module_recipe.precision_file import QUANT_RECIPE_FIELD
    from bridge.read.megatron_lm.module_recipe.te_precision_file import read

    rows: tuple[ModuleRow, ...] = ()
    if run.precision is not None:
        rows = parse_module_rows(get_field_value(run.precision, "modules"))
    if rows:
        rule, remedy = "takes the place of mixed_precision.modules", "Give the file or the rows."
        raise RunConfigError.of("--file", rule, list(map(str, rows)), remedy)
    reading = run.reading
    reason = reading.uncertainty.no_plan_reason
    # The run had no plan because its recipe file was not found. The file of the option replaces it.
    if reason is not None and reason.startswith(QUANT_RECIPE_FIELD):
        uncertainty = replace(reading.uncertainty, no_plan_reason=None)
        reading = replace(reading, uncertainty=uncertainty)
    sections = {**run.sections, "model": {**run.model, "quant_recipe": read(path)}}
    # The notes are about the recipe of the run, which the file replaces.
    return replace(run, sections=sections, reading=replace(reading, notes=()))


def _format_layout(plan: PrecisionPlan) -> str:
    """Return the parallel sizes that module names depend on: "PP=4, VPP=2, EP=8"."""
    parallel = plan.parallel
    sizes = (("PP", parallel.pipeline), ("VPP", parallel.virtual), ("EP", parallel.expert))
    shown = []
    for name, size in sizes:
        if size > 1 or name == "PP":
            shown.append(f"{name}={size}")
    return ", ".join(shown)


def _write_recipe_files(plan: PrecisionPlan, path: Path) -> None:
    """Write Megatron's file for the run, or a file for each pipeline stage if they differ."""
    from bridge.read.foreign.payload_text import as_yaml

    files = [recipe.to_file() for recipe in plan.settings.recipes]
    file_by_name = {str(path): files[0]}
    if len(files) > 1:
        file_by_name = {}
        for stage, file in enumerate(make_stage_recipes(files, plan.parallel.pipeline)):
            name = str(path.with_stem(f"{path.stem}.stage{stage}"))
            file_by_name[name] = _require_stage_file(file, stage)
    for name, file in file_by_name.items():
        write_file(name, as_yaml(file), "--write")
    print(f"wrote {', '.join(file_by_name)}")


def _require_stage_file(file: dict[str, Any] | None, stage: int) -> dict[str, Any]:
    """Return the file of a pipeline stage.

    Raises:
        RunConfigError: The file is None, since the model chunks of the stage need different files.
    """
    if file is not None:
        return file
    rule = (
        f"one file serves all model chunks of a stage, and those of stage {stage} "
        "need different ones"
    )
    remedy = "Use virtual_pipeline_model_parallel_size=null, or no layers."
    raise RunConfigError.of("--write", rule, stage, remedy)

"""`precision-bridge plan --modules`: the modules that each row or matcher takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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


def _write_recipe_files(plan: PrecisionPlan, path: Path) -> None:
    """Write Megatron's file for the run, or one for each pipeline stage that needs its own."""
    from bridge.read.foreign.payload_text import as_yaml

    files = [recipe.to_file() for recipe in plan.settings.recipes]
    named = {str(path): files[0]}
    if len(files) > 1:
        named = {}
        for stage, file in enumerate(make_stage_recipes(files, plan.parallel.pipeline)):
            name = str(path.with_stem(f"{path.stem}.stage{stage}"))
            named[name] = _require_stage_file(file, stage)
    for name, file in named.items():
        write_file(name, as_yaml(file), "--write")
    print(f"wrote {', '.join(named)}")


def _require_stage_file(file: dict[str, Any] | None, stage: int) -> dict[str, Any]:
    """Return the file of a stage; RunConfigError where its chunks need different ones."""
    if file is not None:
        return file
    rule = (
        f"one file serves all model chunks of a stage, and those of stage {stage} "
        "need different ones"
    )
    remedy = "Use virtual_pipeline_model_parallel_size=null, or no layers."
    raise RunConfigError.of("--write", rule, stage, remedy)


def print_modules(args: argparse.Namespace) -> int:
    """Print the selection and what the rules say of it.

    Return 2 where the run's check finds an error, else 0.
    """
    run = read_run(args)
    if args.file:
        run = _replace_recipe(run, args.file)
    from bridge.preflight.check import get_report

    plan = run.plan
    selection = plan.selection
    findings = [finding for finding in get_report(run).findings if finding.id in MODULE_RULE_IDS]
    if not selection.rows:
        _print_module_names(run, plan, findings, as_json=args.json)
        return compute_exit_code(run)
    if args.write:
        _write_recipe_files(plan, Path(args.write))
        return 0
    from bridge.report.module_table import make_module_table, selection_to_dict  # rich is heavy

    layout, mode = _format_layout(plan), plan.settings.mode
    if args.json:
        content = {"precision": plan.label, "layout": layout}
        print_checked_json(run, {**content, **selection_to_dict(selection, findings)})
    else:
        scheme = plan.settings.scheme or mode
        print_report(make_module_table(selection, findings, layout=layout, run=scheme, mode=mode))
        print_check_notes(run, shown=MODULE_RULE_IDS)
    return compute_exit_code(run)


def _replace_recipe(run: Run, path: str) -> Run:
    """Return the run with a file's recipe as it stands.

    RunConfigError for a run with rows of `modules`.
    """
    from bridge.read.megatron_lm.precision_file import QUANT_RECIPE_FIELD
    from bridge.read.megatron_lm.te_precision_file import read

    rows: tuple[ModuleRow, ...] = ()
    if run.precision is not None:
        rows = parse_module_rows(get_field_value(run.precision, "modules"))
    if rows:
        rule, remedy = "takes the place of mixed_precision.modules", "Give the file or the rows."
        raise RunConfigError.of("--file", rule, list(map(str, rows)), remedy)
    reading = run.reading
    if reading.no_plan_reason is not None and reading.no_plan_reason.startswith(QUANT_RECIPE_FIELD):
        reading = replace(reading, no_plan_reason=None)
    sections = {**run.sections, "model": {**run.model, "quant_recipe": read(path)}}
    return replace(run, sections=sections, reading=replace(reading, read_too=()))


def _format_layout(plan: PrecisionPlan) -> str:
    """Return the sizes that decide about names: PP 4, VPP 2, EP 8."""
    parallel = plan.parallel
    sizes = (("PP", parallel.pipeline), ("VPP", parallel.virtual), ("EP", parallel.expert))
    shown = []
    for name, size in sizes:
        if size > 1 or name == "PP":
            shown.append(f"{name}={size}")
    return ", ".join(shown)


def _print_module_names(
    run: Run, plan: PrecisionPlan, findings: Sequence[RuleFinding], *, as_json: bool
) -> None:
    """Print the modules of a run that chooses nothing per module, as rows would name them."""
    names = [module.path for module in plan.selection.unselected]
    if as_json:
        from bridge.report.module_table import findings_to_dicts  # rich is heavy

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

"""`precision-bridge compare --twin`: a config that differs in precision only, and the proof.

A low-precision run is judged by the same run in BF16. The twin has every section of the run as it
is, and another recipe in the place of `mixed_precision`. Two kinds of values are left out:
precision fields that other sections state themselves (such as model.fp8), so that the recipe
decides, and the folders of checkpoints, which both must not share. The file is read back and
compared field by field before the command reports it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.output import format_value, print_json, write_file
from bridge.cli.run_answer import plan_run
from bridge.cli.run_arguments import read_run, read_without_overrides
from bridge.errors import RunConfigError
from bridge.precision.mode import format_label
from bridge.precision.statements import get_recipe_name
from bridge.registry.registry import REGISTRY
from bridge.sync.routes import ROUTES

if TYPE_CHECKING:
    from bridge.preflight.run import Run

TWIN_SECTIONS = ("model", "optimizer", "ddp", "train", "data", "checkpoint")
CHECKPOINT_FOLDERS = ("checkpoint.save", "checkpoint.load")
"""Left out: the twin would write over the run's own checkpoints, or resume from them."""
PRECISION = "mixed_precision"
_PRECISION_ROUTES = [route for route in ROUTES if route.rule != "stated" or route.family]
PRECISION_FIELDS = frozenset(
    f"{route.owner}.{route.attribute}" for route in _PRECISION_ROUTES if route.attribute
)
"""Precision fields of other sections: "model.fp8", for example."""
DEFAULT_TWIN_RECIPE = "bf16_mixed"
"""Recipe of a twin."""
NO_PLAN_TEXT = "not known, as the model cannot be planned"


def write_twin(args: argparse.Namespace) -> None:
    """Write the twin of a run, and print the proof that it differs in precision fields only."""
    values = read_run(args)
    name = args.base or DEFAULT_TWIN_RECIPE
    base = REGISTRY.get(name)
    if args.json and not args.output:
        rule = "prints the proof, so the twin needs a file, got no --output"
        raise RunConfigError(f"--json: {rule}. Give --output FILE.")
    text = _format_twin(values, get_recipe_name(base) or name)
    if not args.output:
        print(text, end="")
        return
    path = Path(args.output)
    write_file(path, text, "--output")
    twin = read_without_overrides(args, str(path))
    differences = list(_list_differences(values, twin))
    names = ", ".join(str(row["field"]) for row in differences if not row["precision"])
    if names:
        raise RunConfigError(
            f"{path}: the twin must differ in precision fields only, got {names}. Remove it."
        )
    if args.json:
        print_json(
            {
                "twin": str(path),
                "differs_in": differences,
                **_count_low_precision_linears(values, twin),
            }
        )
        return
    print(_format_proof(path, values, twin, differences))


def _list_differences(values: Run, twin: Run) -> Iterator[dict[str, Any]]:
    before, after = _flatten_sections(values), _flatten_sections(twin)
    for field in before | after:
        if before.get(field) != after.get(field):
            yield {
                "field": field,
                "run": before.get(field),
                "twin": after.get(field),
                "precision": field.startswith(f"{PRECISION}.") or field in PRECISION_FIELDS,
            }


def _flatten_sections(values: Run) -> dict[str, Any]:
    """Return "section.field" -> the value, of the twin's sections and of the precision."""
    sections = {name: _copy_section(values, name) for name in TWIN_SECTIONS}
    sections[PRECISION] = {}
    if values.precision is not None:
        sections[PRECISION] = values.precision.to_dict(full=True)
    flat = {}
    for name, section in sections.items():
        for key, value in section.items():
            flat[f"{name}.{key}"] = value
    return flat


def _copy_section(values: Run, name: str) -> dict[str, Any]:
    """Return a section without the folders of checkpoints.

    The section of checkpoints is whole, so that the twin can be saved.
    """
    section = dict(values.section(name))
    if name == "checkpoint":
        from bridge.training.config import CheckpointConfig

        section = dataclasses.asdict(CheckpointConfig()) | section
    for key in section:
        if f"{name}.{key}" in CHECKPOINT_FOLDERS:
            section[key] = None
    return section


def _format_twin(values: Run, recipe: str) -> str:
    """Return the twin as YAML: the recipe decides what other sections state about precision."""
    import yaml

    whole: dict[str, Any] = {PRECISION: recipe}
    for name in TWIN_SECTIONS:
        section = _copy_section(values, name)
        for key in list(section):
            if f"{name}.{key}" in PRECISION_FIELDS:
                del section[key]
        if section:
            whole[name] = section
    target = values.sections.get("target")
    if target:
        whole["target"] = target
    label = "its own settings"
    if values.precision is not None:
        label = format_label(values.precision)
    content = yaml.safe_dump(whole, sort_keys=False)
    return f"# The twin of {values.name} ({label}) in {recipe}.\n{content}"


def _count_low_precision_linears(values: Run, twin: Run) -> dict[str, Any]:
    """Return how many linear layers compute in FP8 or FP4 in each of the two.

    None where the model has no plan.
    """
    counts: dict[str, str | None] = {}
    for name, each in (("run", values), ("twin", twin)):
        counts[f"{name}_low_precision_linears"] = None
        with suppress(RunConfigError):
            low, linears = plan_run(each).linears()
            counts[f"{name}_low_precision_linears"] = f"{low} of {linears}"
    return counts


def _format_proof(path: Path, values: Run, twin: Run, differences: list[dict[str, Any]]) -> str:
    same = len(_flatten_sections(values).keys() | _flatten_sections(twin).keys()) - len(differences)
    counts = _count_low_precision_linears(values, twin)
    lines = [
        f"{path}: differs in {len(differences)} precision fields and in nothing else "
        f"({same} fields are the same)."
    ]
    for row in differences:
        change = f"{format_value(row['run'])} -> {format_value(row['twin'])}"
        lines.append(f"  {row['field']:<50} {change}")
    before = counts["run_low_precision_linears"] or NO_PLAN_TEXT
    after = counts["twin_low_precision_linears"] or NO_PLAN_TEXT
    lines.append(f"  linear layers in FP8 or FP4: {before} -> {after}")
    return "\n".join(lines)

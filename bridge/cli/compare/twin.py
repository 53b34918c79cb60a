"""`precision-bridge compare --twin`: a config that differs in precision only, and the proof.

A low-precision run is judged by comparison with the same run in BF16. The twin has every section of
the run, and another recipe as its `mixed_precision`. Two kinds of values are left out. Precision
fields in other sections, such as model.fp8, are left out so that the recipe decides them. The
folders of checkpoints are left out because two runs must not share them. The written file is read
back and compared with the run field by field.
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
from bridge.sync.field_routes import ROUTES

if TYPE_CHECKING:
    from bridge.preflight.run import Run

TWIN_SECTIONS = ("model", "optimizer", "ddp", "train", "data", "checkpoint")
CHECKPOINT_FOLDERS = ("checkpoint.save", "checkpoint.load")
"""Settings that are left out. A twin with them would overwrite or load the run's checkpoints."""
PRECISION = "mixed_precision"


def _collect_precision_fields() -> frozenset[str]:
    """Return the fields of other sections that a recipe decides: "model.fp8", for example.

    Some fields are not about FP8 or FP4, and a sync writes them only if they are stated. Such a
    field belongs to the run, not to the recipe.
    """
    fields = set()
    for route in ROUTES:
        is_of_run = route.rule == "stated" and not route.family
        if route.attribute and not is_of_run:
            fields.add(f"{route.owner}.{route.attribute}")
    return frozenset(fields)


PRECISION_FIELDS = _collect_precision_fields()
DEFAULT_TWIN_RECIPE = "bf16_mixed"
"""The recipe of a twin without ``--base``."""
NO_PLAN_TEXT = "not known, as the model cannot be planned"


def write_twin(args: argparse.Namespace) -> None:
    """Write the twin of a run, and print the proof that it differs in precision fields only.

    Without ``--output`` the twin is printed, without a proof.

    Raises:
        RunConfigError: The twin differs in other fields, or ``--json`` has no ``--output``.
    """
    run = read_run(args)
    name = args.base or DEFAULT_TWIN_RECIPE
    base = REGISTRY.get(name)
    if args.json and not args.output:
        rule = "prints the proof, so the twin needs a file, got no --output"
        raise RunConfigError(f"--json: {rule}. Give --output FILE.")
    twin_yaml = _format_twin(run, get_recipe_name(base) or name)
    if not args.output:
        print(twin_yaml, end="")
        return
    path = Path(args.output)
    write_file(path, twin_yaml, "--output")
    twin = read_without_overrides(args, str(path))
    differences = list(_list_differences(run, twin))
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
                **_count_low_precision_linears(run, twin),
            }
        )
        return
    print(_format_proof(path, run, twin, differences))


def _list_differences(run: Run, twin: Run) -> Iterator[dict[str, Any]]:
    """Yield each field that differs, with both values and whether it is a precision field."""
    before, after = _flatten_sections(run), _flatten_sections(twin)
    for field in before | after:
        if before.get(field) != after.get(field):
            yield {
                "field": field,
                "run": before.get(field),
                "twin": after.get(field),
                "precision": field.startswith(f"{PRECISION}.") or field in PRECISION_FIELDS,
            }


def _flatten_sections(run: Run) -> dict[str, Any]:
    """Return "section.field" -> the value, for the sections of a twin and for the precision."""
    sections = {name: _copy_section(run, name) for name in TWIN_SECTIONS}
    sections[PRECISION] = {}
    if run.precision is not None:
        sections[PRECISION] = run.precision.to_dict(full=True)
    flat = {}
    for name, section in sections.items():
        for key, value in section.items():
            flat[f"{name}.{key}"] = value
    return flat


def _copy_section(run: Run, name: str) -> dict[str, Any]:
    """Return a section without the folders of checkpoints.

    The section of checkpoints has every field, so that its two folders are stated as None.
    """
    section = dict(run.section(name))
    if name == "checkpoint":
        from bridge.training.config import CheckpointConfig

        section = dataclasses.asdict(CheckpointConfig()) | section
    for key in section:
        if f"{name}.{key}" in CHECKPOINT_FOLDERS:
            section[key] = None
    return section


def _format_twin(run: Run, recipe: str) -> str:
    """Return the twin as YAML, without the precision fields of other sections."""
    import yaml

    config: dict[str, Any] = {PRECISION: recipe}
    for name in TWIN_SECTIONS:
        section = _copy_section(run, name)
        for key in list(section):
            if f"{name}.{key}" in PRECISION_FIELDS:
                del section[key]
        if section:
            config[name] = section
    target = run.sections.get("target")
    if target:
        config["target"] = target
    label = "its own settings"
    if run.precision is not None:
        label = format_label(run.precision)
    content = yaml.safe_dump(config, sort_keys=False)
    return f"# The twin of {run.name} ({label}) in {recipe}.\n{content}"


def _count_low_precision_linears(run: Run, twin: Run) -> dict[str, str | None]:
    """Return the number of linear layers in FP8 or FP4 in both runs; None if there is no plan."""
    counts: dict[str, str | None] = {}
    for name, planned in (("run", run), ("twin", twin)):
        counts[f"{name}_low_precision_linears"] = None
        with suppress(RunConfigError):
            low, linears = plan_run(planned).linears()
            counts[f"{name}_low_precision_linears"] = f"{low} of {linears}"
    return counts


def _format_proof(path: Path, run: Run, twin: Run, differences: list[dict[str, Any]]) -> str:
    """Return the number of equal fields, each difference, and the linear layers in FP8 or FP4."""
    fields = _flatten_sections(run).keys() | _flatten_sections(twin).keys()
    same = len(fields) - len(differences)
    counts = _count_low_precision_linears(run, twin)
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

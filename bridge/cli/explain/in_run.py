"""`precision-bridge explain FIELD --run RUN`: a setting in a run, from the files of its folder."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.cli.explain.field import explain_field
from bridge.precision.precision_config import FIELD_DEFAULTS
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.audit.setting import Setting, describe_effect
from bridge.sync.field_routes import ROUTES


def explain_in_run(
    key: str, folder: Path, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return the value of a setting in a run, with its traces in the files of the run.

    Args:
        key: A field of the precision, or any key of the run's config.
        folder: The folder of the run.
        recipe: A recipe whose value of the field is added; None: no recipe.
        config_dir: A folder with recipes of a team; None: no such folder.

    Returns:
        Plain data. For a field of the precision it is the result of `explain_field`. For a key of
        the config, "setting" has the `Setting`. For both, "in_run" has the traces: the rows of the
        sync, the findings of the check and the sync, and a sentence about the records.
    """
    run = RunFolder.from_path(folder)
    section, _, name = key.rpartition(".")
    is_precision = name in FIELD_DEFAULTS or any(name == route.attribute for route in ROUTES)
    setting = None
    if not is_precision or section not in ("", "mixed_precision"):
        setting = Setting.from_run(run, key)
    if setting is None:
        content = explain_field(key, recipe, config_dir=config_dir)
        return {**content, "in_run": _collect_traces(run, content["field"])}
    if not is_precision:
        traces = _collect_traces(run, setting.key)
        return {"field": setting.key, "setting": asdict(setting), "in_run": traces}
    content = explain_field(key, recipe, config_dir=config_dir)
    traces = _collect_traces(run, content["field"])
    return {**content, "in_run": traces, "setting": asdict(setting)}


def _collect_traces(run: RunFolder, field: str) -> dict[str, Any]:
    """Return the traces of a field in the files of a run, as plain data."""
    rows = []
    paths = {field, f"mixed_precision.{field}"}
    for row in run.sync.get("rows", ()):
        path = f"{row['owner']}.{row['attribute']}"
        if field in {row["field"], path}:
            rows.append(row)
            paths.add(path)
    findings = []
    for finding in (*run.findings.get("findings", ()), *run.sync.get("findings", ())):
        # The path of a finding may name several fields.
        if paths & set(re.findall(r"[\w.]+", finding["path"])):
            findings.append(f"{finding['severity']}: {finding['rule']}")
    ran = ""
    if field in FIELD_DEFAULTS:
        ran = describe_effect(run, field)
    return {"run": str(run.path), "rows": rows, "findings": findings, "ran": ran}

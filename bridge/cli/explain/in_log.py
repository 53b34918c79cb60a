"""`precision-bridge explain FIELD --run LOG`: a setting in the log of another trainer's run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.cli.explain.field import explain_field, format_field
from bridge.cli.explain.in_file import explain_in_file, format_in_file
from bridge.precision.precision_config import FIELDS
from bridge.runtime.audit.setting import LOSS_SCALE_SUBJECT, describe_loss_scale, describe_trace

if TYPE_CHECKING:
    from bridge.cli.described_logs import DescribedLog
    from bridge.runtime.audit.run_log import RunLog


def explain_in_log(
    key: str, described: DescribedLog, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return the values of a field in the run of a log.

    Args:
        key: The name of the field. The name of a config may precede it.
        described: The log, and the run that its arguments describe.
        recipe: A recipe whose value of the field is added if the log has no arguments. None: no
            recipe.
        config_dir: A folder with recipes of a team. None: no such folder.

    Returns:
        Plain data: the result of `explain_in_file` if the log has arguments, else the result of
        `explain_field`. "in_log" has the log, and a sentence about the values of the field in it.
    """
    log = described.log
    name = key.rpartition(".")[2]
    trace = _describe_log_trace(log, name)
    if described.run is not None:
        content = explain_in_file(key, described.run)
    elif trace and name not in FIELDS:
        content = {"field": key}
    else:
        content = explain_field(key, recipe, config_dir=config_dir)
    return {**content, "in_log": {"log": str(log.path), "source": log.source, "ran": trace}}


def _describe_log_trace(log: RunLog, name: str) -> str:
    """Return a sentence about the values of a field in a log. Empty if the log has no values."""
    subject = None
    if name in FIELDS:
        subject = FIELDS[name].subject
    if (
        subject is not None
        and subject.title == LOSS_SCALE_SUBJECT
        and log.list_values("loss_scale")
    ):
        return describe_loss_scale(log.list_records())
    if name in ("lr", "min_lr") and log.list_values("learning_rate"):
        return describe_trace(f"optimizer.{name}", log.list_records())
    if name == "train_iters":
        return describe_trace("train.train_iters", log.list_records())
    return ""


def format_in_log(content: Mapping[str, Any], described: DescribedLog) -> str:
    """Return the sentences about a field in a log.

    Args:
        content: The result of `explain_in_log`.
    """
    log = described.log
    if described.run is None:
        field_text = format_field(content) or content["field"]
        lines = [
            field_text,
            f"  Its value in {log.path} is not known: {log.source} without arguments.",
        ]
    else:
        lines = [format_in_file(content, described.run.reading.lines)]
    trace = content["in_log"]["ran"]
    if trace:
        lines.append(f"  {trace}.")
    return "\n".join(lines)

"""`CheckBeforeSubmit`: a plugin of nemo-run that checks a task before it is submitted.

    run.run(task, executor=executor, plugins=[CheckBeforeSubmit(target="h100x64,te2.9")])

nemo-run calls its plugins when a task is added to an experiment. So an error of the check is raised
before anything is copied or queued (nemo-run 0.11.1, run/experiment.py, _add_single_job).
"""

from __future__ import annotations

import logging
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_run import Plugin, Script

from bridge.errors import BridgeError, CheckError
from bridge.front.loader import load_run
from bridge.front.python_check import check
from bridge.preflight.rule_check import Report

log = logging.getLogger("bridge.front")

SHELLS = ("bash", "sh")
TASK, CONFIG = "task.sh", "config.yaml"
"""Names of the files that a task is written to for the check."""


@dataclass(kw_only=True)
class CheckBeforeSubmit(Plugin):  # type: ignore[misc]  # nemo-run has no types
    """Checks each task, and stops the submission if the check finds an error.

    A task in which no run can be read is submitted. A warning has the reason.
    """

    target: str | None = None
    """Machines of the run, ``h100x64,te2.9,cuda12.9``. None: rules about a GPU are not evaluated."""
    strict: bool = False
    """Whether warnings stop the submission too."""

    def setup(self, task: Any, executor: Any) -> None:
        """Check a task.

        Args:
            task: A `Script` or a `Partial` of nemo-run.
            executor: The executor of the task, whose environment variables count.

        Raises:
            CheckError: The check finds errors, or warnings if `strict`.
        """
        with tempfile.TemporaryDirectory() as folder:
            try:
                report = self._check_task(task, executor, Path(folder))
            except BridgeError as error:
                log.warning("check: %s", error)
                return
        if report is None:
            log.warning("check: %s holds no config that can be read.", type(task).__name__)
            return
        findings = list(report.of("error"))
        if self.strict:
            findings += report.of("warning")
        if findings:
            raise CheckError("The task must pass the check before it is submitted:", findings)
        for finding in report.of("warning"):
            log.warning("check: %s", finding)

    def _check_task(self, task: Any, executor: Any, folder: Path) -> Report | None:
        """Return the report on a task, or None if the task has no config.

        The task is written to a file of the folder.

        Raises:
            BridgeError: The file cannot be read as a run.
        """
        file = _write_task_file(task, executor, folder)
        if file is None:
            return None
        return check(load_run(config_file=file, strict=False), target=self.target)


def _write_task_file(task: Any, executor: Any, folder: Path) -> Path | None:
    """Write a task as a file that describes a run, and return it, or None without a config."""
    if isinstance(task, Script):
        file = folder / TASK
        variables = {**getattr(executor, "env_vars", {}), **task.env}
        file.write_text(_format_script(task, variables), encoding="utf-8")
        return file
    for argument in getattr(task, "__arguments__", {}).values():
        if hasattr(argument, "to_yaml"):  # Megatron Bridge's ConfigContainer
            file = folder / CONFIG
            argument.to_yaml(str(file))
            return file
    return None


def _format_script(script: Any, variables: dict[str, str]) -> str:
    """Return a script as a file of bash, with its environment variables and its arguments."""
    lines = []
    for name, value in variables.items():
        lines.append(f"export {name}={shlex.quote(str(value))}")
    is_shell_script = Path(script.entrypoint).name in SHELLS
    if script.inline:
        lines.append(script.inline)
    elif is_shell_script:
        lines.append(shlex.join(["set", "--", *map(str, script.args)]))
        lines.append(Path(script.path).read_text(encoding="utf-8"))
    else:
        lines.append(shlex.join(map(str, script.to_command(with_entrypoint=True))))
    return "\n".join(lines) + "\n"

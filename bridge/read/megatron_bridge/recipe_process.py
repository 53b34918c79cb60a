"""`read_container_from_process`: the container of a recipe as Megatron Bridge itself makes it.

Another process makes it, on request.

It runs the recipe, and what the recipe imports; a checkpoint's config may be downloaded. The container is
written as the YAML that Megatron Bridge saves with a run, and read as such a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml
from bridge.preflight.file_reading import FileReading
from bridge.read.megatron_bridge import saved_container
from bridge.read.megatron_bridge.source_library import Library
from bridge.read.megatron_bridge.values import Function

ASK_OPTION = "--ask-megatron-bridge"
TIMEOUT_SECONDS = 600
PROCESS_PROGRAM = """
import importlib, runpy, sys
place, function, path = sys.argv[1:]
names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
names[function]().to_yaml(path)
"""
"""What the process runs: a recipe of a module or of a file, saved to a path."""
RECIPE_FAILED = (
    "{option}: {function} of {place} makes no container here; {reason}. "
    "Drop the option: the file is read by its syntax then."
)
CONTAINER_MADE = (
    "Megatron Bridge itself made the container: {function} of {place}, in a process of its own."
)


def read_container_from_process(library: Library, function: Function, path: Path) -> FileReading:
    """Return what the container says of a run that a recipe makes when it is called without arguments.

    Args:
        library: The source of Megatron Bridge, which the process imports where one is at hand.
        function: The recipe.
        path: The file that is read.

    Raises:
        RunConfigError: Megatron Bridge cannot be imported, or the recipe fails.
    """
    location = function.module.name or str(path.resolve())
    facts = {"function": function.node.name, "place": location}
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "run_config.yaml"
        reason = _run_process(library, [location, function.node.name, str(saved)])
        if not saved.is_file():
            raise RunConfigError(RECIPE_FAILED.format(option=ASK_OPTION, reason=reason, **facts))
        data = strict_yaml.read_bytes(saved, error=RunConfigError)
    text = strict_yaml.decode_text(data, str(saved), error=RunConfigError)
    (config, *_) = strict_yaml.load_documents(text, str(saved), error=RunConfigError) or ({},)
    reading = saved_container.read_saved_container(config, path)
    return replace(reading, read_too=(CONTAINER_MADE.format(**facts), *reading.read_too))


def _run_process(library: Library, arguments: list[str]) -> str:
    """Run the process; return why it failed, as a clause: the last line of its errors."""
    variables = dict(os.environ)
    if library.root is not None:
        python_paths = (str(library.root), variables.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, python_paths))
    command = [sys.executable, "-c", PROCESS_PROGRAM, *arguments]
    try:
        done = subprocess.run(  # noqa: S603  on request
            command,
            capture_output=True,
            text=True,
            env=variables,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT_SECONDS} seconds"
    lines = done.stderr.strip().splitlines()
    if not lines:
        return f"it ended with {done.returncode}"
    return lines[-1].rstrip(".")

"""What the tests of the check share."""

from typing import Any

from bridge.preflight.check_context import CheckContext
from bridge.preflight.run import Run
from bridge.rules.program import Program
from bridge.target.declaration import parse_target


def run_of(said: dict[str, Any]) -> Run:
    """The run that a row of a topic in `cases` describes."""
    said = dict(said)
    target = said.pop("target", None)
    known = {}
    for name in ("is_own", "is_bridge", "is_resumed", "refused", "faulty_options", "dropped_fields"):
        if name in said:
            known[name] = said.pop(name)
    program = Program(**known)
    backend = said.pop("backend", None)
    if backend is not None:
        said["precision_backend"] = backend
    place = parse_target(target) if target else None
    return Run.from_configs(said.pop("precision", None), target=place, program=program, **said)


def setup_of(said: dict[str, Any]) -> CheckContext:
    """The facts that the check of that run asks about."""
    return CheckContext(run_of(said))

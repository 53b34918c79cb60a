"""Fields that a run honours: the rules about what has no effect here, or cannot run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.layout import ParallelLayout
from bridge.precision.mode import get_scheme
from bridge.preflight.check_context import CheckContext
from bridge.preflight.run import Run
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.program import Program
from bridge.rules.rule import RuleFinding, evaluate_rules
from bridge.rules.rulebook import RULES_BY_ID
from bridge.runtime.megatron.te.machine import list_missing_for_te
from bridge.target.declaration import make_target
from bridge.training.config import ConfigContainer

CONFIG_RULES = (
    "PB407",  # interleaved stages without overlapped messages
    "PB408",  # a size that does not divide by its ranks
    "PB701",  # a field that the run does not honour
    "PB702",  # a value that the run cannot have
    "PB703",  # a layout that trains another model
)
"""Rules that the configs of a run answer before the precision is written into them."""
PHASE_RULES = (
    "PB109",  # a stage that receives another dtype than was sent
    "PB213",  # a per-module recipe that Transformer Engine refuses
    "PB266",  # no layer is left in low precision
    "PB296",  # stored weights in another scheme
    *CONFIG_RULES,
)
"""Rules that the configs of a run answer in the precision of a phase."""
EMULATION_RULES = (
    "PB615",  # a setting that is not emulated
    "PB616",  # a custom scheme that is not emulated
)
"""Rules about emulated GEMMs."""


def find_unsupported_fields(config: ConfigContainer) -> list[RuleFinding]:
    """Return the findings about fields that the build refuses.

    `require_supported` asks once more after the precision is written into the sections.
    """
    scheme = None
    if isinstance(config.mixed_precision, MixedPrecisionConfig):
        scheme = get_scheme(config.mixed_precision)
    backend = config.precision_backend
    if backend == "auto":
        backend = "te"
        if list_missing_for_te(scheme):
            backend = "emulated"
    return find_rule_errors(config, backend=backend, rules=CONFIG_RULES)


def find_rule_errors(
    config: Any, *, backend: str, rules: Iterable[str], model: Any = None
) -> list[RuleFinding]:
    """Return the errors that some rules find in model, optimizer and DDP config.

    Args:
        config: The run.
        backend: Backend of its GEMMs.
        rules: Ids of the rules.
        model: Model config that takes the place of `config.model`.
    """
    if model is None:
        model = config.model
    sections = {"model": model, "optimizer": config.optimizer, "ddp": config.ddp}
    run = Run.from_configs(**sections, target=make_target(None), program=Program(is_own=True))
    context = CheckContext(run, backend=backend)
    asked = [RULES_BY_ID[name] for name in rules]
    return [finding for finding in evaluate_rules(asked, context) if finding.severity == "error"]


def require_supported(config: Any, phases: Sequence[Any], *, backend: str) -> None:
    """Refuse a run with fields that have no effect here or cannot run.

    Args:
        config: The run.
        phases: The model config of each phase of its precision.
        backend: Backend of its GEMMs.

    Raises:
        RunConfigError: A rule finds an error in the config of a phase.
    """
    rules = list(PHASE_RULES)
    if backend == "emulated":
        rules += EMULATION_RULES
    lines: dict[str, None] = {}
    for model in phases:
        for fault in find_rule_errors(config, backend=backend, rules=rules, model=model):
            lines[f"{fault.id} {fault}"] = None
    if lines:
        raise RunConfigError("\n".join(lines))
    # Called for its exception: the layers may not divide by the stages.
    ParallelLayout.from_model(config.model).places(config.model.num_layers)

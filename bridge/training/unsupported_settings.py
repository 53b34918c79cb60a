"""Unsupported settings: the fields of a run that have no effect here, or cannot run.

The rules of `check` find them. This module evaluates the rules on Megatron's configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from bridge.errors import RunConfigError
from bridge.model.layout import ParallelLayout
from bridge.precision.mode import get_scheme
from bridge.preflight.check_context import CheckContext
from bridge.preflight.run import Run
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.rules.program import Program, ProgramKind
from bridge.rules.rule import RuleFinding, evaluate_rules
from bridge.rules.rulebook import RULES_BY_ID
from bridge.runtime.megatron.te.machine import list_missing_for_te
from bridge.target.declaration import make_target
from bridge.training.config import ConfigContainer

CONFIG_RULES = (
    "PB407",  # interleaved stages without overlapped messages
    "PB408",  # a size that does not divide by its ranks
    "PB701",  # a field that has no effect
    "PB702",  # a value that the run cannot have
    "PB703",  # a layout that trains another model
)
"""Rules that are checked before the precision is written into the configs."""
PHASE_RULES = (
    "PB109",  # a stage that receives another dtype than was sent
    "PB213",  # a per-module recipe that Transformer Engine refuses
    "PB266",  # no layer is left in low precision
    "PB296",  # stored weights in another scheme
    *CONFIG_RULES,
)
"""Rules that are checked for each phase, after its precision is written into the configs."""
EMULATION_RULES = (
    "PB615",  # a setting that is not emulated
    "PB616",  # a custom scheme that is not emulated
)
"""Rules that are checked in addition if the GEMMs are emulated."""


class MegatronConfigs(Protocol):
    """Any object with the three configs of Megatron Core, such as a `ConfigContainer`."""

    model: Any
    optimizer: Any
    ddp: Any


def find_unsupported_settings(config: ConfigContainer) -> list[RuleFinding]:
    """Return the findings about settings with which the run cannot be built.

    The precision is not yet in the configs. `require_supported_settings` checks them again when it
    is.
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
    config: MegatronConfigs, *, backend: str, rules: Iterable[str], model: Any = None
) -> list[RuleFinding]:
    """Return the errors that some rules find in the model, optimizer and DDP config.

    Args:
        config: The configs of the run.
        backend: Backend of the GEMMs.
        rules: Ids of the rules.
        model: Model config that replaces `config.model`. None: `config.model` itself.
    """
    if model is None:
        model = config.model
    sections = {"model": model, "optimizer": config.optimizer, "ddp": config.ddp}
    run = Run.from_configs(
        **sections, target=make_target(None), program=Program(kind=ProgramKind.TRAIN_SCRIPT)
    )
    context = CheckContext(run, backend=backend)
    findings = evaluate_rules([RULES_BY_ID[name] for name in rules], context)
    return [finding for finding in findings if finding.severity == "error"]


def require_supported_settings(
    config: MegatronConfigs, phase_models: Sequence[Any], *, backend: str
) -> None:
    """Refuse a run with settings that have no effect here or cannot run.

    Args:
        config: The configs of the run.
        phase_models: The model config of each phase of the precision.
        backend: Backend of the GEMMs.

    Raises:
        RunConfigError: A rule finds an error in the configs of a phase, or the layers cannot be
            split over the pipeline stages.
    """
    rules = list(PHASE_RULES)
    if backend == "emulated":
        rules += EMULATION_RULES
    lines: list[str] = []
    for model in phase_models:
        for error in find_rule_errors(config, backend=backend, rules=rules, model=model):
            line = f"{error.id} {error}"
            if line not in lines:
                lines.append(line)
    if lines:
        raise RunConfigError("\n".join(lines))
    # Called only for its exception if the layers cannot be split over the stages.
    ParallelLayout.from_model(config.model).split_layers(config.model.num_layers)

"""A recipe exported to a trainer: the payload, with everything that would be another precision refused."""

import logging
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.contract import ExportReport
from bridge.interop.systems import system
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config

DECISIVE = frozenset({"fp8", "fp4", "autocast_enabled", "modules"})
"""Fields without which a run computes in another format than the recipe says."""

log = logging.getLogger(__name__)


def exported(name: str, recipe: str | MixedPrecisionConfig, **context: Any) -> ExportReport:
    """Return a recipe as `system(name)` writes it.

    Args:
        name: The system, as in ``precision-bridge convert --to``.
        recipe: A recipe's name, or a config.
        context: Facts that the exporter takes.

    Returns:
        The export; a warning is logged for each stated field that the trainer has no exact setting for.

    Raises:
        PayloadError: The trainer cannot run the format or the autocast of the recipe.
        PrecisionConfigError: The precision can never be right.
        UnknownRecipeError: No such recipe.
    """
    config = get_mixed_precision_config(recipe)
    config.finalize()
    written = system(name)
    export = written.export
    if export is None:
        raise PayloadError(
            f"{name}: is a system that nothing is written for. `precision-bridge convert --help` lists all."
        )
    report = export(config, **context)
    missing = [entry for entry in report.unmapped if entry.field in DECISIVE]
    if missing:
        lines = [f"{written.title} cannot run {config.label}:", *(f"  {entry}" for entry in missing)]
        raise PayloadError("\n".join(lines))
    for entry in report.unmapped:
        log.warning("%s: %s", written.title, entry)
    return report

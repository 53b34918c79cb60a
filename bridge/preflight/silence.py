"""`silence`: the rules and early warnings that a run leaves out, each with a reason.

A reason is stated in the section `silence` of the run, by the override `silence.NAME=REASON`, or by
the option ``--silence NAME=REASON`` of the check.
"""

from collections.abc import Mapping

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.rules.rulebook import RULES

EARLY_WARNING_NAMES = (
    "loss-not-finite",
    "gradients-not-finite",
    "loss-spike",
    "gradient-spike",
    "skipped-steps",
    "loss-scale-floor",
    "spike-after-scale-change",
    "amax-history",
    "underflow-rising",
    "stale-weights",
)
"""The names of the rows in `bridge.runtime.audit.early_warnings`.

The rows have the condition of each warning. They are in a room that imports this room, so the names
are listed here again, and a test compares them.
"""
REASONS_RULE = "must be a mapping of rules to reasons"
"""The rule of a section `silence` that is not a mapping."""
REASONS_REMEDY = "Write PB306: why."


def parse_reasons(silence: object) -> dict[str, str]:
    """Return the section `silence` of a run: name -> the reason why it is silenced.

    Raises:
        RunConfigError: The section is not a mapping.
    """
    if silence is None:
        return {}
    if not isinstance(silence, Mapping):
        raise RunConfigError.of("silence", REASONS_RULE, silence, REASONS_REMEDY)
    return {str(name): str(reason) for name, reason in silence.items()}


def refuse_unknown_names(reasons: Mapping[str, str]) -> None:
    """Refuse a name that is neither a rule nor an early warning, and a name without a reason.

    Args:
        reasons: Name -> the reason why the rule or the warning is silenced.

    Raises:
        RunConfigError: The first such name.
    """
    if not reasons:
        return
    known = [*(rule.id for rule in RULES), *EARLY_WARNING_NAMES]
    for name, reason in reasons.items():
        if name not in known:
            matches = [known_name for known_name in known if known_name.startswith(name)][:3]
            if not matches:
                matches = close_matches(name, known)
            hint = did_you_mean(matches) or "`precision-bridge explain rules` lists them."
            raise RunConfigError(
                f"silence.{name}: must name a rule or an early warning, got {name!r}. {hint}",
                matches,
            )
        if not str(reason).strip():
            raise RunConfigError(
                f"silence.{name}: needs a reason, got {reason!r}. {_format_reason_remedy(name)}"
            )


def parse_silence_option(argument: str) -> tuple[str, str]:
    """Return the name and the reason of ``--silence NAME=REASON``.

    Raises:
        RunConfigError: The argument has no reason.
    """
    name, _, reason = argument.partition("=")
    if not reason.strip():
        remedy = _format_reason_remedy(name or "PB306")
        raise RunConfigError.of("--silence", "needs a reason", argument, remedy)
    return name.strip(), reason.strip()


def _format_reason_remedy(name: str) -> str:
    """Return the remedy of a name without a reason."""
    return f"Write {name}=why it is all right."

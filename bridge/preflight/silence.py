"""What `silence.NAME=REASON` may name: a rule, or an early warning of a run in progress."""

from collections.abc import Mapping

from bridge.errors import RunConfigError, close_matches, did_you_mean
from bridge.rules.rulebook import RULES

EARLY_WARNINGS = (
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

The rows say when each warning stands.
"""


def refuse_unknown_names(reasons: Mapping[str, str]) -> None:
    """Refuse to silence a name that is neither a rule nor an early warning.

    A name without a reason is refused too.
    """
    if not reasons:
        return
    known = [*(rule.id for rule in RULES), *EARLY_WARNINGS]
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
                f"silence.{name}: needs a reason, got {reason!r}. Write {name}=why it is all right."
            )

"""`check_support`: whether a target runs a recipe.

    check_support("bf16_with_mxfp8_mixed", parse_target("b200,te2.8"))   # Support(verdict="native")

The rules of FP8 and FP4 decide about low precision. `build_support_matrix` answers for every recipe
and every generation of GPUs.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from bridge.model.read_tracking import AttributeView
from bridge.precision.grouping import group_pairs
from bridge.precision.mode import get_mode, get_scheme
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.context import PRECISION_OWNERS, RuleContext, get_effective_values
from bridge.rules.rule import RuleFinding, cast_to_precision_rules, evaluate_rules
from bridge.rules.rulebook import RULES_BY_ID
from bridge.rules.topics.system.target import BLOCKWISE_ON_BLACKWELL, is_blockwise_on_blackwell
from bridge.target.fields import OWNER_DEFAULTS
from bridge.target.gpus import GPUS, Gpu
from bridge.target.target import Target
from bridge.target.versions import format_dotted

Verdict = Literal["native", "emulated", "unknown", "no"]
"""Whether a target runs a recipe.

native: in hardware of that format. emulated: it runs, but not in hardware of that format.
unknown: it depends on versions that the target does not state. no: it does not run.
"""

_RULE_VERDICTS: dict[str, Verdict] = {
    "PB602": "no",
    "PB603": "no",
    "PB621": "no",
    "PB622": "no",
    "PB608": "no",
    "PB606": "no",
    "PB610": "no",
    "PB605": "no",
    "PB611": "emulated",
    "PB609": "emulated",
    "PB617": "emulated",
    "PB604": "emulated",
    "PB623": "emulated",
    "PB614": "unknown",
    "PB607": "unknown",
}
"""Rule -> the verdict of its finding; the first rule of this order with a finding decides."""
_VERSION_INDEPENDENT_RULES = (
    "PB602",
    "PB603",
    "PB608",
    "PB611",
    "PB614",
    "PB621",
    "PB622",
    "PB623",
)
"""Rules whose verdict no version changes."""
_SUPPORT_RULES = cast_to_precision_rules(RULES_BY_ID[name] for name in _RULE_VERDICTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Whether a target runs a recipe."""

    verdict: Verdict
    reason: str
    """Why, as a clause."""
    needs: tuple[tuple[str, str], ...] = ()
    """(product, least version) pairs that the recipe needs on the target."""


def check_support(recipe: str | MixedPrecisionConfig, target: Target) -> Support:
    """Return whether a target runs a recipe.

    Args:
        recipe: A recipe's name, or a config.
        target: The GPU and the versions of CUDA and Transformer Engine, as far as they are known.
    """
    config = get_mixed_precision_config(recipe)
    if target.gpu is None:
        return Support(verdict="unknown", reason="the target names no GPU")
    if get_scheme(config) is not None:
        return _check_low_precision(config, target)
    mode = get_mode(config)
    if config.autocast_enabled:
        mode = "bf16"
    if mode == "bf16" and not target.gpu.has_native_bf16:
        return Support(verdict="emulated", reason="BF16 is native from compute capability 8.0 on")
    if mode == "fp16" and not target.gpu.is_gpu:
        return Support(verdict="emulated", reason="CPUs convert FP16 for most operators")
    return Support(verdict="native", reason=f"{mode.upper()} is native")


def _check_low_precision(config: MixedPrecisionConfig, target: Target) -> Support:
    """Return whether a target runs a recipe in FP8 or FP4, by the rules about targets."""
    views = {}
    for owner_name in PRECISION_OWNERS:
        values = {**OWNER_DEFAULTS[owner_name], **get_effective_values(config)}
        views[owner_name] = AttributeView(values)
    context = RuleContext(config, views=views, target=target)
    findings = evaluate_rules(_SUPPORT_RULES, context)
    verdict = _find_verdict(findings)
    reasons = []
    for finding in findings:
        if _RULE_VERDICTS[finding.id] == verdict:
            reasons.append(finding.rule + _format_version(finding))
    reason = "; ".join(reasons) or f"{get_scheme(config)} is native"
    needs: tuple[tuple[str, str], ...] = ()
    if not any(finding.id in _VERSION_INDEPENDENT_RULES for finding in findings):
        needs = _list_least_versions(context)
    return Support(verdict=verdict, reason=reason, needs=needs)


def _find_verdict(findings: Collection[RuleFinding]) -> Verdict:
    """Return the verdict of the first rule of the table that has a finding."""
    ids = {finding.id for finding in findings}
    for rule_id, verdict in _RULE_VERDICTS.items():
        if rule_id in ids:
            return verdict
    return "native"


def _format_version(finding: RuleFinding) -> str:
    """Return the version that a rule is about, as the end of its sentence."""
    # PB608: there is no Transformer Engine, so there is no version to name.
    if finding.path not in ("target.te", "target.cuda") or finding.id == "PB608":
        return ""
    return f", this is {finding.value}"


def _list_least_versions(context: RuleContext) -> tuple[tuple[str, str], ...]:
    """Return (product, least version) pairs that the scheme needs on the target."""
    if context.scheme_row is None:
        return ()
    te = context.scheme_row.min_transformer_engine
    if is_blockwise_on_blackwell(context):
        te = BLOCKWISE_ON_BLACKWELL
    needs = []
    for product, least in (("te", te), ("cuda", context.scheme_row.min_cuda)):
        if least is not None:
            needs.append((product, least))
    return tuple(needs)


def group_gpus() -> dict[str, list[Gpu]]:
    """Return the columns of the matrix: architecture and compute capability -> its GPUs.

    The GPUs of a column run the same recipes.
    """
    titles = []
    for gpu in GPUS.values():
        capability = format_dotted(gpu.capability or ())
        titles.append((f"{gpu.generation} {capability}".rstrip(), gpu))
    return group_pairs(titles)


def build_support_matrix(recipes: Iterable[str]) -> dict[str, dict[str, Support]]:
    """Return recipe -> generation's title -> support, with no versions assumed."""
    columns = group_gpus()
    rows: dict[str, dict[str, Support]] = {}
    for name in recipes:
        rows[name] = {}
        for title, gpus in columns.items():
            rows[name][title] = check_support(name, Target(gpu=gpus[0]))
    return rows

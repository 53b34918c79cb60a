"""`list_agreements`: settings that would make rollout agree with training, or training with rollout.

The settings are words of the framework, rows of `rows/rollout.yaml`. A rollout without a framework
agrees by the `quantization_config` that `manifest --for` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bridge.convert.rollout.comparison import CACHE_SUBJECT, DIFFERS, RolloutComparison
from bridge.convert.rollout.frameworks import FRAMEWORKS
from bridge.convert.serving.exporter import export
from bridge.convert.serving.formats import SERVED_SCHEMES, SGLANG, VLLM, format_scheme
from bridge.convert.serving.serving_config import ServingConfig

NO_SCHEME = "none"
"""The row of a side that quantises nothing."""
NO_SETTING_MESSAGE = "{framework} has no setting that makes {side} use {scheme}."
SEVERAL_SCHEMES_MESSAGE = "{side} has several schemes, for which no row of settings is written."
CACHE_REMAINS_MESSAGE = (
    "No training has a cache: keys and values in {cache} remain, until rollout has auto."
)
KEPT_MODULES_MESSAGE = (
    "Rollout keeps modules by parts of their names, which no setting of training here follows."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Settings that would make a side agree with the other."""

    side: str
    """rollout or training: the side that changes."""
    words: tuple[str, ...] = ()
    """Settings in the framework's words."""
    quantization_config: Mapping[str, Any] | None = None
    """The block of the served checkpoint's config.json."""
    why_not: str = ""
    """Why there are no such settings, as a sentence."""
    remains: str = ""
    """The difference that remains with them, as a sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the agreement as plain data."""
        return asdict(self)


def list_agreements(comparison: RolloutComparison) -> list[Agreement]:
    """Return the settings that would make either side agree; nothing where no row differs."""
    subjects = {row.subject for row in comparison.rows if row.verdict == DIFFERS}
    if not subjects:
        return []
    modules_differ = subjects != {CACHE_SUBJECT}
    has_settings = comparison.rollout.framework in FRAMEWORKS and bool(comparison.rollout.engine)
    if not has_settings and not modules_differ:
        return []
    if not has_settings:
        return [_make_serving_config(comparison)]
    if not modules_differ:
        return [Agreement(side="rollout", words=(_format_cache_setting(comparison),))]
    cache_differs = CACHE_SUBJECT in subjects
    return [
        _make_rollout_settings(comparison, cache_differs=cache_differs),
        _make_training_settings(comparison, cache_differs=cache_differs),
    ]


def _format_cache_setting(comparison: RolloutComparison) -> str:
    """Return the framework's setting that stores keys and values in the dtype of the model."""
    table = FRAMEWORKS[comparison.rollout.framework]
    return str(table["cache_in_rollout"]).format(engine=comparison.rollout.engine)


def _make_rollout_settings(comparison: RolloutComparison, *, cache_differs: bool) -> Agreement:
    """Return the framework's settings of rollout that agree with training."""
    table = FRAMEWORKS[comparison.rollout.framework]
    if not table["in_rollout"]:
        return _make_serving_config(comparison)
    scheme = _get_single_scheme(comparison.training.manifest.schemes)
    if scheme is None:
        return Agreement(side="rollout", why_not=SEVERAL_SCHEMES_MESSAGE.format(side="training"))
    words = table["in_rollout"].get(scheme)
    if words is None:
        return _make_no_setting(comparison, "rollout", _format_scheme_title(scheme, comparison))
    stated = list(words)
    if scheme != NO_SCHEME and _has_first_last_layers(comparison):
        if not table["edges_in_rollout"]:
            return _make_no_setting(
                comparison, "rollout", "another precision in first and last layers"
            )
        stated.extend(table["edges_in_rollout"])
    if scheme != NO_SCHEME and comparison.rollout.kept_parts:
        stated.append(table["kept_in_rollout"])
    if cache_differs:
        stated.append(_format_cache_setting(comparison))
    filled = _format_settings(
        stated, comparison, comparison.training.first, comparison.training.last
    )
    return Agreement(side="rollout", words=filled)


def _make_training_settings(comparison: RolloutComparison, *, cache_differs: bool) -> Agreement:
    """Return the framework's settings of training that agree with rollout."""
    table = FRAMEWORKS[comparison.rollout.framework]
    if comparison.rollout.quantization is None:
        why_not = f"{comparison.rollout.quantization_decided_by} decides what rollout uses."
        return Agreement(side="training", why_not=why_not)
    scheme = _get_quantization_scheme(comparison.rollout.quantization)
    if scheme is None:
        return _make_no_setting(comparison, "training", "several schemes")
    words = table["in_training"].get(scheme)
    if words is None:
        return _make_no_setting(comparison, "training", _format_scheme_title(scheme, comparison))
    if scheme != NO_SCHEME and comparison.rollout.kept_parts:
        return Agreement(side="training", why_not=KEPT_MODULES_MESSAGE)
    stated = list(words)
    if scheme != NO_SCHEME and _has_first_last_layers(comparison):
        stated.extend(table["edges_in_training"])
    remains = ""
    if cache_differs:
        remains = CACHE_REMAINS_MESSAGE.format(cache=comparison.rollout.cache)
    filled = _format_settings(stated, comparison, comparison.rollout.first, comparison.rollout.last)
    return Agreement(side="training", words=filled, remains=remains)


def _has_first_last_layers(comparison: RolloutComparison) -> bool:
    """Return whether either side keeps first or last layers in high precision."""
    training, rollout = comparison.training, comparison.rollout
    return any((training.first, training.last, rollout.first, rollout.last))


def _get_quantization_scheme(quantization: Mapping[str, Any]) -> str | None:
    """Return the scheme of a quantization config, `NO_SCHEME` without one; None for several."""
    if not quantization:
        return NO_SCHEME
    config = ServingConfig.from_mapping({"quantization_config": quantization})
    return _get_single_scheme(tuple({scheme for _, scheme in config.targets if scheme is not None}))


def _make_no_setting(comparison: RolloutComparison, side: str, scheme: str) -> Agreement:
    """Return that the framework has no setting by which a side uses a scheme."""
    framework = comparison.rollout.framework
    why_not = NO_SETTING_MESSAGE.format(framework=framework, side=side, scheme=scheme)
    return Agreement(side=side, why_not=why_not)


def _make_serving_config(comparison: RolloutComparison) -> Agreement:
    """Return the quantization config of the checkpoint that the engine reads."""
    if comparison.training.is_substitute:
        return _make_config_without_modules(comparison)
    system = VLLM
    if comparison.rollout.engine == SGLANG:
        system = SGLANG
    report = export(comparison.training.manifest, system)
    return Agreement(side="rollout", quantization_config=report.payload)


def _make_config_without_modules(comparison: RolloutComparison) -> Agreement:
    """Return the quantization config where the run states no sizes: without a list of modules."""
    scheme = _get_single_scheme(comparison.training.manifest.schemes)
    block: Mapping[str, Any] = {}
    if scheme != NO_SCHEME:
        form = SERVED_SCHEMES.get(str(scheme), {}).get("fp8")
        if form is None:
            return Agreement(
                side="rollout", why_not=SEVERAL_SCHEMES_MESSAGE.format(side="training")
            )
        block = dict(form)
    return Agreement(side="rollout", quantization_config=block)


def _get_single_scheme(schemes: tuple[str, ...]) -> str | None:
    """Return the scheme of a side, `NO_SCHEME` where it quantises nothing; None for several."""
    if not schemes:
        return NO_SCHEME
    if len(schemes) > 1:
        return None
    return schemes[0]


def _format_scheme_title(scheme: str, comparison: RolloutComparison) -> str:
    mode = comparison.training.manifest.mode
    if scheme == NO_SCHEME:
        return format_scheme(None, mode)
    return format_scheme(scheme, mode)


def _format_settings(
    words: list[str], comparison: RolloutComparison, first: int, last: int
) -> tuple[str, ...]:
    """Return settings with the engine and the numbers of layers in the place of their braces."""
    filled: list[str] = []
    for word in words:
        filled.append(word.format(first=first, last=last, engine=comparison.rollout.engine))
    return tuple(filled)

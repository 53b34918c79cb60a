"""`list_agreements`: settings with which the precisions of training and rollout would agree.

They are settings of the framework, rows of `foreign/tables/rollout.yaml`. Without a framework, they are the
`quantization_config` that `manifest --for` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bridge.convert.rollout.comparison import CACHE_SUBJECT, DIFFERS, RolloutComparison
from bridge.convert.rollout.frameworks import FRAMEWORKS
from bridge.convert.serving.exporter import export
from bridge.convert.serving.formats import SERVED_SCHEMES, SGLANG, VLLM, format_scheme
from bridge.convert.serving.serving_config import ServingConfig

NO_SCHEME = "none"
"""The key in `foreign/tables/rollout.yaml` for a side that quantises nothing."""
NO_SETTING_MESSAGE = "{framework} has no setting that makes {side} use {scheme}."
NO_EDGES_SETTING_MESSAGE = (
    "{framework} has no setting that makes rollout use another precision in first and last layers."
)
NO_SEVERAL_SETTING_MESSAGE = "{framework} has no setting that makes training use several schemes."
SEVERAL_SCHEMES_MESSAGE = "training has several schemes, for which no row of settings is written."
NO_FP8_FORM_MESSAGE = (
    "A quantization_config for {scheme} lists the modules of the model, which are not known "
    "without its sizes. State them, for example model.num_layers=VALUE."
)
CACHE_REMAINS_MESSAGE = (
    "No training has a cache: keys and values in {cache} remain, until rollout has auto."
)
KEPT_MODULES_MESSAGE = (
    "Rollout keeps modules by parts of their names, which no setting of training here follows."
)


Side = Literal["rollout", "training"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Settings with which one side would agree with the other."""

    side: Side
    """The side that changes."""
    words: tuple[str, ...] = ()
    """The settings of the framework."""
    quantization_config: Mapping[str, Any] | None = None
    """The block of the served checkpoint's config.json. Empty: a checkpoint without this block."""
    why_not: str = ""
    """The reason if there are no such settings, as a sentence."""
    remains: str = ""
    """The difference that remains with the settings, as a sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the agreement as plain data."""
        return asdict(self)


def list_agreements(comparison: RolloutComparison) -> list[Agreement]:
    """Return the settings with which either side would agree. Empty if no row differs."""
    different_subjects = {row.subject for row in comparison.rows if row.verdict == DIFFERS}
    if not different_subjects:
        return []
    only_cache_differs = different_subjects == {CACHE_SUBJECT}
    has_settings = comparison.rollout.framework in FRAMEWORKS and bool(comparison.rollout.engine)
    if only_cache_differs and not has_settings:
        return []
    if not has_settings:
        return [_make_serving_config(comparison)]
    if only_cache_differs:
        return [Agreement(side="rollout", words=(_format_cache_setting(comparison),))]
    cache_differs = CACHE_SUBJECT in different_subjects
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
    schemes = comparison.training.manifest.schemes
    if len(schemes) > 1:
        return Agreement(side="rollout", why_not=SEVERAL_SCHEMES_MESSAGE)
    scheme = _get_only_scheme(schemes)
    row = table["in_rollout"].get(scheme)
    if row is None:
        return _make_no_setting(comparison, "rollout", _format_scheme_title(scheme, comparison))
    settings = list(row)
    if scheme != NO_SCHEME and _has_first_last_layers(comparison):
        if not table["edges_in_rollout"]:
            why_not = NO_EDGES_SETTING_MESSAGE.format(framework=comparison.rollout.framework)
            return Agreement(side="rollout", why_not=why_not)
        settings.extend(table["edges_in_rollout"])
    if scheme != NO_SCHEME and comparison.rollout.kept_parts:
        settings.append(table["kept_in_rollout"])
    if cache_differs:
        settings.append(_format_cache_setting(comparison))
    training = comparison.training
    words = _fill_settings(settings, comparison, first=training.first, last=training.last)
    return Agreement(side="rollout", words=words)


def _make_training_settings(comparison: RolloutComparison, *, cache_differs: bool) -> Agreement:
    """Return the framework's settings of training that agree with rollout."""
    rollout = comparison.rollout
    table = FRAMEWORKS[rollout.framework]
    if rollout.quantization is None:
        why_not = f"{rollout.quantization_decided_by} decides what rollout uses."
        return Agreement(side="training", why_not=why_not)
    schemes = _list_quantization_schemes(rollout.quantization)
    if len(schemes) > 1:
        why_not = NO_SEVERAL_SETTING_MESSAGE.format(framework=rollout.framework)
        return Agreement(side="training", why_not=why_not)
    scheme = _get_only_scheme(schemes)
    row = table["in_training"].get(scheme)
    if row is None:
        return _make_no_setting(comparison, "training", _format_scheme_title(scheme, comparison))
    if scheme != NO_SCHEME and rollout.kept_parts:
        return Agreement(side="training", why_not=KEPT_MODULES_MESSAGE)
    settings = list(row)
    if scheme != NO_SCHEME and _has_first_last_layers(comparison):
        settings.extend(table["edges_in_training"])
    remains = ""
    if cache_differs:
        remains = CACHE_REMAINS_MESSAGE.format(cache=rollout.cache)
    words = _fill_settings(settings, comparison, first=rollout.first, last=rollout.last)
    return Agreement(side="training", words=words, remains=remains)


def _has_first_last_layers(comparison: RolloutComparison) -> bool:
    """Return whether either side keeps first or last layers in high precision."""
    training, rollout = comparison.training, comparison.rollout
    return any((training.first, training.last, rollout.first, rollout.last))


def _list_quantization_schemes(quantization: Mapping[str, Any]) -> list[str]:
    """Return the schemes of a quantization config."""
    if not quantization:
        return []
    config = ServingConfig.from_mapping({"quantization_config": quantization})
    schemes: dict[str, None] = {}
    for _, scheme in config.targets:
        if scheme is not None:
            schemes[scheme] = None
    return list(schemes)


def _make_no_setting(comparison: RolloutComparison, side: Side, scheme: str) -> Agreement:
    """Return the agreement of a side whose framework has no setting for a scheme."""
    framework = comparison.rollout.framework
    why_not = NO_SETTING_MESSAGE.format(framework=framework, side=side, scheme=scheme)
    return Agreement(side=side, why_not=why_not)


def _make_serving_config(comparison: RolloutComparison) -> Agreement:
    """Return the quantization config that the engine's checkpoint has to have."""
    if comparison.training.is_substitute:
        return _make_config_without_modules(comparison)
    system = VLLM
    if comparison.rollout.engine == SGLANG:
        system = SGLANG
    report = export(comparison.training.manifest, system)
    return Agreement(side="rollout", quantization_config=report.payload)


def _make_config_without_modules(comparison: RolloutComparison) -> Agreement:
    """Return the quantization config for a run that states no sizes.

    Its modules are not known, so the config must not list modules. Only the fp8 dialect has such
    configs.
    """
    schemes = comparison.training.manifest.schemes
    if len(schemes) > 1:
        return Agreement(side="rollout", why_not=SEVERAL_SCHEMES_MESSAGE)
    scheme = _get_only_scheme(schemes)
    if scheme == NO_SCHEME:
        return Agreement(side="rollout", quantization_config={})
    fp8_form = SERVED_SCHEMES.get(scheme, {}).get("fp8")
    if fp8_form is None:
        title = _format_scheme_title(scheme, comparison)
        return Agreement(side="rollout", why_not=NO_FP8_FORM_MESSAGE.format(scheme=title))
    return Agreement(side="rollout", quantization_config=dict(fp8_form))


def _get_only_scheme(schemes: Sequence[str]) -> str:
    """Return the scheme of a side that has at most one: `NO_SCHEME` if it has none."""
    if not schemes:
        return NO_SCHEME
    (scheme,) = schemes
    return scheme


def _format_scheme_title(scheme: str, comparison: RolloutComparison) -> str:
    """Return the title of a scheme. For `NO_SCHEME`, return the dtype of high precision."""
    mode = comparison.training.manifest.mode
    if scheme == NO_SCHEME:
        return format_scheme(None, mode)
    return format_scheme(scheme, mode)


def _fill_settings(
    settings: Sequence[str], comparison: RolloutComparison, *, first: int, last: int
) -> tuple[str, ...]:
    """Return settings with their braces filled.

    Args:
        settings: The settings, with `{first}`, `{last}` and `{engine}`.
        comparison: The comparison, which has the engine.
        first: First layers in high precision.
        last: Last layers in high precision.
    """
    filled: list[str] = []
    for setting in settings:
        filled.append(setting.format(first=first, last=last, engine=comparison.rollout.engine))
    return tuple(filled)

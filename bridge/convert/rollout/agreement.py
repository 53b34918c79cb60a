"""`agreements`: settings that would make rollout agree with training, or training with rollout.

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
from bridge.convert.serving.formats import SERVED, SGLANG, VLLM, title_of
from bridge.convert.serving.reader import ServingConfig

NONE = "none"
"""The row of a side that quantises nothing."""
NO_SETTING = "{framework} has no setting that makes {side} use {scheme}."
SEVERAL = "{side} has several schemes, for which no row of settings is written."
CACHE_REMAINS = (
    "No training has a cache: keys and values in {cache} remain, until rollout has auto."
)
KEPT_MODULES = (
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


def agreements(found: RolloutComparison) -> list[Agreement]:
    """Return the settings that would make either side agree; nothing where no row differs."""
    subjects = {row.subject for row in found.rows if row.verdict == DIFFERS}
    if not subjects:
        return []
    modules_differ = subjects != {CACHE_SUBJECT}
    has_settings = found.rollout.framework in FRAMEWORKS and bool(found.rollout.engine)
    if not has_settings and not modules_differ:
        return []
    if not has_settings:
        return [_rollout_by_config(found)]
    if not modules_differ:
        return [Agreement(side="rollout", words=(_cache_word(found),))]
    cache_differs = CACHE_SUBJECT in subjects
    return [
        _rollout_by_framework(found, cache_differs=cache_differs),
        _training_by_framework(found, cache_differs=cache_differs),
    ]


def _cache_word(found: RolloutComparison) -> str:
    """Return the framework's setting that stores keys and values in the dtype of the model."""
    table = FRAMEWORKS[found.rollout.framework]
    return str(table["cache_in_rollout"]).format(engine=found.rollout.engine)


def _rollout_by_framework(found: RolloutComparison, *, cache_differs: bool) -> Agreement:
    """Return the framework's settings of rollout that agree with training."""
    table = FRAMEWORKS[found.rollout.framework]
    if not table["in_rollout"]:
        return _rollout_by_config(found)
    scheme = _single(found.training.manifest.schemes)
    if scheme is None:
        return Agreement(side="rollout", why_not=SEVERAL.format(side="training"))
    words = table["in_rollout"].get(scheme)
    if words is None:
        return _without(found, "rollout", _title(scheme, found))
    stated = list(words)
    if scheme != NONE and _has_edges(found):
        if not table["edges_in_rollout"]:
            return _without(found, "rollout", "another precision in first and last layers")
        stated.extend(table["edges_in_rollout"])
    if scheme != NONE and found.rollout.kept_parts:
        stated.append(table["kept_in_rollout"])
    if cache_differs:
        stated.append(_cache_word(found))
    filled = _filled(stated, found, found.training.first, found.training.last)
    return Agreement(side="rollout", words=filled)


def _training_by_framework(found: RolloutComparison, *, cache_differs: bool) -> Agreement:
    """Return the framework's settings of training that agree with rollout."""
    table = FRAMEWORKS[found.rollout.framework]
    if found.rollout.quantization is None:
        why_not = f"{found.rollout.quantization_decided_by} decides what rollout uses."
        return Agreement(side="training", why_not=why_not)
    scheme = _scheme_of(found.rollout.quantization)
    if scheme is None:
        return _without(found, "training", "several schemes")
    words = table["in_training"].get(scheme)
    if words is None:
        return _without(found, "training", _title(scheme, found))
    if scheme != NONE and found.rollout.kept_parts:
        return Agreement(side="training", why_not=KEPT_MODULES)
    stated = list(words)
    if scheme != NONE and _has_edges(found):
        stated.extend(table["edges_in_training"])
    remains = ""
    if cache_differs:
        remains = CACHE_REMAINS.format(cache=found.rollout.cache)
    filled = _filled(stated, found, found.rollout.first, found.rollout.last)
    return Agreement(side="training", words=filled, remains=remains)


def _has_edges(found: RolloutComparison) -> bool:
    """Return whether either side keeps first or last layers in high precision."""
    training, rollout = found.training, found.rollout
    return any((training.first, training.last, rollout.first, rollout.last))


def _scheme_of(quantization: Mapping[str, Any]) -> str | None:
    """Return the scheme of a quantization config, `NONE` without one; None for several."""
    if not quantization:
        return NONE
    config = ServingConfig.of({"quantization_config": quantization})
    return _single(tuple({scheme for _, scheme in config.targets if scheme is not None}))


def _without(found: RolloutComparison, side: str, scheme: str) -> Agreement:
    """Return that the framework has no setting by which a side uses a scheme."""
    framework = found.rollout.framework
    why_not = NO_SETTING.format(framework=framework, side=side, scheme=scheme)
    return Agreement(side=side, why_not=why_not)


def _rollout_by_config(found: RolloutComparison) -> Agreement:
    """Return the quantization config of the checkpoint that the engine reads."""
    if found.training.is_stand_in:
        return _rollout_by_kinds(found)
    system = VLLM
    if found.rollout.engine == SGLANG:
        system = SGLANG
    report = export(found.training.manifest, system)
    return Agreement(side="rollout", quantization_config=report.payload)


def _rollout_by_kinds(found: RolloutComparison) -> Agreement:
    """Return the quantization config where the run states no sizes: without a list of modules."""
    scheme = _single(found.training.manifest.schemes)
    block: Mapping[str, Any] = {}
    if scheme != NONE:
        form = SERVED.get(str(scheme), {}).get("fp8")
        if form is None:
            return Agreement(side="rollout", why_not=SEVERAL.format(side="training"))
        block = dict(form)
    return Agreement(side="rollout", quantization_config=block)


def _single(schemes: tuple[str, ...]) -> str | None:
    """Return the scheme of a side, `NONE` where it quantises nothing; None for several."""
    if not schemes:
        return NONE
    if len(schemes) > 1:
        return None
    return schemes[0]


def _title(scheme: str, found: RolloutComparison) -> str:
    mode = found.training.manifest.mode
    if scheme == NONE:
        return title_of(None, mode)
    return title_of(scheme, mode)


def _filled(words: list[str], found: RolloutComparison, first: int, last: int) -> tuple[str, ...]:
    """Return settings with the engine and the numbers of layers in the place of their braces."""
    filled: list[str] = []
    for word in words:
        filled.append(word.format(first=first, last=last, engine=found.rollout.engine))
    return tuple(filled)

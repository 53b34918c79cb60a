"""The config of one side that agrees with the other: what to state in rollout, and what to state in training.

The words are the framework's own, rows of `rows/rollout.yaml`. A serving config without a framework is the
`quantization_config` that `manifest --for` writes.
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
    """What would make one side agree with the other."""

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
        """Return it as plain data."""
        return asdict(self)


def agreements(found: RolloutComparison) -> list[Agreement]:
    """Return what would make either side agree with the other; nothing where no row differs."""
    subjects = {row.subject for row in found.rows if row.verdict == DIFFERS}
    if not subjects:
        return []
    modules_differ = bool(subjects - {CACHE_SUBJECT})
    if found.rollout.framework not in FRAMEWORKS or not found.rollout.engine:
        return [_rollout_by_config(found)] if modules_differ else []
    if not modules_differ:
        return [Agreement(side="rollout", words=(_cache_word(found),))]
    cache_differs = CACHE_SUBJECT in subjects
    return [
        _rollout_by_framework(found, cache_differs=cache_differs),
        _training_by_framework(found, cache_differs=cache_differs),
    ]


def _cache_word(found: RolloutComparison) -> str:
    table = FRAMEWORKS[found.rollout.framework]
    return str(table["cache_in_rollout"]).format(engine=found.rollout.engine)


def _rollout_by_framework(found: RolloutComparison, *, cache_differs: bool) -> Agreement:
    table = FRAMEWORKS[found.rollout.framework]
    if not table["in_rollout"]:
        return _rollout_by_config(found)
    scheme = _single(found.training.manifest.schemes)
    if scheme is None:
        return Agreement(side="rollout", why_not=SEVERAL.format(side="training"))
    words = table["in_rollout"].get(scheme)
    if words is None:
        return _without(found, "rollout", _title(scheme, found))
    stated = [*words]
    first, last = found.training.first, found.training.last
    if scheme != NONE and (first or last or found.rollout.first or found.rollout.last):
        if not table["edges_in_rollout"]:
            return _without(found, "rollout", "another precision in first and last layers")
        stated.extend(table["edges_in_rollout"])
    if scheme != NONE and found.rollout.kept_parts:
        stated.append(table["kept_in_rollout"])
    if cache_differs:
        stated.append(_cache_word(found))
    return Agreement(side="rollout", words=_filled(found, stated, first, last))


def _training_by_framework(found: RolloutComparison, *, cache_differs: bool) -> Agreement:
    table = FRAMEWORKS[found.rollout.framework]
    if found.rollout.quantization is None:
        why_not = f"{found.rollout.quantization_decided_by} decides what rollout uses."
        return Agreement(side="training", why_not=why_not)
    scheme = _scheme_of(found.rollout.quantization)
    words = None if scheme is None else table["in_training"].get(scheme)
    if words is None:
        return _without(found, "training", _title(scheme, found) if scheme else "several schemes")
    if scheme != NONE and found.rollout.kept_parts:
        return Agreement(side="training", why_not=KEPT_MODULES)
    stated = [*words]
    first, last = found.rollout.first, found.rollout.last
    if scheme != NONE and (first or last or found.training.first or found.training.last):
        stated.extend(table["edges_in_training"])
    remains = ""
    if cache_differs:
        remains = CACHE_REMAINS.format(cache=found.rollout.cache)
    return Agreement(side="training", words=_filled(found, stated, first, last), remains=remains)


def _scheme_of(quantization: Mapping[str, Any]) -> str | None:
    """Return the scheme of a quantization config, `NONE` without one; None for several."""
    if not quantization:
        return NONE
    config = ServingConfig.of({"quantization_config": quantization})
    return _single(tuple({scheme for _, scheme in config.targets if scheme is not None}))


def _without(found: RolloutComparison, side: str, what: str) -> Agreement:
    framework = found.rollout.framework
    return Agreement(
        side=side, why_not=NO_SETTING.format(framework=framework, side=side, scheme=what)
    )


def _rollout_by_config(found: RolloutComparison) -> Agreement:
    """Return the quantization config of the checkpoint that the engine reads, by `manifest --for`."""
    engine = found.rollout.engine or VLLM
    if found.training.is_stand_in:
        scheme = _single(found.training.manifest.schemes)
        if scheme is None or (scheme != NONE and "fp8" not in SERVED.get(scheme, {})):
            return Agreement(side="rollout", why_not=SEVERAL.format(side="training"))
        block = {} if scheme == NONE else dict(SERVED[scheme]["fp8"])
        return Agreement(side="rollout", quantization_config=block)
    report = export(found.training.manifest, engine if engine in {VLLM, SGLANG} else VLLM)
    return Agreement(side="rollout", quantization_config=report.payload)


def _single(schemes: tuple[str, ...]) -> str | None:
    """Return the scheme of a side, `NONE` where it quantises nothing; None for several."""
    if not schemes:
        return NONE
    return schemes[0] if len(schemes) == 1 else None


def _title(scheme: str, found: RolloutComparison) -> str:
    return title_of(None if scheme == NONE else scheme, found.training.manifest.mode)


def _filled(found: RolloutComparison, words: list[str], first: int, last: int) -> tuple[str, ...]:
    filled = []
    for word in words:
        filled.append(word.format(first=first, last=last, engine=found.rollout.engine))
    return tuple(filled)

"""The file behind `--te-precision-config-file`: Megatron Core's per-module recipe, as YAML or Megatron Bridge's `.cfg`.

    read("te_quant.yaml")["matchers"]

The content is kept as it is written. Faults that stop Megatron are refused together, a sentence
each. Its patterns count layers within one stage of a pipeline, so that the content is a value of
`model.quant_recipe` and never becomes rows of `modules`.

Source: megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py,
extensions/transformer_engine.py.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.precision import strict_yaml
from bridge.precision.matchers import (
    EVALUATION,
    PAYLOAD_KEYS,
    TE_CONFIG_TYPE,
    TRAINING,
    find_payload_faults,
)

TYPE_KEY = next(iter(TE_CONFIG_TYPE))
CORRECT_REMEDY = "Correct it."


def read(path: str | Path) -> dict[str, Any]:
    """Return the content of a file; PayloadError, every fault on its own line, where Megatron refuses it."""
    return parse(strict_yaml.decode_text(strict_yaml.read_bytes(path), str(path)), str(path))


def parse(text: str, name: str) -> dict[str, Any]:
    """Return the content of a YAML text; `name` is its name in messages. It raises as `read`."""
    (content, *_) = strict_yaml.load_documents(text, name) or (None,)
    if not isinstance(content, dict):
        rule = "must be a mapping of configs and matchers"
        raise PayloadError.of(name, rule, content, "Give Megatron's file.")
    sentences: list[str] = []
    for fault in _find_faults(content):
        error = PayloadError.of(f"{name}: {fault.path}", fault.rule, fault.value, fault.remedy)
        sentences.append(str(error))
    if sentences:
        raise PayloadError("\n".join(sentences))
    return content


class _Fault(NamedTuple):
    """A part of a file that Megatron refuses."""

    path: str
    rule: str
    value: object
    remedy: str


def _find_faults(content: Mapping[str, Any]) -> Iterator[_Fault]:
    configs = content.get("configs", {})
    matchers = content.get("matchers") or {}
    if not isinstance(configs, Mapping):
        yield _Fault("configs", "must be a mapping of names to payloads", configs, CORRECT_REMEDY)
        return
    if not isinstance(matchers, Mapping):
        yield _Fault("matchers", "must be a mapping of names to matchers", matchers, CORRECT_REMEDY)
        return
    for name, payload in configs.items():
        yield from _find_payload_faults(f"configs.{name}", payload)
    for name, matcher in matchers.items():
        yield from _find_matcher_faults(f"matchers.{name}", matcher, configs)


def _find_payload_faults(path: str, payload: object) -> Iterator[_Fault]:
    """Yield the faults of a payload; a payload of another library, Kitchen's for example, has none."""
    if not isinstance(payload, Mapping):
        remedy = "Give transformer_engine_config_type and training_recipe."
        yield _Fault(path, "must be a mapping", payload, remedy)
        return
    if TYPE_KEY not in payload:
        return
    type_name = payload[TYPE_KEY]
    if type_name != TE_CONFIG_TYPE[TYPE_KEY]:
        yield _Fault(
            f"{path}.{TYPE_KEY}", "must be TEQuantizationParams", type_name, CORRECT_REMEDY
        )
    if TRAINING not in payload:
        remedy = "Write training_recipe: {} for high precision."
        yield _Fault(path, "must have a training_recipe", list(payload), remedy)
    for part in (TRAINING, EVALUATION):
        if part in payload:
            yield from _find_recipe_faults(f"{path}.{part}", payload[part])


def _find_recipe_faults(path: str, recipe: object) -> Iterator[_Fault]:
    """Yield the faults of the recipe of Transformer Engine in a payload."""
    if not isinstance(recipe, Mapping):
        yield _Fault(path, "must be a mapping", recipe, "Write {} for high precision.")
        return
    for key in recipe:
        near = close_matches(str(key), PAYLOAD_KEYS)
        if key not in PAYLOAD_KEYS and near:  # a key of a later release is kept
            rule = "Transformer Engine's recipes have no such key"
            yield _Fault(f"{path}.{key}", rule, recipe[key], did_you_mean(near))
    for key, rule in find_payload_faults(recipe):
        if key:
            remedy = "Use 'tensorwise', 'blockwise' or 'mxfp8'."
            yield _Fault(f"{path}.{key}", rule, recipe[key], remedy)
        else:
            yield _Fault(path, rule, dict(recipe), CORRECT_REMEDY)


def _find_matcher_faults(
    path: str, matcher: object, configs: Mapping[str, Any]
) -> Iterator[_Fault]:
    """Yield the faults of a matcher; Megatron does not read a matcher that is not enabled."""
    if not isinstance(matcher, Mapping):
        yield _Fault(path, "must be a mapping", matcher, "Give type, pattern, config and enabled.")
        return
    if not matcher.get("enabled", False):
        return
    if matcher.get("type") != "glob":
        yield _Fault(f"{path}.type", "must be glob", matcher.get("type"), CORRECT_REMEDY)
    for key in ("pattern", "config"):
        if matcher.get(key) is None:
            yield _Fault(f"{path}.{key}", "must be given", None, "Give it.")
    name = matcher.get("config")
    if name is not None and name not in configs:
        hint = did_you_mean(close_matches(str(name), configs)) or "Add it."
        yield _Fault(f"{path}.config", "no payload has this name", name, hint)

"""The file behind `--te-precision-config-file`: Megatron Core's per-module recipe, as YAML or Megatron Bridge's `.cfg`.

The content is kept as it is written; a fault that stops Megatron is one sentence each. It counts
layers within one stage of a pipeline, so it is held as `model.quant_recipe` and never as rows of
`modules`.

Source: megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py,
extensions/transformer_engine.py.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.precision import strict_yaml
from bridge.precision.matchers import (
    CONFIG_TYPE,
    EVALUATION,
    PAYLOAD_KEYS,
    TRAINING,
    payload_faults,
)

TYPE_KEY = next(iter(CONFIG_TYPE))


def read(path: str | Path) -> dict[str, Any]:
    """Return the content of a file.

    PayloadError, every fault on its own line, where Megatron would refuse it.
    """
    return parse(strict_yaml.decoded(strict_yaml.read_bytes(path), str(path)), str(path))


def parse(text: str, name: str) -> dict[str, Any]:
    """Return the content of a YAML text; `name` is its name in messages. It raises as `read`."""
    (content, *_) = strict_yaml.load_all(text, name) or (None,)
    if not isinstance(content, dict):
        raise PayloadError.of(
            name, "must be a mapping of configs and matchers", content, "Give Megatron's file."
        )
    faults = [
        str(PayloadError.of(f"{name}: {path}", rule, value, remedy))
        for path, rule, value, remedy in _faults(content)
    ]
    if faults:
        raise PayloadError("\n".join(faults))
    return content


Fault = tuple[str, str, object, str]
"""Path, rule, value and remedy."""


def _faults(content: Mapping[str, Any]) -> Iterator[Fault]:
    configs, matchers = content.get("configs", {}), content.get("matchers") or {}
    if not isinstance(configs, Mapping):
        yield "configs", "must be a mapping of names to payloads", configs, "Correct it."
    elif not isinstance(matchers, Mapping):
        yield "matchers", "must be a mapping of names to matchers", matchers, "Correct it."
    else:
        for name, payload in configs.items():
            yield from _payload_faults(f"configs.{name}", payload)
        for name, row in matchers.items():
            yield from _matcher_faults(f"matchers.{name}", row, configs)


def _payload_faults(path: str, payload: object) -> Iterator[Fault]:
    if not isinstance(payload, Mapping):
        yield (
            path,
            "must be a mapping",
            payload,
            "Give transformer_engine_config_type and training_recipe.",
        )
        return
    if TYPE_KEY not in payload:  # another library's: Kitchen has payloads of its own
        return
    if payload[TYPE_KEY] != CONFIG_TYPE[TYPE_KEY]:
        yield f"{path}.{TYPE_KEY}", "must be TEQuantizationParams", payload[TYPE_KEY], "Correct it."
    if TRAINING not in payload:
        yield (
            path,
            "must have a training_recipe",
            list(payload),
            "Write training_recipe: {} for high precision.",
        )
    for part in (one for one in (TRAINING, EVALUATION) if one in payload):
        recipe = payload[part]
        if not isinstance(recipe, Mapping):
            yield f"{path}.{part}", "must be a mapping", recipe, "Write {} for high precision."
            continue
        for key in recipe:
            near = close_matches(str(key), PAYLOAD_KEYS)
            if key not in PAYLOAD_KEYS and near:  # a key of a later release is kept
                rule = "Transformer Engine's recipes have no such key"
                yield f"{path}.{part}.{key}", rule, recipe[key], did_you_mean(near)
        for key, rule in payload_faults(recipe):
            remedy = "Use 'tensorwise', 'blockwise' or 'mxfp8'." if key else "Correct it."
            yield (
                f"{path}.{part}.{key}".rstrip("."),
                rule,
                recipe[key] if key else dict(recipe),
                remedy,
            )


def _matcher_faults(path: str, row: object, configs: Mapping[str, Any]) -> Iterator[Fault]:
    if not isinstance(row, Mapping):
        yield path, "must be a mapping", row, "Give type, pattern, config and enabled."
    elif row.get("enabled", False):
        if row.get("type") != "glob":
            yield f"{path}.type", "must be glob", row.get("type"), "Correct it."
        for key in ("pattern", "config"):
            if row.get(key) is None:
                yield f"{path}.{key}", "must be given", None, "Give it."
        if row.get("config") is not None and row["config"] not in configs:
            hint = did_you_mean(close_matches(str(row["config"]), configs)) or "Add it."
            yield f"{path}.config", "no payload has this name", row["config"], hint

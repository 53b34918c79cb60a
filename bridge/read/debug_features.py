"""Features of Transformer Engine's debugger that change the precision of layers.

    tensor_inspect:
      enabled: true
      features:
        fc1_in_bf16:
          enabled: true
          layers: {layer_name_regex_pattern: .*fc1.*}
          transformer_engine: {DisableFP8Layer: {enabled: true}}

No plan follows them: they choose layers by names that the debugger makes when the run starts, and
single GEMMs or tensors of them. Features that log and save, and change nothing, are left alone.

Source: Transformer Engine 2.20 debug/features; Megatron Bridge 0.6.2 training/config.py, TensorInspectConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SECTION = "tensor_inspect"
FEATURES = "features"
ENABLED = "enabled"
NAMESPACE = "transformer_engine"
HARMLESS = frozenset({"LogTensorStats", "LogFp8TensorStats", "LogNvfp4TensorStats", "DumpTensors"})
"""Features that read tensors and change none."""
NOT_FOUND = (
    "{path} names {file}, which is not found; the layers whose precision it changes are not known."
)
CHANGES = "{path}: {names} changes the precision of layers, and the plan does not follow it."
REMEDY = f"Set {SECTION}.{ENABLED}=false to plan the run without it."


def unfollowed_features(sections: Mapping[str, Any]) -> str | None:
    """Return why a run with a debugger has no plan, as a sentence.

    It is None where its features change no precision.
    """
    debugger = sections.get(SECTION)
    if not isinstance(debugger, Mapping) or not debugger.get(ENABLED):
        return None
    features = debugger.get(FEATURES)
    path = f"{SECTION}.{FEATURES}"
    if isinstance(features, str) and features:
        return f"{NOT_FOUND.format(path=path, file=features)} {REMEDY}"
    names = ", ".join(dict.fromkeys(changing_features(features)))
    if not names:
        return None
    return f"{CHANGES.format(path=path, names=names)} {REMEDY}"


def changing_features(features: Any) -> Iterator[str]:
    """Yield the names of the features that are on and change what layers compute."""
    if not isinstance(features, Mapping):
        return
    for block in features.values():
        if not isinstance(block, Mapping) or not block.get(ENABLED, True):
            continue
        by_name = block.get(NAMESPACE)
        if not isinstance(by_name, Mapping):
            continue
        for name, feature in by_name.items():
            is_on = not isinstance(feature, Mapping) or feature.get(ENABLED, True)
            if is_on and name not in HARMLESS and name != ENABLED:
                yield str(name)

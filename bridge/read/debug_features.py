"""`changing_features`: features of Transformer Engine's debugger that change what layers compute in.

    tensor_inspect:
      enabled: true
      features:
        fc1_in_bf16:
          enabled: true
          layers: {layer_name_regex_pattern: .*fc1.*}
          transformer_engine: {DisableFP8Layer: {enabled: true}}

No plan follows them: they choose layers by names that the debugger makes when the run starts, and single GEMMs or
tensors of them. Features that log and save, and change nothing, are left alone.

Source: Transformer Engine 2.20 debug/features; Megatron Bridge 0.6.2 training/config.py, TensorInspectConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SECTION, FEATURES, ENABLED = "tensor_inspect", "features", "enabled"
NAMESPACE = "transformer_engine"
HARMLESS = frozenset({"LogTensorStats", "LogFp8TensorStats", "LogNvfp4TensorStats", "DumpTensors"})
"""Features that read tensors and change none."""
NOT_FOUND = (
    "{path} names {file}, which is not found; the layers whose precision it changes are not known."
)
CHANGES = "{path}: {names} changes the precision of layers, and the plan does not follow it."
REMEDY = f"Set {SECTION}.{ENABLED}=false to plan the run without it."


def unfollowed_features(sections: Mapping[str, Any]) -> str | None:
    """Return why a run with a debugger has no plan, as a sentence; None where its features change no precision."""
    held = sections.get(SECTION)
    if not isinstance(held, Mapping) or not held.get(ENABLED):
        return None
    features, path = held.get(FEATURES), f"{SECTION}.{FEATURES}"
    if isinstance(features, str) and features:
        return f"{NOT_FOUND.format(path=path, file=features)} {REMEDY}"
    names = ", ".join(dict.fromkeys(changing_features(features)))
    return f"{CHANGES.format(path=path, names=names)} {REMEDY}" if names else None


def changing_features(features: Any) -> Iterator[str]:
    """Yield the names of the features that are on and change what layers compute."""
    rows = features.values() if isinstance(features, Mapping) else ()
    for row in rows:
        own = row.get(NAMESPACE) if isinstance(row, Mapping) and row.get(ENABLED, True) else None
        for name, feature in own.items() if isinstance(own, Mapping) else ():
            is_on = not isinstance(feature, Mapping) or feature.get(ENABLED, True)
            if is_on and name not in HARMLESS and name != ENABLED:
                yield str(name)

"""FP8 in a NeMo 1.x configuration: the gate, the format and the amax settings with their three sets of defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.nemo1_file import switch

if TYPE_CHECKING:
    from bridge.interop.crossing import Inward
    from bridge.interop.nemo1_file import File

__all__ = ["SETTINGS", "low_precision"]

GATED = ("fp8", "fp8_e4m3", "fp8_hybrid", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_params")
COUNTS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
PLAIN = ("fp8_recipe", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "first_last_layers_bf16")
SETTINGS = (*GATED, *PLAIN, *COUNTS)
"""Keys of the model section that FP8 reads."""


def low_precision(file: File, crossing: Inward) -> bool:
    """Carry the FP8 settings; return whether they act."""
    gate, wanted = file.setting("transformer_engine"), file.setting("fp8")
    if gate is not None:
        crossing.carry("model.transformer_engine")
    elif file.shipped is None and wanted:
        crossing.implied("model.transformer_engine", False)
    if not (file.switch("transformer_engine") and file.switch("fp8")):
        _ignored(file, crossing)
        return False
    _format(file, crossing)
    _amax(file, crossing)
    if "fp8_params" in file:
        crossing.carry("model.fp8_params", fp8_param_gather=file.switch("fp8_params"))
    if "fp8_recipe" not in file:
        crossing.implied("model.fp8_recipe", "delayed", fp8_recipe="delayed")
    for key in PLAIN + COUNTS:
        if key in file:
            crossing.carry(f"model.{key}", **{key: file.setting(key)})
    for key in COUNTS if crossing.fields.get("first_last_layers_bf16") else ():
        if key not in crossing.fields:
            crossing.implied(f"model.{key}", 1, **{key: 1})
    return True


def _ignored(file: File, crossing: Inward) -> None:
    """Name the switches that are on and do nothing; what only goes with them is without effect on either side."""
    gate = file.switch("transformer_engine")
    for key in SETTINGS:
        value = file.written(key)
        if value is True and key != "fp8_hybrid" and not gate:
            why, remedy = "ignored unless transformer_engine is true", "Set model.transformer_engine=True to have it."
            crossing.lose(f"model.{key}", value, "dead knob", why, remedy)
        elif value is not None:
            crossing.carry(f"model.{key}")


def _format(file: File, crossing: Inward) -> None:
    said = {key: file.setting(key) for key in ("fp8_e4m3", "fp8_hybrid")}
    for key, value in said.items():
        if value is None and file.shipped is not None:
            said[key] = file.shipped[key]
            if said[key]:
                crossing.implied(f"model.{key}", True)
    e4m3, hybrid = (switch(said[key] or False, f"model.{key}") for key in ("fp8_e4m3", "fp8_hybrid"))
    if not e4m3 and not hybrid:
        rule = "NeMo raises on fp8 with neither fp8_e4m3 nor fp8_hybrid"
        remedy = "Set model.fp8_hybrid=True, or give nemo_version if this file overrides a shipped one."
        raise PayloadError(f"model.fp8: {rule}, got True. {remedy}")
    chosen = "e4m3" if e4m3 else "hybrid"
    for key in ("fp8", "fp8_e4m3", "fp8_hybrid"):
        if key in file:
            acts = key != "fp8_hybrid" or not e4m3
            crossing.carry(f"model.{key}", **({"fp8": chosen} if acts and file.setting(key) else {}))
    if e4m3 and hybrid:
        crossing.carried.pop("model.fp8_hybrid", None)
        crossing.lose("model.fp8_hybrid", True, "dead knob", "fp8_e4m3 wins where both are set", "Drop it.")
    crossing.fields["fp8"] = chosen


def _amax(file: File, crossing: Inward) -> None:
    legacy = not file.setting("mcore_gpt") if "mcore_gpt" in file else not (file.shipped or {}).get("mcore_gpt", False)
    code = {
        "fp8_margin": 0,
        "fp8_amax_history_len": 1024 if legacy else 1,
        "fp8_amax_compute_algo": "max" if legacy else "most_recent",
    }
    path = "the transformer of NeMo itself" if legacy else "Megatron Core (mcore_gpt)"
    for key, default in code.items():
        if key in file:
            crossing.carry(f"model.{key}", **{key: file.setting(key)})
        elif file.setting("fp8_recipe") not in (None, "delayed"):
            continue
        elif file.shipped is not None:
            crossing.implied(f"model.{key}", file.shipped[key], **{key: file.shipped[key]})
        else:
            crossing.implied(f"model.{key}", default, f"absent, and {path} takes this value", **{key: default})

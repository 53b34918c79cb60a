"""FP8 in a NeMo 1.x configuration: the gate, the format and the amax settings with their three sets of defaults.

What opens the gate depends on whose layers are built. NeMo's own transformer takes Transformer Engine's layers where
`transformer_engine` is true. Megatron Core's GPT (`mcore_gpt`) has them in any case up to 1.23, so that `fp8` alone
decides; from 2.0 on it has local layers without `transformer_engine`, unless `name` is a spec that brings its own.
Source: NeMo 1.20 to 2.0, models/language_modeling/megatron_gpt_model.py (`model_provider_func`, `get_specs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.builders import DELAYED
from bridge.interop.nemo1.file import switch
from bridge.precision.fields import LAYER_COUNTS

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.nemo1.file import File

__all__ = ["PLAIN", "SETTINGS", "low_precision"]

GATED = ("fp8", "fp8_e4m3", "fp8_hybrid", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_params")
SPECS = (
    "te_gpt",
    "megatron_falcon_gpt",
    "megatron_gemma2",
    "megatron_gpt_full_te_layer_autocast",
    "te_gpt_hyena",
)
"""Values of `name` in the model section whose layers are Transformer Engine's."""
LOCAL_LAYERS = (2, 0)
"""The first release whose GPT on Megatron Core asks `transformer_engine`."""
PLAIN = ("fp8_recipe", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "first_last_layers_bf16")
SETTINGS = (*GATED, *PLAIN, *LAYER_COUNTS)
"""Keys of the model section that FP8 reads."""


def low_precision(file: File, builder: ImportBuilder) -> bool:
    """Map the FP8 settings; return whether they act."""
    if not (_gate(file, builder) and file.switch("fp8")):
        _ignored(file, builder)
        return False
    _format(file, builder)
    _amax(file, builder)
    if "fp8_params" in file:
        builder.map("model.fp8_params", fp8_param_gather=file.switch("fp8_params"))
    if "fp8_recipe" not in file:
        builder.implied("model.fp8_recipe", "delayed", fp8_recipe="delayed")
    for key in PLAIN + LAYER_COUNTS:
        if key in file:
            builder.map(f"model.{key}", **{key: file.setting(key)})
    for key in LAYER_COUNTS if builder.fields.get("first_last_layers_bf16") else ():
        if key not in builder.fields:
            builder.implied(f"model.{key}", 1, **{key: 1})
    return True


def _gate(file: File, builder: ImportBuilder) -> bool:
    """Return whether the layers can run FP8, and account for `transformer_engine`."""
    where, value = "model.transformer_engine", file.setting("transformer_engine")
    is_on, own_spec = file.switch("transformer_engine"), file.setting("name") in SPECS
    wanted = file.switch("fp8") and file.is_on_megatron_core
    if is_on or not wanted or (file.release is not None and file.release >= LOCAL_LAYERS and not own_spec):
        if value is not None:
            builder.map(where)
        elif file.shipped is None and file.switch("fp8"):
            builder.implied(where, False)
        return is_on
    if file.release is None and not own_spec:
        detail = (
            "a release before 2.0 was assumed: under mcore_gpt NeMo 1.21 to 1.23 build Transformer Engine's layers "
            "whatever this says, and fp8 alone decides; 2.0 builds local layers, which run no FP8"
        )
        reason = "implied default" if value is None else "semantics"
        builder.report(
            where, value, reason, detail, "Pass nemo_version, or write true, which every release takes alike."
        )
    elif value is not None:
        whose = f"of {file.setting('name')}" if own_spec else f"of mcore_gpt in NeMo {file.version}"
        detail = f"the layers {whose} are Transformer Engine's whatever this says, and fp8 alone decides"
        builder.report(where, value, "dead knob", detail, "Write true, which every release takes alike.")
    return True


def _ignored(file: File, builder: ImportBuilder) -> None:
    """Name the switches that are on and do nothing; what only goes with them is without effect on either side."""
    gate = file.switch("transformer_engine")
    why = "ignored unless transformer_engine is true"
    if file.is_on_megatron_core:
        why = "mcore_gpt builds local layers, which run no FP8, unless transformer_engine is true (NeMo 2.0)"
    for key in SETTINGS:
        value = file.written(key)
        if value is True and key != "fp8_hybrid" and not gate:
            builder.report(f"model.{key}", value, "dead knob", why, "Set model.transformer_engine=True to have it.")
        elif value is not None:
            builder.map(f"model.{key}")


def _format(file: File, builder: ImportBuilder) -> None:
    said = {key: file.setting(key) for key in ("fp8_e4m3", "fp8_hybrid")}
    for key, value in said.items():
        if value is None and file.shipped is not None:
            said[key] = file.shipped[key]
            if said[key]:
                builder.implied(f"model.{key}", True)
    e4m3, hybrid = (switch(said[key] or False, f"model.{key}") for key in ("fp8_e4m3", "fp8_hybrid"))
    if not e4m3 and not hybrid:
        rule = "NeMo raises on fp8 with neither fp8_e4m3 nor fp8_hybrid"
        remedy = "Set model.fp8_hybrid=True, or give nemo_version if this file overrides a shipped one."
        raise PayloadError(f"model.fp8: {rule}, got True. {remedy}")
    chosen = "e4m3" if e4m3 else "hybrid"
    for key in ("fp8", "fp8_e4m3", "fp8_hybrid"):
        if key in file:
            acts = key != "fp8_hybrid" or not e4m3
            builder.map(f"model.{key}", **({"fp8": chosen} if acts and file.setting(key) else {}))
    if e4m3 and hybrid:
        builder.mapped.pop("model.fp8_hybrid", None)
        builder.report("model.fp8_hybrid", True, "dead knob", "fp8_e4m3 wins where both are set", "Drop it.")
    builder.fields["fp8"] = chosen


def _amax(file: File, builder: ImportBuilder) -> None:
    legacy = not file.is_on_megatron_core
    code = DELAYED | ({"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"} if legacy else {})
    path = "the transformer of NeMo itself" if legacy else "Megatron Core (mcore_gpt)"
    for key, default in code.items():
        if key in file:
            builder.map(f"model.{key}", **{key: file.setting(key)})
        elif file.setting("fp8_recipe") not in (None, "delayed"):
            continue
        elif file.shipped is not None:
            builder.implied(f"model.{key}", file.shipped[key], **{key: file.shipped[key]})
        else:
            builder.implied(f"model.{key}", default, f"absent, and {path} takes this value", **{key: default})

"""Settings of Megatron models in NeMo 1.x that bear on precision, other than the mode, the scale and FP8.

Nothing of it has a field; all of it is reported. `apply_query_key_layer_scaling` depends on the release and on whose
layers are built:

    NeMo's own transformer                           acts, whatever the dtype
    Megatron Core                                    acts in FP16; else a warning, and it is off

Source: NeMo 1.20 to 2.0 models/language_modeling (megatron_gpt_model.py, megatron_base_model.py,
`build_transformer_config`), modules/common/megatron/attention.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from bridge.interop.lightning.apex import report_apex
from bridge.interop.megatron_lm.flags import bears_on_precision, report_other
from bridge.interop.nemo1.file import switch
from bridge.interop.settings import Settings

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.nemo1.file import File

__all__ = ["report_optimizer", "report_quantisation", "report_unsupported"]

MECHANICS = ("grad_allreduce_chunk_size_mb", "grad_div_ar_fusion", "async_grad_allreduce")
QK_SCALING = "apply_query_key_layer_scaling"
OPTIMIZER = ("dtype", "with_scaled_states", "store_params", "store_param_remainders")
"""Keys of `optim` that state what the optimizer keeps, other than those that end in `_dtype`."""
QUANTISATION = ("enable_kv_cache", "awq_block_size", "alpha", "sq_alpha")
"""Settings of the section `quantization` that say how its `algorithm` quantises."""


def report_unsupported(file: File, builder: ImportBuilder, dtype: str, done: Collection[str], *, on: bool) -> None:
    """Report whatever else than `done` bears on precision.

    Args:
        file: The configuration.
        builder: Its builder.
        dtype: What is trained in: fp16, bf16 or fp32.
        done: Keys of the model section that are accounted for.
        on: FP8 acts.
    """
    trainer = file.payload.get("trainer")
    if isinstance(trainer, Mapping):
        report_apex(builder, Settings(trainer, builder.system, "trainer"))
    for key, value in file.model.items():
        if str(key) not in done:
            _setting(file, builder, str(key), value, dtype=dtype, on=on)


def report_optimizer(file: File, builder: ImportBuilder) -> None:
    """Report what the optimizer's section says of the dtypes of its own states."""
    section = file.setting("optim")
    for key, value in section.items() if isinstance(section, Mapping) else ():
        if key in OPTIMIZER or (str(key).endswith("_dtype") and key != "grad_sync_dtype"):
            where = f"model.optim.{key}"
            if value in (None, False):
                builder.map(where)
            else:
                detail = "a setting of the optimizer's own states, which no recipe has"
                builder.report(where, value, "unsupported", detail, "Keep it in the optimizer's configuration.")


def _setting(file: File, builder: ImportBuilder, key: str, value: Any, *, dtype: str, on: bool) -> None:
    """Report one setting of the model section."""
    where = f"model.{key}"
    if key == "fp8_param" and switch(file.setting(key), where):
        detail = "NeMo raises on it: it is set before fp8 is"
        builder.report(where, value, "semantics", detail, "Say fp8_params instead.")
    elif key == "reduce_amax":
        _reduce_amax(file.setting(key), builder, on=on)
    elif key == QK_SCALING:
        _query_key_scaling(file, builder, dtype)
    elif key == "fp8_interval":
        builder.report(where, value, "dead knob", "Transformer Engine ignores it since 1.8", "Drop it.")
    elif key in MECHANICS:
        detail = "how gradients are sent, not how exactly"
        builder.report(where, value, "unsupported", detail, "Nothing to do for the precision.")
    elif key == "mcore_customization_config" and isinstance(value, Mapping):
        for name, inner in value.items():
            if bears_on_precision(str(name)):
                detail = "set on the model without any check"
                builder.report(f"{where}.{name}", inner, "unsupported", detail, "State it as a field.")
    else:
        report_other(builder, where, key, value)


def _reduce_amax(value: Any, builder: ImportBuilder, *, on: bool) -> None:
    if switch(value, "model.reduce_amax") or not on:
        builder.map("model.reduce_amax")
        return
    detail = "read by NeMo's own transformer only; Megatron Core always reduces, at the nearest over TP alone"
    remedy = "Set tp_only_amax_red on the TransformerConfig if ranks may differ."
    builder.report("model.reduce_amax", value, "unsupported", detail, remedy)


def _query_key_scaling(file: File, builder: ImportBuilder, dtype: str) -> None:
    where, value = f"model.{QK_SCALING}", file.setting(QK_SCALING)
    if value is None or not switch(value, where):
        builder.map(where)
        return
    if file.is_on_megatron_core and dtype != "fp16":
        detail = (
            f"under mcore_gpt NeMo 1.22 and later turn it off in {dtype.upper()}, with a warning: FP16 alone has it"
        )
        builder.report(where, value, "dead knob", detail, "Drop it.")
    else:
        report_other(builder, where, QK_SCALING, value)


def report_quantisation(file: File, builder: ImportBuilder) -> bool:
    """Report the section `quantization`; return whether values are quantised by it."""
    section = file.payload.get("quantization")
    if not isinstance(section, Mapping):
        return False
    algorithm = file.follow(section.get("algorithm"), "quantization.algorithm")
    if algorithm is None:
        builder.map("quantization.algorithm")
        return False
    data = file.model.get("data")
    detail = f"weights, and with most algorithms activations, are quantised ({algorithm}) once the model is trained"
    if isinstance(data, Mapping) and "train_ds" in data:
        detail = f"training goes on over values that are fake-quantised ({algorithm}), which no recipe has"
    builder.report("quantization.algorithm", algorithm, "unsupported", detail, "Quantise by other means.")
    for key in QUANTISATION:
        value = file.follow(section.get(key), f"quantization.{key}")
        if value not in (None, False):
            detail = f"an option of the quantisation to {algorithm}"
            builder.report(f"quantization.{key}", value, "unsupported", detail, "Set it where the model is quantised.")
    return True

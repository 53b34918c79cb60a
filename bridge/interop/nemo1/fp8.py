"""FP8 in NeMo 1.x: delayed scaling unless a key `fp8_recipe` says otherwise.

Everything called `fp8_*` acts only on Transformer Engine's layers. NeMo's own transformer takes them where
`transformer_engine` is true. Megatron Core's GPT (`mcore_gpt`) has them in any case up to 1.23, so that `fp8` alone
decides; from 2.0 on it has local layers without `transformer_engine`.
"""

from bridge.errors import PayloadError
from bridge.interop.builders import DELAYED, ImportBuilder
from bridge.interop.nemo1.file import TABLE, File
from bridge.precision.fields import LAYER_COUNTS

FP8 = TABLE.parts["fp8"].named
LOCAL_LAYERS = (2, 0)
"""The first release whose GPT on Megatron Core asks `transformer_engine`."""


def read_fp8(file: File, builder: ImportBuilder) -> bool:
    """Map the FP8 settings; return whether they act."""
    model, fields = file.model, builder.fields
    if not (_has_engine_layers(file, builder) and model.switch("fp8")):
        gate = model.switch("transformer_engine")
        why = "ignored-by-local-layers" if file.is_on_megatron_core else "ignored-without-te"
        for key in (key for key in FP8 if model.given(key)):  # one may be a reference that leads nowhere
            if file.written[key] is True and key != "fp8_hybrid" and not gate:
                builder.record(f"nemo1.{why}", f"model.{key}", True)
            else:
                builder.map(f"model.{key}")
        return False
    _format(file, builder)
    TABLE.read(builder, model, "fp8")
    source = "mcore" if file.is_on_megatron_core else "nemo"
    values = file.shipped or TABLE.data["absent"][source]
    for key in (key for key in DELAYED if not model.given(key)):
        if model["fp8_recipe"] in (None, "delayed"):
            fields[key] = values[key]
            builder.record(f"nemo1.absent-{'in-shipped' if file.shipped else source}", f"model.{key}", values[key])
    if not model.given("fp8_recipe"):
        builder.implied("model.fp8_recipe", "delayed", fp8_recipe="delayed")
    for key in (key for key in LAYER_COUNTS if not model.given(key) and fields.get("first_last_layers_bf16")):
        builder.implied(f"model.{key}", 1, **{key: 1})
    return True


def _has_engine_layers(file: File, builder: ImportBuilder) -> bool:
    """Return whether the layers can run FP8, and account for `transformer_engine`."""
    where, value = "model.transformer_engine", file.model["transformer_engine"]
    is_on, always = file.model.switch("transformer_engine"), file.release is None or file.release < LOCAL_LAYERS
    if is_on or not (always and file.model.switch("fp8") and file.is_on_megatron_core):
        if value is not None:
            builder.map(where)
        elif not file.shipped and file.model.switch("fp8"):
            builder.implied(where, False)
        return is_on
    if file.release is None:
        kind = "is-not-written" if value is None else "is-off"
        builder.record(f"nemo1.the-release-is-not-known-and-it-{kind}", where, value)
    elif value is not None:
        builder.record("nemo1.the-layers-of-mcore_gpt-in-nemo", where, value, version=file.version)
    return True


def _format(file: File, builder: ImportBuilder) -> None:
    on = {}
    for key in ("fp8_e4m3", "fp8_hybrid"):
        on[key] = file.model.switch(key)
        if file.model[key] is None and file.shipped.get(key):
            on[key] = True
            builder.implied(f"model.{key}", True)
    e4m3, hybrid = on.values()
    if not e4m3 and not hybrid:
        rule = "NeMo raises on fp8 with neither fp8_e4m3 nor fp8_hybrid"
        remedy = "Set model.fp8_hybrid=True, or give nemo_version if this file overrides a shipped one."
        raise PayloadError(f"model.fp8: {rule}, got True. {remedy}")
    builder.fields["fp8"] = chosen = "e4m3" if e4m3 else "hybrid"
    for key in ("fp8", "fp8_e4m3", "fp8_hybrid"):
        if key == "fp8_hybrid" and e4m3 and hybrid:
            builder.record("nemo1.fp8_e4m3-wins-where", "model.fp8_hybrid", True)
        elif file.model.given(key):
            builder.map(f"model.{key}", **({"fp8": chosen} if file.model.switch(key) else {}))

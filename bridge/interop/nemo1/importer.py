"""NeMo 1.x: `megatron_gpt_config.yaml` and its kin, and the files of models that are not Megatron's.

`trainer.precision` chooses the dtype, `model.megatron_amp_O2` between O2 (half-precision weights, FP32 masters) and O1
(FP32 weights under autocast). The FP8 recipe is delayed scaling unless a key `fp8_recipe` says otherwise.

Everything called `fp8_*` acts only on Transformer Engine's layers. NeMo's own transformer takes them where
`transformer_engine` is true. Megatron Core's GPT (`mcore_gpt`) has them in any case up to 1.23, so that `fp8` alone
decides; from 2.0 on it has local layers without `transformer_engine`.

Defaults moved: the shipped file had `fp8_hybrid: False`, history 1 and `most_recent` up to 1.21, and has `True`, 1024
and `max` since 1.22; precision 16 and O1 became bf16 and O2 by 2.0. A key that is absent from the composed
configuration has the *code's* default, which is neither for the amax settings under Megatron Core. `nemo_version` says
that the file is a set of overrides over the shipped one of that release.

A model that is not Megatron's (speech, BERT on Hugging Face weights, translation) is trained by Lightning, which takes
the section `trainer` as it stands: 16 is torch's autocast under a torch GradScaler (or Apex), not Megatron's scaler.
Source: NeMo 1.20 to 2.0 models/language_modeling (megatron_gpt_model.py, megatron_base_model.py), utils/utils.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import PayloadError
from bridge.interop import lightning
from bridge.interop.builders import DELAYED, ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.interop.lightning import report_apex
from bridge.interop.meaning import meaning
from bridge.interop.megatron_lm.flags import bears_on_precision, report_other
from bridge.interop.nemo1.file import File
from bridge.interop.pytorch.amp import amp_fields, export_as_amp
from bridge.interop.reading.document import Document
from bridge.interop.reading.settings import Settings
from bridge.precision.fields import LAYER_COUNTS
from bridge.registry.config import MixedPrecisionConfig

TITLE = "NeMo 1.x"
PLAIN = ("fp8_recipe", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "first_last_layers_bf16")
"""Keys of the model section that reach Megatron Core's TransformerConfig because they are called like its fields."""
SCALER = {
    "native_amp_init_scale": ("initial_loss_scale", 2**32),
    "native_amp_growth_interval": ("loss_scale_window", 1000),
    "hysteresis": ("hysteresis", 2),
}
"""Key of the model section -> field, and the default."""
USUAL = {"fp8_recipe": "delayed", "fp8_wgrad": True}
"""Field of `PLAIN` -> the value that need not be written; elsewhere false."""
PRECISIONS = {
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("32", "32-true"), "fp32"),
}
"""What `torch_dtype_from_precision` takes; anything else raises there."""
NAMES = ("trainer.precision", "model.precision", "precision")
"""Settings that state the precision, the one that decides first."""
FP8 = ("fp8", "fp8_e4m3", "fp8_hybrid", *DELAYED, "fp8_params", *PLAIN, *LAYER_COUNTS)
READ = {*FP8, *SCALER, "transformer_engine", "megatron_amp_O2", "precision", "fsdp_grad_reduce_dtype"}
LOCAL_LAYERS = (2, 0)
"""The first release whose GPT on Megatron Core asks `transformer_engine`."""
SENT = ("unsupported", "how gradients are sent, not how exactly", "Nothing to do for the precision.")
QK_SCALING = "apply_query_key_layer_scaling"
OPTIMIZER = ("dtype", "with_scaled_states", "store_params", "store_param_remainders")
"""Keys of `optim` that state what the optimizer keeps, other than those that end in `_dtype`."""
QUANTISATION = ("enable_kv_cache", "awq_block_size", "alpha", "sq_alpha")
"""Settings of the section `quantization` that say how its `algorithm` quantises."""
TRAINER = ("precision", "accelerator", "strategy", "plugins", "amp_backend", "amp_level")
"""Keys of the section `trainer` that Lightning's importer reads."""
MARKS = (
    *("megatron_amp_O2", "native_amp_init_scale", "native_amp_growth_interval", "reduce_amax", "mcore_gpt"),
    "fp8_e4m3",
)


def import_(payload: object, *, nemo_version: str | None = None, base: str | None = None) -> ImportReport:
    """Return what a NeMo 1.x configuration, composed or only its `model` section, asks for.

    Overrides go over the file that `nemo_version` shipped, or over `base`, a noun for the file that is not read.
    """
    if not isinstance(payload, Mapping):
        raise PayloadError(f"nemo1: must be a mapping, got {payload!r:.60}. Give the parsed contents of the file.")
    file = File(payload, nemo_version)
    builder = ImportBuilder(f"{TITLE} ({nemo_version})" if nemo_version else TITLE)
    refused = file.get("trainer.precision") in ("bf16-true", "16-true")  # by Megatron's models
    if not file.is_megatron or (refused and not file.has_megatrons_keys(other_than=("data",))):
        return _trained_by_lightning(file, builder)
    base = None if file.shipped else base
    dtype = _precision(file, builder, base)
    o2 = _weights(file, dtype, builder, base)
    has_fp8 = _low_precision(file, builder)
    _loss_scale(file, dtype, builder)
    _reduction(file, dtype, builder, o2=o2)
    _others(file, builder, dtype, has_fp8=has_fp8)
    is_quantised = _quantisation(file, builder)
    semantics = "fsdp_policy" if not o2 and file.switch("fsdp") else "amp_o1"
    if dtype == "fp32":
        semantics = "fp32"
    elif o2:
        semantics = "megatron_o2"
    imported = builder.finish(semantics)
    return replace(imported, recipe=None) if is_quantised else imported


def _trained_by_lightning(file: File, builder: ImportBuilder) -> ImportReport:
    """Return what Lightning's Trainer makes of the section `trainer`, or of the file where there is none."""
    section = file.payload.get("trainer")
    prefix = "trainer." if isinstance(section, Mapping) else ""
    given: Mapping[Any, Any] = section if isinstance(section, Mapping) else file.payload
    trainer = {str(key): value for key, value in given.items()}
    trainer |= {key: file.follow(trainer[key], f"{prefix}{key}") for key in TRAINER if key in trainer}
    precision = trainer.get("precision")
    if isinstance(precision, float) and precision.is_integer():
        trainer["precision"] = int(precision)
    unread = file.model if prefix and file.model is not file.payload else {}
    for key, value in unread.items():
        if bears_on_precision(str(key)) and value not in (None, False):
            builder.record("nemo1.a-setting-of-the-model-that", f"model.{key}", value)
    builder.record("nemo1.no-key-of-a-megatron-model", "model", None)
    read = lightning.import_({"trainer": trainer} if prefix else trainer)
    return replace(read, unmapped=(*read.unmapped, *builder.unmapped))


def _precision(file: File, builder: ImportBuilder, base: str | None) -> str:
    where = next((name for name in NAMES if file.get(name) is not None), None)
    if where is None:
        if base is not None or (not file.shipped and "trainer" not in file.payload):
            builder.leave_mode(base or "the section trainer of another file")
            return "fp32"
        value = file.shipped["precision"] if file.shipped else "32"
        builder.implied("trainer.precision", value, f"{builder.system} takes {value} where the trainer says nothing")
        return PRECISIONS[value]
    value = file.get(where)
    dtype = PRECISIONS.get(str(value).removesuffix(".0"))
    if dtype is None:
        remedy = "Use 16, 'bf16', 32 or their -mixed forms."
        raise PayloadError(f"{where}: NeMo takes {', '.join(PRECISIONS)}, got {value!r:.60}. {remedy}")
    builder.map(where)
    for other in NAMES[NAMES.index(where) + 1 :]:
        second = file.raw(other)
        if second is None or "${" in str(second):  # a reference leads to the one that decides
            continue
        if PRECISIONS.get(str(second).removesuffix(".0")) == dtype:
            builder.map(other)
        else:
            builder.record("nemo1.decides", other, second, where=where, value=value)
    return dtype


def _weights(file: File, dtype: str, builder: ImportBuilder, base: str | None) -> bool:
    """State the mode; return whether it is O2."""
    where, fsdp, half = "model.megatron_amp_O2", file.switch("fsdp"), dtype != "fp32"
    o2 = file.switch("megatron_amp_O2")
    if file.setting("megatron_amp_O2") is not None:
        builder.map(where)
    elif base is not None and half:
        builder.leave_mode(f"megatron_amp_O2 in {base}, which is not read,", default=dtype)
        return False
    elif half:
        o2 = bool(file.shipped and file.shipped["megatron_amp_O2"])
        builder.implied(where, o2)
    if o2 and (fsdp or not half):
        detail = "NeMo switches O2 off under torch FSDP" if half else "acts in 16 and bf16 only"
        builder.report(where, True, "dead knob", detail, "Drop it.")
        o2 = False
    fields: dict[str, Any] = {} if builder.decided_by else {"fp32": True}
    if half and fsdp:  # NLPFSDPStrategy casts FP32 shards; nothing is left to autocast
        fields = {dtype: True, "params_dtype": dtype}
    elif half:
        fields = {dtype: True, "params_dtype": dtype, "pipeline_dtype": dtype} if o2 else amp_fields(dtype)
    for name in [name for name in NAMES if name in builder.mapped][:1]:
        builder.map(name, **fields)
    builder.fields |= fields
    if dtype == "fp16" and o2 and "dist" not in str(file.get("model.optim.name") or file.get("optim.name") or "dist"):
        builder.record("nemo1.nemo-raises-on-fp16", where, True)
    return o2


def _low_precision(file: File, builder: ImportBuilder) -> bool:
    """Map the FP8 settings; return whether they act."""
    if not (_has_engine_layers(file, builder) and file.switch("fp8")):
        gate = file.switch("transformer_engine")
        why = "ignored unless transformer_engine is true"
        if file.is_on_megatron_core:
            why = "mcore_gpt builds local layers, which run no FP8, unless transformer_engine is true (NeMo 2.0)"
        for key in FP8:  # a value that is not read may be a reference that leads nowhere
            value = file.model.get(key)
            if value is True and key != "fp8_hybrid" and not gate:
                builder.report(f"model.{key}", value, "dead knob", why, "Set model.transformer_engine=True to have it.")
            elif value is not None:
                builder.map(f"model.{key}")
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
        elif key in LAYER_COUNTS and builder.fields.get("first_last_layers_bf16"):
            builder.implied(f"model.{key}", 1, **{key: 1})
    return True


def _has_engine_layers(file: File, builder: ImportBuilder) -> bool:
    """Return whether the layers can run FP8, and account for `transformer_engine`."""
    where, value = "model.transformer_engine", file.setting("transformer_engine")
    is_on, always = file.switch("transformer_engine"), file.release is None or file.release < LOCAL_LAYERS
    if is_on or not (always and file.switch("fp8") and file.is_on_megatron_core):
        if value is not None:
            builder.map(where)
        elif file.shipped is None and file.switch("fp8"):
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
        on[key] = file.switch(key)
        if file.setting(key) is None and file.shipped is not None and file.shipped[key]:
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
        elif key in file:
            builder.map(f"model.{key}", **({"fp8": chosen} if file.switch(key) else {}))


def _amax(file: File, builder: ImportBuilder) -> None:
    values, why = DELAYED, "absent, and Megatron Core (mcore_gpt) takes this value"
    if file.shipped is not None:
        values, why = file.shipped, ""
    elif not file.is_on_megatron_core:
        values = {**DELAYED, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
        why = "absent, and the transformer of NeMo itself takes this value"
    for key in DELAYED:
        if key in file:
            builder.map(f"model.{key}", **{key: file.setting(key)})
        elif file.setting("fp8_recipe") in (None, "delayed"):
            builder.implied(f"model.{key}", values[key], why, **{key: values[key]})


def _loss_scale(file: File, dtype: str, builder: ImportBuilder) -> None:
    is_unread = "mcore_distributed_optim" in str(file.setting("optim") or "")
    for key, (field, default) in SCALER.items():
        if key not in file and dtype == "fp16":
            builder.implied(f"model.{key}", default, **{field: default})
        elif key in file:
            builder.map(f"model.{key}", **({field: file.setting(key)} if dtype == "fp16" else {}))
            if dtype == "fp16" and is_unread:
                builder.record("nemo1.with-mcore_distributed_optim-it-never", f"model.{key}", file.setting(key))


def _reduction(file: File, dtype: str, builder: ImportBuilder, *, o2: bool) -> None:
    """State the dtype in which gradients are reduced: the distributed optimizer's setting, or that of torch FSDP."""
    fsdp, optim = file.switch("fsdp"), file.setting("optim")
    sync = optim.get("grad_sync_dtype") if isinstance(optim, Mapping) else None
    rows = {
        "model.optim.grad_sync_dtype": (
            sync,
            not fsdp,
            "torch FSDP reduces the gradients, as fsdp_grad_reduce_dtype says",
        ),
        "model.fsdp_grad_reduce_dtype": (file.model.get("fsdp_grad_reduce_dtype"), fsdp, "read under torch FSDP only"),
    }
    for where, (written, acts, detail) in rows.items():
        value = file.follow(written, where)
        in_fp32 = str(value).lower() in ("32", "fp32", "float32", "32-true")
        if value is not None and acts:
            builder.map(where, grad_reduce_in_fp32=in_fp32)
        elif value is not None and in_fp32 and not fsdp:
            builder.map(where)
        elif value is not None:
            builder.report(where, value, "dead knob", detail, "Drop it.")
    if dtype == "fp32" or not (fsdp or o2) or "grad_reduce_in_fp32" in builder.fields:
        return
    kept = "fp32" if dtype == "bf16" and not fsdp else dtype
    where, detail = "model.optim.grad_sync_dtype", f"O2 keeps {kept.upper()} main gradients for {dtype}"
    if fsdp:
        where, detail = "model.fsdp_grad_reduce_dtype", f"NeMo's FSDP strategy reduces gradients in {dtype}"
    builder.implied(where, kept, f"{detail} where nothing states it", grad_reduce_in_fp32=kept == "fp32")


def _others(file: File, builder: ImportBuilder, dtype: str, *, has_fp8: bool) -> None:
    """Report whatever else bears on precision; nothing of it has a field."""
    trainer = file.payload.get("trainer")
    if isinstance(trainer, Mapping):
        report_apex(builder, Settings(trainer, builder.system, "trainer"))
    rows = {
        **dict.fromkeys(("grad_allreduce_chunk_size_mb", "grad_div_ar_fusion", "async_grad_allreduce"), SENT),
        "fp8_interval": ("dead knob", "Transformer Engine ignores it since 1.8", "Drop it."),
    }
    if file.switch("fp8_param"):
        rows["fp8_param"] = ("semantics", "NeMo raises on it: it is set before fp8 is", "Say fp8_params instead.")
    if "reduce_amax" in file and has_fp8 and not file.switch("reduce_amax"):
        detail = "read by NeMo's own transformer only; Megatron Core always reduces, at the nearest over TP alone"
        remedy = "Set tp_only_amax_red on the TransformerConfig if ranks may differ."
        rows["reduce_amax"] = ("unsupported", detail, remedy)
    if file.switch(QK_SCALING) and file.is_on_megatron_core and dtype != "fp16":
        detail = f"under mcore_gpt NeMo 1.22 and later turn it off in {dtype.upper()}, with a warning"
        rows[QK_SCALING] = ("dead knob", f"{detail}: FP16 alone has it", "Drop it.")
    custom = file.model.get("mcore_customization_config")
    inner = custom.items() if isinstance(custom, Mapping) else ()
    settings = {**file.model, **{f"mcore_customization_config.{key}": value for key, value in inner}}
    for name, value in settings.items():
        where, key = f"model.{name}", str(name).rpartition(".")[2]
        if name in rows:
            builder.report(where, value, *rows[name])
        elif name == "reduce_amax" or (name == QK_SCALING and not file.switch(QK_SCALING)):
            builder.map(where)
        elif name not in READ:
            report_other(builder, where, key, value)
    _optimizer(file, builder)


def _optimizer(file: File, builder: ImportBuilder) -> None:
    """Report what the optimizer keeps; Megatron's own has no field for it."""
    optim = file.setting("optim")
    if not isinstance(optim, Mapping):
        return
    for key, value in optim.items():
        where, is_own = f"model.optim.{key}", str(key).endswith("_dtype") and key != "grad_sync_dtype"
        if (key in OPTIMIZER or is_own) and value in (None, False):
            builder.map(where)
        elif key in OPTIMIZER or is_own:
            builder.record("nemo1.a-setting-of-the-optimizer-own", where, value)


def _quantisation(file: File, builder: ImportBuilder) -> bool:
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
        value = section.get(key)
        if value not in (None, False):
            builder.record("nemo1.an-option-of-the-quantisation-to", f"quantization.{key}", value, algorithm=algorithm)
    return True


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the precision's part of a NeMo 1.x configuration, every default written out."""
    builder = ExportBuilder(config, TITLE)
    acting = meaning(config)
    model: dict[str, Any] = {"megatron_amp_O2": semantics_of(config) == "megatron_o2"}
    dtype = _export_mode(builder, is_o2=model["megatron_amp_O2"])
    _export_fp8(builder, model, acting)
    if config.loss_scale:
        builder.record("nemo1.nemo-x-scales", "loss_scale")
    for key, (field, _) in SCALER.items():
        if dtype == "fp16" and field in acting:
            model[key] = acting[field]
            builder.map(field, f"model.{key}")
    if dtype == "fp16" and acting.get("min_loss_scale", 1.0) != 1.0:
        builder.record("nemo1.its-scaler-has-no-floor", "min_loss_scale")
    if model["megatron_amp_O2"]:
        model["optim"] = {"grad_sync_dtype": "fp32" if config.grad_reduce_in_fp32 else dtype}
        builder.map("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    if config.fp4:
        fields = ("fp4", "fp4_recipe", "first_last_layers_bf16")
        builder.record_if_stated("nemo1.nemo-x-has", fields)
    return builder.finish({"trainer": {"precision": {"fp32": 32, "fp16": 16, "bf16": "bf16"}[dtype]}, "model": model})


def _export_mode(builder: ExportBuilder, *, is_o2: bool) -> str:
    mode = builder.config.mode
    dtype = mode if is_o2 else export_as_amp(builder, "trainer.precision", "model.megatron_amp_O2")
    if is_o2:
        builder.map(mode, "trainer.precision", "model.megatron_amp_O2")
    dtypes = ("params_dtype", "pipeline_dtype") if is_o2 else ("pipeline_dtype",)
    for field in dtypes:
        if builder.values[field] in (None, mode):
            builder.map(field, "trainer.precision")
        elif is_o2:
            builder.record("nemo1.o2-makes-it", field, mode=mode)
    if is_o2 and builder.config.autocast_enabled:
        fields = ("autocast_enabled", "autocast_dtype")
        builder.record_if_stated("nemo1.nemo-x-runs", fields)
    return dtype


def _export_fp8(builder: ExportBuilder, model: dict[str, Any], acting: dict[str, Any]) -> None:
    chosen = builder.values["fp8"]
    model |= {"transformer_engine": True} if chosen else {}
    model |= {"fp8": chosen is not None, "fp8_e4m3": chosen == "e4m3", "fp8_hybrid": chosen == "hybrid"}
    if not chosen:
        return
    builder.map("fp8", "model.transformer_engine", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
    builder.map("fp8_recipe")
    for field in (*DELAYED, *PLAIN, *LAYER_COUNTS):
        if field in acting and (field in DELAYED or acting[field] != USUAL.get(field, False)):
            model[field] = acting[field]
            builder.map(field, f"model.{field}")
    if acting["fp8_param_gather"]:
        model["fp8_params"] = True
        for field in ("fp8_param", "fp8_param_gather"):
            if acting["fp8_recipe"] == "delayed":
                builder.map(field, "model.fp8_params")
            else:
                builder.record_if_stated("nemo1.fp8_params-initialises-weights", field)


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for NeMo 1.x's, or None."""
    top = document.mapping
    model = top.get("model") if isinstance(top.get("model"), Mapping) else top
    found = [key for key in MARKS if isinstance(model, Mapping) and key in model]
    if found:
        certainty = 0.95 if len(found) > 1 else 0.8
        return Recognised(certainty, f"has {', '.join(f'`{key}`' for key in found[:3])}, NeMo 1.x's own keys")
    if document.has("trainer.precision", "exp_manager"):
        return Recognised(0.6, "has `trainer.precision` and `exp_manager`")
    return None


VERSION = ContextKey("nemo_version", "release whose shipped file this one overrides (unsaid: the file is whole)")
SYSTEM = System("nemo1", "NeMo 1.x", "1.23 to 2.0", import_, export, recognise, as_yaml, context=(VERSION,))

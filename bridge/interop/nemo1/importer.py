"""NeMo 1.x: `megatron_gpt_config.yaml` and its kin, and the files of models that are not Megatron's.

`trainer.precision` chooses the dtype, `model.megatron_amp_O2` between O2 (half-precision weights, FP32 masters) and O1
(FP32 weights under autocast).

Defaults moved: the shipped file had `fp8_hybrid: False`, history 1 and `most_recent` up to 1.21, and has `True`, 1024
and `max` since 1.22; precision 16 and O1 became bf16 and O2 by 2.0. A key that is absent from the composed
configuration has the *code's* default, which is neither for the amax settings under Megatron Core. `nemo_version` says
that the file is a set of overrides over the shipped one of that release.

A model that is not Megatron's (speech, BERT on Hugging Face weights, translation) is trained by Lightning, which takes
the section `trainer` as it stands: 16 is torch's autocast under a torch GradScaler (or Apex), not Megatron's scaler.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import PayloadError
from bridge.interop import lightning
from bridge.interop.builders import ImportBuilder
from bridge.interop.contract import ContextKey, ImportReport, Recognised, System, as_yaml
from bridge.interop.megatron_lm.flags import bears_on_precision, report_other
from bridge.interop.nemo1.exporter import export
from bridge.interop.nemo1.file import TABLE, File
from bridge.interop.nemo1.fp8 import FP8, read_fp8
from bridge.interop.pytorch.amp import amp_fields
from bridge.interop.reading.document import Document
from bridge.interop.reading.settings import Settings

__all__ = ["SYSTEM", "export", "import_"]

SCALER, MODEL = TABLE.parts["scaler"].named, TABLE.parts["model"].named
PRECISIONS: Mapping[str, str] = TABLE.data["precisions"]
NAMES = ("trainer.precision", "model.precision", "precision")
"""Settings that state the precision, the one that decides first."""
QK_SCALING, CUSTOM = "apply_query_key_layer_scaling", "mcore_customization_config"
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
    builder = ImportBuilder(f"{TABLE.title} ({nemo_version})" if nemo_version else TABLE.title)
    refused = file.get("trainer.precision") in ("bf16-true", "16-true")  # by Megatron's models
    if not file.is_megatron or (refused and not file.has_megatrons_keys(other_than="data")):
        return _trained_by_lightning(file, builder)
    base = None if file.shipped else base
    dtype = _precision(file, builder, base)
    o2 = _weights(file, dtype, builder, base)
    has_fp8 = read_fp8(file, builder)
    TABLE.read(builder, file.model if dtype == "fp16" else file.written, "scaler", fp16=dtype == "fp16")
    if dtype == "fp16" and "mcore_distributed_optim" in str(file.model["optim"] or ""):
        for key in (key for key in SCALER if file.model.given(key)):
            builder.record("nemo1.with-mcore_distributed_optim-it-never", f"model.{key}", file.model[key])
    _reduction(file, dtype, builder, o2=o2)
    _others(file, builder, dtype, has_fp8=has_fp8)
    is_quantised = _quantisation(file, builder)
    semantics = "fsdp_policy" if not o2 and file.model.switch("fsdp") else "amp_o1"
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
    unread = file.written.values if prefix and file.has_model else {}
    for key, value in unread.items():
        if bears_on_precision(key) and value not in (None, False):
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
        value = file.shipped.get("precision", "32")
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
    where, fsdp, half = "model.megatron_amp_O2", file.model.switch("fsdp"), dtype != "fp32"
    o2 = file.model.switch("megatron_amp_O2")
    if file.model["megatron_amp_O2"] is not None:
        builder.map(where)
    elif base is not None and half:
        builder.leave_mode(f"megatron_amp_O2 in {base}, which is not read,", default=dtype)
        return False
    elif half:
        o2 = file.shipped.get("megatron_amp_O2", False)
        builder.implied(where, o2)
    if o2 and (fsdp or not half):
        builder.record("nemo1.o2-under-fsdp" if half else "nemo1.o2-in-fp32", where, True)
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


def _reduction(file: File, dtype: str, builder: ImportBuilder, *, o2: bool) -> None:
    """State the dtype in which gradients are reduced: the distributed optimizer's setting, or that of torch FSDP."""
    fsdp, optim = file.model.switch("fsdp"), file.model["optim"]
    places = ("model.fsdp_grad_reduce_dtype", "model.optim.grad_sync_dtype")
    decides, other = places if fsdp else reversed(places)
    written = {
        places[0]: file.written.values.get("fsdp_grad_reduce_dtype"),
        places[1]: optim.get("grad_sync_dtype") if isinstance(optim, Mapping) else None,
    }
    values = {where: file.follow(value, where) for where, value in written.items()}
    in_fp32 = {where: str(value).lower() in ("32", "fp32", "float32", "32-true") for where, value in values.items()}
    if values[other] is not None and in_fp32[other] and not fsdp:
        builder.map(other)
    elif values[other] is not None:
        builder.record("nemo1.reduced-by-fsdp" if fsdp else "nemo1.read-under-fsdp", other, values[other])
    if values[decides] is not None:
        builder.map(decides, grad_reduce_in_fp32=in_fp32[decides])
    elif dtype != "fp32" and (fsdp or o2):
        kept = "fp32" if dtype == "bf16" and not fsdp else dtype
        builder.record(
            "nemo1.fsdp-reduces" if fsdp else "nemo1.o2-keeps", decides, kept, dtype=dtype, kept=kept.upper()
        )
        builder.fields["grad_reduce_in_fp32"] = kept == "fp32"


def _others(file: File, builder: ImportBuilder, dtype: str, *, has_fp8: bool) -> None:
    """Report whatever else bears on precision; nothing of it has a field."""
    trainer, optim, custom = (file.payload.get("trainer"), file.model["optim"], file.written.values.get(CUSTOM))
    if isinstance(trainer, Mapping):
        lightning.TABLE.read(builder, Settings(trainer, builder.system, "trainer"), "apex")
    apart = has_fp8 and file.model.given("reduce_amax") and not file.model.switch("reduce_amax")
    facts = {"raised on": file.model.switch("fp8_param"), "amax apart": apart}
    TABLE.read(builder, file.written, "model", **facts)
    is_off = file.model.switch(QK_SCALING) and file.is_on_megatron_core and dtype != "fp16"
    inner = custom.items() if isinstance(custom, Mapping) else ()
    for name, value in {**file.written.values, **{f"{CUSTOM}.{key}": value for key, value in inner}}.items():
        if name == QK_SCALING and is_off:
            builder.record("nemo1.qk-scaling-is-off", f"model.{name}", value, mode=dtype.upper())
        elif name not in {*FP8, *SCALER, *MODEL}:
            report_other(builder, f"model.{name}", name.rpartition(".")[2], value)
    if isinstance(optim, Mapping):
        TABLE.read(builder, Settings(optim, builder.system, "model.optim"), "optim")


def _quantisation(file: File, builder: ImportBuilder) -> bool:
    """Report the section `quantization`; return whether values are quantised by it."""
    section = file.payload.get("quantization")
    if not isinstance(section, Mapping):
        return False
    algorithm = file.follow(section.get("algorithm"), "quantization.algorithm")
    if algorithm is None:
        builder.map("quantization.algorithm")
        return False
    data = file.written.values.get("data")
    when = "in-training" if isinstance(data, Mapping) and "train_ds" in data else "afterwards"
    builder.record(f"nemo1.quantised-{when}", "quantization.algorithm", algorithm, algorithm=algorithm)
    options = {key: value for key, value in section.items() if value not in (None, False)}
    TABLE.read(builder, Settings(options, builder.system, "quantization"), "quantization", algorithm=algorithm)
    return True


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for NeMo 1.x's, or None."""
    top = document.mapping
    model = top.get("model") if isinstance(top.get("model"), Mapping) else top
    found = [key for key in MARKS if isinstance(model, Mapping) and key in model]
    if found:
        certainty = 0.95 if len(found) > 1 else 0.8
        return Recognised(certainty, f"has {', '.join(f'`{key}`' for key in found[:3])}, NeMo 1.x's own keys")
    return TABLE.recognise(document)


VERSION = ContextKey("nemo_version", "release whose shipped file this one overrides (unsaid: the file is whole)")
SYSTEM = System("nemo1", TABLE.title, TABLE.version, import_, export, recognise, as_yaml, context=(VERSION,))

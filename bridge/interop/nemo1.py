"""NeMo 1.x: `megatron_gpt_config.yaml` and its kin, and the files of models that are not Megatron's.

`trainer.precision` chooses the dtype, `model.megatron_amp_O2` between O2 (half-precision weights, FP32 masters) and O1
(FP32 weights under autocast).

Everything called `fp8_*` acts only on Transformer Engine's layers. NeMo's own transformer takes them where
`transformer_engine` is true. Megatron Core's GPT (`mcore_gpt`) has them in any case up to 1.23, so that `fp8` alone
decides; from 2.0 on it has local layers without `transformer_engine`.

Defaults moved: the shipped file had `fp8_hybrid: False`, history 1 and `most_recent` up to 1.21, and has `True`, 1024
and `max` since 1.22; precision 16 and O1 became bf16 and O2 by 2.0. A key that is absent from the composed
configuration has the *code's* default, which is neither for the amax settings under Megatron Core. `nemo_version` says
that the file is a set of overrides over the shipped one of that release.

A model that is not Megatron's (speech, BERT on Hugging Face weights, translation) is trained by Lightning, which takes
the section `trainer` as it stands: 16 is torch's autocast under a torch GradScaler (or Apex), not Megatron's scaler.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import PayloadError
from bridge.interop import lightning
from bridge.interop.builders import DELAYED, ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, System, as_yaml
from bridge.interop.meaning import meaning, semantics_of
from bridge.interop.megatron_lm.flags import bears_on_precision, report_other
from bridge.interop.pytorch.amp import amp_fields, export_as_amp
from bridge.interop.reading.settings import Settings
from bridge.interop.table import at, table
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("nemo1")
FP8, SCALER, MODEL = (TABLE.parts[name].named for name in ("fp8", "scaler", "model"))
PRECISIONS: Mapping[str, str] = TABLE.data["precisions"]
NAMES = ("trainer.precision", "model.precision", "precision")
"""Settings that state the precision, the one that decides first."""
QK_SCALING, CUSTOM = "apply_query_key_layer_scaling", "mcore_customization_config"
MEGATRON = re.compile(TABLE.data["megatron"].replace(" |", "|"))
REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.]+)\s*\}")
"""OmegaConf's reference to another key of the file; dots in front make it relative to the key it stands at."""
DEEPEST = 16
LOCAL_LAYERS = (2, 0)
"""The first release whose GPT on Megatron Core asks `transformer_engine`."""
WORDS = {"fp32": 32, "fp16": 16, "bf16": "bf16"}


class File:
    """A configuration with its references followed, its sections, and the defaults of the shipped file."""

    def __init__(self, payload: Mapping[Any, Any], version: str | None) -> None:
        self.payload: dict[Any, Any] = _followed(payload, payload)
        self.version = version
        self.has_model = isinstance(payload.get("model"), Mapping)
        self.model = Settings(self.payload["model"] if self.has_model else self.payload, "nemo1", "model", lenient=True)
        self.optim = self.model.values.get("optim")
        self.release: tuple[int, int] | None = None
        self.shipped: Mapping[str, Any] = {}
        if version is not None:
            found = re.match(r"v?(\d+)\.(\d+)", str(version))
            if found is None:
                raise PayloadError(f"nemo_version: must be a version, got {version!r}. Write nemo_version=1.23.")
            self.release = (int(found[1]), int(found[2]))
            self.shipped = next(row for row in TABLE.data["shipped"] if self.release < tuple(row["before"]))

    @property
    def is_megatron(self) -> bool:
        """Whether one of Megatron's models is trained; a release says so too, as its shipped file is of one."""
        if self.has_megatrons_keys() or (self.has_model and "precision" in self.model):
            return True
        return self.release is not None and not any(key in self.model for key in TABLE.data["others"])

    def has_megatrons_keys(self, *, other_than: str = "") -> bool:
        """Return whether a key, other than `other_than`, is one that only Megatron's models read."""
        keys = {str(key) for section in (self.model.values, self.payload) for key in section}
        return any(MEGATRON.fullmatch(key) for key in keys - {other_than})

    @property
    def is_on_megatron_core(self) -> bool:
        """Whether GPT is Megatron Core's (since 1.21), and not the transformer that NeMo brings itself."""
        if self.release is not None and self.release < (1, 21):
            return False
        return bool(self.model.switch("mcore_gpt") if self.model.given("mcore_gpt") else self.shipped.get("mcore_gpt"))

    def get(self, path: str) -> Any:
        """Return a value by its dotted path from the top, None where there is none."""
        return at(self.payload, path)


def _followed(value: Any, payload: Mapping[Any, Any], where: str = "", depth: int = 0) -> Any:
    """Return a value with each reference to a plain value of the file replaced by it.

    One that leads nowhere or in a circle, and what is computed when the run is started, stay as they are written.
    """
    if isinstance(value, Mapping):
        return {key: _followed(inner, payload, f"{where}.{key}".lstrip("."), depth) for key, inner in value.items()}
    found = REFERENCE.fullmatch(value) if isinstance(value, str) and depth < DEEPEST else None
    if found is None:
        return value
    path = ".".join([*where.split(".")[: -len(found[1])], found[2]]) if found[1] else found[2]
    target = at(payload, path)
    is_plain = target is not None and not isinstance(target, Mapping | list)
    return _followed(target, payload, path, depth + 1) if is_plain else value


def _check_stated(where: str, value: object) -> None:
    """Raise PayloadError for a value that the file leaves to the start of the run, or to a reference without end."""
    if "${" in str(value) or value == "???":
        raise PayloadError(f"{where}: must be written out, got {value!r:.60}. Write the value that it comes to.")


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
    has_fp8 = _float8(file, builder)
    TABLE.read(builder, file.model, "scaler", fp16=dtype == "fp16")
    _reduction(file, dtype, builder, o2=o2)
    _others(file, builder, dtype, has_fp8=has_fp8)
    if isinstance(file.payload.get("quantization"), Mapping):
        TABLE.read(builder, Settings(file.payload["quantization"], builder.system, "quantization"), "quantization")
    semantics = "fsdp_policy" if not o2 and file.model.switch("fsdp") else "amp_o1"
    if dtype == "fp32":
        semantics = "fp32"
    elif o2:
        semantics = "megatron_o2"
    return builder.finish(semantics, is_whole=file.get("quantization.algorithm") is None)


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the precision's part of a NeMo 1.x configuration, every default written out."""
    builder = ExportBuilder(config, TABLE.title)
    acting, is_o2, chosen = meaning(config), semantics_of(config) == "megatron_o2", builder.values["fp8"]
    settings = ("trainer.precision", "model.megatron_amp_O2")
    builder.map_dtype("pipeline_dtype", settings[0])
    if is_o2:
        builder.map_dtype("params_dtype", settings[0])
        builder.map(config.mode, *settings)
    dtype = config.mode if is_o2 else export_as_amp(builder, *settings)
    model: dict[str, Any] = {"megatron_amp_O2": is_o2} | ({"transformer_engine": True} if chosen else {})
    model |= {"fp8": chosen is not None, "fp8_e4m3": chosen == "e4m3", "fp8_hybrid": chosen == "hybrid"}
    if chosen:
        builder.map("fp8", "model.transformer_engine", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid")
        builder.map("fp8_recipe")
        model |= TABLE.write(builder, "fp8", "model", acting)
        for field in ("fp8_param", "fp8_param_gather") if acting["fp8_param_gather"] else ():
            if acting["fp8_recipe"] == "delayed":
                builder.map(field, "model.fp8_params")
            else:
                builder.record_if_stated("nemo1.fp8_params-initialises-weights", field)
    if dtype == "fp16":
        model |= TABLE.write(builder, "scaler", "model", acting)
    if is_o2:
        model["optim"] = {"grad_sync_dtype": "fp32" if config.grad_reduce_in_fp32 else dtype}
        builder.map("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    payload = {"trainer": {"precision": WORDS[dtype]}, "model": model}
    return builder.finish(payload, TABLE.unwritten, o2=is_o2)


def _trained_by_lightning(file: File, builder: ImportBuilder) -> ImportReport:
    """Return what Lightning's Trainer makes of the section `trainer`, or of the file where there is none."""
    section = file.payload.get("trainer")
    has_section = isinstance(section, Mapping)
    given: Mapping[Any, Any] = section if isinstance(section, Mapping) else file.payload
    trainer = {str(key): value for key, value in given.items()}
    for key, value in (file.model.values if has_section and file.has_model else {}).items():
        if bears_on_precision(key) and value not in (None, False):
            builder.record("nemo1.a-setting-of-the-model-that", f"model.{key}", value)
    builder.record("nemo1.no-key-of-a-megatron-model", "model", None)
    read = lightning.import_({"trainer": trainer} if has_section else trainer)
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
    _check_stated(where, value)
    dtype = PRECISIONS.get(str(value).removesuffix(".0"))
    if dtype is None:
        remedy = "Use 16, 'bf16', 32 or their -mixed forms."
        raise PayloadError(f"{where}: NeMo takes {', '.join(PRECISIONS)}, got {value!r:.60}. {remedy}")
    builder.map(where)
    for other in NAMES[NAMES.index(where) + 1 :]:
        second = file.get(other)
        if PRECISIONS.get(str(second).removesuffix(".0")) == dtype:
            builder.map(other)
        elif second is not None:
            builder.record("nemo1.decides", other, second, where=where, value=value)
    return dtype


def _weights(file: File, dtype: str, builder: ImportBuilder, base: str | None) -> bool:
    """State the mode; return whether it is O2."""
    where, fsdp, half = "model.megatron_amp_O2", file.model.switch("fsdp"), dtype != "fp32"
    o2 = bool(file.model.switch("megatron_amp_O2"))
    if file.model.given("megatron_amp_O2"):
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
    return o2


def _reduction(file: File, dtype: str, builder: ImportBuilder, *, o2: bool) -> None:
    """State the dtype in which gradients are reduced: the distributed optimizer's setting, or that of torch FSDP."""
    values = {
        "model.fsdp_grad_reduce_dtype": file.model.values.get("fsdp_grad_reduce_dtype"),
        "model.optim.grad_sync_dtype": at(file.optim, "grad_sync_dtype"),
    }
    fsdp = file.model.switch("fsdp")
    decides, other = values if fsdp else reversed(values)
    in_fp32 = {where: str(value).lower() in ("32", "fp32", "float32", "32-true") for where, value in values.items()}
    _check_stated(decides, values[decides])
    if values[other] is not None and in_fp32[other] and not fsdp:
        builder.map(other)
    elif values[other] is not None:
        builder.record("nemo1.reduced-by-fsdp" if fsdp else "nemo1.read-under-fsdp", other, values[other])
    if values[decides] is not None:
        builder.map(decides, grad_reduce_in_fp32=in_fp32[decides])
    elif dtype != "fp32" and (fsdp or o2):
        kept = "fp32" if dtype == "bf16" and not fsdp else dtype
        sentence, state = "nemo1.fsdp-reduces" if fsdp else "nemo1.o2-keeps", {"grad_reduce_in_fp32": kept == "fp32"}
        builder.record(sentence, decides, kept, state, dtype=dtype, kept=kept.upper())


def _float8(file: File, builder: ImportBuilder) -> bool:
    """Map the FP8 settings; return whether they act."""
    is_on, engine = bool(file.model.switch("fp8")), _has_engine_layers(file, builder)
    if is_on and engine:
        _format(file, builder)
    kind = "mcore" if file.is_on_megatron_core else "nemo"
    ignored, absent = TABLE.data["ignored"][kind], TABLE.data["absent"][kind]
    TABLE.read(builder, file.model, "fp8", engine=engine, on=is_on, acts=is_on and engine, ignored=ignored)
    if is_on and engine:
        why = dict.fromkeys(DELAYED, "" if file.shipped else absent["why"])
        builder.imply_scheme("model.{}".format, delayed=file.shipped or absent, layers=1, why=why)
    return is_on and engine


def _has_engine_layers(file: File, builder: ImportBuilder) -> bool:
    """Return whether the layers can run FP8, and account for `transformer_engine`."""
    where, value = "model.transformer_engine", file.model.values.get("transformer_engine")
    is_on, always = bool(file.model.switch("transformer_engine")), file.release is None or file.release < LOCAL_LAYERS
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
    on = {key: bool(file.model.switch(key)) for key in ("fp8_e4m3", "fp8_hybrid")}
    for key in (key for key in on if not file.model.given(key) and file.shipped.get(key)):
        on[key] = True
        builder.implied(f"model.{key}", True)
    if not any(on.values()):
        rule = "NeMo raises on fp8 with neither fp8_e4m3 nor fp8_hybrid"
        remedy = "Set model.fp8_hybrid=True, or give nemo_version if this file overrides a shipped one."
        raise PayloadError(f"model.fp8: {rule}, got True. {remedy}")
    builder.fields["fp8"] = chosen = "e4m3" if on["fp8_e4m3"] else "hybrid"
    for key in ("fp8", "fp8_e4m3", "fp8_hybrid"):
        if key == "fp8_hybrid" and all(on.values()):
            builder.record("nemo1.fp8_e4m3-wins-where", "model.fp8_hybrid", True)
        elif file.model.given(key):
            builder.map(f"model.{key}", **({"fp8": chosen} if file.model.switch(key) else {}))


def _others(file: File, builder: ImportBuilder, dtype: str, *, has_fp8: bool) -> None:
    """Report whatever else bears on precision; nothing of it has a field."""
    trainer, custom = file.payload.get("trainer"), file.model.values.get(CUSTOM)
    if isinstance(trainer, Mapping):
        lightning.TABLE.read(builder, Settings(trainer, builder.system, "trainer"), "apex")
    apart = has_fp8 and file.model.given("reduce_amax") and not file.model.switch("reduce_amax")
    TABLE.read(builder, file.model, "model", **{"raised on": file.model.switch("fp8_param"), "amax apart": apart})
    is_off = file.model.switch(QK_SCALING) and file.is_on_megatron_core and dtype != "fp16"
    inner = custom.items() if isinstance(custom, Mapping) else ()
    for name, value in {**file.model.values, **{f"{CUSTOM}.{key}": value for key, value in inner}}.items():
        if name == QK_SCALING and is_off:
            builder.record("nemo1.qk-scaling-is-off", f"model.{name}", value, mode=dtype.upper())
        elif name not in {*FP8, *SCALER, *MODEL}:
            report_other(builder, f"model.{name}", name.rpartition(".")[2], value)
    if isinstance(file.optim, Mapping):
        TABLE.read(builder, Settings(file.optim, builder.system, "model.optim"), "optim")


VERSION = ContextKey("nemo_version", "release whose shipped file this one overrides (unsaid: the file is whole)")
SYSTEM = System("nemo1", TABLE.title, TABLE.version, import_, export, TABLE.recognise, as_yaml, context=(VERSION,))

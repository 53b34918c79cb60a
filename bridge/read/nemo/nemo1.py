"""NeMo 1.x: `megatron_gpt_config.yaml` and its kin, and the files of models that are not Megatron's.

`trainer.precision` chooses the dtype, `model.megatron_amp_O2` between O2 (half-precision weights, FP32 masters) and O1
(FP32 weights under autocast). A file is read as release 2.0 reads it, the last one with these models, and as a whole:
nothing of a shipped file stands under it.

Everything called `fp8_*` acts only on Transformer Engine's layers, which `transformer_engine` chooses. An amax setting
that is absent has the *code's* default: Megatron Core's under `mcore_gpt`, else that of NeMo's own transformer.

A model that is not Megatron's (speech, BERT on Hugging Face weights, translation) is trained by Lightning, without
Megatron Core: its file is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError
from bridge.precision.mode import mode_of
from bridge.read.amp import amp_fields, export_as_amp
from bridge.read.builders import DELAYED, ExportBuilder, ImportBuilder
from bridge.read.contract import ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.read.meaning import meaning, semantics_of
from bridge.read.megatron_lm.flags import report_other
from bridge.read.table import at, table
from bridge.read.text.document import Document
from bridge.read.text.settings import Settings, half_or_fp32
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("nemo1")
PRECISIONS: Mapping[str, str] = TABLE.data["precisions"]
NAMES = ("trainer.precision", "model.precision", "precision")
"""Settings that state the precision, the one that decides first."""
MEGATRON = re.compile(TABLE.data["megatron"])
REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.]+)\s*\}")
"""OmegaConf's reference to another key of the file; dots in front make it relative to the key it stands at."""
DEEPEST = 16
WORDS = {"fp32": 32, "fp16": 16, "bf16": "bf16"}


def _followed(value: Any, payload: Mapping[Any, Any], where: str = "", depth: int = 0) -> Any:
    """Return a value with each reference to a plain value of the file replaced by it.

    One that leads nowhere or in a circle, and what is computed when the run is started, stay as they are written.
    """
    if isinstance(value, Mapping):
        return {
            key: _followed(inner, payload, f"{where}.{key}".lstrip("."), depth)
            for key, inner in value.items()
        }
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
        raise PayloadError(
            f"{where}: must be written out, got {value!r:.60}. Write the value that it comes to."
        )


def import_(payload: object) -> ImportReport:
    """Return what a NeMo 1.x configuration, composed or only its `model` section, asks for."""
    builder, top = ImportBuilder(TABLE.title), Settings(payload, "nemo1").values
    file: dict[str, Any] = _followed(top, top)
    has_model = isinstance(file.get("model"), Mapping)
    file |= {} if has_model else {"model": dict(file)}
    model = Settings(file["model"], "nemo1", "model", lenient=True)
    if not _is_of_megatron(file, model.values if has_model else {}):
        raise TABLE.wrong("no-model-of-megatron", Settings(file, "nemo1"), "model")
    dtype = _precision(file, builder)
    semantics = _weights(model, dtype, builder)
    _reduction(file, dtype, builder, semantics, fsdp=bool(model.switch("fsdp")))
    _settings(model, dtype, builder)
    for path, part in (
        ("trainer", "apex"),
        ("model.optim", "optim"),
        ("quantization", "quantization"),
    ):
        section = at(file, path)
        if isinstance(section, Mapping):
            TABLE.read(builder, Settings(section, builder.system, path), part)
    return builder.finish(semantics, is_whole=at(file, "quantization.algorithm") is None)


def _is_of_megatron(file: Mapping[Any, Any], model: Mapping[Any, Any]) -> bool:
    """Return whether a file, with its section `model`, is of one of Megatron's models."""
    keys = {key for key in (*model, *file) if isinstance(key, str) and MEGATRON.fullmatch(key)}
    if not keys and "precision" not in model:
        return False
    is_refused_by_megatron = at(file, "trainer.precision") in ("bf16-true", "16-true")
    return not (is_refused_by_megatron and keys <= {"data"})


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for NeMo 1.x's, or None: so for a model that is not Megatron's."""
    model = document.mapping.get("model")
    section = model if isinstance(model, Mapping) else {}
    return TABLE.recognise(document) if _is_of_megatron(document.mapping, section) else None


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the precision's part of a NeMo 1.x configuration, every default written out."""
    builder = ExportBuilder(config, TABLE.title)
    acting, is_o2, chosen = (
        meaning(config),
        semantics_of(config) == "megatron_o2",
        builder.values["fp8"],
    )
    settings = ("trainer.precision", "model.megatron_amp_O2")
    builder.map_dtype("pipeline_dtype", settings[0])
    if is_o2:
        builder.map_dtype("params_dtype", settings[0])
        builder.map(mode_of(config), *settings)
    dtype = mode_of(config) if is_o2 else export_as_amp(builder, *settings)
    model: dict[str, Any] = {"megatron_amp_O2": is_o2} | (
        {"transformer_engine": True} if chosen else {}
    )
    model |= {
        "fp8": chosen is not None,
        "fp8_e4m3": chosen == "e4m3",
        "fp8_hybrid": chosen == "hybrid",
    }
    if chosen:
        builder.map(
            "fp8", "model.transformer_engine", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid"
        )
        builder.map("fp8_recipe")
    facts = {
        "engine": bool(chosen),
        "on": bool(chosen),
        "acts": bool(chosen),
        "fp16": dtype == "fp16",
    }
    model |= TABLE.write(builder, "model", "model", acting, **facts)
    if "fp8_params" in model:
        for field in ("fp8_param", "fp8_param_gather"):
            builder.map(field, "model.fp8_params")
            if acting["fp8_recipe"] != "delayed":
                builder.record_if_stated("nemo1.fp8_params-initialises-weights", field)
    if is_o2:
        model["optim"] = {"grad_sync_dtype": "fp32" if config.grad_reduce_in_fp32 else dtype}
        builder.map("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    payload = {"trainer": {"precision": WORDS[dtype]}, "model": model}
    return builder.finish(payload, TABLE.unwritten, o2=is_o2)


def _precision(file: Mapping[str, Any], builder: ImportBuilder) -> str:
    stated = {name: value for name in NAMES if (value := at(file, name)) is not None}
    if not stated:
        if "trainer" in file:
            builder.implied(
                "trainer.precision",
                "32",
                f"{builder.system} takes 32 where the trainer says nothing",
            )
        else:
            builder.leave_mode("the section trainer of another file")
        return "fp32"
    (where, value), *others = stated.items()
    _check_stated(where, value)
    dtype = PRECISIONS.get(str(value).removesuffix(".0"))
    if dtype is None:
        remedy = "Use 16, 'bf16', 32 or their -mixed forms."
        raise PayloadError(
            f"{where}: NeMo takes {', '.join(PRECISIONS)}, got {value!r:.60}. {remedy}"
        )
    builder.map(where)
    for other, second in others:
        if PRECISIONS.get(str(second).removesuffix(".0")) == dtype:
            builder.map(other)
        else:
            builder.record("nemo1.decides", other, second, where=where, value=value)
    return dtype


def _weights(model: Settings, dtype: str, builder: ImportBuilder) -> str:
    """State the mode; return its semantics."""
    where, fsdp, half = "model.megatron_amp_O2", model.switch("fsdp"), dtype != "fp32"
    o2 = model.switch("megatron_amp_O2")
    if half and o2 is None:
        builder.implied(where, False)
    if o2 and (fsdp or not half):
        builder.record("nemo1.o2-under-fsdp" if half else "nemo1.o2-in-fp32", where, True)
    semantics, fields = "fp32", {} if builder.decided_by else amp_fields("fp32")
    if half and fsdp:  # NLPFSDPStrategy casts FP32 shards; nothing is left to autocast
        semantics, fields = "fsdp_policy", {dtype: True, "params_dtype": dtype}
    elif half and o2:
        semantics, fields = (
            "megatron_o2",
            {dtype: True, "params_dtype": dtype, "pipeline_dtype": dtype},
        )
    elif half:
        semantics, fields = "amp_o1", amp_fields(dtype)
    builder.fields |= fields
    for name in [*builder.mapped][:1]:
        builder.map(name, **fields)
    return semantics


def _reduction(
    file: Mapping[str, Any], dtype: str, builder: ImportBuilder, semantics: str, *, fsdp: bool
) -> None:
    """State the dtype in which gradients are reduced: the distributed optimizer's setting, or that of torch FSDP."""
    names = ("model.fsdp_grad_reduce_dtype", "model.optim.grad_sync_dtype")
    decides, other = names if fsdp else reversed(names)
    value, unread = at(file, decides), at(file, other)
    _check_stated(decides, value)
    if _is_fp32(unread) and not fsdp:
        builder.map(other)
    elif unread is not None:
        builder.record("nemo1.reduced-by-fsdp" if fsdp else "nemo1.read-under-fsdp", other, unread)
    if value is not None:
        builder.map(decides, grad_reduce_in_fp32=_is_fp32(value))
    elif semantics in ("fsdp_policy", "megatron_o2"):
        kept = "fp32" if dtype == "bf16" and not fsdp else dtype
        sentence, state = (
            "nemo1.fsdp-reduces" if fsdp else "nemo1.o2-keeps",
            {"grad_reduce_in_fp32": kept == "fp32"},
        )
        builder.record(sentence, decides, kept, state, dtype=dtype, kept=kept.upper())


def _is_fp32(dtype: object) -> bool:
    return str(dtype).lower() in ("32", "32-true") or half_or_fp32(dtype) == "fp32"


def _settings(given: Settings, dtype: str, builder: ImportBuilder) -> None:
    """Map or report the settings of the model: of FP8, of the loss scale, and whatever else bears on precision."""
    is_on, engine, on_core = (
        bool(given.switch(key)) for key in ("fp8", "transformer_engine", "mcore_gpt")
    )
    formats = [name for name in ("e4m3", "hybrid") if given.switch(f"fp8_{name}")]
    acts = is_on and engine
    if acts and not formats:
        raise TABLE.wrong("fp8-without-a-format", given, "fp8")
    if acts:
        builder.map("model.fp8", fp8=formats[0])
        builder.map(f"model.fp8_{formats[0]}", fp8=formats[0])
    if is_on and not given.given("transformer_engine"):
        builder.implied("model.transformer_engine", False)
    facts = {
        "engine": engine,
        "on": is_on,
        "acts": acts,
        "one format": len(formats) == 1,
        "fp16": dtype == "fp16",
        "raised on": given.switch("fp8_param"),
        "amax apart": acts and given.given("reduce_amax") and not given.switch("reduce_amax"),
        "no scaling": on_core and dtype != "fp16" and given.switch("apply_query_key_layer_scaling"),
    }
    TABLE.read(builder, given, "model", report_other, mode=dtype.upper(), **facts)
    if acts:
        absent = TABLE.data["absent"]["mcore" if on_core else "nemo"]
        builder.imply_scheme(
            "model.{}".format, delayed=absent, layers=1, why=dict.fromkeys(DELAYED, absent["why"])
        )


TITLE = f"{TABLE.title}, read as {TABLE.version}"
SYSTEM = System("nemo1", TITLE, TABLE.version, export, import_, recognise, as_yaml)

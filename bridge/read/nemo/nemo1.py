"""NeMo 1.x: `megatron_gpt_config.yaml` and other files for Megatron's models.

    trainer: {precision: bf16}
    model: {megatron_amp_O2: true, transformer_engine: true, fp8: true, fp8_hybrid: true}

`trainer.precision` chooses the dtype. `model.megatron_amp_O2` chooses between O2 (half-precision
weights, FP32 masters) and O1 (FP32 weights under autocast). A file is read as NeMo 2.0 reads it,
the last release with these models. The file counts as complete: values of the configs that NeMo
ships are not added to it.

Settings called `fp8_*` affect only Transformer Engine's layers, which `transformer_engine` chooses.
An absent amax setting has the default of the code, not of a shipped config: the default of Megatron
Core under `mcore_gpt`, otherwise the default of NeMo's transformer.

Models that do not use Megatron Core (speech, BERT on Hugging Face weights, translation) are trained
by Lightning alone. Their files are refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError
from bridge.precision.mode import get_mode
from bridge.read.foreign.amp import export_as_amp, make_amp_fields
from bridge.read.foreign.document_signs import Recognition
from bridge.read.foreign.effective_fields import compute_effective_fields
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import DELAYED_SCALING_DEFAULTS, ImportBuilder
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.reports import ExportReport, ImportReport
from bridge.read.foreign.semantics import get_semantics
from bridge.read.foreign.system import System
from bridge.read.foreign.table import load_table
from bridge.read.megatron_lm.flags import report_model_setting
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.settings import Settings, parse_mode_dtype
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

TABLE = load_table("nemo1")
PRECISION_DTYPES: Mapping[str, str] = TABLE.data["precisions"]
PRECISION_SETTINGS = ("trainer.precision", "model.precision", "precision")
"""Settings that state the precision. The first setting that is present decides."""
MEGATRON_MODEL_PATTERN = re.compile(TABLE.data["megatron"])
REFERENCE_PATTERN = re.compile(r"\$\{\s*(\.*)([\w.]+)\s*\}")
"""OmegaConf's reference to another key of the file. Leading dots make the reference relative."""
OTHER_SECTIONS = {"trainer": "apex", "model.optim": "optim", "quantization": "quantization"}
"""Section next to the model's -> the part of the table with its settings."""
MAX_REFERENCE_DEPTH = 16
"""The longest chain of references that lead to each other."""
PRECISION_BY_MODE = {"fp32": 32, "fp16": 16, "bf16": "bf16"}


def _resolve_references(
    value: Any, payload: Mapping[Any, Any], where: str = "", depth: int = 0
) -> Any:
    """Return a value with each reference replaced by the value that it refers to.

    Some references stay as they are written: a reference to an absent key, a circular reference,
    and a reference to a value that is computed at the start of the run.
    """
    if isinstance(value, Mapping):
        values: dict[Any, Any] = {}
        for key, inner in value.items():
            values[key] = _resolve_references(inner, payload, f"{where}.{key}".lstrip("."), depth)
        return values
    if not isinstance(value, str) or depth >= MAX_REFERENCE_DEPTH:
        return value
    reference = REFERENCE_PATTERN.fullmatch(value)
    if reference is None:
        return value
    path = reference[2]
    if reference[1]:
        folders = where.split(".")[: -len(reference[1])]
        path = ".".join([*folders, path])
    target = get_dotted_value(payload, path)
    if target is None or isinstance(target, Mapping | list):
        return value
    return _resolve_references(target, payload, path, depth + 1)


def _require_decided(where: str, value: object) -> None:
    """Refuse a value that is decided only when the run starts.

    Raises:
        PayloadError: The value is an interpolation or `???`.
    """
    if "${" in str(value) or value == "???":
        remedy = "Write the value that it comes to."
        raise PayloadError(f"{where}: must be written out, got {value!r:.60}. {remedy}")


def import_(payload: object) -> ImportReport:
    """Return the precision that a NeMo 1.x configuration states.

    Args:
        payload: The composed configuration, or only its section `model`.

    Raises:
        PayloadError: The model does not use Megatron Core, or NeMo refuses the configuration too.
    """
    builder = ImportBuilder(TABLE.title)
    top = Settings(payload, "nemo1").values
    file: dict[str, Any] = _resolve_references(top, top)
    section: Mapping[Any, Any] = {}
    if isinstance(file.get("model"), Mapping):
        section = Settings(file["model"], "nemo1", "model").values
    else:
        file["model"] = dict(file)
    model = Settings(file["model"], "nemo1", "model", lenient=True)
    if not _is_megatron_model(file, section):
        raise TABLE.wrong("no-model-of-megatron", Settings(file, "nemo1"), "model")
    dtype = _map_precision(file, builder)
    semantics = _map_weights(model, dtype, builder)
    _map_reduction_dtype(file, dtype, builder, semantics, fsdp=bool(model.switch("fsdp")))
    _map_settings(model, dtype, builder)
    for path, part in OTHER_SECTIONS.items():
        other = get_dotted_value(file, path)
        if isinstance(other, Mapping):
            TABLE.read(builder, Settings(other, builder.system, path), part)
    return builder.finish(
        semantics, is_whole=get_dotted_value(file, "quantization.algorithm") is None
    )


def _is_megatron_model(file: Mapping[Any, Any], model: Mapping[Any, Any]) -> bool:
    """Return whether a file, with its section `model`, describes a model on Megatron Core."""
    keys = {
        key
        for key in (*model, *file)
        if isinstance(key, str) and MEGATRON_MODEL_PATTERN.fullmatch(key)
    }
    if not keys and "precision" not in model:
        return False
    is_refused_by_megatron = get_dotted_value(file, "trainer.precision") in ("bf16-true", "16-true")
    return not (is_refused_by_megatron and keys <= {"data"})


def recognise(document: Document) -> Recognition | None:
    """Return the recognition of a file of NeMo 1.x. None if it has no model on Megatron Core."""
    model = document.mapping.get("model")
    section = model if isinstance(model, Mapping) else {}
    if not _is_megatron_model(document.mapping, section):
        return None
    return TABLE.recognise(document)


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the precision settings of a NeMo 1.x configuration, with every default written out."""
    builder = ExportBuilder(config, TABLE.title)
    acting = compute_effective_fields(config)
    is_o2 = get_semantics(config) == "megatron_o2"
    fp8_format = builder.values["fp8"]
    has_fp8 = bool(fp8_format)
    settings = ("trainer.precision", "model.megatron_amp_O2")
    builder.map_dtype("pipeline_dtype", settings[0])
    if is_o2:
        dtype = get_mode(config)
        builder.map_dtype("params_dtype", settings[0])
        builder.map(dtype, *settings)
    else:
        dtype = export_as_amp(builder, *settings)
    model: dict[str, Any] = {"megatron_amp_O2": is_o2}
    if has_fp8:
        model["transformer_engine"] = True
    model["fp8"] = fp8_format is not None
    model["fp8_e4m3"] = fp8_format == "e4m3"
    model["fp8_hybrid"] = fp8_format == "hybrid"
    if has_fp8:
        switches = ("transformer_engine", "fp8", "fp8_e4m3", "fp8_hybrid")
        builder.map("fp8", *(f"model.{switch}" for switch in switches))
        builder.map("fp8_recipe")
    facts = {"engine": has_fp8, "on": has_fp8, "acts": has_fp8, "fp16": dtype == "fp16"}
    model |= TABLE.write(builder, "model", "model", acting, **facts)
    if "fp8_params" in model:
        for field in ("fp8_param", "fp8_param_gather"):
            builder.map(field, "model.fp8_params")
            if acting["fp8_recipe"] != "delayed":
                builder.record_if_stated("nemo1.fp8_params-initialises-weights", field)
    if is_o2:
        reduced_in = dtype
        if config.grad_reduce_in_fp32:
            reduced_in = "fp32"
        model["optim"] = {"grad_sync_dtype": reduced_in}
        builder.map("grad_reduce_in_fp32", "model.optim.grad_sync_dtype")
    payload = {"trainer": {"precision": PRECISION_BY_MODE[dtype]}, "model": model}
    return builder.finish(payload, TABLE.unwritten, o2=is_o2)


def _map_precision(file: Mapping[str, Any], builder: ImportBuilder) -> str:
    """Map the settings that state the precision, and return the dtype that they choose."""
    stated: dict[str, Any] = {}
    for name in PRECISION_SETTINGS:
        value = get_dotted_value(file, name)
        if value is not None:
            stated[name] = value
    if not stated:
        if "trainer" in file:
            why = f"{builder.system} takes 32 where the trainer says nothing"
            builder.imply("trainer.precision", "32", why)
        else:
            builder.leave_mode("the section trainer of another file")
        return "fp32"
    (where, value), *further_settings = stated.items()
    _require_decided(where, value)
    dtype = PRECISION_DTYPES.get(str(value).removesuffix(".0"))
    if dtype is None:
        rule = f"NeMo takes {', '.join(PRECISION_DTYPES)}"
        remedy = "Use 16, 'bf16', 32 or their -mixed forms."
        raise PayloadError(f"{where}: {rule}, got {value!r:.60}. {remedy}")
    builder.map(where)
    for further, second in further_settings:
        if PRECISION_DTYPES.get(str(second).removesuffix(".0")) == dtype:
            builder.map(further)
        else:
            builder.record(
                "nemo1.another-setting-decides", further, second, where=where, value=value
            )
    return dtype


def _map_weights(model: Settings, dtype: str, builder: ImportBuilder) -> str:
    """State the mode from the settings of the weights, and return the semantics of the mode."""
    where = "model.megatron_amp_O2"
    fsdp = model.switch("fsdp")
    o2 = model.switch("megatron_amp_O2")
    half = dtype != "fp32"
    if half and o2 is None:
        builder.imply(where, False)
    if o2 and not half:
        builder.record("nemo1.o2-in-fp32", where, True)
    elif o2 and fsdp:
        builder.record("nemo1.o2-under-fsdp", where, True)
    fields: dict[str, Any] = {}
    semantics = "fp32"
    if half and fsdp:  # NLPFSDPStrategy casts FP32 shards, so autocast has no effect
        semantics = "fsdp_policy"
        fields = {dtype: True, "params_dtype": dtype}
    elif half and o2:
        semantics = "megatron_o2"
        fields = {dtype: True, "params_dtype": dtype, "pipeline_dtype": dtype}
    elif half:
        semantics = "amp_o1"
        fields = make_amp_fields(dtype)
    elif not builder.decided_by:
        fields = make_amp_fields("fp32")
    builder.fields |= fields
    for name in [*builder.mapped][:1]:
        builder.map(name, **fields)
    return semantics


def _map_reduction_dtype(
    file: Mapping[str, Any], dtype: str, builder: ImportBuilder, semantics: str, *, fsdp: bool
) -> None:
    """State the dtype in which gradients are reduced.

    The setting of the distributed optimizer decides. Under torch FSDP, the setting of FSDP decides.
    """
    decisive_setting = "model.optim.grad_sync_dtype"
    unread_setting = "model.fsdp_grad_reduce_dtype"
    if fsdp:
        decisive_setting, unread_setting = unread_setting, decisive_setting
    value = get_dotted_value(file, decisive_setting)
    unread = get_dotted_value(file, unread_setting)
    _require_decided(decisive_setting, value)
    if _is_fp32(unread) and not fsdp:
        builder.map(unread_setting)
    elif unread is not None:
        row = "nemo1.reduced-by-fsdp" if fsdp else "nemo1.read-under-fsdp"
        builder.record(row, unread_setting, unread)
    if value is not None:
        builder.map(decisive_setting, grad_reduce_in_fp32=_is_fp32(value))
    elif semantics in ("fsdp_policy", "megatron_o2"):
        kept = "fp32" if dtype == "bf16" and not fsdp else dtype
        row = "nemo1.fsdp-reduces" if fsdp else "nemo1.o2-keeps"
        state = {"grad_reduce_in_fp32": kept == "fp32"}
        builder.record(row, decisive_setting, kept, state, dtype=dtype, kept=kept.upper())


def _is_fp32(dtype: object) -> bool:
    return str(dtype).lower() in ("32", "32-true") or parse_mode_dtype(dtype) == "fp32"


def _map_settings(model: Settings, dtype: str, builder: ImportBuilder) -> None:
    """Map or report the settings of the model that affect precision."""
    is_on = bool(model.switch("fp8"))
    engine = bool(model.switch("transformer_engine"))
    on_core = bool(model.switch("mcore_gpt"))
    formats = [name for name in ("e4m3", "hybrid") if model.switch(f"fp8_{name}")]
    acts = is_on and engine
    if acts and not formats:
        raise TABLE.wrong("fp8-without-a-format", model, "fp8")
    if acts:
        builder.map("model.fp8", fp8=formats[0])
        builder.map(f"model.fp8_{formats[0]}", fp8=formats[0])
    if is_on and not model.is_written("transformer_engine"):
        builder.imply("model.transformer_engine", False)
    facts = {
        "engine": engine,
        "on": is_on,
        "acts": acts,
        "one format": len(formats) == 1,
        "fp16": dtype == "fp16",
        "raised on": model.switch("fp8_param"),
        "amax apart": acts and model.is_written("reduce_amax") and not model.switch("reduce_amax"),
        "no scaling": on_core and dtype != "fp16" and model.switch("apply_query_key_layer_scaling"),
    }
    TABLE.read(builder, model, "model", report_model_setting, mode=dtype.upper(), **facts)
    if acts:
        stack = "nemo"
        if on_core:
            stack = "mcore"
        absent = TABLE.data["absent"][stack]
        why = dict.fromkeys(DELAYED_SCALING_DEFAULTS, absent["why"])
        builder.imply_scheme("model.{}".format, delayed=absent, layers=1, why=why)


SYSTEM = System(
    name="nemo1",
    title=TABLE.title,
    version=TABLE.version,
    export=export,
    import_=import_,
    write=as_yaml,
)

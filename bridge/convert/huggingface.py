"""Hugging Face `TrainingArguments` as a system of `convert`: `SYSTEM`.

`bf16=True` means autocast over the weights in the dtype in which they were loaded. No argument of
the Trainer states that dtype. FP32 weights make the run AMP. BF16 weights, which transformers 5
takes from the checkpoint by default, leave nothing in FP32. TRL, ms-swift and other trainers write
arguments of the model into the same file, and those decide: AMP over FP32 weights, an FP32 adapter
over frozen BF16 weights, or BF16 throughout. With both switches off the environment's
ACCELERATE_MIXED_PRECISION counts. Without the variable nothing is cast.

Settings and sentences, with their sources, are rows of `rows/huggingface.yaml`.
"""

from typing import Any, NamedTuple

from bridge.read.foreign.amp import (
    assume_torch_scaler,
    export_as_amp,
    make_amp_fields,
    report_scaler,
)
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.payload_text import as_json
from bridge.read.foreign.reports import ExportReport, ImportReport
from bridge.read.foreign.system import ContextKey, System
from bridge.read.foreign.table import load_table
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.settings import Settings, parse_mode_dtype
from bridge.read.text.trainer_arguments import TRAINER_SWITCHES
from bridge.registry.config import MixedPrecisionConfig

TABLE = load_table("huggingface")
TRAINING_DTYPES = ("fp32", "bf16", "fp16")
MODE_VARIABLE = "ACCELERATE_MIXED_PRECISION"
MODE_DECIDERS = TABLE.data["decides"]
"""The source that decides where both switches are off, as a noun."""
DTYPE_NAMES = ("torch_dtype", "dtype", "model_dtype")
"""Settings that name the dtype of the weights."""
DTYPE_SETTINGS = (*DTYPE_NAMES, *(f"model_init_kwargs.{name}" for name in DTYPE_NAMES))
SEMANTICS_BY_SHARDING = {"deepspeed": "megatron_o2", "fsdp": "fsdp_policy"}
"""Setting of a sharding -> its semantics."""


class LoadedWeights(NamedTuple):
    """The dtype in which the weights are loaded."""

    dtype: str | None
    """fp32, bf16 or fp16; None: not known."""
    setting: str = "weights_dtype"
    """The setting that states the dtype, or leaves it open."""
    value: object = None
    """The value of the setting as it is written."""
    adapter: str | None = None
    """The setting that has an adapter trained over frozen weights."""


class ArgumentsPrecision(NamedTuple):
    """The precision that the arguments amount to."""

    fields: dict[str, Any]
    """Fields of the recipe."""
    semantics: str
    decider: str = ""
    """The source that decides instead, as a noun; empty where the arguments do."""


def import_(
    payload: object,
    *,
    weights_dtype: str | None = None,
    accelerate_mixed_precision: str | None = None,
    program: str | None = None,
) -> ImportReport:
    """Return the precision that a mapping of arguments states.

    Args:
        payload: The arguments.
        weights_dtype: The dtype in which the weights are loaded; without it, and without a
            `torch_dtype` in the file, FP32 is assumed and reported.
        accelerate_mixed_precision: The environment's ACCELERATE_MIXED_PRECISION.
        program: The program that reads the file, as a noun.
    """
    top = Settings(payload, TABLE.title)
    outside = Settings(
        {"weights_dtype": weights_dtype, "env": accelerate_mixed_precision}, TABLE.title
    )
    stated = outside.word("weights_dtype", TRAINING_DTYPES)
    environment = outside.word("env", ("no", "fp16", "bf16", "fp8"))
    builder = ImportBuilder(TABLE.title)
    compute = _get_switched_mode(top)
    if environment is not None:
        compute = _map_environment(builder, environment, compute)
    model = _read_loaded_weights(builder, top, stated)
    sharding = _find_sharding(top)
    semantics = _map_mode(builder, top, compute, model, sharding=sharding, program=program)
    if top.values.get("torch_compile") and compute != "fp16" and not top.is_written("tf32"):
        builder.record("huggingface.compile-turns-tf32-on", "tf32", None, {"tf32": True})
    facts = {"fp16": compute == "fp16", "fsdp": bool(top.values.get("fsdp"))}
    for name in SEMANTICS_BY_SHARDING:
        facts[f"{name}_launched"] = name == sharding and not top.values.get(name)
    TABLE.read(builder, top, **facts)
    return builder.finish(semantics, is_whole=sharding != "deepspeed")


def _get_switched_mode(top: Settings) -> str:
    """Return the mode of the switches; PayloadError for a switch of another type, or for two that are on."""
    for name in TRAINER_SWITCHES:
        top.switch(name)
    for first, second in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if top.values.get(first) and top.values.get(second):
            raise TABLE.wrong("both-halves", top, second, other=first)
    for mode in ("bf16", "fp16"):
        if top.values.get(mode):
            return mode
    return "fp32"


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the arguments as a mapping; FP8 has no argument."""
    builder = ExportBuilder(config, TABLE.title)
    compute = export_as_amp(builder, "bf16", "fp16")
    payload: dict[str, Any] = {"bf16": compute == "bf16", "fp16": compute == "fp16"}
    if compute == "fp32":
        builder.record_if_stated("huggingface.no-argument-states-fp32", "fp32")
    if config.tf32 is not None:
        payload |= TABLE.write(builder, "")
    report_scaler(builder, "transformers' Trainer")
    return builder.finish(payload, TABLE.unwritten)


def _map_environment(builder: ImportBuilder, environment: str, compute: str) -> str:
    """Return the mode with the environment's precision, which counts where both switches are off."""
    if compute not in ("fp32", environment):
        builder.record(
            "huggingface.true-overrides-the-environment",
            MODE_VARIABLE,
            environment,
            compute=compute,
        )
        return compute
    if environment == "fp8":
        builder.record("huggingface.fp8-is-of-accelerate", MODE_VARIABLE, "fp8")
        return "bf16"
    mode = environment
    if environment == "no":
        mode = "fp32"
    fields = {}
    if mode != compute:
        fields = make_amp_fields(mode)
    builder.map(MODE_VARIABLE, **fields)
    return mode


def _find_sharding(top: Settings) -> str | None:
    """Return "deepspeed" or "fsdp" where the Trainer, or its launch block, shards so."""
    for name in SEMANTICS_BY_SHARDING:
        is_launched = get_dotted_value(top.values, f"accelerate_launch_args.use_{name}") is True
        if top.values.get(name) or is_launched:
            return name
    return None


def _read_loaded_weights(
    builder: ImportBuilder, top: Settings, stated: str | None
) -> LoadedWeights:
    """Return the dtype in which the weights are loaded, and report each dtype that does not decide.

    Args:
        builder: The report.
        top: The arguments.
        stated: The dtype that the context states.
    """
    adapter = _find_adapter_setting(top)
    dtypes: dict[str, Any] = {}
    for name in DTYPE_SETTINGS:
        value = get_dotted_value(top.values, name)
        if value is not None:
            dtypes[name] = value
    setting: str = "weights_dtype"
    value, dtype = stated, stated
    if dtypes:
        setting, value = next(iter(dtypes.items()))
        dtype = parse_mode_dtype(value)
    model = LoadedWeights(dtype, setting, value, adapter)
    if stated not in (None, dtype):
        builder.record("huggingface.passed-weights-dtype-decides", setting, value, stated=stated)
        model = LoadedWeights(stated, value=stated, adapter=adapter)
    elif dtype is None and value is not None:
        sentence = "huggingface.dtype-is-not-known"
        if value == "auto":
            sentence = "huggingface.checkpoint-decides-the-dtype"
        builder.record(sentence, setting, str(value))
    for name, other in dtypes.items():
        if name == setting:
            continue
        if parse_mode_dtype(other) == model.dtype:
            builder.map(name)
        else:
            builder.record("huggingface.another-dtype-decides", name, other, setting=model.setting)
    return model


def _find_adapter_setting(top: Settings) -> str | None:
    """Return the setting that has an adapter trained over frozen weights; None without one."""
    if top.values.get("use_peft") is True:
        return "use_peft"
    for name in ("tuner_type", "train_type"):
        if str(top.values.get(name) or "full").lower() not in ("full", "freeze", "none"):
            return name
    return None


def _map_mode(
    builder: ImportBuilder,
    top: Settings,
    compute: str,
    model: LoadedWeights,
    *,
    sharding: str | None,
    program: str | None,
) -> str:
    """State the mode, and return its semantics, a key of `semantics.SEMANTICS`."""
    names = [name for name in ("bf16", "fp16") if name in top]
    outcome = _compute_precision(builder, names, compute, model, sharding=sharding, program=program)
    fields, semantics = outcome.fields, outcome.semantics
    if outcome.decider:
        builder.leave_mode(outcome.decider)
    builder.fields |= fields
    if semantics in ("fsdp_policy", "true"):
        builder.fields["grad_reduce_in_fp32"] = False
    for name in names:
        if name == compute:
            builder.map(name, **fields)
        else:
            builder.map(name)
    if compute == "fp16" and sharding != "deepspeed":
        assume_torch_scaler(builder, "the Trainer")
    _report_weights(builder, top, model, compute, semantics)
    return semantics


def _compute_precision(
    builder: ImportBuilder,
    names: list[str],
    compute: str,
    model: LoadedWeights,
    *,
    sharding: str | None,
    program: str | None,
) -> ArgumentsPrecision:
    """Return the precision that the switches, the weights and the sharding amount to."""
    if sharding is not None and compute != "fp32":
        return ArgumentsPrecision(
            {compute: True, "params_dtype": compute}, SEMANTICS_BY_SHARDING[sharding]
        )
    if sharding == "deepspeed":
        decider = MODE_DECIDERS["deepspeed"]
        if not names and program is not None:
            decider = f"{program} or {decider}"
        return ArgumentsPrecision({}, "unstated", decider)
    is_kept = model.dtype in ("bf16", "fp16") and compute in (model.dtype, "fp32")
    if is_kept and (not model.adapter or compute == "fp32"):
        return ArgumentsPrecision({str(model.dtype): True, "params_dtype": model.dtype}, "true")
    if compute != "fp32":
        return ArgumentsPrecision(make_amp_fields(compute), "amp_o1")
    if MODE_VARIABLE in builder.mapped:
        if model.dtype != "fp32":
            return ArgumentsPrecision({}, "unstated", MODE_DECIDERS["model"])
    elif names and model.dtype != "fp32":
        return ArgumentsPrecision({}, "unstated", MODE_DECIDERS["environment"])
    elif not names:
        return ArgumentsPrecision({}, "unstated", program or MODE_DECIDERS["program"])
    return ArgumentsPrecision(make_amp_fields(compute), "fp32")


def _report_weights(
    builder: ImportBuilder, top: Settings, model: LoadedWeights, compute: str, semantics: str
) -> None:
    """Report the dtype of the weights, and map the setting that states it."""
    name = model.setting
    value = model.dtype
    written_as = model.value
    written = name != "weights_dtype" and value is not None
    if semantics == "true":
        builder.record("huggingface.no-fp32-copy-of-the-weights", name, written_as, value=value)
        if value == "fp16" == compute:
            builder.record("huggingface.scaler-refuses-fp16-gradients", name, written_as)
        if written:
            builder.map(name, params_dtype=value)
    elif value not in (None, "fp32", compute) and semantics != "unstated":
        builder.record(
            "huggingface.autocast-over-weights-of-another-dtype",
            name,
            written_as,
            compute=compute,
            value=value,
        )
    elif written:
        builder.map(name)
    elif value is None and written_as is None and semantics in ("amp_o1", "fp32"):
        builder.record("huggingface.fp32-weights-assumed", name, None)
    if model.adapter is not None:
        frozen = "frozen weights"
        if value:
            frozen = f"frozen {value} weights"
        sentence = "huggingface.adapter-alone-is-trained"
        builder.record(sentence, model.adapter, top[model.adapter], frozen=frozen)


CONTEXT = (
    ContextKey("weights_dtype", "dtype the model is loaded in: fp32, bf16 or fp16"),
    ContextKey("accelerate_mixed_precision", "the environment's ACCELERATE_MIXED_PRECISION"),
)
TITLE = f"Hugging Face {TABLE.title}"
SYSTEM = System(
    name="huggingface",
    title=TITLE,
    version=TABLE.version,
    export=export,
    import_=import_,
    write=as_json,
    context=CONTEXT,
)

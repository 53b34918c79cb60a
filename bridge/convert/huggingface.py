"""Hugging Face `TrainingArguments`, as a mapping.

`bf16=True` means autocast over the weights as they were loaded. No argument of the Trainer says how they were loaded:
FP32 makes it AMP, and BF16, which transformers 5 takes from the checkpoint by default, leaves nothing in FP32 at all.
TRL, ms-swift and others write arguments of the model into the same file, and those decide it: AMP over FP32 weights, an
FP32 adapter over frozen BF16 weights, or BF16 throughout. With both switches off the environment's
ACCELERATE_MIXED_PRECISION counts, and without it nothing is cast.
Its settings and sentences, with their sources, are `rows/huggingface.yaml`.
"""

from typing import Any, NamedTuple

from bridge.read.amp import amp_fields, assume_torch_scaler, export_as_amp, report_scaler
from bridge.read.builders import ExportBuilder, ImportBuilder
from bridge.read.contract import ContextKey, ExportReport, ImportReport, System, as_json
from bridge.read.table import at, table
from bridge.read.text.settings import Settings, half_or_fp32
from bridge.read.text.trainer_words import SWITCHES
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("huggingface")
MODES = ("fp32", "bf16", "fp16")
ENVIRONMENT = "ACCELERATE_MIXED_PRECISION"
DECIDES = TABLE.data["decides"]
"""The source that decides where both switches are off, as a noun."""
NAMES = ("torch_dtype", "dtype", "model_dtype")
DTYPES = (*NAMES, *(f"model_init_kwargs.{name}" for name in NAMES))
SHARDED = {"deepspeed": "megatron_o2", "fsdp": "fsdp_policy"}


class Loaded(NamedTuple):
    """The dtype of the weights, as far as it is known."""

    dtype: str | None
    """fp32, bf16 or fp16; None: nothing says."""
    setting: str = "weights_dtype"
    """The setting that states it, or leaves it open."""
    value: object = None
    adapter: str | None = None
    """The setting that has an adapter trained over frozen weights."""


def import_(
    payload: object,
    *,
    weights_dtype: str | None = None,
    accelerate_mixed_precision: str | None = None,
    program: str | None = None,
) -> ImportReport:
    """Return what a mapping of arguments asks for.

    Without `weights_dtype`, and a `torch_dtype` in the file, FP32 is assumed and reported; `program` is a noun.
    """
    top = Settings(payload, TABLE.title)
    outside = Settings(
        {"weights_dtype": weights_dtype, "env": accelerate_mixed_precision}, TABLE.title
    )
    stated, environment = (
        outside.word("weights_dtype", MODES),
        outside.word("env", ("no", "fp16", "bf16", "fp8")),
    )
    builder = ImportBuilder(TABLE.title)
    for name in SWITCHES:
        top.switch(name)
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if top.values.get(one) and top.values.get(other):
            raise TABLE.wrong("both-halves", top, other, other=one)
    compute = next((mode for mode in ("bf16", "fp16") if top.values.get(mode)), "fp32")
    if environment is not None:
        compute = _environment(builder, environment, compute)
    model, sharding = _loaded(builder, top, stated), _sharding(top)
    semantics = _mode(builder, top, compute, model, sharding=sharding, program=program)
    if top.values.get("torch_compile") and compute != "fp16" and not top.given("tf32"):
        builder.record("huggingface.compile-turns-tf32-on", "tf32", None, {"tf32": True})
    facts = {f"{one}_launched": one == sharding and not top.values.get(one) for one in SHARDED}
    facts |= {"fp16": compute == "fp16", "fsdp": bool(top.values.get("fsdp"))}
    TABLE.read(builder, top, **facts)
    return builder.finish(semantics, is_whole=sharding != "deepspeed")


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the arguments as a mapping; fp8 has none."""
    builder = ExportBuilder(config, TABLE.title)
    compute = export_as_amp(builder, "bf16", "fp16")
    payload: dict[str, Any] = {"bf16": compute == "bf16", "fp16": compute == "fp16"}
    if compute == "fp32":
        builder.record_if_stated("huggingface.no-argument-states-fp32", "fp32")
    if config.tf32 is not None:
        payload |= TABLE.write(builder, "")
    report_scaler(builder, "transformers' Trainer")
    return builder.finish(payload, TABLE.unwritten)


def _environment(builder: ImportBuilder, environment: str, compute: str) -> str:
    """Return the compute that the environment's precision leaves, which counts where both switches are off."""
    if compute not in ("fp32", environment):
        builder.record(
            "huggingface.true-overrides-the-environment", ENVIRONMENT, environment, compute=compute
        )
        return compute
    if environment == "fp8":
        builder.record("huggingface.the-fp8-back-end", ENVIRONMENT, "fp8")
        return "bf16"
    taken = "fp32" if environment == "no" else environment
    builder.map(ENVIRONMENT, **(amp_fields(taken) if taken != compute else {}))
    return taken


def _sharding(top: Settings) -> str | None:
    """Return "deepspeed" or "fsdp" where the Trainer, or the block it is launched with, shards so."""
    launched = {
        name: at(top.values, f"accelerate_launch_args.use_{name}") is True for name in SHARDED
    }
    return next((name for name in SHARDED if top.values.get(name) or launched[name]), None)


def _loaded(builder: ImportBuilder, top: Settings, stated: str | None) -> Loaded:
    """Return what the weights are loaded in, and report each dtype that does not decide; `stated` is the context's."""
    adapter = _adapter(top)
    dtypes = {name: value for name in DTYPES if (value := at(top.values, name)) is not None}
    setting, value = next(iter(dtypes.items()), ("weights_dtype", stated))
    dtype = half_or_fp32(value) if dtypes else stated
    model = Loaded(dtype, setting, value, adapter)
    if stated not in (None, dtype):
        builder.record("huggingface.weights_dtype-was-passed", setting, value, stated=stated)
        model = Loaded(stated, value=stated, adapter=adapter)
    elif dtype is None and value is not None:
        sentence = "the-checkpoint-own-dtype" if value == "auto" else "not-one-of-float32-bfloat16"
        builder.record(f"huggingface.{sentence}", setting, str(value))
    for name, other in dtypes.items():
        if name == setting:
            continue
        if half_or_fp32(other) == model.dtype:
            builder.map(name)
        else:
            builder.record("huggingface.another-dtype-decides", name, other, setting=model.setting)
    return model


def _adapter(top: Settings) -> str | None:
    """Return the setting that has an adapter trained over frozen weights, None where there is none."""
    if top.values.get("use_peft") is True:
        return "use_peft"
    for name in ("tuner_type", "train_type"):
        if str(top.values.get(name) or "full").lower() not in ("full", "freeze", "none"):
            return name
    return None


def _mode(
    builder: ImportBuilder,
    top: Settings,
    compute: str,
    model: Loaded,
    *,
    sharding: str | None,
    program: str | None,
) -> str:
    """State the mode, and return what it means for weights that were loaded like that."""
    names = [name for name in ("bf16", "fp16") if name in top]
    half = model.dtype if model.dtype in ("bf16", "fp16") else None
    kept = half is not None and compute in (half, "fp32")
    fields: dict[str, Any] = amp_fields(compute)
    semantics = "fp32" if compute == "fp32" else "amp_o1"
    decider = ""
    if sharding is not None and compute != "fp32":
        fields, semantics = {compute: True, "params_dtype": compute}, SHARDED[sharding]
    elif sharding == "deepspeed":
        own = DECIDES["deepspeed"]
        decider = own if names or program is None else f"{program} or {own}"
    elif kept and not (model.adapter and compute != "fp32"):
        fields, semantics = {str(half): True, "params_dtype": half}, "true"
    elif compute == "fp32" and ENVIRONMENT in builder.mapped:
        decider = DECIDES["model"] if model.dtype != "fp32" else ""
    elif compute == "fp32" and not (names and model.dtype == "fp32"):
        decider = DECIDES["environment"] if names else program or DECIDES["program"]
    if decider:
        fields, semantics = {}, "unstated"
        builder.leave_mode(decider)
    builder.fields |= fields
    if semantics in ("fsdp_policy", "true"):
        builder.fields["grad_reduce_in_fp32"] = False
    for name in names:
        builder.map(name, **(fields if name == compute else {}))
    if compute == "fp16" and sharding != "deepspeed":
        assume_torch_scaler(builder, "the Trainer")
    _weights(builder, top, model, compute, semantics)
    return semantics


def _weights(
    builder: ImportBuilder, top: Settings, model: Loaded, compute: str, semantics: str
) -> None:
    """Report the dtype of the weights, and map the setting that states it."""
    name, value, written_as = model.setting, model.dtype, model.value
    written = name != "weights_dtype" and value is not None
    if semantics == "true":
        builder.record("huggingface.weights-were-loaded", name, written_as, value=value)
        if value == "fp16" == compute:
            builder.record("huggingface.torch-gradscaler-refuses", name, written_as)
        if written:
            builder.map(name, params_dtype=value)
    elif value not in (None, "fp32", compute) and semantics != "unstated":
        builder.record(
            "huggingface.autocast-over-weights", name, written_as, compute=compute, value=value
        )
    elif written:
        builder.map(name)
    elif value is None and written_as is None and semantics in ("amp_o1", "fp32"):
        builder.record("huggingface.fp32-was-assumed", name, None)
    if model.adapter is not None:
        frozen = f"frozen {value} weights" if value else "frozen weights"
        builder.record(
            "huggingface.only-the-adapter-is-trained",
            model.adapter,
            top[model.adapter],
            frozen=frozen,
        )


CONTEXT = (
    ContextKey("weights_dtype", "dtype the model is loaded in: fp32, bf16 or fp16"),
    ContextKey("accelerate_mixed_precision", "the environment's ACCELERATE_MIXED_PRECISION"),
)
TITLE = f"Hugging Face {TABLE.title}"
SYSTEM = System(
    "huggingface", TITLE, TABLE.version, export, import_, TABLE.recognise, as_json, context=CONTEXT
)

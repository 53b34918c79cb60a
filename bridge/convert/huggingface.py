"""`SYSTEM`: reads and writes the precision in Hugging Face `TrainingArguments`, for `convert`.

`bf16=True` means autocast over the weights, in the dtype in which they were loaded. No argument of
the Trainer states that dtype:

- with FP32 weights the run is AMP;
- with BF16 weights, which transformers 5 takes from the checkpoint by default, nothing is in FP32.

TRL, ms-swift and other trainers write arguments of the model into the same file. These arguments
decide between AMP over FP32 weights, an FP32 adapter over frozen BF16 weights, and BF16 throughout.

If both switches are off, the environment variable ACCELERATE_MIXED_PRECISION counts. Without this
variable nothing is cast.

Settings and sentences, with their sources, are rows of `foreign/tables/huggingface.yaml`.
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
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

TABLE = load_table("huggingface")
TRAINING_DTYPES = ("fp32", "bf16", "fp16")
MODE_VARIABLE = "ACCELERATE_MIXED_PRECISION"
MODE_DECIDERS = TABLE.data["decides"]
"""Case -> the source that decides the mode if both switches are off, as a noun."""
DTYPE_NAMES = ("torch_dtype", "dtype", "model_dtype")
"""Settings that name the dtype of the weights."""
DTYPE_SETTINGS = (*DTYPE_NAMES, *(f"model_init_kwargs.{name}" for name in DTYPE_NAMES))
"""The same settings, also within the block of arguments for the model."""
SEMANTICS_BY_SHARDING = {"deepspeed": "megatron_o2", "fsdp": "fsdp_policy"}
"""Setting that shards the model -> the semantics of a half-precision mode with it."""


class LoadedWeights(NamedTuple):
    """The dtype in which the weights are loaded."""

    dtype: str | None
    """fp32, bf16 or fp16; None: not known."""
    setting: str = "weights_dtype"
    """The setting of the dtype. `weights_dtype` is the key of the context."""
    value: object = None
    """The value of the setting as it is written."""
    adapter: str | None = None
    """The setting that trains only an adapter, over frozen weights. None: no adapter."""


class ArgumentsPrecision(NamedTuple):
    """The precision that the arguments state together."""

    fields: dict[str, Any]
    """Fields of the recipe."""
    semantics: str
    decider: str = ""
    """The source that decides the mode, as a noun. Empty: the arguments decide it."""


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
        weights_dtype: The dtype in which the weights are loaded. Without it, and without a
            `torch_dtype` in the file, FP32 is assumed, and this is reported.
        accelerate_mixed_precision: The environment's ACCELERATE_MIXED_PRECISION.
        program: The program that reads the file, as a noun.

    Raises:
        PayloadError: The Trainer refuses the arguments too.
    """
    top = Settings(payload, TABLE.title)
    facts = Settings(
        {"weights_dtype": weights_dtype, "env": accelerate_mixed_precision}, TABLE.title
    )
    stated_dtype = facts.word("weights_dtype", TRAINING_DTYPES)
    environment = facts.word("env", ("no", "fp16", "bf16", "fp8"))
    builder = ImportBuilder(TABLE.title)
    compute = _get_switched_mode(top)
    if environment is not None:
        compute = _map_environment(builder, environment, compute)
    weights = _read_loaded_weights(builder, top, stated_dtype)
    sharding = _find_sharding(top)
    semantics = _map_mode(builder, top, compute, weights, sharding=sharding, program=program)
    if top.values.get("torch_compile") and compute != "fp16" and not top.is_written("tf32"):
        builder.record("huggingface.compile-turns-tf32-on", "tf32", None, {"tf32": True})
    row_facts = {"fp16": compute == "fp16", "fsdp": bool(top.values.get("fsdp"))}
    for name in SEMANTICS_BY_SHARDING:
        row_facts[f"{name}_launched"] = name == sharding and not top.values.get(name)
    TABLE.read(builder, top, **row_facts)
    # With DeepSpeed, the file of DeepSpeed decides the rest of the precision.
    return builder.finish(semantics, is_whole=sharding != "deepspeed")


def _get_switched_mode(top: Settings) -> str:
    """Return the mode of the switches.

    Raises:
        PayloadError: A switch is neither true nor false, or two switches are on.
    """
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
    """Return the arguments for a precision as a mapping. The Trainer does not have FP8."""
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
    """Map the precision of the environment, which counts if both switches are off. Return the mode.

    Args:
        builder: The report of the import.
        environment: The value of ACCELERATE_MIXED_PRECISION.
        compute: The mode of the switches.
    """
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
    """Return "deepspeed" or "fsdp" if the Trainer or Accelerate's launcher uses it, or None."""
    for name in SEMANTICS_BY_SHARDING:
        is_launched = get_dotted_value(top.values, f"accelerate_launch_args.use_{name}") is True
        if top.values.get(name) or is_launched:
            return name
    return None


def _read_loaded_weights(
    builder: ImportBuilder, top: Settings, stated_dtype: str | None
) -> LoadedWeights:
    """Return the dtype in which the weights are loaded, and report each dtype that does not decide.

    The dtype of the context decides. Without it, the first setting with a dtype decides.

    Args:
        builder: The report of the import.
        top: The arguments.
        stated_dtype: The dtype that the context states.
    """
    adapter = _find_adapter_setting(top)
    dtypes: dict[str, object] = {}
    for name in DTYPE_SETTINGS:
        value = get_dotted_value(top.values, name)
        if value is not None:
            dtypes[name] = value
    weights = LoadedWeights(stated_dtype, value=stated_dtype, adapter=adapter)
    first_setting = ""
    if dtypes:
        first_setting, value = next(iter(dtypes.items()))
        dtype = parse_mode_dtype(value)
        if stated_dtype not in (None, dtype):
            sentence = "huggingface.passed-weights-dtype-decides"
            builder.record(sentence, first_setting, value, stated=stated_dtype)
        else:
            weights = LoadedWeights(dtype, first_setting, value, adapter)
            if dtype is None:
                _report_unknown_dtype(builder, first_setting, value)
    for name, value in dtypes.items():
        if name == first_setting:
            continue
        if parse_mode_dtype(value) == weights.dtype:
            builder.map(name)
        else:
            sentence = "huggingface.another-dtype-decides"
            builder.record(sentence, name, value, setting=weights.setting)
    return weights


def _report_unknown_dtype(builder: ImportBuilder, setting: str, value: object) -> None:
    """Report a dtype of the weights that is not read, or that the checkpoint decides."""
    sentence = "huggingface.dtype-is-not-known"
    if value == "auto":
        sentence = "huggingface.checkpoint-decides-the-dtype"
    builder.record(sentence, setting, str(value))


def _find_adapter_setting(top: Settings) -> str | None:
    """Return the setting that trains only an adapter, over frozen weights. None: no adapter."""
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
    weights: LoadedWeights,
    *,
    sharding: str | None,
    program: str | None,
) -> str:
    """Map the switches of the mode. Return the semantics of the mode, a key of `SEMANTICS`.

    Args:
        builder: The report of the import.
        top: The arguments.
        compute: The mode of the switches and the environment.
        sharding: "deepspeed" or "fsdp". None: no sharding.
        program: The program that reads the arguments, as a noun.
    """
    switches = [name for name in ("bf16", "fp16") if name in top]
    precision = _compute_precision(
        compute,
        weights,
        sharding=sharding,
        program=program,
        has_switches=bool(switches),
        has_environment=MODE_VARIABLE in builder.mapped,
    )
    if precision.decider:
        builder.leave_mode(precision.decider)
    builder.fields |= precision.fields
    if precision.semantics in ("fsdp_policy", "true"):
        builder.fields["grad_reduce_in_fp32"] = False
    for name in switches:
        if name == compute:
            builder.map(name, **precision.fields)
        else:
            builder.map(name)
    if compute == "fp16" and sharding != "deepspeed":
        assume_torch_scaler(builder, "the Trainer")
    _report_weights(builder, weights, compute, precision.semantics)
    _report_adapter(builder, top, weights)
    return precision.semantics


def _compute_precision(
    compute: str,
    weights: LoadedWeights,
    *,
    sharding: str | None,
    program: str | None,
    has_switches: bool,
    has_environment: bool,
) -> ArgumentsPrecision:
    """Return the precision that results from the switches, the weights and the sharding.

    Args:
        compute: The mode of the switches and the environment.
        sharding: "deepspeed" or "fsdp". None: no sharding.
        program: The program that reads the arguments, as a noun.
        has_switches: Whether the file has a switch, on or off.
        has_environment: Whether ACCELERATE_MIXED_PRECISION is known.
    """
    if sharding is not None and compute != "fp32":
        fields = {compute: True, "params_dtype": compute}
        return ArgumentsPrecision(fields, SEMANTICS_BY_SHARDING[sharding])
    if sharding == "deepspeed":
        decider = MODE_DECIDERS["deepspeed"]
        if not has_switches and program is not None:
            decider = f"{program} or {decider}"
        return ArgumentsPrecision({}, "unstated", decider)
    # The weights are in half precision, and autocast does not change them. So nothing is in FP32.
    is_half = weights.dtype in ("bf16", "fp16") and compute in (weights.dtype, "fp32")
    if is_half and (not weights.adapter or compute == "fp32"):
        fields = {str(weights.dtype): True, "params_dtype": weights.dtype}
        return ArgumentsPrecision(fields, "true")
    if compute != "fp32":
        return ArgumentsPrecision(make_amp_fields(compute), "amp_o1")
    decider = ""
    if not (has_switches or has_environment):
        decider = program or MODE_DECIDERS["program"]
    elif weights.dtype != "fp32" and has_environment:
        decider = MODE_DECIDERS["model"]
    elif weights.dtype != "fp32":
        decider = MODE_DECIDERS["environment"]
    if decider:
        return ArgumentsPrecision({}, "unstated", decider)
    return ArgumentsPrecision(make_amp_fields("fp32"), "fp32")


def _report_weights(
    builder: ImportBuilder, weights: LoadedWeights, compute: str, semantics: str
) -> None:
    """Report the dtype of the weights, and map the setting that states it.

    Args:
        builder: The report of the import.
        compute: The mode of the switches and the environment.
        semantics: The semantics of the mode.
    """
    setting = weights.setting
    dtype = weights.dtype
    value = weights.value
    is_in_file = setting != "weights_dtype" and dtype is not None
    if semantics == "true":
        builder.record("huggingface.no-fp32-copy-of-the-weights", setting, value, value=dtype)
        if dtype == compute == "fp16":
            builder.record("huggingface.scaler-refuses-fp16-gradients", setting, value)
        if is_in_file:
            builder.map(setting, params_dtype=dtype)
    elif dtype not in (None, "fp32", compute) and semantics != "unstated":
        sentence = "huggingface.autocast-over-weights-of-another-dtype"
        builder.record(sentence, setting, value, compute=compute, value=dtype)
    elif is_in_file:
        builder.map(setting)
    elif dtype is None and value is None and semantics in ("amp_o1", "fp32"):
        builder.record("huggingface.fp32-weights-assumed", setting, None)


def _report_adapter(builder: ImportBuilder, top: Settings, weights: LoadedWeights) -> None:
    """Report the setting that trains only an adapter, over frozen weights."""
    if weights.adapter is None:
        return
    frozen = "frozen weights"
    if weights.dtype:
        frozen = f"frozen {weights.dtype} weights"
    sentence = "huggingface.adapter-alone-is-trained"
    builder.record(sentence, weights.adapter, top[weights.adapter], frozen=frozen)


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

"""Hugging Face `TrainingArguments`, as a mapping, as JSON or as command-line arguments.

`bf16=True` means autocast over the weights as they were loaded. No argument of the Trainer says how they were loaded:
FP32 makes it AMP, and BF16, which transformers 5 takes from the checkpoint by default, leaves nothing in FP32 at all.
TRL, LLaMA-Factory, ms-swift and others write arguments of the model into the same file, and those decide it: AMP over
FP32 weights, an FP32 adapter over frozen BF16 weights, or BF16 throughout. With both switches off the environment's
ACCELERATE_MIXED_PRECISION counts, and without it nothing is cast.

LLaMA-Factory hands `fp8` on to accelerate past the Trainer. That stopped working: the Trainer reads
ACCELERATE_MIXED_PRECISION before LLaMA-Factory sets it, and gives its own answer to the Accelerator, from transformers
5.0 on. The requested FP8 is mapped, and this is reported.
Source: transformers 4.57.6 to 5.23.0 training_args.py and trainer.py, TRL 1.9.2 trainer/model_config.py, LLaMA-Factory
0.9.5 hparams, model/adapter.py and train/fp8_utils.py, ms-swift 4.6.0 arguments.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.errors import PayloadError
from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.pytorch.amp import amp_fields, assume_torch_scaler, export_as_amp, report_scaler
from bridge.interop.reading.settings import Settings, half_or_fp32, shown
from bridge.interop.unsupported import Row, report_optimizer, report_row, report_rows, rows
from bridge.registry.config import MixedPrecisionConfig

TITLE = "TrainingArguments"
VERSION = "transformers 5.23.0"
FACTORY = "LLaMA-Factory 0.9.5"
SWITCH_NAMES = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "torch_compile", "use_cpu", "no_cuda")
ENVIRONMENT = "ACCELERATE_MIXED_PRECISION"
OFF = f"the environment's {ENVIRONMENT}, and without it the dtype that the model is loaded in,"
"""The source that decides where both switches are off."""
NO_AUTOCAST = f"the dtype that the model is loaded in, since {ENVIRONMENT}=no only means no autocast,"
READERS = f"({VERSION} leaves bf16 off, TRL turns it on, ms-swift chooses by torch_dtype)"
LAUNCHER = "accelerate_launch_args"
"""The block that `accelerate launch` is started with; its sharding counts."""
GATHER = "fp8_enable_fsdp_float8_all_gather"
FP8 = ("fp8", "fp8_backend", GATHER)
CHECK = "Look for `enabled: True` in its log line on FP8, and state no fp8 in the recipe if it is not there."
DTYPES = ("torch_dtype", "dtype", "model_dtype")
INNER = "model_init_kwargs"
QUANTISED = re.compile(
    r"load_in_[48]bit|bnb_4bit_\w+|use_bnb_nested_quant|double_quantization|hqq_axis|quant_(config|method|bits)"
    r"|(export_|ref_model_|reward_model_)?quantization_\w+"
)
QUANTISATIONS = (
    (r"export_.*", "how the finished model is quantised; a recipe is about training"),
    (r"(ref|reward)_model_.*", "bits of a frozen model next to the trained one"),
    (r"load_in_[48]bit|quantization_(bit|config)|quant_(bits|method)", "the frozen weights are stored in few bits"),
    (r".*", "the frozen weights are stored in few bits, and this is an option of it"),
)
"""Pattern of a setting about quantisation, the first that fits -> what it says."""
LOOKS_LIKE_PRECISION = re.compile(
    r"(^|_)(bf16|fp16|fp8|fp4|fp32|tf32|amp|nvfp4|mxfp[48])(_|$)|float\d|bfloat|(^|_)precision|dtype|quantiz|quant_"
    r"|autocast|upcast|\dbit|int[48](_|$)"
)
OWN = ("per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps", "output_dir", "warmup_ratio")


class Loaded(NamedTuple):
    """The dtype of the weights, as far as it is known."""

    dtype: str | None
    """fp32, bf16 or fp16; None: nothing says."""
    setting: str = "weights_dtype"
    """The setting that states it, or leaves it open."""
    value: object = None
    is_open: bool = False
    """`setting` says that the checkpoint decides, and that was reported."""
    adapter: str | None = None
    """The setting that has an adapter trained over frozen weights."""
    upcasts: bool = False
    """Trained weights are upcast to FP32 after loading."""


def import_(
    payload: object,
    *,
    weights_dtype: str | None = None,
    accelerate_mixed_precision: str | None = None,
    program: str | None = None,
) -> ImportReport:
    """Return what a mapping of arguments, or a list of command-line words, asks for.

    Without `weights_dtype`, and a `torch_dtype` in the file, FP32 is assumed and reported; `program` is a noun.
    """
    given = arguments(payload) if isinstance(payload, list | tuple) else payload
    top = Settings(given, TITLE)
    outside = Settings({"weights_dtype": weights_dtype, "env": accelerate_mixed_precision}, TITLE)
    stated = outside.word("weights_dtype", ("fp32", "bf16", "fp16"))
    environment = outside.word("env", ("no", "fp16", "bf16", "fp8"))
    builder = ImportBuilder(TITLE)
    on = {name: _switch(builder, top, name) for name in SWITCH_NAMES}
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if on[one] and on[other]:
            raise top.wrong(other, f"must be off where {one} is on", top[other], "Keep one of the two")
    compute = "fp16" if on["fp16"] else "fp32"
    if on["bf16"]:
        compute = "bf16"
    if environment is not None:
        compute = _environment(builder, environment, compute)
    compute = _float8(builder, top, compute, on=bool(_switch(builder, top, "fp8")))
    model = _loaded(builder, top, stated)
    semantics = _mode(builder, top, compute, model, program)
    if compute == "fp16" and (on["use_cpu"] or on["no_cuda"]):
        builder.record("huggingface.without-cuda-accelerate", "fp16", True)
    if on["tf32"] is not None:
        builder.map("tf32", tf32=on["tf32"])
    elif on["torch_compile"] and compute != "fp16":
        detail = f"torch_compile without fp16 turns TF32 on unless tf32 is written ({VERSION})"
        builder.implied("tf32", None, detail, tf32=True)
    _report_others(builder, top, on, model)
    imported = builder.finish(semantics)
    return replace(imported, recipe=None) if _sharding(top) == "deepspeed" else imported


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the arguments as a mapping; fp8 has none."""
    builder = ExportBuilder(config, TITLE)
    compute = export_as_amp(builder, "bf16", "fp16")
    payload: dict[str, Any] = {"bf16": compute == "bf16", "fp16": compute == "fp16"}
    if compute == "fp32":
        builder.record_if_stated("huggingface.no-argument-states-fp32", "fp32")
    if config.tf32 is not None:
        payload["tf32"] = config.tf32
        builder.map("tf32", "tf32")
    report_scaler(builder, "transformers' Trainer")
    for field in ("fp8", "fp4"):
        if builder.values[field] is not None:
            builder.record("huggingface.there-is-no-argument-for-it", field)
    return builder.finish(payload)


def arguments(words: Any) -> dict[str, Any]:
    """Return the arguments that command-line words set: `--bf16`, `--bf16 True`, `--tf32=false`, `--no_tf32`."""
    found: dict[str, Any] = {}
    waiting: str | None = None
    for word in words:
        if not isinstance(word, str):
            raise PayloadError(f"{TITLE}: command-line words must be strings, got {shown(word)}. Quote it.")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name.startswith("no_") and name[3:] in SWITCH_NAMES and not equals:
                found[name[3:]], waiting = False, None
                continue
            found[name], waiting = (value if equals else True), (None if equals else name)
        elif waiting is not None:
            found[waiting], waiting = word, None
    switches = Settings({name: found[name] for name in SWITCH_NAMES if name in found}, TITLE, lenient=True)
    return found | {name: switches.switch(name) for name in switches.values}


def _switch(builder: ImportBuilder, top: Settings, name: str) -> bool | None:
    """Return a switch as Python takes it: transformers checks no types, and "false" in quotes is true."""
    value = top.values.get(name)
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str | int | float):
        raise top.wrong(name, "must be true or false", value, "Write true or false, without quotes")
    taken = bool(value)
    detail = f"types are not checked ({VERSION}): anything but an empty or zero value turns it on"
    builder.report(name, value, "semantics", detail, f"It means {str(taken).lower()}; write that, without quotes.")
    return taken


def _environment(builder: ImportBuilder, environment: str, compute: str) -> str:
    if compute == environment:
        builder.map(ENVIRONMENT)
    elif compute != "fp32":
        builder.record("huggingface.true-overrides-the-environment", ENVIRONMENT, environment, compute=compute)
    elif environment == "fp8":
        builder.record("huggingface.the-fp8-back-end", ENVIRONMENT, "fp8")
        return "bf16"
    else:
        compute = {"no": "fp32"}.get(environment, environment)
        builder.map(ENVIRONMENT, **({} if compute == "fp32" else amp_fields(compute)))
    return compute


def _float8(builder: ImportBuilder, top: Settings, compute: str, *, on: bool) -> str:
    """Map LLaMA-Factory's FP8, and return the compute that it runs under; `compute` where it is off."""
    if not on:
        dead = [name for name in FP8 if top.values.get(name) not in (None, False, "auto")]
        builder.dead(top, dead, "nothing is FP8 without fp8: true")
        for name in FP8:
            builder.map(name) if top.given(name) and name not in dead else None
        return compute
    backend = top.word("fp8_backend", ("auto", "torchao", "te", "msamp")) or "auto"
    if top.values.get("quantization_bit") is not None:
        raise top.wrong("fp8", f"must be off where quantization_bit is set ({FACTORY})", top["fp8"], "Keep one of them")
    if compute == "fp16":
        builder.record("huggingface.fp8-runs-under", "fp16", True)
    if backend == "te":
        builder.map("fp8", fp8="hybrid", fp8_amax_history_len=16, fp8_amax_compute_algo="max")
        builder.map("fp8_backend", fp8_recipe="delayed")
        builder.record("huggingface.llama-factory-asks", "fp8_backend", "te")
        builder.dead(top, [GATHER], "a setting of torchao")
        return "bf16"
    builder.map("fp8", fp8="hybrid", fp8_recipe="tensorwise")
    detail = (
        f"from transformers 5.0 on the Trainer tells the Accelerator {'no' if compute == 'fp32' else compute} all the "
        "same; before, accelerate's own tensorwise recipe runs, not the rowwise one that is built for the log"
    )
    builder.report("fp8", True, "semantics", f"{detail} ({FACTORY})", CHECK)
    unread = f"{FACTORY} hands it on under a name that accelerate does not read"
    if backend == "msamp":
        builder.dead(top, ["fp8_backend"], f"{unread}, which takes torchao first", "Write torchao.")
    elif top.given("fp8_backend"):
        builder.map("fp8_backend", fp8_recipe="tensorwise")
    gather = top.switch(GATHER)
    reason, detail = "semantics", f"{unread}, whose default, on, decides under FSDP2"
    if gather is None:
        reason, detail = "implied default", f"off in {FACTORY}; accelerate's own default, on, decides under FSDP2"
    else:
        builder.map(GATHER, fp8_param_gather=gather)
    builder.report(GATHER, gather, reason, detail, "State fp8_param_gather as it is meant.")
    return "bf16"


def _sharding(top: Settings) -> str | None:
    """Return "deepspeed" or "fsdp" where the Trainer or its launcher shards so."""
    launcher = top.values.get(LAUNCHER)
    block = launcher if isinstance(launcher, Mapping) else {}
    given = (name for name in ("deepspeed", "fsdp") if top.values.get(name) or block.get(f"use_{name}") is True)
    return next(given, None)


def _dtypes(top: Settings) -> dict[str, Any]:
    """Return the settings that say a dtype, the one that decides first, with what they say."""
    inner = top.values.get(INNER)
    found = {name: top.values.get(name) for name in DTYPES}
    if isinstance(inner, Mapping):
        found |= {f"{INNER}.{name}": inner.get(name) for name in DTYPES}
    return {name: value for name, value in found.items() if value is not None}


def _loaded(builder: ImportBuilder, top: Settings, stated: str | None) -> Loaded:
    """Return what the weights are loaded in, and report a dtype that does not decide; `stated` is the context's."""
    tuners = ("finetuning_type", "tuner_type", "train_type")
    kinds = [name for name in tuners if str(top.values.get(name) or "").lower() not in ("full", "freeze", "none", "")]
    adapter = "use_peft" if top.values.get("use_peft") is True else next(iter(kinds), None)
    factory = top.given("finetuning_type")
    if factory and top.values.get("pure_bf16"):
        builder.record("huggingface.llama-factory-leaves", "pure_bf16", top["pure_bf16"])
        return Loaded(stated or "bf16", "pure_bf16", top["pure_bf16"])
    if "pure_bf16" in top:
        report_row(builder, "pure_bf16", top["pure_bf16"], Row(f"read by {FACTORY}, which needs finetuning_type too"))
    setting, value = next(iter(_dtypes(top).items()), ("weights_dtype", None))
    upcasts = factory and stated is None and not top.values.get("use_badam")
    dtype = None if value is None else half_or_fp32(value)
    if value is None:
        return Loaded(stated, value=stated, adapter=adapter, upcasts=upcasts)
    if stated is not None and stated != dtype:
        builder.record("huggingface.weights_dtype-was-passed", setting, value, stated=stated)
        return Loaded(stated, value=stated, adapter=adapter)
    if dtype is None and value == "auto":
        builder.record("huggingface.the-checkpoint-own-dtype", setting, value)
    elif dtype is None:
        builder.record("huggingface.not-one-of-float32-bfloat16", setting, str(value))
    return Loaded(dtype, setting, value, is_open=dtype is None, adapter=adapter, upcasts=upcasts)


def _mode(builder: ImportBuilder, top: Settings, compute: str, model: Loaded, program: str | None) -> str:
    """State the mode, and return what it means for weights that were loaded like that."""
    names = [name for name in ("bf16", "fp16") if name in top]
    half = model.dtype if model.dtype in ("bf16", "fp16") else None
    kept = half is not None and compute in (half, "fp32") and not (compute != "fp32" and model.upcasts)
    sharding = _sharding(top)
    fields: dict[str, Any] = amp_fields(compute)
    semantics = "fp32" if compute == "fp32" else "amp_o1"
    if sharding is not None and compute != "fp32":
        fields = {compute: True, "params_dtype": compute}
        semantics = "megatron_o2" if sharding == "deepspeed" else "fsdp_policy"
        if sharding == "fsdp":
            builder.fields["grad_reduce_in_fp32"] = False
    elif sharding == "deepspeed":
        fields, semantics = {}, "unstated"
        own = "DeepSpeed's own configuration"
        builder.leave_mode(own if names or program is None else f"{program} or {own}")
    elif kept and not (model.adapter and compute != "fp32"):
        fields, semantics = {str(half): True, "params_dtype": half}, "true"
        builder.fields["grad_reduce_in_fp32"] = False
    elif compute == "fp32" and not ((names or ENVIRONMENT in builder.mapped) and model.dtype == "fp32"):
        fields, semantics = {}, "unstated"
        off = OFF if names else ""
        if ENVIRONMENT in builder.mapped:
            off = NO_AUTOCAST
        builder.leave_mode(off or program or f"the program that reads these arguments {READERS}")
    builder.fields |= fields
    for name in names:
        builder.map(name, **(fields if name == compute else {}))
    if compute == "fp16" and sharding != "deepspeed":
        assume_torch_scaler(builder, "the Trainer")
    _weights(builder, top, model, compute, semantics)
    return semantics


def _weights(builder: ImportBuilder, top: Settings, model: Loaded, compute: str, semantics: str) -> None:
    """Report the dtype of the weights, and map the setting that states it."""
    name, value, said = model.setting, model.dtype, model.value
    written = name != "weights_dtype" and not model.is_open
    if semantics == "true":
        if name != "pure_bf16":
            builder.record("huggingface.weights-were-loaded", name, said, value=value)
        if value == "fp16" == compute:
            builder.record("huggingface.torch-gradscaler-refuses", name, said)
        if written:
            builder.map(name, params_dtype=value)
    elif value not in (None, "fp32", compute) and semantics != "unstated":
        builder.record("huggingface.autocast-over-weights", name, said, compute=compute, value=value)
    elif value is not None and written:
        builder.map(name)
    elif value is None and not model.is_open and semantics in ("amp_o1", "fp32"):
        detail = f"FP32 was assumed; from_pretrained takes the checkpoint's own dtype by default ({VERSION})"
        remedy = "Pass weights_dtype=bf16 if that is how it is loaded."
        if model.upcasts:
            detail = "FP32: LLaMA-Factory 0.9.5 upcasts what it trains, unless pure_bf16 is on"
            remedy = "Pass weights_dtype if that was changed."
        builder.report(name, None, "implied default", detail, remedy)
    if model.adapter is not None:
        frozen = f"frozen {value} weights" if value else "frozen weights"
        builder.record("huggingface.only-the-adapter-is-trained", model.adapter, top[model.adapter], frozen=frozen)


def _report_others(builder: ImportBuilder, top: Settings, on: Mapping[str, bool | None], model: Loaded) -> None:
    report_rows(builder, top, "huggingface_removed")
    for name, row in rows("huggingface").items():
        value = on.get(name, top.values.get(name))
        if name == "fsdp_config" and value and not top.values.get("fsdp"):
            builder.dead(top, [name], f"read where fsdp is on only ({VERSION})", "Drop it, or turn fsdp on.")
        elif name in top and not value:
            builder.map(name)
        elif name in top:
            report_row(builder, name, value, row)
    sharding = _sharding(top)
    if sharding is not None and not top.values.get(sharding):
        report_row(builder, f"{LAUNCHER}.use_{sharding}", True, rows("huggingface")[sharding])
    report_optimizer(builder, "optim", top.values.get("optim"))
    dtypes = list(_dtypes(top).items())
    for name, value in dtypes if model.setting == "pure_bf16" else dtypes[1:]:
        if half_or_fp32(value) == model.dtype:
            builder.map(name)
        else:
            builder.report(name, value, "dead knob", f"{model.setting} decides", "Keep one of them.")
    done = {*SWITCH_NAMES, *rows("huggingface_removed"), *rows("huggingface"), *FP8, *DTYPES, "optim", "pure_bf16"}
    for key, value in top.values.items():
        if value is not None and key not in done:
            _other(builder, key, value, done)


def _other(builder: ImportBuilder, key: str, value: object, done: set[str]) -> None:
    row = rows("huggingface_model").get(key)
    if QUANTISED.fullmatch(key) and str(value).lower() in ("false", "none", ""):
        builder.map(key)
    elif QUANTISED.fullmatch(key):
        detail = next(detail for pattern, detail in QUANTISATIONS if re.fullmatch(pattern, key))
        report_row(builder, key, value, Row(detail))
    elif key != key.lower() and (key.lower() in done or LOOKS_LIKE_PRECISION.search(key.lower())):
        remedy = f"Write {key.lower()} if it is meant."
        builder.report(key, value, "dead knob", "another letter case, which is not read", remedy)
    elif row is not None and not (key == INNER and isinstance(value, Mapping)):
        report_row(builder, key, value, row)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            looks = QUANTISED.fullmatch(str(name)) or LOOKS_LIKE_PRECISION.search(str(name))
            if looks and inner is not None and not (key == INNER and name in DTYPES):
                detail = f"no argument of {VERSION}; the reader of this block decides"
                report_row(builder, f"{key}.{name}", inner, Row(detail))
    elif LOOKS_LIKE_PRECISION.search(key):
        report_row(builder, key, value, Row(f"no argument of {VERSION}; another reader of this file decides"))


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    if "base_model" in content:
        return None
    found = [key for key in OWN if key in content]
    switches = [key for key in SWITCH_NAMES[:6] if key in content and not isinstance(content[key], dict)]
    if "per_device_train_batch_size" in found or (found and switches):
        names = f"`{(switches or found)[0]}` and `{found[0]}`" if switches else f"`{found[0]}`"
        return Recognised(
            certainty=0.85 if switches else 0.5, evidence=f"has {names}, arguments of transformers' Trainer"
        )
    return None


CONTEXT = (
    ContextKey("weights_dtype", "dtype the model is loaded in: fp32, bf16 or fp16"),
    ContextKey("accelerate_mixed_precision", "the environment's ACCELERATE_MIXED_PRECISION"),
)
SYSTEM = System(
    "huggingface", "Hugging Face TrainingArguments", VERSION, import_, export, _recognise, as_json, context=CONTEXT
)

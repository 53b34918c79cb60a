"""Hugging Face `TrainingArguments`, as a mapping, as JSON or as command-line arguments.

`bf16=True` means autocast over the weights as they were loaded. No argument of the Trainer says how they were loaded:
FP32 makes it AMP, and BF16, which transformers 5 takes from the checkpoint by default, leaves nothing in FP32 at all.
Arguments of the model that other programs write into the same file do say it, and are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.interop.amp import amp_fields, export_as_amp
from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.huggingface.fp8 import SETTINGS as FP8
from bridge.interop.huggingface.fp8 import float8
from bridge.interop.huggingface.launcher import LAUNCHER, launchers_precision, launchers_sharding, report_launcher
from bridge.interop.huggingface.model import Loaded, loaded, report_model
from bridge.interop.optimizers import report_optimizer
from bridge.interop.scaler import assume_torch_scaler, report_scaler
from bridge.interop.settings import SWITCHES, Settings, shown
from bridge.interop.unsupported import report_row, report_rows, rows

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SYSTEM", "arguments", "export", "import_"]

TITLE = "TrainingArguments"
VERSION = "transformers 5.23.0"
SWITCH_NAMES = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "torch_compile", "use_cpu", "no_cuda")
ACCELERATOR = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
    "use_configured_state": False,
}
"""Defaults of `accelerator_config`, which a dump always holds."""
ENVIRONMENT = frozenset({"ACCELERATE_MIXED_PRECISION", f"{LAUNCHER}.mixed_precision"})
REMOVED = ("fp16_backend", "half_precision_backend", "fp16_opt_level")
"""Arguments of transformers 4: whether NVIDIA's Apex casts instead of torch, and at what level."""
OWN = ("per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps", "output_dir", "warmup_ratio")


def import_(
    payload: object,
    *,
    weights_dtype: str | None = None,
    accelerate_mixed_precision: str | None = None,
    program: str | None = None,
) -> ImportReport:
    """Return what the arguments ask for.

    Args:
        payload: A mapping of arguments, or a list of command-line words.
        weights_dtype: What the model is loaded in: fp32, bf16 or fp16. None: what the file says, in `torch_dtype` say;
            where it says nothing FP32 is assumed, and reported.
        accelerate_mixed_precision: The environment's ACCELERATE_MIXED_PRECISION, read where neither switch is on.
        program: The program that reads the arguments, as a noun; None: it is not known.
    """
    given = arguments(payload) if isinstance(payload, list | tuple) else payload
    top = Settings(given, TITLE)
    outside = Settings({"weights_dtype": weights_dtype, "env": accelerate_mixed_precision}, TITLE)
    stated = outside.word("weights_dtype", ("fp32", "bf16", "fp16"))
    environment = outside.word("env", ("no", "fp16", "bf16", "fp8"))
    builder = ImportBuilder(TITLE)
    on = {name: _switch(builder, top, name) for name in SWITCH_NAMES}
    if on["bf16"] and on["fp16"]:
        raise top.wrong("fp16", "must be off where bf16 is on", top["fp16"], f"Keep one of the two{_quoted(top)}")
    if on["bf16_full_eval"] and on["fp16_full_eval"]:
        raise top.wrong("fp16_full_eval", "must be off where bf16_full_eval is on", top["fp16_full_eval"], "Keep one")
    _inline_deepspeed(top, on)
    asked = compute = next((name for name in ("bf16", "fp16") if on[name]), "fp32")
    said_by = "ACCELERATE_MIXED_PRECISION" if environment is not None else f"{LAUNCHER}.mixed_precision"
    compute = _environment(builder, environment or launchers_precision(top), compute, said_by)
    compute = float8(builder, top, compute, on=bool(_switch(builder, top, "fp8")))
    model = loaded(builder, top, stated)
    semantics = _mode(builder, top, compute, model, program)
    if compute == "fp16" and (on["use_cpu"] or on["no_cuda"]):
        detail = "without CUDA, accelerate has no FP16 autocast and no scaler: the run is FP32"
        builder.report("fp16", True, "semantics", detail, "Use bf16 on a CPU.")
    _tf32(builder, on, compute)
    report_rows(builder, top, "huggingface_removed")
    _report_others(builder, top, on)
    read = {*SWITCH_NAMES, *REMOVED, *rows("huggingface"), *FP8, LAUNCHER, "optim", "pure_bf16"}
    report_model(builder, top, model, read)
    is_open = report_launcher(builder, top) and asked == "fp32" and environment is None
    is_open = is_open or bool(top.values.get("deepspeed")) or launchers_sharding(top) == "deepspeed"
    imported = builder.finish(semantics)
    return replace(imported, recipe=None) if is_open else imported


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the arguments as a mapping; fp8 has none."""
    builder = ExportBuilder(config, TITLE)
    compute = export_as_amp(builder, "bf16", "fp16")
    payload: dict[str, Any] = {"bf16": compute == "bf16", "fp16": compute == "fp16"}
    if config.tf32 is not None:
        payload["tf32"] = config.tf32
        builder.map("tf32", "tf32")
    report_scaler(builder, "transformers' Trainer")
    for field in ("fp8", "fp4"):
        if builder.values[field] is not None:
            detail = "there is no argument for it; accelerate decides"
            builder.report(field, "unsupported", detail, "Convert to accelerate, and leave bf16 and fp16 off here.")
    return builder.finish(payload)


def arguments(words: Any) -> dict[str, Any]:
    """Return the arguments that command-line words set: `--bf16`, `--bf16 True`, `--tf32=false`, `--no_tf32`.

    Raises:
        PayloadError: A switch with a value that is no switch's.
    """
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
    for name in SWITCH_NAMES:
        given = found.get(name)
        if isinstance(given, str):
            if given.lower() not in SWITCHES:
                raise PayloadError(
                    f"{TITLE}: --{name}: must be true or false, got {shown(given)}. Write --{name} true."
                )
            found[name] = SWITCHES[given.lower()]
    return found


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


def _quoted(top: Settings) -> str:
    """Return what to add about a switch whose text says off and that is on."""
    values = {name: top[name] for name in ("bf16", "fp16") if isinstance(top[name], str)}
    said = [f"{name}: {shown(value)}" for name, value in values.items() if SWITCHES.get(value.lower()) is False]
    return f"; {said[0]} in quotes is on, since any text is" if said else ""


def _inline_deepspeed(top: Settings, on: dict[str, bool | None]) -> None:
    """Raise PayloadError for a block of DeepSpeed's that contradicts the switches, as transformers does."""
    block = top.values.get("deepspeed")
    if not isinstance(block, Mapping) or any(top.given(name) for name in REMOVED):
        return
    for name in ("bf16", "fp16"):
        inner = block.get(name)
        said = inner.get("enabled") if isinstance(inner, Mapping) else None
        wanted = bool(on[name] or on[f"{name}_full_eval"])
        if isinstance(said, bool) and said is not wanted:
            rule = f"must agree with the switch {name}, which is {'on' if wanted else 'off'}"
            raise top.wrong(f"deepspeed.{name}.enabled", rule, said, 'Write "auto" there, or change one of the two')


def _environment(builder: ImportBuilder, environment: str | None, compute: str, name: str) -> str:
    """Return the compute; the environment, or the launcher's arguments, decide where neither switch is on."""
    if environment is None:
        return compute
    if compute != "fp32":
        if environment != compute:
            detail = f"{compute}=True overrides the environment ({VERSION})"
            builder.report(name, environment, "dead knob", detail, f"Turn {compute} off to let the environment decide.")
        else:
            builder.map(name)
        return compute
    if environment == "fp8":
        detail = "the FP8 back end and its recipe are accelerate's"
        builder.report(name, "fp8", "unsupported", detail, "Convert accelerate's own configuration instead.")
        return "bf16"
    builder.map(name, **amp_fields({"no": "fp32"}.get(environment, environment)))
    return {"no": "fp32"}.get(environment, environment)


def _mode(builder: ImportBuilder, top: Settings, compute: str, model: Loaded, program: str | None) -> str:
    """State the mode, and return what it means for weights that were loaded like that."""
    names = [name for name in ("bf16", "fp16") if name in top]
    half = model.dtype if model.dtype in ("bf16", "fp16") else None
    kept = half is not None and compute in (half, "fp32") and not (compute != "fp32" and model.upcasts)
    sharding = next((name for name in ("deepspeed", "fsdp") if top.values.get(name)), launchers_sharding(top))
    fields: dict[str, Any] = amp_fields(compute)
    semantics = "fp32" if compute == "fp32" else "amp_o1"
    if sharding is not None and compute != "fp32":
        fields = {compute: True, "params_dtype": compute}
        semantics = "megatron_o2" if sharding == "deepspeed" else "fsdp_policy"
        if sharding == "fsdp":
            builder.fields["grad_reduce_in_fp32"] = False
    elif sharding == "deepspeed" and not isinstance(top.values.get("deepspeed"), Mapping):
        fields, semantics = {}, "unstated"
        own = "DeepSpeed's own configuration"
        builder.leave_mode(own if names or program is None else f"{program} or {own}")
    elif kept and not (model.adapter and compute != "fp32"):
        fields, semantics = {str(half): True, "params_dtype": half}, "true"
        builder.fields["grad_reduce_in_fp32"] = False
    builder.fields |= fields
    for name in names:
        builder.map(name, **(fields if name == compute else {}))
    if semantics == "fp32" and not names and not builder.mapped.keys() & ENVIRONMENT:
        del builder.fields["fp32"]
        builder.leave_mode(
            program
            or f"the program that reads these arguments ({VERSION} leaves bf16 off, TRL turns it on, "
            "ms-swift chooses by torch_dtype)"
        )
    if compute == "fp16" and sharding != "deepspeed":
        assume_torch_scaler(builder, "the Trainer")
    _weights(builder, top, model, compute, semantics)
    return semantics


def _weights(builder: ImportBuilder, top: Settings, model: Loaded, compute: str, semantics: str) -> None:
    """Report the dtype of the weights, and map the setting that states it."""
    name, value, said = model.setting, model.dtype, model.value
    written = name != "weights_dtype" and not model.is_open
    if semantics == "true":
        detail = f"weights were loaded in {value}, and nothing keeps an FP32 copy of them"
        remedy = "Megatron keeps FP32 masters: 4 more bytes per weight."
        if name != "pure_bf16":
            builder.report(name, said, "semantics", detail, remedy)
        if value == "fp16" == compute:
            detail = "torch's GradScaler refuses gradients in FP16, and the run stops at its first step"
            builder.report(name, said, "semantics", detail, "Load the weights in FP32, or use bf16.")
        if written:
            builder.map(name, params_dtype=value)
    elif value not in (None, "fp32", compute) and semantics != "unstated":
        detail = f"{compute} autocast over {value} weights"
        builder.report(name, said, "unsupported", detail, "Load the model in FP32 or in the compute dtype.")
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
        detail = f"only the adapter is trained, in FP32 unless PEFT is configured otherwise, over {frozen}"
        remedy = "Use Megatron's own adapters; its masters are FP32 too."
        builder.report(model.adapter, top[model.adapter], "semantics", detail, remedy)


def _tf32(builder: ImportBuilder, on: dict[str, bool | None], compute: str) -> None:
    if on["tf32"] is not None:
        builder.map("tf32", tf32=on["tf32"])
    elif on["torch_compile"] and compute != "fp16":
        detail = f"torch_compile without fp16 turns TF32 on unless tf32 is written ({VERSION})"
        builder.implied("tf32", None, detail, tf32=True)


def _report_others(builder: ImportBuilder, top: Settings, on: dict[str, bool | None]) -> None:
    for name, row in rows("huggingface").items():
        value = on.get(name, top.values.get(name))
        if name in top and (not value or (name == "accelerator_config" and _is_usual(value))):
            builder.map(name)
        elif name == "fsdp_config" and name in top and not top.values.get("fsdp"):
            detail = f"read where fsdp is on only ({VERSION})"
            builder.report(name, value, "dead knob", detail, "Drop it, or turn fsdp on.")
        elif name in top:
            report_row(builder, name, value, row)
    report_optimizer(builder, "optim", top.values.get("optim"))


def _is_usual(block: object) -> bool:
    """Return whether arguments of the Accelerator are its defaults, none of which bears on precision."""
    return isinstance(block, Mapping) and all(
        name in ACCELERATOR and value is ACCELERATOR[name] for name, value in block.items()
    )


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


SYSTEM = System(
    name="huggingface",
    title="Hugging Face TrainingArguments",
    version=VERSION,
    import_=import_,
    export=export,
    recognise=_recognise,
    write=as_json,
    context=(
        ContextKey(name="weights_dtype", meaning="dtype the model is loaded in: fp32, bf16 or fp16"),
        ContextKey(name="accelerate_mixed_precision", meaning="the environment's ACCELERATE_MIXED_PRECISION"),
    ),
)

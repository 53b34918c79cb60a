"""DeepSpeed's JSON configuration.

Its `fp16` and `bf16` blocks are Megatron's O2: the engine casts the module and keeps FP32 master weights. Its
`torch_autocast` block is AMP over FP32 weights. Gradients are accumulated and reduced in the model's own dtype unless
two settings in two places say FP32.
"""

from __future__ import annotations

from typing import Any

from bridge.interop.amp import amp_fields
from bridge.interop.builders import ImportBuilder
from bridge.interop.contract import ContextKey, ImportReport, Recognised, System, as_json
from bridge.interop.deepspeed.exporter import export
from bridge.interop.deepspeed.gradients import DTYPE_NAMES, import_gradients
from bridge.interop.deepspeed.unsupported import STATE, refuse_apex, report_half, report_unsupported
from bridge.interop.scaler import assume_torch_scaler
from bridge.interop.settings import Settings

__all__ = ["SYSTEM", "export", "import_"]

TITLE = "DeepSpeed"
VERSION = "DeepSpeed 0.19.8"
DTYPES = ("fp32", "fp16", "bf16")
SCALE_DEFAULTS = {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
LOW_MEMORY = {
    "fp16": ("fp16_master_weights_and_grads",),
    "bf16": ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
}
"""Switches that drop the FP32 copies."""
OFF = (None, False, "auto")


def import_(payload: object, *, auto: str | None = None) -> ImportReport:
    """Return what a DeepSpeed configuration asks for.

    Args:
        payload: The parsed JSON.
        auto: What the layer above (transformers, accelerate) trains in: bf16, fp16 or fp32. It fills in "auto" and adds
            a block that is not there. None: it is not known.
    """
    top = Settings(payload, TITLE, lenient=True)
    above = Settings({"auto": auto}, TITLE).word("auto", DTYPES)
    builder = ImportBuilder(TITLE)
    refuse_apex(builder, top)
    bf16_name = "bf16" if top.given("bf16") else "bfloat16"
    fp16, bf16 = top.section("fp16"), top.section(bf16_name)
    if bf16_name == "bf16" and top.given("bfloat16"):
        detail = "the old name of the block, not read where there is a `bf16` block"
        builder.report("bfloat16", top["bfloat16"], "dead knob", detail, "Drop it.")
    on = {
        "fp16": _enabled(builder, fp16, "fp16", above),
        "bf16": _enabled(builder, bf16, "bf16", above),
    }
    blocks = {"fp16": fp16, "bf16": bf16}
    if above in on and not any(on.values()) and not blocks[above].values:
        on[above] = True
        detail = f"the layer above adds the block that is not there, as auto={above} says"
        builder.implied(f"{above}.enabled", True, detail, **{above: True})
    is_auto = above is None and any(block.values.get("enabled") == "auto" for block in (fp16, bf16))
    if all(on.values()):
        remedy = "Enable one of the two"
        raise top.wrong("bf16.enabled", "must be off where fp16 is on", bf16.values.get("enabled"), remedy)
    mode = next((name for name, enabled in on.items() if enabled), None)
    autocast = _autocast(builder, top.section("torch_autocast"), mode)
    if mode is not None:
        builder.fields |= {mode: True, "params_dtype": mode}
    elif autocast == "bf16":
        builder.fields |= amp_fields("bf16")
    elif autocast == "fp16":
        builder.fields |= amp_fields("fp16")
        if top.section("torch_autocast").given("dtype"):
            assume_torch_scaler(builder, f"{TITLE} under torch_autocast")
        else:
            detail = f"{VERSION} makes a loss scaler where dtype is written only, so FP16 gradients may vanish"
            builder.report("torch_autocast.dtype", None, "semantics", detail, "Write dtype: bfloat16, or float16.")
    elif is_auto:
        builder.leave_mode('the layer above that fills in "auto" (transformers, accelerate)')
    elif above is not None or any(one.given("enabled") for one in (fp16, bf16, top.section("torch_autocast"))):
        builder.fields["fp32"] = True
    else:
        builder.leave_mode(f"the trainer that reads it ({VERSION} by itself takes fp32)")
    _loss_scale(builder, fp16, dynamic_mode=on["fp16"])
    report_half(builder, fp16, "fp16", on=on["fp16"])
    report_half(builder, bf16, "bf16", on=on["bf16"])
    import_gradients(builder, top, mode)
    report_unsupported(builder, top)
    semantics = "megatron_o2" if mode else "amp_o1" if autocast else "fp32"
    if mode and any(section.values.get(key) not in OFF for section in (fp16, bf16) for key in LOW_MEMORY[mode]):
        semantics = "true"
    return builder.finish(semantics)


def _enabled(builder: ImportBuilder, block: Settings, mode: str, above: str | None) -> bool:
    """Return whether a block is on, with "auto" resolved by the layer above, or off without one."""
    if not block.given("enabled"):
        if block.values:
            builder.report(block.name("enabled"), False, "implied default", f"off in {VERSION}", STATE)
        return False
    if block["enabled"] == "auto":
        if above is not None:
            builder.map(block.name("enabled"), **({mode: True} if above == mode else {}))
            return above == mode
        detail = f"transformers and accelerate fill it in; {VERSION} by itself reads it as off"
        remedy = "Pass auto=bf16, auto=fp16 or auto=fp32."
        builder.report(block.name("enabled"), "auto", "unsupported", detail, remedy)
        return False
    enabled = bool(block.switch("enabled"))
    builder.map(block.name("enabled"), **({mode: True, "params_dtype": mode} if enabled else {}))
    return enabled


def _autocast(builder: ImportBuilder, block: Settings, mode: str | None) -> str | None:
    """Return the dtype of an enabled `torch_autocast` block."""
    on = bool(block.values.get("enabled"))
    if on and block["enabled"] not in (True, 1):
        detail = f"{VERSION} asks whether it is empty, and a word is not: autocast is on"
        builder.report(
            block.name("enabled"), block["enabled"], "semantics", detail, "Write true or false, without quotes."
        )
    written = block.values.get("dtype")
    if written is not None and not (isinstance(written, str) and written in DTYPE_NAMES):
        rule = "must be bfloat16, float16 or float32, as torch or DeepSpeed spell them, letter by letter"
        raise block.wrong("dtype", rule, written, "Use bfloat16 or float16, or drop the key")
    compute = DTYPE_NAMES.get(written or "")
    if block.given("lower_precision_safe_modules"):
        detail = "which module classes are cast is torch's own list elsewhere"
        name, value = block.name("lower_precision_safe_modules"), block["lower_precision_safe_modules"]
        builder.report(name, value, "unsupported", detail, "Check that these classes are what you want cast.")
    if not on:
        for key in ("enabled", "dtype"):
            if block.given(key):
                builder.map(block.name(key))
        return None
    if compute == "fp32":
        detail = "torch autocasts to half precision only: it warns, and nothing is cast"
        builder.report(block.name("dtype"), block["dtype"], "dead knob", detail, "Use bfloat16, or disable the block.")
        builder.map(block.name("enabled"))
        return None
    if mode is not None:
        detail = f"{mode} weights under autocast: autocast has nothing left to cast"
        for key in ("enabled", "dtype") if block.given("dtype") else ("enabled",):
            builder.report(block.name(key), block[key], "semantics", detail, "Keep one of the two blocks.")
        return None
    if compute is None:
        detail = f"{VERSION} leaves it to torch, which casts to BF16 on CPU and FP16 on CUDA"
        builder.report(block.name("dtype"), None, "implied default", detail, STATE)
        compute = "fp16"
    else:
        builder.map(block.name("dtype"), autocast_dtype=compute)
    builder.map(block.name("enabled"), autocast_enabled=True)
    detail = f"gradients of the cast modules are communicated in {compute}"
    builder.report(
        "communication_data_type", compute, "implied default", f"{detail} under torch_autocast, {VERSION}", STATE
    )
    return compute


def _loss_scale(builder: ImportBuilder, block: Settings, *, dynamic_mode: bool) -> None:
    """Map the loss scale and its schedule, where FP16 is on."""
    keys = ("loss_scale", *SCALE_DEFAULTS)
    if not dynamic_mode:
        for key in keys:
            if block.given(key):
                detail = "read only where fp16.enabled is true"
                builder.report(block.name(key), block[key], "dead knob", detail, "Drop it, or enable FP16.")
        return
    scale = _unless_auto(builder, block, "loss_scale")
    if scale is not None:
        scale = block.number("loss_scale", least=0)
        builder.map(block.name("loss_scale"), loss_scale=scale or None)
    for key, default in SCALE_DEFAULTS.items():
        given = _unless_auto(builder, block, key)
        if scale:
            if given is not None:
                detail = "a constant loss scale does not read it"
                builder.report(block.name(key), given, "dead knob", detail, "Drop it, or set loss_scale to 0.")
            continue
        least = 1 if key in ("loss_scale_window", "min_loss_scale", "hysteresis") else 0
        value = block.whole(key, least=least) if given is not None else default
        field, field_value = _scale_field(block, key, value if value is not None else default)
        if given is not None:
            builder.map(block.name(key), **{field: field_value})
        else:
            builder.fields[field] = field_value
            builder.report(block.name(key), default, "implied default", f"{default} in {VERSION}", STATE)
    if not scale and block.given("min_loss_scale"):
        detail = "an overflow at the smallest scale ends the run there; Megatron stays at it and goes on"
        builder.report(
            block.name("min_loss_scale"), block["min_loss_scale"], "semantics", detail, "Watch for skipped steps."
        )


def _scale_field(block: Settings, key: str, value: int) -> tuple[str, int]:
    if key != "initial_scale_power":
        return key, value
    if value > 1000:
        raise block.wrong(key, "must be a power of two that a float can hold", value, "Use 16, the default")
    return "initial_loss_scale", 2**value


def _unless_auto(builder: ImportBuilder, block: Settings, key: str) -> object:
    if block.values.get(key) != "auto":
        return block.values.get(key)
    builder.report(block.name(key), "auto", "implied default", f"{VERSION} reads auto as its default", STATE)
    return None


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    blocks = [key for key in ("fp16", "bf16", "bfloat16") if isinstance(content.get(key), dict)]
    own = [key for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "torch_autocast") if key in content]
    if blocks and own:
        return Recognised(0.95, f"has `{blocks[0]}` as a block together with `{own[0]}`")
    if own or (blocks and any("enabled" in content[key] for key in blocks)):
        return Recognised(0.8, f"has `{(own or blocks)[0]}`, which only DeepSpeed reads")
    return None


SYSTEM = System(
    name="deepspeed",
    title=TITLE,
    version=VERSION,
    import_=import_,
    export=export,
    recognise=_recognise,
    write=as_json,
    context=(
        ContextKey(
            name="auto", meaning='what the layer above trains in, for "auto" and a missing block: bf16, fp16 or fp32'
        ),
    ),
)

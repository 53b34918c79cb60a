"""DeepSpeed's JSON configuration.

Its `fp16` and `bf16` blocks are Megatron's O2: the engine casts the module and keeps FP32 master weights. Its
`torch_autocast` block is AMP over FP32 weights. Gradients are accumulated and reduced in the model's own dtype unless
two settings in two places say FP32.
"""

from __future__ import annotations

import json
from typing import Any

from bridge.interop.amp import amp_fields
from bridge.interop.contract import ContextKey, Imported, Recognised, System
from bridge.interop.deepspeed_export import export
from bridge.interop.ledger import Arrival
from bridge.interop.scaler import assume_torch_scaler
from bridge.interop.settings import Settings

__all__ = ["SYSTEM", "export", "import_"]

TITLE = "DeepSpeed"
VERSION = "DeepSpeed 0.19.8"
DTYPES = ("fp32", "fp16", "bf16")
AUTOCAST_DTYPES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
}
SCALE_DEFAULTS = {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1, "hysteresis": 2}
LOW_MEMORY = {
    "fp16": ("fp16_master_weights_and_grads",),
    "bf16": ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
}
"""Switches that drop the FP32 copies."""
QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
IGNORED_BLOCKS = ("fp8", "fp4", "tf32", "float16", "fp32", "mixed_precision", "fp32_allreduce")
OWN_BLOCKS = (
    "zero_optimization",
    "bf16",
    "fp16",
    "bfloat16",
    "torch_autocast",
    "data_types",
    "communication_data_type",
)


def import_(payload: object, *, auto: str | None = None) -> Imported:
    """Return what a DeepSpeed configuration asks for.

    Args:
        payload: The parsed JSON.
        auto: What the layer above (transformers, accelerate) makes of "auto": bf16, fp16 or fp32. None: nothing
            stands above, and DeepSpeed reads "auto" as its default, off.
    """
    top = Settings(payload, TITLE, lenient=True)
    above = Settings({"auto": auto}, TITLE).word("auto", DTYPES)
    book = Arrival(TITLE)
    if "amp" in top and top["amp"] is not None:
        remedy = "Use an fp16, bf16 or torch_autocast block"
        raise top.wrong("amp", f"must not be there: {VERSION} removed Apex", top["amp"], remedy)
    bf16_name = "bf16" if top.given("bf16") else "bfloat16"
    fp16, bf16 = top.section("fp16"), top.section(bf16_name)
    if bf16_name == "bf16" and top.given("bfloat16"):
        detail = "the old name of the block, not read where there is a `bf16` block"
        book.lose("bfloat16", top["bfloat16"], "dead knob", detail, "Drop it.")
    on = {
        "fp16": _enabled(book, fp16, "fp16", above),
        "bf16": _enabled(book, bf16, "bf16", above),
    }
    if all(on.values()):
        remedy = "Enable one of the two"
        raise top.wrong("bf16.enabled", "must be off where fp16 is on", bf16.values.get("enabled"), remedy)
    mode = next((name for name, enabled in on.items() if enabled), None)
    autocast = _autocast(book, top.section("torch_autocast"), mode, above)
    if mode is not None:
        book.fields |= {mode: True, "params_dtype": mode}
    elif autocast == "bf16":
        book.fields |= amp_fields("bf16")
    elif autocast == "fp16":
        book.fields |= amp_fields("fp16")
        assume_torch_scaler(book, f"{TITLE} under torch_autocast")
    else:
        book.fields["fp32"] = True
        if not any(top.given(name) for name in ("fp16", "bf16", "bfloat16", "torch_autocast")):
            book.lose("bf16.enabled", False, "implied default", f"{VERSION} trains in FP32 without a block", _STATE)
    _loss_scale(book, fp16, dynamic_mode=on["fp16"])
    _half_details(book, fp16, bf16, on)
    _reduction(book, top, mode)
    _rest(book, top)
    semantics = "megatron_o2" if mode else "amp_o1" if autocast else "fp32"
    if mode and any(section.values.get(key) for section in (fp16, bf16) for key in LOW_MEMORY[mode]):
        semantics = "true"
    return book.close(semantics)


_STATE = "Write it down to be sure."


def _enabled(book: Arrival, block: Settings, mode: str, above: str | None) -> bool:
    """Return whether a block is on, with "auto" resolved by the layer above, or by nobody."""
    if not block.given("enabled"):
        if block.values:
            book.lose(block.name("enabled"), False, "implied default", f"off in {VERSION}", _STATE)
        return False
    if block["enabled"] == "auto":
        if above is not None:
            book.carry(block.name("enabled"), **({mode: True} if above == mode else {}))
            return above == mode
        detail = f"{VERSION} by itself reads auto as off; only transformers and accelerate resolve it"
        book.lose(
            block.name("enabled"), "auto", "implied default", detail, f"Say auto={mode} to resolve it as they do."
        )
        return False
    enabled = bool(block.switch("enabled"))
    book.carry(block.name("enabled"), **({mode: True, "params_dtype": mode} if enabled else {}))
    return enabled


def _autocast(book: Arrival, block: Settings, mode: str | None, above: str | None) -> str | None:
    """Return the dtype of an enabled `torch_autocast` block."""
    enabled = block["enabled"] == "auto" if "enabled" in block and block["enabled"] == "auto" else None
    if enabled:
        book.lose(block.name("enabled"), "auto", "implied default", f"{VERSION} reads auto as off", _STATE)
    on = bool(block.switch("enabled")) if not enabled else False
    dtype = block.word("dtype", tuple(AUTOCAST_DTYPES)) if block.values.get("dtype") != "auto" else above
    compute = AUTOCAST_DTYPES.get(dtype or "")
    if block.given("lower_precision_safe_modules"):
        detail = "which module classes are cast is torch's own list elsewhere"
        name, value = block.name("lower_precision_safe_modules"), block["lower_precision_safe_modules"]
        book.lose(name, value, "unsupported", detail, "Check that these classes are what you want cast.")
    if not on:
        for key in ("enabled", "dtype"):
            if block.given(key) and not enabled:
                book.carry(block.name(key))
        return None
    if mode is not None:
        detail = f"{mode} weights under autocast: autocast has nothing left to cast"
        for key in ("enabled", "dtype") if block.given("dtype") else ("enabled",):
            book.lose(block.name(key), block[key], "semantics", detail, "Keep one of the two blocks.")
        return None
    if compute is None:
        detail = f"{VERSION} leaves it to torch, which casts to BF16 on CPU and FP16 on CUDA"
        book.lose(block.name("dtype"), block.values.get("dtype"), "implied default", detail, _STATE)
        compute = "fp16"
    else:
        book.carry(block.name("dtype"), autocast_dtype=compute)
    book.carry(block.name("enabled"), autocast_enabled=True)
    detail = f"gradients of the cast modules are communicated in {compute}"
    book.lose(
        "communication_data_type", compute, "implied default", f"{detail} under torch_autocast, {VERSION}", _STATE
    )
    return compute


def _loss_scale(book: Arrival, block: Settings, *, dynamic_mode: bool) -> None:
    """Carry the loss scale and its schedule, where FP16 is on."""
    keys = ("loss_scale", *SCALE_DEFAULTS)
    if not dynamic_mode:
        for key in keys:
            if block.given(key):
                detail = "read only where fp16.enabled is true"
                book.lose(block.name(key), block[key], "dead knob", detail, "Drop it, or enable FP16.")
        return
    scale = _unless_auto(book, block, "loss_scale")
    if scale is not None:
        scale = block.number("loss_scale", least=0)
        book.carry(block.name("loss_scale"), loss_scale=scale or None)
    for key, default in SCALE_DEFAULTS.items():
        given = _unless_auto(book, block, key)
        if scale:
            if given is not None:
                detail = "a constant loss scale does not read it"
                book.lose(block.name(key), given, "dead knob", detail, "Drop it, or set loss_scale to 0.")
            continue
        least = 1 if key in ("loss_scale_window", "min_loss_scale", "hysteresis") else 0
        value = block.whole(key, least=least) if given is not None else default
        field, carried = _scale_field(block, key, value if value is not None else default)
        if given is not None:
            book.carry(block.name(key), **{field: carried})
        else:
            book.fields[field] = carried
            book.lose(block.name(key), default, "implied default", f"{default} in {VERSION}", _STATE)
    if not scale and block.given("min_loss_scale"):
        detail = "an overflow at the smallest scale ends the run there; Megatron stays at it and goes on"
        book.lose(
            block.name("min_loss_scale"), block["min_loss_scale"], "semantics", detail, "Watch for skipped steps."
        )


def _scale_field(block: Settings, key: str, value: int) -> tuple[str, int]:
    if key != "initial_scale_power":
        return key, value
    if value > 1000:
        raise block.wrong(key, "must be a power of two that a float can hold", value, "Use 16, the default")
    return "initial_loss_scale", 2**value


def _unless_auto(book: Arrival, block: Settings, key: str) -> object:
    if block.values.get(key) != "auto":
        return block.values.get(key)
    book.lose(block.name(key), "auto", "implied default", f"{VERSION} reads auto as its default", _STATE)
    return None


def _half_details(book: Arrival, fp16: Settings, bf16: Settings, on: dict[str, bool]) -> None:
    """Report what the blocks say beyond on and off, none of which has a field."""
    notes = {
        "auto_cast": (
            fp16,
            "inputs of the module are cast to FP16 by the engine",
            "Cast the inputs in the data loader.",
        ),
        "consecutive_hysteresis": (
            fp16,
            "refills on every good step; Megatron's tracker refills when the scale grows",
            "Lower hysteresis if the scale falls too late.",
        ),
        "immediate_grad_update": (bf16, "when gradients are copied, not how exactly", "Nothing to do."),
        "check_grad_overflow": (bf16, "Megatron checks BF16 gradients for NaN instead", "See check_for_nan_in_grad."),
        **dict.fromkeys(LOW_MEMORY["fp16"], (fp16, "no FP32 masters: FP16 throughout", _MASTERS)),
        **dict.fromkeys(LOW_MEMORY["bf16"], (bf16, "no FP32 masters: BF16 throughout", _MASTERS)),
    }
    for key, (block, detail, remedy) in notes.items():
        if not block.given(key):
            continue
        value = block[key] if block[key] == "auto" else block.switch(key)
        active = on["fp16" if block is fp16 else "bf16"]
        if value is False and key != "check_grad_overflow":
            book.carry(block.name(key))
        else:
            reason = "unsupported" if active else "dead knob"
            book.lose(block.name(key), value, reason, detail if active else "its block is off", remedy)


_MASTERS = "Megatron keeps FP32 masters: plan 4 more bytes per weight, or use its precision-aware optimizer."


def _reduction(book: Arrival, top: Settings, mode: str | None) -> None:
    """Carry the two settings that together decide in what gradients are accumulated and reduced."""
    types = top.section("data_types")
    accumulate = types.word("grad_accum_dtype", DTYPES)
    communicate = (top.text("communication_data_type") or "").lower() or None
    if communicate is not None and communicate not in DTYPES:
        raise top.wrong("communication_data_type", f"must be {', '.join(DTYPES)}", communicate, "Use 'fp32'")
    names = {types.name("grad_accum_dtype"): accumulate, "communication_data_type": communicate}
    if mode is None:
        for name, value in names.items():
            if value is not None:
                book.lose(name, value, "unsupported", "FP32 gradients need no choice elsewhere", "Drop it.")
    else:
        in_fp32 = {name: (value or mode) == "fp32" for name, value in names.items()}
        book.fields["grad_reduce_in_fp32"] = all(in_fp32.values())
        for name, value in names.items():
            if value is None:
                detail = f"{VERSION} uses the model's dtype, so gradients are kept or sent in {mode}"
                book.lose(name, mode, "implied default", detail, "Say fp32 in both places for FP32 reduction.")
            elif len(set(in_fp32.values())) > 1 or value not in (mode, "fp32"):
                detail = "gradients are accumulated in one dtype and sent in another; Megatron has one switch for both"
                book.lose(name, value, "approximated", detail, "State grad_reduce_in_fp32 as you want it.")
            else:
                book.carry(name, grad_reduce_in_fp32=in_fp32[name])
    _module_dtypes(book, types, mode)


def _module_dtypes(book: Arrival, types: Settings, mode: str | None) -> None:
    for key in ("param_dtype", "buffer_dtype", "keep_in_fp32_modules"):
        if types.given(key) and key == "param_dtype" and types.word(key, DTYPES) == (mode or "fp32"):
            book.carry(types.name(key), **({"params_dtype": mode} if mode else {}))
        elif types.given(key):
            if key == "param_dtype":
                remedy = "Make it agree with the enabled block, or drop it"
                raise types.wrong(key, f"must be the dtype of the mode, {mode or 'fp32'}", types[key], remedy)
            book.lose(types.name(key), types[key], "unsupported", "no such choice in Megatron", "Check these by hand.")


def _rest(book: Arrival, top: Settings) -> None:
    """Report blocks that bear on precision and are ignored by DeepSpeed, or unknown here."""
    for key in IGNORED_BLOCKS:
        if key in top:
            detail = f"{VERSION} ignores a block of this name without a word"
            book.lose(key, top[key], "dead knob", detail, "Drop it; FP8 comes through accelerate, not from here.")
    zero = top.section("zero_optimization") if isinstance(top.values.get("zero_optimization"), dict) else None
    for key in QUANTISED if zero else ():
        if zero and zero.values.get(key):
            detail = "weights or gradients are quantised for communication (ZeRO++)"
            book.lose(zero.name(key), zero[key], "unsupported", detail, "Megatron communicates in full dtype.")
    for key in ("seq_parallel_communication_data_type", "compression_training", "quantize_training"):
        if top.given(key):
            book.lose(key, top[key], "unsupported", "no such choice in a recipe", "Check it by hand.")


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    blocks = [key for key in ("fp16", "bf16", "bfloat16") if isinstance(content.get(key), dict)]
    own = [key for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "torch_autocast") if key in content]
    if blocks and own:
        return Recognised(certainty=0.95, evidence=f"has `{blocks[0]}` as a block beside `{own[0]}`")
    if own or (blocks and any("enabled" in content[key] for key in blocks)):
        return Recognised(certainty=0.8, evidence=f"has `{(own or blocks)[0]}`, which only DeepSpeed reads")
    return None


def _write(payload: Any) -> str:
    return json.dumps(payload, indent=2) + "\n"


SYSTEM = System(
    name="deepspeed",
    title=TITLE,
    version=VERSION,
    kinds=("json",),
    import_=import_,
    export=export,
    recognise=_recognise,
    write=_write,
    context=(
        ContextKey(name="auto", meaning='what the layer above makes of "auto": bf16, fp16 or fp32; none: nothing does'),
    ),
)

"""DeepSpeed's JSON configuration.

Its `fp16` and `bf16` blocks are Megatron's O2: the engine casts the module and keeps FP32 master weights. Its
`torch_autocast` block is AMP over FP32 weights. With all of them off the engine casts nothing, and the model trains in
the dtype it was loaded in. Gradients are accumulated and reduced in the model's own dtype unless two settings in two
places say FP32; FP32 accumulation of half-precision gradients takes ZeRO.

Blocks forbid names they do not know, and the top of the file ignores them silently; both are reported.
Source: DeepSpeed 0.19.8 runtime/config.py, runtime/precision_config.py, runtime/zero/config.py, runtime/engine.py.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from bridge.interop.builders import MODES, ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.optimizers import low_precision_optimizer
from bridge.interop.pytorch.amp import amp_fields, assume_torch_scaler, export_as_amp, report_scaler
from bridge.interop.reading.settings import Settings
from bridge.interop.unsupported import report_row, rows
from bridge.precision.dtypes import TORCH_NAMES
from bridge.registry.config import MixedPrecisionConfig

TITLE = "DeepSpeed"
VERSION = "DeepSpeed 0.19.8"
STATE = "Write it down to be sure."
DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Spelling of a dtype -> ours; case counts. `communication_data_type` takes the keys of `MODES` only, in any case."""
SCALE = {
    "initial_scale_power": ("initial_loss_scale", 0, 16),
    "loss_scale_window": ("loss_scale_window", 1, 1000),
    "min_loss_scale": ("min_loss_scale", 1, 1),
    "hysteresis": ("hysteresis", 1, 2),
}
"""Setting of a dynamic loss scale -> our field, the least value, the default."""
LOW_MEMORY = ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states")
"""Switches that drop the FP32 copies."""
READ = ("fp16", "bf16", "bfloat16", "torch_autocast", "data_types", "communication_data_type", "amp")
IGNORED = ("fp8", "fp4", "tf32", "float16", "fp32", "mixed_precision", "fp32_allreduce")
"""Names at the top that people write and nothing reads."""
LOOKS_LIKE_PRECISION = re.compile(
    r"(^|_)(bf16|fp16|fp8|fp4|fp32|tf32|mxfp\d|nvfp4)(_|$)|float\d|precision|dtype|data_type"
)
SHARDED = (
    "DeepSpeed 0.19.8 raises on FP32 accumulation of half-precision gradients without ZeRO, so zero_optimization.stage="
    "1 was written: optimizer state is sharded as under Megatron's distributed optimizer, and the numbers do not change"
)


def import_(payload: object, *, auto: str | None = None) -> ImportReport:
    """Return what a DeepSpeed configuration asks for; `auto` fills in "auto" and adds a block that is not there."""
    top = Settings(payload, TITLE, lenient=True)
    above = Settings({"auto": auto}, TITLE).word("auto", MODES)
    builder = ImportBuilder(TITLE)
    _refuse_apex(builder, top)
    old = not top.given("bf16")
    blocks = {"fp16": top.section("fp16"), "bf16": top.section("bfloat16" if old else "bf16")}
    if not old:
        builder.dead(top, ["bfloat16"], "the old name of the block, not read where there is a `bf16` block")
    on = {mode: _enabled(builder, block, mode, above) for mode, block in blocks.items()}
    if above in on and not any(on.values()) and not blocks[above].values:
        on[above] = True
        detail = f"the layer above adds the block that is not there, as auto={above} says"
        builder.implied(f"{above}.enabled", True, detail, **{above: True})
    if all(on.values()):
        enabled = blocks["bf16"].values.get("enabled")
        raise top.wrong("bf16.enabled", "must be off where fp16 is on", enabled, "Enable one of the two")
    mode = next((name for name, enabled in on.items() if enabled), None)
    autocast = _autocast(builder, top.section("torch_autocast"), mode)
    if mode is not None:
        builder.fields |= {mode: True, "params_dtype": mode}
    elif autocast is not None:
        builder.fields |= amp_fields(autocast)
    elif above is not None:
        builder.fields["fp32"] = True
    _loss_scale(builder, blocks["fp16"], on=on["fp16"])
    for name, block in blocks.items():
        _half(builder, block, name, on=on[name])
    _gradients(builder, top, mode)
    if mode is None and autocast is None and "fp32" not in builder.fields:
        builder.leave_mode(_decider([*blocks.values(), top.section("torch_autocast")]))
    _report_others(builder, top)
    if mode is None:
        return builder.finish("amp_o1" if autocast else "fp32")
    has_masters = all(blocks[mode].values.get(key) in (None, False, "auto") for key in LOW_MEMORY)
    return builder.finish("megatron_o2" if has_masters else "true")


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return a DeepSpeed configuration's precision blocks."""
    builder = ExportBuilder(config, TITLE)
    mode, semantics = config.mode, semantics_of(config)
    payload: dict[str, Any] = {
        "fp16": {"enabled": config.fp16 and semantics != "amp_o1"},
        "bf16": {"enabled": config.bf16 and semantics != "amp_o1"},
    }
    if semantics == "amp_o1":
        compute = export_as_amp(builder, "torch_autocast.enabled", "torch_autocast.dtype")
        payload["torch_autocast"] = {"enabled": True, "dtype": TORCH_NAMES[compute]}
        report_scaler(builder, f"{TITLE} under torch_autocast")
        if config.grad_reduce_in_fp32:
            builder.record_if_stated("deepspeed.gradients-of-the-cast-modules", "grad_reduce_in_fp32")
        return builder.finish(payload)
    builder.map(mode, "data_types.param_dtype" if mode == "fp32" else f"{mode}.enabled")
    if builder.values["params_dtype"] in (None, mode):
        builder.map("params_dtype", "data_types.param_dtype" if mode == "fp32" else f"{mode}.enabled")
    else:
        builder.record("deepspeed.the-engine-casts-every", "params_dtype", mode=mode)
    if mode == "fp32":
        payload["data_types"] = {"param_dtype": "fp32"}  # both blocks off state nothing by themselves
        builder.map("grad_reduce_in_fp32") if config.grad_reduce_in_fp32 else None
        return builder.finish(payload)
    dtype = "fp32" if config.grad_reduce_in_fp32 else mode
    payload |= {"data_types": {"grad_accum_dtype": dtype}, "communication_data_type": dtype}
    builder.map("grad_reduce_in_fp32", "data_types.grad_accum_dtype", "communication_data_type")
    if dtype != mode:
        payload["zero_optimization"] = {"stage": 1}
        builder.record("deepspeed.deepspeed-raises-on-fp32", "grad_reduce_in_fp32")
    if config.fp16:
        _export_loss_scale(builder, payload["fp16"])
    return builder.finish(payload)


def _refuse_apex(builder: ImportBuilder, top: Settings) -> None:
    """Raise PayloadError for an `amp` block that is on; report one that is off, which is refused all the same."""
    block = top.values.get("amp")
    on = block.get("enabled", False) if isinstance(block, Mapping) else block
    if on not in (None, False, 0, "auto", "false", "False"):
        remedy = "Use an fp16, bf16 or torch_autocast block"
        raise top.wrong("amp", f"must not be there: {VERSION} removed Apex", block, remedy)
    detail = (
        f"Apex was removed: {VERSION} refuses a file that has the block, off as it is here; earlier releases do not"
    )
    builder.dead(top, ["amp"], detail)


def _decider(blocks: list[Settings]) -> str:
    """Return what decides the mode where no block is on, as a noun."""
    if any(block.values.get("enabled") == "auto" for block in blocks):
        return 'the layer above that fills in "auto" (transformers, accelerate)'
    if any(block.given("enabled") for block in blocks):
        return f"the dtype that the model is loaded in, which {VERSION} keeps with both blocks off,"
    return f"the trainer that reads it ({VERSION} by itself keeps the model's own dtype)"


def _enabled(builder: ImportBuilder, block: Settings, mode: str, above: str | None) -> bool:
    """Return whether a block is on, with "auto" resolved by the layer above, or off without one."""
    name, written = block.name("enabled"), block.values.get("enabled")
    if written is None:
        if block.values:
            builder.record("deepspeed.off-in-deepspeed", name, False)
        return False
    if written == "auto" and above is None:
        builder.record("deepspeed.transformers-and-accelerate-fill", name, "auto")
        return False
    on = above == mode if written == "auto" else bool(block.switch("enabled"))
    builder.map(name, **({mode: True, "params_dtype": mode} if on else {}))
    return on


def _autocast(builder: ImportBuilder, block: Settings, mode: str | None) -> str | None:
    """Return the dtype of a `torch_autocast` block that acts."""
    enabled, written = block.values.get("enabled"), block.values.get("dtype")
    if enabled and enabled not in (True, 1):
        builder.record("deepspeed.deepspeed-asks-whether", block.name("enabled"), enabled)
    if written is not None and not (isinstance(written, str) and written in DTYPE_NAMES):
        rule = "must be bfloat16, float16 or float32, as torch or DeepSpeed spell them, letter by letter"
        raise block.wrong("dtype", rule, written, "Use bfloat16 or float16, or drop the key")
    compute = DTYPE_NAMES.get(written or "")
    if not enabled or compute == "fp32" or mode is not None:
        for key in ("enabled", "dtype"):
            if enabled and mode is not None and block.given(key):
                builder.record("deepspeed.weights-under-autocast", block.name(key), block[key], mode=mode)
            elif enabled and key == "dtype":
                detail = "torch autocasts to half precision only: it warns, and nothing is cast"
                builder.dead(block, [key], detail, "Use bfloat16, or disable the block.")
            elif block.given(key):
                builder.map(block.name(key))
        return None
    builder.map(block.name("enabled"), autocast_enabled=True)
    if compute is None:
        builder.record("deepspeed.deepspeed-leaves-it-to-torch", block.name("dtype"), None)
        builder.record("deepspeed.deepspeed-makes-a-loss", block.name("dtype"), None)
    else:
        builder.map(block.name("dtype"), autocast_dtype=compute)
        if compute == "fp16":
            assume_torch_scaler(builder, f"{TITLE} under torch_autocast")
    compute = compute or "fp16"
    builder.record("deepspeed.gradients-of-the-cast-modules-are", "communication_data_type", compute, compute=compute)
    return compute


def _loss_scale(builder: ImportBuilder, block: Settings, *, on: bool) -> None:
    if not on:
        detail = "read only where fp16.enabled is true"
        builder.dead(block, ("loss_scale", *SCALE), detail, "Drop it, or enable FP16.")
        return
    automatic = [key for key in ("loss_scale", *SCALE) if block.values.get(key) == "auto"]
    for key in automatic:
        builder.record("deepspeed.deepspeed-reads-auto", block.name(key), "auto")
        block.values[key] = None
    scale = block.number("loss_scale", least=0)
    if scale is not None:
        builder.map(block.name("loss_scale"), loss_scale=scale or None)
    if scale:
        builder.dead(block, SCALE, "a constant loss scale does not read it", "Drop it, or set loss_scale to 0.")
        return
    for key, (field, least, default) in SCALE.items():
        value = block.whole(key, least=least)
        taken = default if value is None else value
        if field == "initial_loss_scale" and taken > 1000:
            raise block.wrong(key, "must be a power of two that a float can hold", value, "Use 16, the default")
        fields = {field: 2**taken if field == "initial_loss_scale" else taken}
        if value is not None:
            builder.map(block.name(key), **fields)
            continue
        builder.fields |= fields
        builder.record("deepspeed.in-deepspeed", block.name(key), default, default=default)
    if block.given("min_loss_scale"):
        value = block["min_loss_scale"]
        builder.record("deepspeed.an-overflow-at-the-smallest", block.name("min_loss_scale"), value)


def _half(builder: ImportBuilder, block: Settings, mode: str, *, on: bool) -> None:
    """Report what a block says beyond on, off and the loss scale."""
    read = ("enabled", "loss_scale", *SCALE) if mode == "fp16" else ("enabled",)
    for key in block.values:
        row = rows("deepspeed_half").get(f"{mode}.{key}")
        if key in read or not block.given(key):
            continue
        if row is None:
            detail = f"no setting of the block: {VERSION} refuses the file, earlier releases ignore it"
            builder.dead(block, [key], detail, "Drop it, or check its spelling.")
        elif block[key] == "auto":
            builder.record("deepspeed.deepspeed-reads-auto", block.name(key), "auto")
        elif not on and block.switch(key):
            builder.dead(block, [key], "its block is off", row.remedy)
        else:
            report_row(builder, block.name(key), block.switch(key), row)


def _gradients(builder: ImportBuilder, top: Settings, mode: str | None) -> None:
    """Map the two settings that together decide in what gradients are accumulated and reduced."""
    types = top.section("data_types")
    accumulated = DTYPE_NAMES.get(types.word("grad_accum_dtype", tuple(DTYPE_NAMES)) or "")
    sent = (top.text("communication_data_type") or "").lower()
    if top.given("communication_data_type") and sent not in MODES:
        value = top["communication_data_type"]
        known = DTYPE_NAMES.get(sent, "fp32")
        raise top.wrong("communication_data_type", f"must be {', '.join(MODES)}", value, f"Write '{known}'")
    names = {types.name("grad_accum_dtype"): accumulated, "communication_data_type": sent or None}
    in_fp32 = {name: (value or mode) == "fp32" for name, value in names.items()}
    if mode is not None:
        builder.fields["grad_reduce_in_fp32"] = all(in_fp32.values())
    for name, value in names.items():
        if mode is None and value in (None, "fp32"):
            builder.map(name) if value else None
        elif mode is None:
            detail = f"gradients of FP32 weights are accumulated or sent in {value}; Megatron keeps them in FP32"
            builder.report(name, value, "unsupported", detail, "Drop it, or train in half precision.")
        elif value is None:
            builder.record("deepspeed.deepspeed-uses-the-model", name, mode, mode=mode)
        elif len(set(in_fp32.values())) > 1 or value not in (mode, "fp32"):
            builder.record("deepspeed.gradients-are-accumulated-in-one", name, value)
        else:
            builder.map(name, grad_reduce_in_fp32=in_fp32[name])
    zero = top.values.get("zero_optimization")
    if (
        None not in (mode, accumulated)
        and accumulated != mode
        and not (isinstance(zero, Mapping) and zero.get("stage"))
    ):
        builder.record("deepspeed.deepspeed-raises-on-it-without", types.name("grad_accum_dtype"), accumulated)
    _param_dtype(builder, types, mode)


def _param_dtype(builder: ImportBuilder, types: Settings, mode: str | None) -> None:
    """Map the dtype of the weights, which must be that of the enabled block."""
    param = DTYPE_NAMES.get(types.word("param_dtype", tuple(DTYPE_NAMES)) or "")
    if param not in (None, mode or "fp32"):
        remedy = "Make it agree with the enabled block, or drop it"
        rule = f"must be the dtype of the mode, {mode or 'fp32'}"
        raise types.wrong("param_dtype", rule, types["param_dtype"], remedy)
    if param is not None:
        under_autocast = builder.fields.get("autocast_enabled")
        builder.map(types.name("param_dtype"), **({"params_dtype": mode} if mode else {}))
        builder.fields |= {} if mode or under_autocast else {"fp32": True}


def _report_others(builder: ImportBuilder, top: Settings) -> None:
    for key in top.values:
        looks = LOOKS_LIKE_PRECISION.search(key.lower()) and not key.startswith("seq_")
        if key in IGNORED or (key not in READ and looks):
            detail = f"{VERSION} ignores a block of this name without a word"
            builder.dead(top, [key], detail, "Drop it; FP8 comes through accelerate, not from here.")
    for path, row in (rows("deepspeed_removed") | rows("deepspeed") | rows("deepspeed_on")).items():
        value: Any = top.values
        for word in path.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        is_off = path == "msamp" and isinstance(value, Mapping) and not value.get("enabled")
        if value == "auto":
            builder.record("deepspeed.deepspeed-reads-auto-as", path, value)
        elif value is not None:
            report_row(builder, path, False if is_off else value, row)
    optimizer = top.values.get("optimizer")
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    kept = low_precision_optimizer(name)
    if kept is not None:
        gone = f"; {VERSION} has removed such optimizers and fails on the name" if "one bit" in kept else ""
        remedy = "Megatron keeps the state in FP32 and reduces gradients in full."
        builder.report("optimizer.type", name, "unsupported", f"{kept}{gone}", remedy)


def _export_loss_scale(builder: ExportBuilder, block: dict[str, Any]) -> None:
    config = builder.config
    block["loss_scale"] = config.loss_scale or 0
    builder.map("loss_scale", "fp16.loss_scale")
    if config.loss_scale is not None:
        return
    mantissa, exponent = math.frexp(config.initial_loss_scale or 65536)
    block["initial_scale_power"] = max(exponent - 1, 0)
    if mantissa == 0.5 and exponent >= 1:
        builder.map("initial_loss_scale", "fp16.initial_scale_power")
    else:
        builder.record("deepspeed.only-whole-powers", "initial_loss_scale")
    for field in ("min_loss_scale", "loss_scale_window", "hysteresis"):
        value = builder.values[field]
        block[field] = max(int(value), 1)
        if block[field] == value:
            builder.map(field, f"fp16.{field}")
        else:
            builder.report(field, "approximated", "whole numbers from 1 up only", f"Expect {block[field]} instead.")


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    blocks = [key for key in ("fp16", "bf16", "bfloat16") if isinstance(content.get(key), dict)]
    own = [key for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "torch_autocast") if key in content]
    if blocks and own:
        return Recognised(0.95, f"has `{blocks[0]}` as a block together with `{own[0]}`")
    if own or (blocks and any("enabled" in content[key] for key in blocks)):
        return Recognised(0.8, f"has `{(own or blocks)[0]}`, which only DeepSpeed reads")
    return None


CONTEXT = (ContextKey("auto", 'what the layer above trains in, for "auto" and a missing block: bf16, fp16 or fp32'),)
SYSTEM = System("deepspeed", TITLE, VERSION, import_, export, _recognise, as_json, context=CONTEXT)

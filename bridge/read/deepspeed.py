"""DeepSpeed's JSON configuration.

Its `fp16` and `bf16` blocks are Megatron's O2: the engine casts the module and keeps FP32 master
weights. With both off the engine casts nothing, and the model trains in the dtype it was loaded in,
unless its `torch_autocast` block is on, which is written here and not read. Gradients are
accumulated and reduced in the model's own dtype unless two settings in two places say FP32; FP32
accumulation of half-precision gradients takes ZeRO.

Blocks forbid names they do not know, and the top of the file ignores them silently; both are
reported. Its settings and sentences, with their sources, are `rows/deepspeed.yaml`.

The file is in `read` and not in `convert`, since forks of Megatron-LM train with DeepSpeed's engine:
`megatron_lm/engine_file.py` reads the precision of such a run with it.
"""

import math
from typing import Any

from bridge.precision.coercion import TORCH_NAMES
from bridge.precision.mode import get_mode
from bridge.read.foreign.amp import export_as_amp, report_scaler
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import MODES, ImportBuilder
from bridge.read.foreign.payload_text import as_json
from bridge.read.foreign.reports import ExportReport, ImportReport
from bridge.read.foreign.semantics import get_semantics
from bridge.read.foreign.system import ContextKey, System
from bridge.read.foreign.table import load_table
from bridge.read.text.settings import Settings
from bridge.registry.config import MixedPrecisionConfig

TABLE = load_table("deepspeed")
DTYPE_NAMES: dict[str, str] = TABLE.data["dtypes"]
"""Spelling of a dtype -> ours; case counts. `communication_data_type` takes only `MODES`, in any
case."""
DEFAULT_SCALE_POWER = 16
MAX_SCALE_POWER = 1000
"""The largest power that is taken; floats end at 1023."""
LOSS_SCALE_SETTINGS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "min_loss_scale",
    "hysteresis",
)


def import_(payload: object, *, auto: str | None = None) -> ImportReport:
    """Return what a DeepSpeed configuration asks for.

    Args:
        payload: The parsed JSON.
        auto: The mode of the layer above, which fills in "auto" and adds a block that is not there.
    """
    top = Settings(payload, TABLE.title, lenient=True)
    above = Settings({"auto": auto}, TABLE.title).word("auto", MODES)
    builder = ImportBuilder(TABLE.title)
    bf16_name = "bfloat16"
    if top.is_written("bf16"):
        bf16_name = "bf16"
    bf16_block = top.section(bf16_name)
    blocks = {"fp16": top.section("fp16"), "bf16": bf16_block}
    mode = _map_mode(builder, blocks, above)
    autocast = top.section("torch_autocast").values.get("enabled")
    if mode is not None:
        builder.fields |= {mode: True, "params_dtype": mode}
    elif above is not None and not autocast:
        builder.fields["fp32"] = True
    _read_blocks(builder, blocks, mode)
    _map_gradients(builder, top, mode)
    _map_param_dtype(builder, top.section("data_types"), mode)
    if mode is None and "fp32" not in builder.fields:
        builder.leave_mode(_get_mode_decider(blocks, autocast))
    facts = {
        "no_bf16": not top.is_written("bf16"),
        "autocast": bool(autocast),
        "never": False,  # the fact of rows that take effect nowhere
    }
    TABLE.read(builder, top, **facts)
    if mode is None:
        return builder.finish("fp32")
    drops_masters = any(blocks[mode].values.get(key) is True for key in TABLE.data["low memory"])
    if drops_masters:
        return builder.finish("true")
    return builder.finish("megatron_o2")


def _read_blocks(builder: ImportBuilder, blocks: dict[str, Settings], mode: str | None) -> None:
    """Map or report the settings of the blocks `fp16` and `bf16`."""
    fp16 = blocks["fp16"]
    is_dynamic = mode == "fp16" and _map_loss_scale(builder, fp16)
    for name, block in blocks.items():
        for key in TABLE.data["switches"][name]:
            if block.values.get(key) != "auto":
                block.values[key] = block.switch(key)
        facts = {"on": name == mode, "fp16": mode == "fp16", "dynamic": is_dynamic}
        TABLE.read(builder, block, name, **facts)
    if is_dynamic and fp16.is_written("min_loss_scale"):
        name = fp16.name("min_loss_scale")
        builder.record(
            "deepspeed.overflow-at-the-smallest-scale-stops", name, fp16["min_loss_scale"]
        )


def _get_mode_decider(blocks: dict[str, Settings], autocast: object) -> str:
    """Return the source that decides the mode where no block is on, as a noun."""
    deciders: dict[str, str] = TABLE.data["decides"]
    switches = [autocast, *(block.values.get("enabled") for block in blocks.values())]
    if autocast:
        return deciders["autocast"]
    if "auto" in switches:
        return deciders["above"]
    if all(switch is None for switch in switches):
        return deciders["trainer"]
    return deciders["model"]


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return a DeepSpeed configuration's precision blocks."""
    builder = ExportBuilder(config, TABLE.title)
    mode = get_mode(config)
    if get_semantics(config) == "amp_o1":
        return _export_autocast(builder)
    payload: dict[str, Any] = {}
    for name in ("fp16", "bf16"):
        payload[name] = {"enabled": name == mode}
    setting = f"{mode}.enabled"
    dtype = "fp32" if config.grad_reduce_in_fp32 else mode
    if mode == "fp32":  # both blocks off state nothing by themselves
        payload["data_types"] = {"param_dtype": "fp32"}
        setting = "data_types.param_dtype"
        if config.grad_reduce_in_fp32:
            builder.map("grad_reduce_in_fp32")
    else:
        payload["data_types"] = {"grad_accum_dtype": dtype}
        payload["communication_data_type"] = dtype
        builder.map("grad_reduce_in_fp32", "data_types.grad_accum_dtype", "communication_data_type")
    builder.map(mode, setting)
    builder.map_dtype("params_dtype", setting)
    if dtype != mode:
        payload["zero_optimization"] = {"stage": 1}
        builder.record("deepspeed.fp32-accumulation-needs-zero", "grad_reduce_in_fp32")
    if config.fp16:
        _export_loss_scale(builder, payload["fp16"])
    return builder.finish(payload, TABLE.unwritten, amp=False)


def _export_autocast(builder: ExportBuilder) -> ExportReport:
    """Return the block of autocast over FP32 weights, with both blocks of half precision off."""
    compute = export_as_amp(builder, "torch_autocast.enabled", "torch_autocast.dtype")
    builder.mapped.pop("grad_reduce_in_fp32", None)
    payload: dict[str, Any] = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": TORCH_NAMES[compute]},
    }
    report_scaler(builder, f"{TABLE.title} under torch_autocast")
    return builder.finish(payload, TABLE.unwritten, amp=True)


def _map_mode(builder: ImportBuilder, blocks: dict[str, Settings], above: str | None) -> str | None:
    """Return the mode whose block is on; None where both are off.

    "auto" is resolved by the layer above, and off without one.
    """
    modes_on: list[str] = []
    for mode, block in blocks.items():
        name = block.name("enabled")
        written = block.values.get("enabled")
        if written is None and block.values:
            builder.record("deepspeed.off-by-default", name, False)
        elif written == "auto" and above is None:
            builder.record("deepspeed.auto-filled-by-the-trainer", name, "auto")
        elif written is not None:
            is_on = above == mode
            if written != "auto":
                is_on = bool(block.switch("enabled"))
            if is_on:
                modes_on.append(mode)
                builder.map(name, **{mode: True, "params_dtype": mode})
            else:
                builder.map(name)
    if not modes_on and above in blocks and not blocks[above].values:
        row, name = "deepspeed.block-added-by-the-layer-above", f"{above}.enabled"
        builder.record(row, name, True, {above: True}, mode=above)
        return above
    if len(modes_on) > 1:
        raise TABLE.wrong("both-halves", blocks["bf16"], "enabled")
    if not modes_on:
        return None
    return modes_on[0]


def _map_loss_scale(builder: ImportBuilder, block: Settings) -> bool:
    """Map the loss scale, or the power of two that it begins with; return whether it is dynamic."""
    for key in LOSS_SCALE_SETTINGS:
        if block.values.get(key) == "auto":
            builder.record("deepspeed.auto-read-as-the-default", block.name(key), "auto")
            block.values[key] = None
    scale = block.number("loss_scale", least=0)
    if scale is not None:
        builder.map(block.name("loss_scale"), loss_scale=scale or None)
    if scale:
        return False
    name = block.name("initial_scale_power")
    power = block.whole("initial_scale_power", least=0)
    if power is None:
        fields = {"initial_loss_scale": 2**DEFAULT_SCALE_POWER}
        builder.record("deepspeed.default-scale-power", name, DEFAULT_SCALE_POWER, fields)
    elif power > MAX_SCALE_POWER:
        raise TABLE.wrong("powers-of-two", block, "initial_scale_power")
    else:
        builder.map(name, initial_loss_scale=2**power)
    return True


def _map_gradients(builder: ImportBuilder, top: Settings, mode: str | None) -> None:
    """Map the two settings that together decide in what gradients are accumulated and reduced."""
    types = top.section("data_types")
    accumulated = DTYPE_NAMES.get(types.word("grad_accum_dtype", tuple(DTYPE_NAMES)) or "")
    sent = (top.text("communication_data_type") or "").lower()
    if top.is_written("communication_data_type") and sent not in MODES:
        known = DTYPE_NAMES.get(sent, "fp32")
        raise TABLE.wrong("dtypes-of-communication", top, "communication_data_type", known=known)
    names = {types.name("grad_accum_dtype"): accumulated, "communication_data_type": sent or None}
    in_fp32 = {name: (value or mode) == "fp32" for name, value in names.items()}
    if mode is not None:
        builder.fields["grad_reduce_in_fp32"] = all(in_fp32.values())
    for name, value in names.items():
        if mode is None and value in (None, "fp32"):
            if value:
                builder.map(name)
        elif mode is None:
            builder.record("deepspeed.gradients-of-fp32-weights", name, value)
        elif value is None:
            builder.record("deepspeed.gradients-in-the-model-dtype", name, mode)
        elif len(set(in_fp32.values())) > 1 or value not in (mode, "fp32"):
            builder.record("deepspeed.accumulated-and-sent-in-two-dtypes", name, value)
        else:
            builder.map(name, grad_reduce_in_fp32=in_fp32[name])


def _map_param_dtype(builder: ImportBuilder, types: Settings, mode: str | None) -> None:
    """Map the dtype of the weights, which must be that of the enabled block."""
    param = DTYPE_NAMES.get(types.word("param_dtype", tuple(DTYPE_NAMES)) or "")
    if param not in (None, mode or "fp32"):
        raise TABLE.wrong("dtype-of-the-mode", types, "param_dtype", mode=mode or "fp32")
    if param is None:
        return
    if mode:
        builder.map(types.name("param_dtype"), params_dtype=mode)
    else:
        builder.map(types.name("param_dtype"))
        builder.fields["fp32"] = True


def _export_loss_scale(builder: ExportBuilder, block: dict[str, Any]) -> None:
    """Write the loss scale into the block `fp16`."""
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
        builder.record("deepspeed.scale-written-as-a-power-of-two", "initial_loss_scale")
    for field, value in TABLE.write(builder, "fp16", "fp16").items():
        block[field] = max(int(value), 1)
        if block[field] != value:
            builder.record("deepspeed.written-as-a-whole-number", field, written=block[field])


CONTEXT = (
    ContextKey(
        "auto", 'what the layer above trains in, for "auto" and a missing block: bf16, fp16 or fp32'
    ),
)
SYSTEM = System(
    name="deepspeed",
    title=TABLE.title,
    version=TABLE.version,
    export=export,
    import_=import_,
    write=as_json,
    context=CONTEXT,
)

"""DeepSpeed's JSON configuration as a system of `convert`: `SYSTEM`.

The blocks `fp16` and `bf16` are Megatron's O2: the engine casts the module, and keeps FP32 master
weights. With both off the engine casts nothing, and the model trains in the dtype in which it was
loaded. The block `torch_autocast` would change this; it is written here and not read.

Gradients are accumulated and reduced in the dtype of the model unless two settings in two blocks
state FP32. FP32 accumulation of half-precision gradients needs ZeRO.

A block refuses a name that it does not know. The top of the file ignores such a name silently. Both
are reported. The settings and sentences, with their sources, are in `foreign/tables/deepspeed.yaml`.

This module is in `read`, since forks of Megatron-LM train with DeepSpeed's engine.
`megatron_lm/deepspeed/engine_file.py` reads the precision of such a run with it.
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
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

TABLE = load_table("deepspeed")
DTYPE_NAMES: dict[str, str] = TABLE.data["dtypes"]
"""DeepSpeed's spelling of a dtype, in exactly this case -> ours. `communication_data_type` takes
only the spellings of `MODES`, in any case."""
DEFAULT_SCALE_POWER = 16
"""The default of `initial_scale_power`: the loss scale begins at 2**16."""
MAX_SCALE_POWER = 1000
"""The largest `initial_scale_power` that is read. The largest power of a float is 1023."""
LOSS_SCALE_SETTINGS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "min_loss_scale",
    "hysteresis",
)
"""Settings of the block `fp16` about the loss scale, which may be "auto"."""


def import_(payload: object, *, auto: str | None = None) -> ImportReport:
    """Return the precision that a DeepSpeed configuration states.

    Args:
        payload: The parsed JSON.
        auto: The mode of the trainer that uses DeepSpeed: fp32, bf16 or fp16. The trainer replaces
            "auto" by it, and adds an absent block. None: not known.

    Raises:
        PayloadError: DeepSpeed refuses the configuration too.
    """
    top = Settings(payload, TABLE.title, lenient=True)
    trainer_mode = Settings({"auto": auto}, TABLE.title).word("auto", MODES)
    builder = ImportBuilder(TABLE.title)
    bf16_name = "bfloat16"
    if top.is_written("bf16"):
        bf16_name = "bf16"
    bf16_block = top.section(bf16_name)
    blocks = {"fp16": top.section("fp16"), "bf16": bf16_block}
    mode = _map_mode(builder, blocks, trainer_mode)
    autocast = top.section("torch_autocast").values.get("enabled")
    if mode is not None:
        builder.fields |= {mode: True, "params_dtype": mode}
    elif trainer_mode is not None and not autocast:
        builder.fields["fp32"] = True
    _read_blocks(builder, blocks, mode)
    _map_gradients(builder, top, mode)
    _map_param_dtype(builder, top.section("data_types"), mode)
    if mode is None and "fp32" not in builder.fields:
        builder.leave_mode(_get_mode_decider(blocks, autocast))
    facts = {
        "no_bf16": not top.is_written("bf16"),
        "autocast": bool(autocast),
        "never": False,  # rows that need this fact have no effect in any run
    }
    TABLE.read(builder, top, **facts)
    if mode is None:
        return builder.finish("fp32")
    drops_masters = any(blocks[mode].values.get(key) is True for key in TABLE.data["low memory"])
    if drops_masters:
        return builder.finish("true")
    return builder.finish("megatron_o2")


def _read_blocks(builder: ImportBuilder, blocks: dict[str, Settings], mode: str | None) -> None:
    """Map or report the settings of the blocks `fp16` and `bf16`.

    Args:
        builder: The report of the import.
        blocks: Name of a block -> its settings.
        mode: The mode whose block is on; None if both are off.
    """
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
    """Return the source that decides the mode of a file in which no block is on, as a noun.

    Args:
        blocks: The blocks `fp16` and `bf16`.
        autocast: The value of `torch_autocast.enabled`.
    """
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
    """Return the precision blocks of a DeepSpeed configuration."""
    builder = ExportBuilder(config, TABLE.title)
    mode = get_mode(config)
    if get_semantics(config) == "amp_o1":
        return _export_autocast(builder)
    payload: dict[str, Any] = {}
    for name in ("fp16", "bf16"):
        payload[name] = {"enabled": name == mode}
    mode_setting = f"{mode}.enabled"
    grad_dtype = mode
    if config.grad_reduce_in_fp32:
        grad_dtype = "fp32"
    if mode == "fp32":
        # Two blocks that are off do not state FP32: the model keeps the dtype of its checkpoint.
        payload["data_types"] = {"param_dtype": "fp32"}
        mode_setting = "data_types.param_dtype"
        if config.grad_reduce_in_fp32:
            builder.map("grad_reduce_in_fp32")
    else:
        payload["data_types"] = {"grad_accum_dtype": grad_dtype}
        payload["communication_data_type"] = grad_dtype
        builder.map("grad_reduce_in_fp32", "data_types.grad_accum_dtype", "communication_data_type")
    builder.map(mode, mode_setting)
    builder.map_dtype("params_dtype", mode_setting)
    if grad_dtype != mode:
        payload["zero_optimization"] = {"stage": 1}
        builder.record("deepspeed.fp32-accumulation-needs-zero", "grad_reduce_in_fp32")
    if config.fp16:
        _export_loss_scale(builder, payload["fp16"])
    return builder.finish(payload, TABLE.unwritten, amp=False)


def _export_autocast(builder: ExportBuilder) -> ExportReport:
    """Return the block of autocast over FP32 weights, with both blocks of half precision off."""
    compute = export_as_amp(builder, "torch_autocast.enabled", "torch_autocast.dtype")
    # Here the dtype of the reduction follows the weights, and no setting states it.
    builder.mapped.pop("grad_reduce_in_fp32", None)
    payload: dict[str, Any] = {
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": TORCH_NAMES[compute]},
    }
    report_scaler(builder, f"{TABLE.title} under torch_autocast")
    return builder.finish(payload, TABLE.unwritten, amp=True)


def _map_mode(
    builder: ImportBuilder, blocks: dict[str, Settings], trainer_mode: str | None
) -> str | None:
    """Map the switches of both blocks; return the mode whose block is on, or None if both are off.

    Args:
        builder: The report of the import.
        blocks: The blocks `fp16` and `bf16`.
        trainer_mode: The mode of the trainer, which replaces "auto". Without it "auto" is off.

    Raises:
        PayloadError: Both blocks are on.
    """
    modes_on: list[str] = []
    for mode, block in blocks.items():
        setting = block.name("enabled")
        value = block.values.get("enabled")
        if value is None and block.values:
            builder.record("deepspeed.off-by-default", setting, False)
        elif value == "auto" and trainer_mode is None:
            builder.record("deepspeed.auto-filled-by-the-trainer", setting, "auto")
        elif value is not None:
            is_on = trainer_mode == mode
            if value != "auto":
                is_on = bool(block.switch("enabled"))
            if is_on:
                modes_on.append(mode)
                builder.map(setting, **{mode: True, "params_dtype": mode})
            else:
                builder.map(setting)
    if len(modes_on) > 1:
        raise TABLE.wrong("both-halves", blocks["bf16"], "enabled")
    if modes_on:
        return modes_on[0]
    if trainer_mode in blocks and not blocks[trainer_mode].values:
        sentence = "deepspeed.block-added-by-the-layer-above"
        setting = f"{trainer_mode}.enabled"
        builder.record(sentence, setting, True, {trainer_mode: True}, mode=trainer_mode)
        return trainer_mode
    return None


def _map_loss_scale(builder: ImportBuilder, block: Settings) -> bool:
    """Map the loss scale, or the first value of a dynamic one; return whether it is dynamic."""
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
    """Map the two settings that together decide the dtype of gradients.

    One is the dtype in which gradients are accumulated, the other that in which they are sent. The
    field `grad_reduce_in_fp32` is True only if both are FP32.

    Args:
        builder: The report of the import.
        top: The configuration.
        mode: The mode whose block is on; None if both are off. It is the default of both settings.

    Raises:
        PayloadError: DeepSpeed does not take the dtype of the communication.
    """
    types = top.section("data_types")
    accumulated = DTYPE_NAMES.get(types.word("grad_accum_dtype", tuple(DTYPE_NAMES)) or "")
    sent = (top.text("communication_data_type") or "").lower()
    if top.is_written("communication_data_type") and sent not in MODES:
        known = DTYPE_NAMES.get(sent, "fp32")
        raise TABLE.wrong("dtypes-of-communication", top, "communication_data_type", known=known)
    dtypes = {types.name("grad_accum_dtype"): accumulated, "communication_data_type": sent or None}
    in_fp32 = {setting: (dtype or mode) == "fp32" for setting, dtype in dtypes.items()}
    are_different = len(set(in_fp32.values())) > 1
    if mode is not None:
        builder.fields["grad_reduce_in_fp32"] = all(in_fp32.values())
    for setting, dtype in dtypes.items():
        if mode is None and dtype in (None, "fp32"):
            if dtype:
                builder.map(setting)
        elif mode is None:
            builder.record("deepspeed.gradients-of-fp32-weights", setting, dtype)
        elif dtype is None:
            builder.record("deepspeed.gradients-in-the-model-dtype", setting, mode)
        elif are_different or dtype not in (mode, "fp32"):
            builder.record("deepspeed.accumulated-and-sent-in-two-dtypes", setting, dtype)
        else:
            builder.map(setting, grad_reduce_in_fp32=in_fp32[setting])


def _map_param_dtype(builder: ImportBuilder, types: Settings, mode: str | None) -> None:
    """Map the dtype of the weights.

    Raises:
        PayloadError: It is not that of the block that is on.
    """
    weights_dtype = DTYPE_NAMES.get(types.word("param_dtype", tuple(DTYPE_NAMES)) or "")
    if weights_dtype not in (None, mode or "fp32"):
        raise TABLE.wrong("dtype-of-the-mode", types, "param_dtype", mode=mode or "fp32")
    if weights_dtype is None:
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
    # DeepSpeed takes the power of two. frexp returns 2**n as 0.5 * 2**(n + 1).
    mantissa, exponent = math.frexp(config.initial_loss_scale or 2**DEFAULT_SCALE_POWER)
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

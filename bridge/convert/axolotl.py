"""`SYSTEM`: reads and writes the precision in Axolotl's YAML, for `convert`.

`bf16: true` has two effects: the weights are loaded in BF16, and the trainer runs under autocast.
Other settings decide which values are in FP32:

- DeepSpeed and FSDP keep FP32 master weights;
- an adapter is trained in FP32 over a frozen BF16 model;
- without any of these nothing is in FP32.

`bf16: auto` depends on the GPU. For a stated GPU it is resolved in the three steps of Axolotl: by
the capabilities of the GPU (cli/config.py), by `resolve_dtype` (utils/config), and by the arguments
for transformers (core/builders/base.py).

Source: Axolotl 0.19.0, also utils/schemas, loaders/model.py and integrations/kernels/args.py.
"""

from contextlib import suppress
from typing import Any, NamedTuple

from bridge.errors import PayloadError, RunConfigError
from bridge.precision.mode import get_mode
from bridge.read.foreign.amp import assume_torch_scaler, export_as_cast, report_scaler
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.reports import ExportReport, ImportReport
from bridge.read.foreign.semantics import get_semantics
from bridge.read.foreign.system import ContextKey, System
from bridge.read.foreign.table import load_table
from bridge.read.text.settings import Settings
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.target.declaration import parse_target
from bridge.target.gpus import Gpu

TABLE = load_table("axolotl")
DTYPE_BY_SWITCH = {
    "bf16": "bf16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
"""Switch -> its dtype. `bf16` may also be "auto"."""
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""torchao's names of its recipes."""
DECIDERS_BY_SEMANTICS = {
    "megatron_o2": ("axolotl.deepspeed-file-decides-reduction", ("deepspeed",)),
    "fsdp_policy": ("axolotl.fsdp-policy-reduces-in-mode", ("fsdp_config", "fsdp")),
    "true": (
        "axolotl.without-masters",
        ("adapter", "bf16", "bfloat16", "fp16", "float16", "load_in_8bit"),
    ),
}
"""Semantics of the mode -> the sentence about it, and the settings that decide it, in order."""
DTYPE_DECIDERS = ("deepspeed", "fsdp_config", "fsdp", "adapter")
"""Further settings that decide the dtypes of the weights and their gradients."""
TRAINER_NAME = "transformers' Trainer"
KERNELS_PLUGIN = "kernelsplugin"


def import_(payload: object, *, gpu: object = None) -> ImportReport:
    """Return the precision that an Axolotl configuration states.

    Args:
        payload: The configuration, a mapping.
        gpu: The GPU of the run, as in a target. None: a GPU with BF16 is assumed for "auto", and
            this is reported.

    Raises:
        PayloadError: Axolotl refuses the configuration too, or the GPU is not known.
    """
    top = Settings(payload, TABLE.title, lenient=True)
    card = _parse_gpu(gpu)
    is_fp8 = bool(top.switch("fp8"))
    _refuse_contradictions(top, card, is_fp8=is_fp8)
    float8_recipe = top.section("fp8_config").word("recipe", FLOAT8_RECIPES) or "tensorwise"
    is_tensorwise = float8_recipe == "tensorwise"
    builder = ImportBuilder(TABLE.title)
    semantics = _map_mode(builder, top, card)
    if is_fp8 and is_tensorwise:
        builder.map("fp8", fp8="hybrid", fp8_recipe="tensorwise")
        builder.record("axolotl.torchao-keeps-end-modules", "fp8.module_filter", None)
    _map_tf32(builder, top, card)
    _report_weights(builder, top, semantics)
    TABLE.read(builder, top, fp8=is_fp8, tensorwise=is_tensorwise, kernels=_has_kernels(top))
    is_mapped = is_fp8 == ("fp8" in builder.fields)
    has_engine = bool(top.values.get("deepspeed"))
    return builder.finish(semantics, is_whole=is_mapped and not has_engine)


def _refuse_contradictions(top: Settings, card: Gpu | None, *, is_fp8: bool) -> None:
    """Refuse settings with which Axolotl does not start."""
    if top.values.get("bf16") == "full":
        raise TABLE.wrong("bf16-full", top, "bf16")
    if is_fp8 and card is not None and _get_compute_capability(card) < (9, 0):
        raise TABLE.wrong("fp8-needs-hopper", top, "fp8", gpu=card.name)


def _has_kernels(top: Settings) -> bool:
    """Return whether the plugin with kernels of other libraries is on."""
    plugins = top.values.get("plugins")
    if not isinstance(plugins, list):
        return False
    return any(KERNELS_PLUGIN in str(plugin).lower() for plugin in plugins)


def export(config: MixedPrecisionConfig, *, sharding: str | None = None) -> ExportReport:
    """Return the precision settings of an Axolotl YAML.

    All settings are written, since the default of an absent setting is "auto".

    Args:
        sharding: "fsdp" or "deepspeed" if the run will use one of them.
    """
    sharded_by = Settings({"sharding": sharding}, TABLE.title).word(
        "sharding", ("fsdp", "deepspeed")
    )
    builder = ExportBuilder(config, TABLE.title)
    mode = get_mode(config)
    settings: tuple[str, ...] = (mode,)
    if mode == "fp32":
        settings = ("bf16", "fp16")
    compute = export_as_cast(builder, "axolotl.autocast-over-half-weights", *settings)
    payload: dict[str, Any] = {"bf16": compute == "bf16", "fp16": compute == "fp16"}
    has_half_weights = mode != "fp32" and get_semantics(config) != "amp_o1"
    if has_half_weights and sharded_by is None:
        builder.record("axolotl.no-fp32-weights-without-sharding", "params_dtype", mode=mode)
    if (config.fp8, config.fp8_recipe, mode) == ("hybrid", "tensorwise", "bf16"):
        payload.update(_make_fp8_settings(builder))
    payload["tf32"] = bool(config.tf32)
    builder.map("tf32", "tf32")
    if config.tf32 is None:
        builder.record("axolotl.tf32-off-in-place-of-auto", "tf32")
    if compute != "fp32" and not config.grad_reduce_in_fp32:
        builder.map("grad_reduce_in_fp32")
    report_scaler(builder, TRAINER_NAME)
    return builder.finish(payload, TABLE.unwritten)


def _make_fp8_settings(builder: ExportBuilder) -> dict[str, Any]:
    """Return the settings of FP8 with a scale for each tensor, which torchao computes."""
    # torchao's FP8 is faster than BF16 only if it is compiled.
    payload: dict[str, Any] = {"fp8": True, "torch_compile": True}
    for field in ("fp8", "fp8_recipe"):
        builder.map(field, "fp8")
    if builder.config.fp8_param_gather:
        payload |= {"fp8_enable_fsdp_float8_all_gather": True, "fsdp_version": 2}
        builder.record_if_stated(
            "axolotl.gathered-in-fp8-under-fsdp", "fp8_param_gather", "fp8_param"
        )
    if builder.values["first_last_layers_bf16"]:
        builder.record("axolotl.torchao-keeps-no-layers", "first_last_layers_bf16")
    if builder.values["modules"]:
        builder.record("axolotl.no-choice-of-modules", "modules")
    return payload


def _parse_gpu(gpu: object) -> Gpu | None:
    """Return the GPU with a name, as in a target. None if the name is None.

    Raises:
        PayloadError: No GPU has the name.
    """
    if gpu is None:
        return None
    card = None
    with suppress(RunConfigError):
        card = parse_target(str(gpu).replace("_", "")).gpu
    if card is None:
        raise PayloadError(
            f"gpu: must be a GPU as in a target, got {gpu!r:.60}. Say h100, sm90 or cpu."
        )
    return card


def _get_compute_capability(card: Gpu) -> tuple[int, int]:
    """Return the compute capability that torch reports: 9.4 for MI300X, 0.0 without a GPU."""
    if card.capability:
        return card.capability
    if card.is_gpu:
        return (9, 4)
    return (0, 0)


class _PrecisionSwitches(NamedTuple):
    """The half-precision switches, with "auto" resolved."""

    is_auto: bool
    """Whether `bf16` is "auto", which is its default."""
    bf16: bool
    """Whether `bf16` is on, after "auto" is resolved."""
    bfloat16: bool
    fp16: bool
    """Whether `fp16` is on, after "auto" is resolved."""
    mode: str
    """The dtype of the weights: fp32, bf16 or fp16."""


def _read_switches(top: Settings, card: Gpu | None) -> _PrecisionSwitches:
    """Return the switches, with "auto" resolved for a GPU.

    On any GPU "auto" turns BF16 on: Axolotl calls torch.cuda.is_bf16_supported, which by default is
    true for a GPU that emulates BF16.

    Args:
        top: The configuration.
        card: The GPU; None: not known, and a GPU is assumed.
    """
    fp16 = top.switch("fp16")
    float16 = bool(top.switch("float16"))
    bfloat16 = bool(top.switch("bfloat16"))
    is_auto = top.values.get("bf16", "auto") == "auto"
    bf16 = not is_auto and bool(top.switch("bf16"))
    if is_auto and not fp16:
        bf16 = card is None or card.is_gpu
        fp16 = not bf16 and fp16 is None and not float16
    mode = "fp32"
    if bf16 or bfloat16:
        mode = "bf16"
    elif top.switch("load_in_8bit") or fp16 or float16:
        mode = "fp16"
    return _PrecisionSwitches(is_auto, bf16, bfloat16, bool(fp16), mode)


def _map_mode(builder: ImportBuilder, top: Settings, card: Gpu | None) -> str:
    """Map the switches of the mode. Return the semantics of the mode, a key of `SEMANTICS`.

    Args:
        builder: The report of the import.
        top: The configuration.
        card: The GPU. None: not known.
    """
    switches = _read_switches(top, card)
    mode = switches.mode
    fields: dict[str, Any] = {mode: True}
    if mode != "fp32":
        fields["params_dtype"] = mode
    builder.fields |= fields
    if switches.is_auto and switches.bf16 and card is None:
        builder.record("axolotl.bf16-auto-without-a-gpu", "bf16", "auto")
    elif "bf16" in top:
        builder.map("bf16", **fields)
    elif card is None:
        builder.record("axolotl.fp16-turns-auto-off", "bf16", "auto")
    else:
        builder.record("axolotl.bf16-auto-on-a-gpu", "bf16", "auto", gpu=card.name, mode=mode)
    _map_switches(builder, top, mode, fields)
    if switches.bfloat16:
        builder.record("axolotl.bfloat16-runs-autocast", "bfloat16", True)
    is_bf16 = switches.bf16 or switches.bfloat16
    if switches.fp16 and not is_bf16:
        assume_torch_scaler(builder, TRAINER_NAME)
    return _get_semantics(top, mode, has_autocast=is_bf16 or switches.fp16)


def _map_switches(builder: ImportBuilder, top: Settings, mode: str, fields: dict[str, Any]) -> None:
    """Map the switches other than `bf16`, and report those that another setting overrules.

    Args:
        builder: The report of the import.
        top: The configuration.
        mode: The mode that the switches choose.
        fields: The fields of the mode.
    """
    for name, dtype in DTYPE_BY_SWITCH.items():
        if name not in top or name == "bf16":
            continue
        if not top.switch(name):
            builder.map(name)
        elif dtype != mode:
            builder.record("axolotl.another-setting-wins", name, top[name], mode=mode)
        else:
            builder.map(name, **fields)


def _get_semantics(top: Settings, mode: str, *, has_autocast: bool) -> str:
    """Return the semantics of the mode, a key of `SEMANTICS`.

    Args:
        top: The configuration.
        mode: The dtype of the weights.
        has_autocast: Whether the trainer runs autocast.
    """
    if mode == "fp32":
        return "fp32"
    if top.values.get("deepspeed"):
        return "megatron_o2"
    if top.values.get("fsdp") or top.values.get("fsdp_config"):
        return "fsdp_policy"
    has_adapter = bool(top.values.get("adapter"))
    if top.values.get("peft_autocast_adapter_dtype") is False:
        has_adapter = False
    if has_adapter and has_autocast:
        return "amp_o1"
    return "true"


def _map_tf32(builder: ImportBuilder, top: Settings, card: Gpu | None) -> None:
    """Map TF32. "auto" turns it on for a GPU of compute capability 8.0 or more."""
    if top.values.get("tf32", "auto") != "auto":
        builder.map("tf32", tf32=bool(top.switch("tf32")))
    elif card is None:
        builder.record("axolotl.tf32-auto-without-a-gpu", "tf32", "auto")
    else:
        is_on = _get_compute_capability(card) >= (8, 0)
        facts = {"gpu": card.name, "tf32": str(is_on).lower()}
        builder.record("axolotl.tf32-auto-on-a-gpu", "tf32", "auto", {"tf32": is_on}, **facts)


def _report_weights(builder: ImportBuilder, top: Settings, semantics: str) -> None:
    """Report the settings that decide the dtypes of weights and gradients.

    No setting of Axolotl states these dtypes.
    """
    mode = _get_stated_mode(builder)
    decider = ""
    if semantics in DECIDERS_BY_SEMANTICS:
        sentence, settings = DECIDERS_BY_SEMANTICS[semantics]
        decider = _get_decider(top, settings, mode)
        builder.record(sentence, decider, top.values.get(decider), mode=mode)
    if semantics in ("fsdp_policy", "true"):
        builder.fields["grad_reduce_in_fp32"] = False
    for setting in DTYPE_DECIDERS:
        if not top.values.get(setting) or setting == decider:
            continue
        if semantics == "fp32" and setting == "deepspeed":
            builder.record("axolotl.deepspeed-file-may-set-the-mode", setting, top[setting])
        elif semantics == "amp_o1" and setting == "adapter":
            builder.record("axolotl.adapter-is-trained-in-fp32", setting, top[setting], mode=mode)
        elif semantics != "fp32" and setting == "adapter":
            builder.record("axolotl.adapter-alone-is-trained", setting, top[setting], mode=mode)
        else:
            builder.map(setting)


def _get_stated_mode(builder: ImportBuilder) -> str:
    """Return the mode that is stated: fp32, bf16 or fp16."""
    for mode in ("bf16", "fp16"):
        if mode in builder.fields:
            return mode
    return "fp32"


def _get_decider(top: Settings, settings: tuple[str, ...], mode: str) -> str:
    """Return the first of several settings that is on and fits the mode, or else `bf16`."""
    for name in settings:
        if top.values.get(name) and DTYPE_BY_SWITCH.get(name, mode) == mode:
            return name
    return "bf16"


CONTEXT = (
    ContextKey(
        "gpu", "the card it will run on, as in a target: h100, sm90, cpu; decides what auto becomes"
    ),
    ContextKey(
        "sharding", "fsdp or deepspeed where the run will use one (export)", use=("export",)
    ),
)
SYSTEM = System(
    name="axolotl",
    title=TABLE.title,
    version=TABLE.version,
    export=export,
    import_=import_,
    write=as_yaml,
    context=CONTEXT,
)

"""Recipes in plain PyTorch: what to wrap around a training loop of one's own.

    config = get_mixed_precision_config("fp16_mixed")
    apply_tf32(config)
    scaler = grad_scaler_for(config)
    with autocast_for(config):
        loss = model(x)
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

Weights stay in FP32 and autocast casts per operator: they are the master weights and the working ones in one. torch is
imported when one of these is called, not before.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from bridge.errors import BackendUnavailableError, PrecisionTypeError
from bridge.interop import fsdp, torchao
from bridge.interop.amp import amp_fields, depart_as_amp
from bridge.interop.contract import Exported, Imported, Recognised, System
from bridge.interop.fsdp import fsdp_policy_for
from bridge.interop.ledger import Arrival, Departure
from bridge.interop.scaler import assume_torch_scaler
from bridge.interop.settings import Settings
from bridge.precision.dtypes import dtype_token, torch_dtype
from bridge.registry.config import MixedPrecisionConfig

if TYPE_CHECKING:
    import torch

__all__ = [
    "SYSTEM",
    "apply_tf32",
    "autocast_for",
    "emulate_linears",
    "export",
    "float8_linear_config_for",
    "fsdp_policy_for",
    "grad_scaler_for",
    "import_",
]

TITLE = "PyTorch"
VERSION = "PyTorch 2.13.0"
SCALE_FIELDS = {
    "init_scale": "initial_loss_scale",
    "growth_interval": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_scale": "min_loss_scale",
}
"""Argument of `LossScaler` -> field."""


def autocast_for(config: MixedPrecisionConfig, device: str | torch.device | None = None) -> torch.autocast:
    """Return the autocast context of a recipe: its half precision over FP32 weights, switched off for FP32.

    Args:
        config: The recipe.
        device: Where the model is; None: CUDA where there is a device, else the CPU.
    """
    import torch

    given = export(config).payload["autocast"]
    dtype = torch_dtype(given["dtype"]) if given["enabled"] else None
    return torch.autocast(_device(device), dtype=dtype, enabled=given["enabled"])


def grad_scaler_for(config: MixedPrecisionConfig, device: str | torch.device | None = None) -> torch.amp.GradScaler:
    """Return the loss scaler of a recipe, with Megatron's rule; one that does nothing where nothing is to be scaled.

    Args:
        config: The recipe. FP16 scales dynamically unless `loss_scale` is stated; BF16 and FP32 only then.
        device: As for `autocast_for`. On a CPU, too, the scale is real.
    """
    import torch

    from bridge.interop.loss_scaler import LossScaler

    given = export(config).payload["grad_scaler"]
    if not given["enabled"]:
        return torch.amp.GradScaler(_device(device), enabled=False)
    return LossScaler(_device(device), **{key: value for key, value in given.items() if key != "enabled"})


def apply_tf32(config: MixedPrecisionConfig) -> str | None:
    """Allow or forbid TF32 in FP32 matmuls for this process, as the recipe states.

    Returns:
        What float32 matmuls now use: "tf32" or "ieee"; None where the recipe leaves it to the process.

    It goes through `torch.set_float32_matmul_precision`, the one switch after which both of PyTorch's interfaces, old
    and new, can still be read, and for convolutions through `torch.backends.cudnn.allow_tf32`.
    """
    import torch

    _require(config)
    if config.tf32 is None:
        return None
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    return "tf32" if config.tf32 else "ieee"


def float8_linear_config_for(config: MixedPrecisionConfig, *, emulate: bool = False) -> Any:
    """Return torchao's config for the recipe's linear layers, None where the recipe has neither FP8 nor FP4.

    Args:
        config: The recipe.
        emulate: Compute in high precision what FP8 hardware would, for any device.

    Returns:
        A `Float8LinearConfig` (tensorwise) or `MXFP8TrainingOpConfig` (MXFP8).

    Raises:
        BackendUnavailableError: torchao is not installed, or has no such scheme.
    """
    _require(config)
    if config.fp8 is None and config.fp4 is None:
        return None
    payload = torchao.export(config).payload
    if not payload:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao has no {config.scheme} scaling. "
            "Use a tensorwise or MXFP8 recipe, or emulate_linears."
        )
    try:
        return _torchao_object(payload, emulate=emulate)
    except ImportError as error:
        raise BackendUnavailableError(
            f"float8_linear_config_for: torchao 0.18 is needed ({error}). pip install torchao==0.18.0."
        ) from None


def emulate_linears(
    model: torch.nn.Module, config: MixedPrecisionConfig, *, skip: str | Collection[str] = ()
) -> list[str]:
    """Run the model's linear layers in the recipe's FP8 or FP4, emulated; nothing happens without either.

    Args:
        model: Its `nn.Linear` modules are replaced in place and keep their parameters.
        config: The recipe.
        skip: Names of `nn.Linear` modules to leave alone, as in `model.named_modules()`; a string is one name.

    Returns:
        The names of what was replaced.

    Raises:
        PrecisionTypeError: `skip` names what is no linear layer of the model, or the model has none to replace: it is
            itself an `nn.Linear`, or was converted before.
    """
    _require(config)
    if config.fp8 is None and config.fp4 is None:
        return []
    from bridge.interop.emulated_linear import emulate

    return emulate(model, config, skip=(skip,) if isinstance(skip, str) else tuple(skip))


def import_(payload: object) -> Imported:
    """Return what a plain PyTorch set-up asks for.

    Args:
        payload: A mapping with any of ``autocast`` (`dtype`, `enabled`), ``grad_scaler``, ``tf32``, ``fsdp`` (a policy)
            and ``float8`` or ``mxfp8`` (torchao's), as data or as the objects themselves.
    """
    top = Settings(payload, TITLE)
    book = Arrival(TITLE)
    compute = _autocast(book, top)
    policy = fsdp.import_(top["fsdp"]) if top.given("fsdp") else None
    semantics = "fp32" if compute == "fp32" else "amp_o1"
    if policy is not None and compute == "fp32":
        semantics = policy.semantics
        book.fields = {**policy.config.to_dict()}
        for name, fields in policy.carried.items():
            book.carry(f"fsdp.{name}", **{field: book.fields[field] for field in fields})
    elif policy is not None:
        book.lose(
            "fsdp", "a policy", "dead knob", "autocast casts again what FSDP has gathered", "Keep one of the two."
        )
    for loss in policy.losses if policy is not None else ():
        book.lose(f"fsdp.{loss.field}", loss.value, loss.reason, loss.detail, loss.remedy)
    _scaler(book, top, compute)
    if top.given("tf32"):
        book.carry("tf32", tf32=bool(top.switch("tf32")))
    for kind in ("float8", "mxfp8"):
        if top.given(kind):
            _linear(book, kind, top[kind])
    return book.close(semantics)


def export(config: MixedPrecisionConfig) -> Exported:
    """Return the set-up as data; the functions of this module make the objects."""
    book = Departure(config, TITLE)
    compute = depart_as_amp(book, "autocast.dtype", "autocast.enabled")
    payload: dict[str, Any] = {"autocast": {"dtype": compute, "enabled": compute != "fp32"}}
    payload["grad_scaler"] = {"enabled": False}
    if config.loss_scale is not None:
        payload["grad_scaler"] = {"enabled": True, "init_scale": float(config.loss_scale), "constant": True}
        book.carry("loss_scale", "grad_scaler.init_scale")
    elif config.fp16:
        values = {key: book.values[field] for key, field in SCALE_FIELDS.items()}
        values["growth_interval"] = int(values["growth_interval"])
        payload["grad_scaler"] = {"enabled": True, **values}
        for key, field in SCALE_FIELDS.items():
            book.carry(field, f"grad_scaler.{key}")
    if config.tf32 is not None:
        payload["tf32"] = config.tf32
        book.carry("tf32", "tf32")
    linear = torchao.export(config)
    if linear.payload:
        payload |= linear.payload
        for field in ("fp8", "fp8_recipe", "fp8_wgrad"):
            if field in linear.carried:
                book.carry(field, *linear.carried[field])
        for loss in linear.losses:
            if loss.reason == "approximated":
                book.lose(loss.field, loss.reason, loss.detail, loss.remedy)
    elif config.fp8 is not None or config.fp4 is not None:
        detail = f"neither torch nor torchao 0.18 has {config.scheme} scaling"
        for field in ("fp8", "fp8_recipe") if config.fp8 else ("fp4", "fp4_recipe"):
            book.lose_if_stated(field, "unsupported", detail, "emulate_linears runs it, emulated, on any device.")
    return book.close(payload)


def _autocast(book: Arrival, top: Settings) -> str:
    given: Any = top.values.get("autocast")
    if given is not None and not isinstance(given, Mapping) and hasattr(given, "fast_dtype"):
        given = {"dtype": given.fast_dtype, "enabled": given._enabled, "device_type": given.device}
    block = Settings({} if given is None else given, TITLE, "autocast")
    enabled = block.switch("enabled")
    on = bool(block.values) if enabled is None else enabled
    name = block.name("dtype")
    if not on:
        if enabled is not None:
            book.carry(block.name("enabled"), fp32=True)
        else:
            book.lose("autocast", None, "implied default", f"off in {VERSION}", "Write it down to be sure.")
        if block.given("dtype"):
            book.carry(name)
        book.fields["fp32"] = True
        return "fp32"
    if not block.given("dtype"):
        compute = "bf16" if block.values.get("device_type") == "cpu" else "fp16"
        detail = f"BF16 on a CPU and FP16 on CUDA in {VERSION}"
        book.lose(name, compute, "implied default", detail, "Write torch.bfloat16.")
    else:
        try:
            compute = dtype_token(block["dtype"])
        except ValueError:
            compute = "?"
        if compute not in ("bf16", "fp16", "fp32"):
            rule = "must be bfloat16 or float16 (autocast warns and switches itself off for others)"
            raise block.wrong("dtype", rule, block["dtype"], "Use torch.bfloat16")
        book.carry(name, **amp_fields(compute))
    if enabled is not None:
        book.carry(block.name("enabled"))
    book.fields |= amp_fields(compute)
    return compute


def _scaler(book: Arrival, top: Settings, compute: str) -> None:
    given: Any = top.values.get("grad_scaler")
    if given is not None and not isinstance(given, Mapping) and hasattr(given, "get_growth_interval"):
        given = {
            "enabled": given.is_enabled(),
            "init_scale": given._init_scale if given.is_enabled() else None,
            "growth_interval": given.get_growth_interval() if given.is_enabled() else None,
            **{key: getattr(given, key) for key in ("hysteresis", "min_scale", "constant") if hasattr(given, key)},
        }
    block = Settings({} if given is None else given, TITLE, "grad_scaler")
    used = block.switch("enabled") is not False and bool(block.values)
    if block.given("enabled"):
        book.carry(block.name("enabled"))
    if compute == "fp16" and not used:
        detail = "FP16 without a loss scale: small gradients become zero"
        book.lose("grad_scaler", None, "semantics", detail, "Megatron always scales in FP16.")
    if not used:
        return
    if block.switch("constant"):
        book.carry(block.name("init_scale"), loss_scale=block.number("init_scale", least=0))
        book.carry(block.name("constant"))
        return
    if compute != "fp16":
        detail = f"a scale has nothing to do in {compute}: its range is that of FP32"
        book.lose("grad_scaler", "enabled", "dead knob", detail, "Drop it.")
        return
    taken = []
    for key, field in SCALE_FIELDS.items():
        value = block.number(key, least=0)
        if value is not None:
            book.carry(block.name(key), **{field: value})
            taken.append(field)
    for key, usual in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        value = block.number(key)
        if value is not None and value != usual:
            book.lose(block.name(key), value, "unsupported", f"Megatron has {usual:g} built in", "Accept it.")
    if not {"hysteresis", "min_loss_scale"} <= set(taken):
        assume_torch_scaler(book, "torch.amp", given=tuple(taken))


def _linear(book: Arrival, kind: str, given: Any) -> None:
    found = torchao.import_({kind: given} if isinstance(given, Mapping) else given, mode="bf16")
    fields = {name: value for name, value in found.config.to_dict().items() if name != "bf16"}
    book.fields |= fields
    for name, into in found.carried.items():
        book.carry(f"{kind}.{name.rpartition('.')[2]}", **{field: fields[field] for field in into if field in fields})
    for loss in found.losses:
        book.lose(loss.field, loss.value, loss.reason, loss.detail, loss.remedy)


def _torchao_object(payload: Mapping[str, Any], *, emulate: bool) -> Any:
    if "mxfp8" in payload:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

        recipe = payload["mxfp8"]["recipe"]
        made = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe("mxfp8_emulated_rceil" if emulate else recipe))
        made.wgrad_with_hp = recipe.endswith("wgrad_with_hp")
        return made
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType

    arguments: dict[str, Any] = {"emulate": emulate}
    for name, value in payload["float8"].items():
        if name.startswith("cast_config_"):
            target = value.get("target_dtype")
            kind = {"scaling_type": ScalingType(value["scaling_type"])}
            arguments[name] = CastConfig(**kind, **({"target_dtype": torch_dtype(target)} if target else {}))
        elif name != "recipe_name":  # tensorwise is what the class's own defaults are
            arguments[name] = value
    return Float8LinearConfig(**arguments)


def _device(device: str | torch.device | None) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device).type


def _require(config: object) -> None:
    if not isinstance(config, MixedPrecisionConfig):
        raise PrecisionTypeError(
            f"mixed_precision: must be a MixedPrecisionConfig, got {config!r:.80}. "
            "get_mixed_precision_config makes one of a recipe's name."
        )


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    if isinstance(content.get("autocast"), Mapping) and "grad_scaler" in content:
        return Recognised(certainty=0.8, evidence="has `autocast` and `grad_scaler`, as this program writes them")
    return None


def _write(payload: Any) -> str:
    return json.dumps(payload, indent=2) + "\n"


SYSTEM = System(
    name="pytorch",
    title="plain PyTorch",
    version=VERSION,
    kinds=("json",),
    import_=import_,
    export=export,
    recognise=_recognise,
    write=_write,
)

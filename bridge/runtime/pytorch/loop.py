"""Functions that return autocast, loss scaler, FSDP policy and TF32 of a recipe, for a loop.

Each result is made of plain data (`get_compute_dtype`, `make_scaler_settings`,
`get_policy_dtypes`), which is computed without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError
from bridge.precision.coercion import get_torch_dtype
from bridge.precision.mode import get_mode
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

LOSS_SCALE_FIELDS = {
    "init_scale": "initial_loss_scale",
    "growth_interval": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_scale": "min_loss_scale",
}
"""Argument of `LossScaler` -> field."""


def autocast_for(
    config: MixedPrecisionConfig, device: str | torch.device | None = None
) -> torch.autocast:
    """Return the autocast context of a recipe: its half precision over FP32 weights.

    The context of an FP32 recipe switches autocast off.

    Args:
        config: The recipe.
        device: Device of the model. None: CUDA where there is a device, else the CPU.
    """
    import torch

    compute = get_compute_dtype(finalize_config(config))
    if compute == "fp32":
        return torch.autocast(_get_device_type(device), enabled=False)
    return torch.autocast(_get_device_type(device), dtype=get_torch_dtype(compute))


def grad_scaler_for(
    config: MixedPrecisionConfig, device: str | torch.device | None = None
) -> torch.amp.GradScaler:
    """Return the loss scaler of a recipe, with Megatron's rule.

    The scaler of a recipe without a loss scale does nothing.

    Args:
        config: The recipe. FP16 scales dynamically unless `loss_scale` is stated. BF16 and FP32
            scale only if `loss_scale` is stated.
        device: As for `autocast_for`. The loss is scaled on a CPU too.
    """
    import torch

    from bridge.runtime.pytorch.loss_scaler import LossScaler

    settings = make_scaler_settings(finalize_config(config))
    if not settings.pop("enabled"):
        return torch.amp.GradScaler(_get_device_type(device), enabled=False)
    return LossScaler(_get_device_type(device), **settings)


def fsdp_policy_for(
    config: MixedPrecisionConfig, *, version: int = 2
) -> MixedPrecisionPolicy | MixedPrecision:
    """Return the FSDP policy of a recipe.

    Args:
        config: The recipe. Its FP8 or FP4 does not change the policy.
        version: 2 for `fully_shard`, 1 for `FullyShardedDataParallel`.

    Returns:
        A `MixedPrecisionPolicy`, or for version 1 a `MixedPrecision`, with both dtypes. The policy
        of an FP32 recipe casts nothing.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if version not in (1, 2):
        raise PrecisionTypeError(
            f"version: must be 1 or 2, got {version!r}. Use 2 with fully_shard."
        )
    dtypes: dict[str, Any] = {}
    for name, value in get_policy_dtypes(finalize_config(config)).items():
        if value is not None:
            dtypes[name] = get_torch_dtype(value)
    if version == 2:
        return MixedPrecisionPolicy(**dtypes)
    return MixedPrecision(**dtypes)


def apply_tf32(config: MixedPrecisionConfig) -> str | None:
    """Allow or forbid TF32 in FP32 matmuls and convolutions of this process, as the recipe states.

    It calls `torch.set_float32_matmul_precision`, after which both the old and the new interface of
    PyTorch can be read, and sets `torch.backends.cudnn.allow_tf32`.

    Returns:
        "tf32" or "ieee", the arithmetic of FP32 matmuls, or None if the recipe does not state it.
        Then nothing is changed.
    """
    import torch

    tf32 = require_config(config).tf32
    if tf32 is None:
        return None
    matmul_precision, arithmetic = "highest", "ieee"
    if tf32:
        matmul_precision, arithmetic = "high", "tf32"
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = tf32
    return arithmetic


def get_compute_dtype(config: MixedPrecisionConfig) -> str:
    """Return the token of the dtype in which operators compute.

    It is autocast's dtype if the weights are FP32, and the mode otherwise.
    """
    values = config.to_dict(full=True)
    if config.autocast_enabled and (values["params_dtype"] or get_mode(config)) == "fp32":
        return str(values["autocast_dtype"] or get_mode(config))
    return get_mode(config)


def make_scaler_settings(config: MixedPrecisionConfig) -> dict[str, Any]:
    """Return the arguments of `LossScaler`. `enabled`: whether the recipe has a loss scale."""
    if config.loss_scale is not None:
        return {"enabled": True, "init_scale": float(config.loss_scale), "constant": True}
    if not config.fp16:
        return {"enabled": False}
    values = config.to_dict(full=True)
    scale = {argument: values[field] for argument, field in LOSS_SCALE_FIELDS.items()}
    return {"enabled": True, **scale, "growth_interval": int(scale["growth_interval"])}


def get_policy_dtypes(config: MixedPrecisionConfig) -> dict[str, str | None]:
    """Return `param_dtype` and `reduce_dtype` of FSDP as tokens. Both are None for FP32."""
    compute = get_compute_dtype(config)
    if compute == "fp32":
        return {"param_dtype": None, "reduce_dtype": None}
    reduce_dtype = compute
    if config.grad_reduce_in_fp32:
        reduce_dtype = "fp32"
    return {"param_dtype": compute, "reduce_dtype": reduce_dtype}


def finalize_config(config: object) -> MixedPrecisionConfig:
    """Return a recipe after it is finalized.

    Raises:
        PrecisionTypeError: The object is not a recipe.
        PrecisionConfigError: The recipe contradicts itself.
    """
    recipe = require_config(config)
    recipe.finalize()
    return recipe


def require_config(config: object) -> MixedPrecisionConfig:
    """Return a recipe unchanged.

    Raises:
        PrecisionTypeError: The object is not a recipe.
    """
    if not isinstance(config, MixedPrecisionConfig):
        remedy = "get_mixed_precision_config makes one of a recipe's name."
        raise PrecisionTypeError.of(
            "mixed_precision", "must be a MixedPrecisionConfig", config, remedy
        )
    return config


def _get_device_type(device: str | torch.device | None) -> str:
    """Return the type of a device. By default it is CUDA where CUDA is available."""
    import torch

    if device is None:
        if torch.cuda.is_available():
            return "cuda"
        return "cpu"
    return torch.device(device).type

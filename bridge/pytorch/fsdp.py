"""The FSDP policy of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError
from bridge.precision.dtypes import torch_dtype
from bridge.pytorch.autocast import checked, compute_dtype

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["fsdp_policy_for", "policy_dtypes"]


def fsdp_policy_for(config: MixedPrecisionConfig, *, version: int = 2) -> MixedPrecisionPolicy | MixedPrecision:
    """Return the FSDP policy of a recipe.

    Args:
        config: The recipe; its FP8 or FP4 is not FSDP's business.
        version: 2 for `fully_shard`, 1 for `FullyShardedDataParallel`.

    Returns:
        A `MixedPrecisionPolicy`, or for version 1 a `MixedPrecision`, with both dtypes written out; no casts for FP32.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if version not in (1, 2):
        raise PrecisionTypeError(f"version: must be 1 or 2, got {version!r}. Use 2 with fully_shard.")
    dtypes: dict[str, Any] = {
        name: torch_dtype(value) for name, value in policy_dtypes(checked(config)).items() if value is not None
    }
    return MixedPrecisionPolicy(**dtypes) if version == 2 else MixedPrecision(**dtypes)


def policy_dtypes(config: MixedPrecisionConfig) -> dict[str, str | None]:
    """Return `param_dtype` and `reduce_dtype` by our names; both None for FP32. Needs no torch."""
    compute = compute_dtype(config)
    if compute == "fp32":
        return {"param_dtype": None, "reduce_dtype": None}
    return {"param_dtype": compute, "reduce_dtype": "fp32" if config.grad_reduce_in_fp32 else compute}

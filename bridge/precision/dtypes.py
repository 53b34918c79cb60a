"""Dtype names: one canonical token per dtype, every common spelling in, `torch.dtype` out.

Tokens are plain strings so that recipes can be listed, compared and written to YAML without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import WrongValueError, close_matches, did_you_mean

if TYPE_CHECKING:
    import torch


class _LazyTorch:
    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


LAZY_TORCH = _LazyTorch()
"""Stands for `torch` in a module whose annotations name it, and imports it when they are evaluated."""

TORCH_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "uint8": "uint8",
}
"""Canonical token -> name of the attribute of `torch`."""

SPELLINGS = {
    **{token: token for token in TORCH_NAMES},
    **{name: token for token, name in TORCH_NAMES.items()},
    "double": "fp64",
    "float": "fp32",
    "half": "fp16",
    "bfloat": "bf16",
    "single": "fp32",
    "32": "fp32",
}
"""Every accepted spelling, lower case and without ``torch.`` -> canonical token."""


def is_torch_dtype(value: object) -> bool:
    """Return whether `value` is a `torch.dtype`, without importing torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def dtype_token(value: object) -> str:
    """Return the canonical token ("bf16") of a `torch.dtype` or of any common spelling of one.

    WrongValueError for a string that names no dtype (the remedy gives the nearest), and for any other value.
    """
    text = str(value)
    is_dtype = is_torch_dtype(value)
    if not isinstance(value, str) and not is_dtype:
        raise WrongValueError("must be a dtype or its name, such as torch.bfloat16 or 'bf16'", value)
    name = text.strip().lower().removeprefix("torch.")
    if name in SPELLINGS:
        return SPELLINGS[name]
    if is_dtype:
        return name
    nearest = did_you_mean(close_matches(name, SPELLINGS)) or "Use 'fp32', 'bf16' or 'fp16'."
    raise WrongValueError("must be the name of a dtype", value, nearest)


def torch_dtype(token: str) -> torch.dtype:
    """Return the `torch.dtype` of a canonical token. Imports torch on first use."""
    import torch

    dtype = getattr(torch, TORCH_NAMES.get(token, token))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{token!r} names no torch.dtype")  # noqa: TRY004  the token is a string as it should be
    return dtype

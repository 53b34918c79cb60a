"""`Target`: the GPUs and versions of a run. None stands for unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.rules.versions import TITLES, Version

if TYPE_CHECKING:
    from bridge.rules.gpus import Gpu

__all__ = ["PRODUCTS", "Target"]

PRODUCTS = tuple(TITLES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """GPUs and versions of a run. None means unknown."""

    gpu: Gpu | None = None
    """The GPU; the row "cpu" where there is none."""
    count: int | None = None
    """GPUs of the whole run."""
    mcore: Version | None = None
    """megatron-core."""
    te: Version | None = None
    """Transformer Engine."""
    cuda: Version | None = None
    """CUDA."""
    cudnn: Version | None = None
    """cuDNN."""
    torch: Version | None = None
    """PyTorch."""
    has_te: bool | None = None
    """Whether Transformer Engine is there at all; None: unknown."""
    is_detected: bool = False
    """Read off this machine rather than declared."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU, or None."""
        return self.gpu.capability if self.gpu is not None else None

    def __str__(self) -> str:
        parts = []
        if self.gpu is not None:
            parts.append(self.gpu.name + (f"x{self.count}" if self.count is not None else ""))
        for product in PRODUCTS:
            version: Version | None = getattr(self, product)
            if version is not None:
                parts.append(f"{product}{version}")
        if self.has_te is False:
            parts.append("te-none")
        return ",".join(parts) or "nothing declared"

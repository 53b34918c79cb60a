"""`Target`: the GPUs of a run, and the releases of the packages that it runs with.

None stands for a version that a target does not state. A rule that needs the version reports that
it is not known, instead of a guess.
"""

from dataclasses import dataclass

from bridge.target.gpus import GPUS, Gpu
from bridge.target.versions import PRODUCT_TITLES, Version

PRODUCTS = tuple(PRODUCT_TITLES)
"""The packages whose releases a target can state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The GPUs and versions of a run. None stands for unknown."""

    gpu: Gpu | None = None
    count: int | None = None
    mcore: Version | None = None
    te: Version | None = None
    cuda: Version | None = None
    cudnn: Version | None = None
    torch: Version | None = None
    has_te: bool | None = None
    """Whether Transformer Engine is installed; None where that is unknown."""
    is_detected: bool = False
    """Whether it was read from this machine. Otherwise a user declared it."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU, or None."""
        if self.gpu is None:
            return None
        return self.gpu.capability

    def is_from(self, major: int) -> bool:
        """Return whether the GPU is known to have this compute capability or a later one."""
        return self.capability is not None and self.capability[0] >= major

    def is_before(self, major: int) -> bool:
        """Return whether the GPU is known to have an earlier compute capability."""
        return self.capability is not None and self.capability[0] < major

    def stated(self, name: str) -> str | int | None:
        """Return what is stated of one part of the target.

        Args:
            name: gpu, count or a product; empty: all of it, as text.
        """
        if not name:
            return str(self)
        if name == "gpu":
            if self.gpu is None:
                return None
            return self.gpu.title
        if name == "te" and self.has_te is False:
            return "none"
        value: Version | int | str | None = getattr(self, name)
        if isinstance(value, Version):
            return str(value)
        return value

    def __str__(self) -> str:
        parts = []
        if self.gpu is not None:
            parts += self._gpu_parts(self.gpu)
        for product in PRODUCTS:
            version: Version | None = getattr(self, product)
            if version is not None:
                parts.append(f"{product}{version}")
        if self.has_te is False:
            parts.append("te-none")
        return ",".join(parts) or "nothing declared"

    def _gpu_parts(self, gpu: Gpu) -> list[str]:
        name = gpu.name
        if self.count is not None:
            name += f"x{self.count}"
        known_memory_gib = 0
        if gpu.name in GPUS:
            known_memory_gib = GPUS[gpu.name].memory_gib
        if gpu.memory_gib == known_memory_gib:
            return [name]
        return [name, f"memory={gpu.memory_gib}GiB"]

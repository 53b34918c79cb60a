"""`Target`: the GPUs of a run, and the releases of the packages that it runs with.

A version that a target does not state is None. A rule that needs this version reports that the
version is not known. The rule does not guess.
"""

from dataclasses import dataclass

from bridge.target.gpus import GPUS, Gpu
from bridge.target.versions import PRODUCT_TITLES, Version

PRODUCTS = tuple(PRODUCT_TITLES)
"""The packages whose releases a target can state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The GPUs and versions of a run. An unknown value is None."""

    gpu: Gpu | None = None
    count: int | None = None
    """Number of GPUs."""
    mcore: Version | None = None
    te: Version | None = None
    cuda: Version | None = None
    cudnn: Version | None = None
    torch: Version | None = None
    has_te: bool | None = None
    """Whether Transformer Engine is installed. None: not known."""
    is_detected: bool = False
    """Whether the target was detected on this machine. False: a user declared it."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU. None if it is unknown, or if the GPU is not NVIDIA's."""
        if self.gpu is None:
            return None
        return self.gpu.capability

    def is_from(self, major: int) -> bool:
        """Return whether the GPU is known to have a compute capability of `major`.0 or later."""
        return self.capability is not None and self.capability[0] >= major

    def is_before(self, major: int) -> bool:
        """Return whether the GPU is known to have a compute capability before `major`.0."""
        return self.capability is not None and self.capability[0] < major

    def stated(self, name: str) -> str | int | None:
        """Return the stated value of one part of the target, or None.

        Args:
            name: The part: gpu, count or a product. "" is the whole target.

        Returns:
            The title of the GPU, the number of GPUs, or a version as text. "none" for Transformer
            Engine that is stated as not installed.
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
        """Return the target as `parse_target` reads it."""
        parts = []
        if self.gpu is not None:
            parts += self._format_gpu(self.gpu)
        for product in PRODUCTS:
            version: Version | None = getattr(self, product)
            if version is not None:
                parts.append(f"{product}{version}")
        if self.has_te is False:
            parts.append("te-none")
        return ",".join(parts) or "nothing declared"

    def _format_gpu(self, gpu: Gpu) -> list[str]:
        """Return the GPU with its number, and its memory if it is not the common size."""
        name = gpu.name
        if self.count is not None:
            name += f"x{self.count}"
        known_memory_gib = 0
        if gpu.name in GPUS:
            known_memory_gib = GPUS[gpu.name].memory_gib
        if gpu.memory_gib == known_memory_gib:
            return [name]
        return [name, f"memory={gpu.memory_gib}GiB"]

"""`detect_target`: this machine as a `Target`."""

import os
from dataclasses import replace

from bridge.target.gpus import CPU, Gpu, find_gpu_of_device, make_gpu_of_capability
from bridge.target.target import Target
from bridge.target.versions import Version, get_installed_version, parse_version


def detect_target() -> Target:
    """Return this machine as a target. It imports torch.

    Without a visible GPU the target is the CPU. The number of GPUs is `WORLD_SIZE` if a launcher
    has set it, and otherwise the number of visible GPUs.
    """
    import torch  # heavy, and only this module of the folder needs it

    base = Target(
        gpu=CPU,
        mcore=get_installed_version("mcore"),
        te=get_installed_version("te"),
        torch=parse_version(torch.__version__),
        has_te=get_installed_version("te") is not None,
        is_detected=True,
    )
    if not torch.cuda.is_available():
        return base
    count = int(os.environ.get("WORLD_SIZE", "0")) or torch.cuda.device_count()
    device = torch.cuda.get_device_name(0)
    gpu = None
    if torch.version.hip:
        # A GPU of AMD reports a capability that is not a CUDA compute capability.
        gpu = find_gpu_of_device(device)
    if gpu is None:
        gpu = detect_gpu(device, torch.cuda.get_device_capability(0))
    cuda = None
    if torch.version.cuda:
        cuda = parse_version(torch.version.cuda)
    return replace(base, gpu=gpu, count=count, cuda=cuda, cudnn=_detect_cudnn())


def _detect_cudnn() -> Version | None:
    """Return the version of cuDNN that torch uses.

    The version of an installed package is preferred, since loading the library can find another
    one, for example through `LD_LIBRARY_PATH`.

    Returns:
        None if torch has no cuDNN, or refuses the cuDNN that it finds.
    """
    packaged = get_installed_version("cudnn")
    if packaged is not None:
        return packaged
    import torch

    try:
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError):  # a library of another version, or an incomplete library
        return None
    if not number:
        return None
    # 91002 is 9.10.2.
    return parse_version(f"{number // 10000}.{number // 100 % 100}.{number % 100}")


def detect_gpu(device: str, capability: tuple[int, int]) -> Gpu:
    """Return the GPU of a device.

    Args:
        device: The name that the driver reports ("NVIDIA H100 80GB HBM3").
        capability: The compute capability that the driver reports.

    Returns:
        The row of `GPUS` with this name and capability. If no row has both, a GPU of which only
        the capability is known.
    """
    row = find_gpu_of_device(device)
    if row is not None and row.capability == capability:
        return row
    return make_gpu_of_capability(capability)

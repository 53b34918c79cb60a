"""`detect_target`: this machine as a `Target`."""

import os
from dataclasses import replace

from bridge.target.gpus import CPU, Gpu, find_gpu_of_device, make_gpu_of_capability
from bridge.target.target import Target
from bridge.target.versions import Version, get_installed_version, parse_version


def detect_target() -> Target:
    """Return this machine as a target. Imports torch.

    Without a visible GPU the target is the CPU. The number of GPUs is `WORLD_SIZE` where a launcher
    has set it, and otherwise that of this machine.
    """
    import torch  # heavy: the one place in this room that needs it

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
        gpu = find_gpu_of_device(device)
    if gpu is None:
        gpu = detect_gpu(device, torch.cuda.get_device_capability(0))
    cuda = None
    if torch.version.cuda:
        cuda = parse_version(torch.version.cuda)
    return replace(base, gpu=gpu, count=count, cuda=cuda, cudnn=_detect_cudnn())


def _detect_cudnn() -> Version | None:
    """Return the version of cuDNN that torch brought along, or that it loads.

    It is None where torch has none or refuses it. An installed package is asked first: loading the
    library can bring in another one, for example from `LD_LIBRARY_PATH`.
    """
    packaged = get_installed_version("cudnn")
    if packaged is not None:
        return packaged
    import torch

    try:
        number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError):  # a library of another version, or one without a part of it
        return None
    if not number:
        return None
    return parse_version(f"{number // 10000}.{number // 100 % 100}.{number % 100}")


def detect_gpu(device: str, capability: tuple[int, int]) -> Gpu:
    """Return the GPU of a device: the row of its name, where that has the device's capability too.

    Otherwise only the capability is known.
    """
    named = find_gpu_of_device(device)
    if named is not None and named.capability == capability:
        return named
    return make_gpu_of_capability(capability)

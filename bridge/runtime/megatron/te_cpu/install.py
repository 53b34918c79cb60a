"""Import of Transformer Engine without CUDA.

The stand-in comes first, then Transformer Engine, then Megatron, then patches. Megatron decides at
import whether there is a Transformer Engine, so `install_te` runs before the first import of
`megatron.core`, and the process keeps Transformer Engine to its end.

The order, with the reason of each step:

1. `NVTE_PROJECT_BUILDING=1`: else transformer_engine/common/__init__.py:499 loads CUDA's libraries.
2. `transformer_engine_torch` and stubs of the files that import Triton and ONNX Script into
   `sys.modules`.
3. `transformer_engine.common`, under an empty parent package. In it `load_framework_extension`,
   which would load a shared object, is replaced.
4. `transformer_engine.pytorch`, which calls that function.
5. `megatron.core`, which imports Transformer Engine. Then the patches.
"""

import importlib
import importlib.util
import os
import sys
import types
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from bridge.errors import BackendUnavailableError
from bridge.runtime.megatron.patching import resolve_patches
from bridge.runtime.megatron.te_cpu.extension import (
    EXTENSION_NAME,
    build_extension,
    make_refusing_module,
)
from bridge.runtime.megatron.te_cpu.patches import build_patch_table

SUPPORTED_VERSION = "2.20"
"""The release of Transformer Engine that the stand-in was written for."""
_TE_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # no CUDA libraries
    "NVTE_TORCH_COMPILE": "0",  # torch.compile has nothing to gain from functions of Python
    "NVTE_MASKED_SOFTMAX_FUSION": "0",  # the fused softmax is a CUDA kernel
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "0",  # so are the fused experts
}
"""Variable -> the value that a CPU needs."""
_TRITON_PACKAGE = "transformer_engine.pytorch.triton"
_STUB_MODULES = (
    _TRITON_PACKAGE,
    f"{_TRITON_PACKAGE}.mhc",
    f"{_TRITON_PACKAGE}.permutation",
    f"{_TRITON_PACKAGE}.cross_entropy",
    f"{_TRITON_PACKAGE}.pad",
    f"{_TRITON_PACKAGE}.grouped_dbias_dscales",
    "transformer_engine.pytorch.onnx_extensions",
)
"""Modules that import Triton or ONNX Script. `triton` has no stub, since torch looks for it."""


TOO_LATE_MESSAGE = (
    "precision_backend: te_cpu needs a process in which Megatron Core was not imported before, "
    "because Megatron decides at import whether there is Transformer Engine. "
    "Start the run by itself, or call bridge.preflight.gpu_for_te_cpu.declare() before anything else."
)
"""The error of a run, or of a declaration, after the import of Megatron Core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledTE:
    """Transformer Engine as it was imported here."""

    version: str
    capability: tuple[int, int]
    """Compute capability of the declared GPU."""


_installed_te: list[InstalledTE] = []


def find_te() -> tuple[Path, str]:
    """Return the folder of Transformer Engine's Python, and its version.

    The folder is that of an installed package, or ``te`` in the environment, which ``make setup``
    fills and which is not on Python's path.

    Raises:
        BackendUnavailableError: There is no Transformer Engine of the release `SUPPORTED_VERSION`.
    """
    side = Path(sys.prefix) / "te"
    root = side
    spec = importlib.util.find_spec("transformer_engine")
    places = getattr(spec, "submodule_search_locations", None)
    if places:
        root = Path(next(iter(places))).parent
    version = _find_version(root)
    if version is not None and version.startswith(f"{SUPPORTED_VERSION}."):
        return root, version
    fault = "it is not installed"
    if version is not None:
        fault = f"{version} is installed"
    raise BackendUnavailableError(
        f"precision_backend=te_cpu: needs the Python files of Transformer Engine {SUPPORTED_VERSION}, "
        f"and {fault} in {root}. "
        f"Run: pip install --target {side} transformer-engine=={SUPPORTED_VERSION}.2 'pydantic>=2' einops"
    )


def _find_version(root: Path) -> str | None:
    """Return the version of the Transformer Engine in a folder, None without its Python files."""
    if not (root / "transformer_engine" / "pytorch" / "__init__.py").is_file():
        return None
    for distribution in metadata.distributions(name="transformer_engine", path=[str(root)]):
        return distribution.version
    return None


def get_installed_te() -> InstalledTE | None:
    """Return the Transformer Engine that `install_te` imported in this process, or None."""
    if _installed_te:
        return _installed_te[0]
    return None


def install_te(capability: tuple[int, int]) -> InstalledTE:
    """Import Transformer Engine's Python over the stand-in, then Megatron.

    Args:
        capability: Compute capability whose branches Transformer Engine takes.

    Raises:
        BackendUnavailableError: Its files are not installed, or Megatron Core was imported before.
    """
    if "megatron.core" in sys.modules:
        raise BackendUnavailableError(TOO_LATE_MESSAGE)
    root, version = find_te()
    if str(root) not in sys.path:
        sys.path.append(str(root))
    os.environ.update(_TE_ENVIRONMENT)
    sys.modules[EXTENSION_NAME] = build_extension()
    for name in _STUB_MODULES:
        sys.modules[name] = _make_stub(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_te(root)
        for change in resolve_patches(build_patch_table(capability)):
            setattr(*change)
    installed = InstalledTE(version=version, capability=capability)
    _installed_te.append(installed)
    return installed


def _make_stub(name: str) -> types.ModuleType:
    """Return the stub of a module that imports Triton or ONNX Script."""
    stub = make_refusing_module(name)
    if name == _TRITON_PACKAGE:
        stub.__path__ = []
    if name.endswith(".pad"):
        stub.__dict__["pad_columnwise_scale_inv"] = _pad_scales
    return stub


def _pad_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return gathered NVFP4 scales padded as a GEMM reads them (pytorch/triton/pad.py)."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))


def _import_te(root: Path) -> None:
    """Import `transformer_engine.common`, replace its loader, then import the rest and Megatron."""
    parent = types.ModuleType("transformer_engine")
    parent.__path__ = [str(root / "transformer_engine")]
    sys.modules["transformer_engine"] = parent
    common = importlib.import_module("transformer_engine.common")
    common.__dict__["load_framework_extension"] = lambda _framework: None
    del sys.modules["transformer_engine"]
    package = importlib.import_module("transformer_engine")
    package.__dict__["common"] = common
    importlib.import_module("transformer_engine.pytorch")
    importlib.import_module("megatron.core")

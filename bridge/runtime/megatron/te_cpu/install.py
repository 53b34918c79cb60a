"""Import of Transformer Engine without CUDA: the stand-in first, then Transformer Engine, then Megatron, then patches.

Megatron decides at import whether there is a Transformer Engine, so `install` runs before the first import of
`megatron.core`, and the process keeps Transformer Engine to its end.

The order, and the failure of any other:

1. `NVTE_PROJECT_BUILDING=1`: else transformer_engine/common/__init__.py:499 loads CUDA's libraries.
2. `transformer_engine_torch` and stubs of the files that import Triton and ONNX Script into `sys.modules`.
3. `transformer_engine.common` alone, under an empty parent, and `load_framework_extension` replaced in it, which would
   load a shared object.
4. `transformer_engine.pytorch`, the real one.
5. `megatron.core`, which imports it. Then the patches.
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
from bridge.runtime.megatron.replacement import changes
from bridge.runtime.megatron.te_cpu.extension import NAME, extension, module_of_missing
from bridge.runtime.megatron.te_cpu.patches import patches

VERSION = "2.20"
"""The release of Transformer Engine that the stand-in was written for."""
_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # no CUDA libraries
    "NVTE_TORCH_COMPILE": "0",  # torch.compile has nothing to gain from functions of Python
    "NVTE_MASKED_SOFTMAX_FUSION": "0",  # the fused softmax is a CUDA kernel
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "0",  # so are the fused experts
}
"""Variable -> the value that a CPU needs."""
_TRITON = "transformer_engine.pytorch.triton"
_STUBS = (
    _TRITON,
    *(
        f"{_TRITON}.{name}"
        for name in ("mhc", "permutation", "cross_entropy", "pad", "grouped_dbias_dscales")
    ),
    "transformer_engine.pytorch.onnx_extensions",
)
"""Modules that import Triton or ONNX Script. `triton` itself stays what it is: torch asks for it."""


TOO_LATE = (
    "precision_backend: te_cpu needs a process in which Megatron Core was not imported before, because Megatron "
    "decides at import whether there is Transformer Engine. Start the run by itself, or call "
    "bridge.preflight.te_cpu.declare() before anything else."
)
"""The answer to a run, or a declaration, that comes after that import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """Transformer Engine as it was imported here."""

    version: str
    capability: tuple[int, int]
    """Compute capability of the declared GPU."""


_installed: list[Installed] = []


def find_te() -> tuple[Path, str]:
    """Return the folder that holds Transformer Engine's Python, and its version.

    ``make setup`` fills a folder in the environment, which is on no path unless it is asked for.
    """
    spec, side = importlib.util.find_spec("transformer_engine"), Path(sys.prefix) / "te"
    places = getattr(spec, "submodule_search_locations", None)
    root = Path(next(iter(places))).parent if places else side
    is_there = (root / "transformer_engine" / "pytorch" / "__init__.py").is_file()
    stated = [
        one.version for one in metadata.distributions(name="transformer_engine", path=[str(root)])
    ]
    version = stated[0] if is_there and stated else None
    if version is None or not version.startswith(f"{VERSION}."):
        found = "it is not installed" if version is None else f"{version} is installed"
        raise BackendUnavailableError(
            f"precision_backend=te_cpu: needs the Python files of Transformer Engine {VERSION}, and {found} in {root}. "
            f"Run: pip install --target {side} transformer-engine=={VERSION}.2 'pydantic>=2' einops"
        )
    return root, version


def installed_te() -> Installed | None:
    """Return what was installed in this process, None where nothing was."""
    return _installed[0] if _installed else None


def install(capability: tuple[int, int]) -> Installed:
    """Import Transformer Engine's Python over the stand-in, with the branches of a compute capability, and Megatron.

    BackendUnavailableError where its files are not there, or Megatron Core was imported already.
    """
    if "megatron.core" in sys.modules:
        raise BackendUnavailableError(TOO_LATE)
    root, version = find_te()
    if str(root) not in sys.path:
        sys.path.append(str(root))
    os.environ.update(_ENVIRONMENT)
    sys.modules[NAME] = extension()
    for name in _STUBS:
        sys.modules[name] = _stub(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_te(root)
        for change in changes(patches(capability)):
            setattr(*change)
    found = Installed(version=version, capability=capability)
    _installed.append(found)
    return found


def _stub(name: str) -> types.ModuleType:
    made = module_of_missing(name)
    if name == _TRITON:
        made.__path__ = []
    if name.endswith(".pad"):
        made.__dict__["pad_columnwise_scale_inv"] = _padded_scales
    return made


def _padded_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return gathered NVFP4 scales padded as a GEMM reads them (pytorch/triton/pad.py)."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))


def _import_te(root: Path) -> None:
    """Import `transformer_engine.common` alone, replace its loader, then import the package and Megatron."""
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

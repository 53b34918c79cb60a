"""The systems that a trained model is handed to: which dialect each reads for a scheme, and where its values differ.

A dialect is a key of `DIALECTS`. A scheme that a system has no dialect for cannot be written for it alone; several
schemes in one model need compressed-tensors, whose config groups are the only form for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from bridge.errors import RunConfigError, close_matches, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPRESSED, FP8 = "compressed-tensors", "fp8"
_ALL = dict.fromkeys(("tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4"), COMPRESSED)

STORED_INPUTS = (
    "the scales of inputs are stored numbers there, and follow the amax history in training",
    "Write each input's last scale as input_scale, or calibrate on a few batches.",
)
STORED_LEVEL = (
    "the scale over a whole input is a stored number there, and the amax of each step in training",
    "Calibrate input_global_scale on a few batches.",
)
PER_TOKEN = (
    "inputs are scaled per token there where its CUTLASS kernels run, and per tensor in training",
    "Nothing has to be done: the scales are finer.",
)
FP32_SCALES = (
    "scales of inputs are FP32 numbers there where its kernel asks for no others, and powers of two in training",
    "Train with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 to have FP32 scales in both.",
)
DOUBLED_SCALES = (
    "a block whose largest value is exactly 448 times a power of two, as every block with the code 448 has it, gets "
    "twice the scale there that Transformer Engine gives it",
    "Store the codes and scales of training instead of quantising BF16 weights again.",
)
Difference = tuple[str, str]
"""The difference as a clause, and its remedy as a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSystem:
    """A system that serves a model."""

    name: str
    """As in `--for NAME`."""
    title: str
    version: str
    """The release or commit its facts were taken from."""
    dialects: Mapping[str, str]
    """Scheme -> the dialect it is written in where the model has one scheme."""
    mixed: frozenset[str] = frozenset(_ALL)
    """Schemes that it reads from config groups of compressed-tensors."""
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Scheme -> further keys of its config."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """Scheme -> a difference of values from training."""


_SYSTEMS = (
    ServingSystem(
        name="vllm",
        title="vLLM",
        version="1436674 model_executor/layers/quantization/fp8.py (Fp8LinearMethod); compressed_tensors.py of be69645",
        dialects={**_ALL, "tensorwise": FP8, "delayed": FP8, "blockwise": FP8},
        differences={
            "tensorwise": PER_TOKEN,
            "delayed": STORED_INPUTS,
            "blockwise": FP32_SCALES,
            "nvfp4": STORED_LEVEL,
        },
    ),
    ServingSystem(
        name="sglang",
        title="SGLang",
        version="00563d3 layers/quantization/fp8.py (Fp8Config.from_config)",
        dialects={**_ALL, "tensorwise": FP8, "delayed": FP8, "blockwise": FP8, "mxfp8": FP8},
        mixed=frozenset({"tensorwise", "delayed", "nvfp4"}),
        keys={"blockwise": {"scale_fmt": "ue8m0"}},
        differences={"tensorwise": PER_TOKEN, "delayed": STORED_INPUTS, "nvfp4": STORED_LEVEL},
    ),
    ServingSystem(
        name="compressed-tensors",
        title="compressed-tensors",
        version="0.20.0 quantization/quant_config.py, quantization/utils/mxfp_utils.py",
        dialects=_ALL,
        differences={"delayed": STORED_INPUTS, "nvfp4": STORED_LEVEL, "mxfp8": DOUBLED_SCALES},
    ),
    ServingSystem(
        name="hf",
        title="transformers",
        version="5.23.0 utils/quantization_config.py (FineGrainedFP8Config, CompressedTensorsConfig)",
        dialects={**_ALL, "blockwise": FP8},
        differences={
            "delayed": STORED_INPUTS,
            "blockwise": FP32_SCALES,
            "nvfp4": STORED_LEVEL,
            "mxfp8": DOUBLED_SCALES,
        },
    ),
)
SYSTEMS = MappingProxyType({system.name: system for system in _SYSTEMS})


def serving_system(name: str) -> ServingSystem:
    """Return a serving system by its name."""
    if name not in SYSTEMS:
        remedy = did_you_mean(close_matches(name, SYSTEMS))
        raise RunConfigError.of("--for", f"must be one of {', '.join(SYSTEMS)}", name, remedy)
    return SYSTEMS[name]

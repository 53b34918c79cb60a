"""The systems that a trained model is handed to: the dialect that each reads for a scheme, and where its values differ.

Source: vLLM 1436674 model_executor/layers/quantization/fp8.py (Fp8LinearMethod), be69645 and 4728ddc
compressed_tensors/; SGLang 00563d3 layers/quantization/fp8.py (Fp8Config.from_config), b553569 compressed_tensors/;
compressed-tensors 0.20.0 quantization/utils/mxfp_utils.py; transformers 5.23.0 utils/quantization_config.py
(FineGrainedFP8Config, CompressedTensorsConfig).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from bridge.interop.serving.formats import SERVED

ALL = frozenset(SERVED)

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

    title: str
    fp8: frozenset[str]
    """Schemes that are written in the fp8 dialect where the model has no other; others are compressed-tensors."""
    mixed: frozenset[str] = ALL
    """Schemes that it reads from config groups of compressed-tensors, the only form for several schemes."""
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Scheme -> further keys of its config."""
    differences: Mapping[str, Difference] = field(default_factory=dict)
    """Scheme -> a difference of values from training."""


_CALIBRATED = {"delayed": STORED_INPUTS, "nvfp4": STORED_LEVEL}
SYSTEMS = MappingProxyType(
    {
        "vllm": ServingSystem(
            title="vLLM",
            fp8=frozenset({"tensorwise", "delayed", "blockwise"}),
            differences={**_CALIBRATED, "tensorwise": PER_TOKEN, "blockwise": FP32_SCALES},
        ),
        "sglang": ServingSystem(
            title="SGLang",
            fp8=frozenset({"tensorwise", "delayed", "blockwise", "mxfp8"}),
            mixed=frozenset({"tensorwise", "delayed", "nvfp4"}),
            keys={"blockwise": {"scale_fmt": "ue8m0"}},
            differences={**_CALIBRATED, "tensorwise": PER_TOKEN},
        ),
        "compressed-tensors": ServingSystem(
            title="compressed-tensors", fp8=frozenset(), differences={**_CALIBRATED, "mxfp8": DOUBLED_SCALES}
        ),
        "hf": ServingSystem(
            title="transformers",
            fp8=frozenset({"blockwise"}),
            differences={**_CALIBRATED, "blockwise": FP32_SCALES, "mxfp8": DOUBLED_SCALES},
        ),
    }
)
"""Name of a system, as in `--for NAME` -> the system."""

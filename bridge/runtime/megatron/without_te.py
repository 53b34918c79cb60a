"""Patches that repair Megatron's layers where Transformer Engine is not installed.

The layers are experts, latent attention and prediction layers. In them Megatron 0.16.1 names
functions of Transformer Engine that it has not imported, and compares the version of Transformer
Engine, which is None. The layers do not need these functions: Megatron's own or emulated linear
layers multiply.

Line numbers refer to megatron-core 0.16.1.
"""

from megatron.core.transformer import (
    multi_latent_attention,
    multi_token_prediction,
    transformer_config,
)
from megatron.core.transformer.moe import moe_utils, shared_experts
from megatron.core.utils import get_te_version

from bridge.runtime.megatron.patching import Patch

_FUSED_PERMUTATIONS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_unpermute",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
)
"""Names that transformer_config.py:1829 imports from the module of the experts, for a check."""
_INFERENCE_QUERY = "is_inference_column_parallel_linear"
_CHANGES_OF_SOME_RELEASES: list[Patch] = []
"""Patches of layers that only some releases need."""
if not hasattr(moe_utils, "te_general_gemm"):  # :1192, NameError
    _CHANGES_OF_SOME_RELEASES.append((moe_utils, "te_general_gemm", None))
if hasattr(multi_token_prediction, _INFERENCE_QUERY):
    # From 0.20 on (main of 2026-08-22, :1193): TypeError, a class of layers that needs TE is None
    # there.
    _CHANGES_OF_SOME_RELEASES.append(
        (multi_token_prediction, _INFERENCE_QUERY, lambda *_, **_named: False)
    )

CHANGES_FOR_CONFIGS: tuple[Patch, ...] = (
    (transformer_config, "is_te_min_version", lambda *_, **_named: True),
    *((moe_utils, name, None) for name in _FUSED_PERMUTATIONS),
)
"""Patches while Megatron checks a config, so that it accepts FP8 with experts.

The check refuses a Transformer Engine that fails for an expert without tokens
(transformer_config.py:1601). Emulated layers accept such an expert.
"""
CHANGES_FOR_LAYERS: tuple[Patch, ...] = (
    (shared_experts, "is_te_min_version", lambda *_, **_named: False),  # :68, TypeError under FP8
    # :184, TypeError: the flag is True although the layers of Transformer Engine are None
    (multi_latent_attention, "HAVE_TE", False),
    *_CHANGES_OF_SOME_RELEASES,
)
"""Patches while Megatron builds and runs experts, latent attention and prediction layers."""
# Without Transformer Engine the version is 0.0.0 from megatron-core 0.19 on, and None before.
if str(get_te_version()) not in ("None", "0.0.0"):
    CHANGES_FOR_CONFIGS = CHANGES_FOR_LAYERS = ()

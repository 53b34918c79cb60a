"""Repairs of Megatron's experts and latent attention where Transformer Engine is not installed.

Megatron 0.16.1 names functions of Transformer Engine there that it has not imported, and compares the version of a
package that is not there. The modules need none of it: Megatron's own layers multiply, or emulated ones.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.transformer import multi_latent_attention, transformer_config
from megatron.core.transformer.moe import moe_utils, shared_experts
from megatron.core.utils import get_te_version

from bridge.megatron.replacement import replaced

_FUSED = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
"""Names that transformer_config.py:1829 imports from the module of the experts."""


def _is_there() -> bool:
    return str(get_te_version()) not in ("None", "0.0.0")  # 0.0.0 from megatron-core 0.19 on


def config_checks() -> AbstractContextManager[None]:
    """Let Megatron's config accept FP8 with experts, which it asks Transformer Engine's version for.

    The check is about experts without tokens (transformer_config.py:1601), which emulated layers accept.
    """
    if _is_there():
        return nullcontext()
    # The functions are imported in a check that then names the package, which is an ImportError without them.
    missing = [(moe_utils, name, None) for name in _FUSED]
    return replaced([(transformer_config, "is_te_min_version", lambda *_: True), *missing])


def repaired_layers() -> AbstractContextManager[None]:
    """Let Megatron build and run layers with experts or latent attention, for the length of a ``with`` block."""
    if _is_there():
        return nullcontext()
    repairs: list[tuple[Any, str, Any]] = [
        (shared_experts, "is_te_min_version", lambda *_: False),  # :68, TypeError under FP8
        (multi_latent_attention, "HAVE_TE", False),  # :184, TypeError: it counts as there, its layers do not
    ]
    if not hasattr(moe_utils, "te_general_gemm"):  # :1192, NameError in the router
        repairs.append((moe_utils, "te_general_gemm", None))
    return replaced(repairs)

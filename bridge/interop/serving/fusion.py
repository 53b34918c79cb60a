"""Linear layers of a checkpoint that vLLM loads as one: it refuses a config that gives them different schemes.

split({"model.layers.0.self_attn.q_a_proj": None, "model.layers.0.self_attn.kv_a_proj_with_mqa": "nvfp4"})
"""

import re
from collections.abc import Iterator, Mapping

from bridge.interop.serving.formats import ROWS
from bridge.plan.precision_plan import compact

FUSED: list[list[str]] = ROWS["fused"]
"""Names in one parent module; a group counts where the checkpoint has all of them."""
_PARENT = re.compile(r"model\.layers\.(\d+)\.(?!.*\bexperts\b)(.+)")
"""Layer and parent module; all experts of a layer are one module."""


def split(schemes: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a sentence for each group of `FUSED` that gets more than one scheme.

    Args:
        schemes: Name of a module in the checkpoint -> its scheme; None: not quantised.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for group in FUSED:
        for name in schemes:
            parent, _, own = name.rpartition(".")
            place = _PARENT.fullmatch(parent)
            members = [f"{parent}.{each}" for each in group]
            if own != group[0] or place is None or any(member not in schemes for member in members):
                continue
            if len({schemes[member] for member in members}) > 1:
                fused = f"{', '.join(group[:-1])} and {group[-1]}"
                found.setdefault((fused, place[2]), []).append(str(int(place[1]) + 1))
    for (fused, inner), layers in found.items():
        yield f"vLLM refuses the config: it fuses {fused}, whose schemes differ in {inner} of layers {compact(layers)}."

"""Random lists of `modules`."""

from typing import Any

from hypothesis import strategies as st

__all__ = ["module_lists"]

NAMES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "mlp.linear_fc1", "linear_*", "router")
PRECISIONS: tuple[dict[str, Any], ...] = (
    {"precision": "bf16"},
    {"precision": "mxfp8"},
    {"precision": "blockwise", "fp8": "e4m3"},
    {"fp8_recipe": "tensorwise", "fp8": "hybrid", "fp8_param": False},
    {"fp4_recipe": "nvfp4"},
    {"fp8_recipe": "blockwise", "evaluation": "bf16"},
    {"fp8_recipe": "custom", "fp8_quantizer_factory": "team.factory", "tp_only_amax_red": True},
)


@st.composite
def module_lists(draw: st.DrawFn, num_layers: int = 8, most: int = 4) -> list[dict[str, Any]]:
    """Return the rows of a random `modules`, legal in every run."""
    layer = st.integers(-num_layers, num_layers - 1)
    name = st.sampled_from(NAMES)
    by_number = st.fixed_dictionaries({"module": name}, optional={"layers": st.lists(layer, min_size=1, max_size=3)})
    numbered = st.builds("decoder.layers.{}.*.{}".format, st.integers(0, num_layers - 1), name)
    globs = st.sampled_from(
        ["*", "*.linear_qkv", "*linear_fc[12]", "decoder.*.linear_proj", "mtp.*", "*.self_attention.*"]
    )
    select = by_number | numbered | globs | st.builds("*layers.{}.*".format, st.integers(0, num_layers - 1))
    row = st.builds(lambda chosen, how: {"select": chosen, **how}, select, st.sampled_from(PRECISIONS))
    return draw(st.lists(row, max_size=most))

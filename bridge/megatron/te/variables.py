"""Transformer Engine's environment variables that change a recipe, one row each.

Most of them become defaults of the recipe classes when `transformer_engine` is imported, so Megatron, which passes few
keywords, gets them into its recipes without a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["NVTE_VARIABLES", "Variable"]

SCOPES = ("none", "weights", "activations", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One row: an environment variable of Transformer Engine."""

    name: str
    effect: str
    """Effect of a value other than the default, as a clause."""
    schemes: tuple[str, ...] = ()
    """Schemes it concerns; empty for every low-precision scheme."""
    reads: str = "import"
    """import: when `transformer_engine` is imported. run: while the run goes on."""
    kind: str = "flag"
    """flag: only the text 1 switches it on. number: an integer, 0 is off. text: a word."""
    default: str | None = "0"
    """A value that means the same as unset; None where there is none."""
    choices: tuple[str, ...] = ()
    """Values that Transformer Engine accepts; empty where it does not check."""
    keyword: str | None = None
    """Keyword of the recipe class whose default it is."""
    contradicts: tuple[str, ...] = ()
    """Values that contradict the config: an error. Any other change is a warning."""
    refused_by: tuple[str, ...] = ()
    """Schemes whose recipe cannot be made while it is set."""
    attention: bool = False
    """Concerns FP8 attention alone, so only recipes with `fp8_dpa`."""
    changes_values: bool = True
    """False: it picks a kernel or permits something; the recipe stays what it was."""

    def parse(self, text: str) -> object:
        """Return a value as Transformer Engine reads it.

        Raises:
            ValueError: Transformer Engine would fail on it.
        """
        if self.kind == "flag":
            return text == "1"
        if self.kind == "number":
            return int(text)
        word = text.upper() if self.name.endswith("ERR_MODE") else text
        if self.choices and word not in self.choices:
            raise ValueError
        return word

    def is_active(self, text: str) -> bool:
        """Return whether a value does something else than leaving the variable unset.

        Raises:
            ValueError: as `parse`.
        """
        parsed = self.parse(text)
        return self.default is None or parsed != self.parse(self.default)

    def concerns(self, scheme: str, *, attention: bool) -> bool:
        """Return whether it can change a run under a scheme, with or without FP8 attention."""
        return (not self.schemes or scheme in self.schemes) and (attention or not self.attention)

    @property
    def accepted(self) -> str:
        """Values that Transformer Engine accepts, in words."""
        if self.kind == "number":
            return "a whole number"
        return f"one of {', '.join(filter(None, self.choices))}" if self.choices else "anything"


NVTE_VARIABLES = MappingProxyType(
    {
        row.name: row
        for row in (
            Variable(
                name="NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
                effect="rounds the scales of current scaling down to powers of two",
                schemes=("tensorwise",),
                keyword="use_power_2_scales",
            ),
            Variable(
                name="NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
                effect="keeps block scales that are no powers of two, which only Hopper GPUs multiply by",
                schemes=("blockwise",),
                keyword="use_f32_scales",
                contradicts=("1",),
            ),
            Variable(
                name="NVTE_BACKWARD_OVERRIDE",
                effect="runs both GEMMs of the backward pass in high precision",
                kind="text",
                default=None,
                choices=("high_precision", "dequantized"),
                keyword="backward_override",
                contradicts=("high_precision", "dequantized"),
                refused_by=("delayed",),
            ),
            Variable(
                name="NVTE_NVFP4_DISABLE_RHT",
                effect="leaves out the random Hadamard transform before the weight gradient's GEMM",
                schemes=("nvfp4",),
                keyword="disable_rht",
                contradicts=("1",),
            ),
            Variable(
                name="NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
                effect="rounds gradients to nearest instead of stochastically",
                schemes=("nvfp4",),
                keyword="disable_stochastic_rounding",
                contradicts=("1",),
            ),
            Variable(
                name="NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
                effect="scales weights per 1x16 values instead of per 16x16",
                schemes=("nvfp4",),
                keyword="disable_2d_quantization",
                contradicts=("1",),
            ),
            Variable(
                name="NVTE_NVFP4_ROW_SCALED_ACTIVATION",
                effect="gives each row of an activation its own second-level scale",
                schemes=("nvfp4",),
                keyword="row_scaled_activation",
            ),
            Variable(
                name="NVTE_NVFP4_4OVER6",
                effect="maps each block to a maximum of 4 or of 6, whichever errs less",
                schemes=("nvfp4",),
                kind="text",
                default="none",
                choices=SCOPES,
                keyword="nvfp4_4over6",
            ),
            Variable(
                name="NVTE_NVFP4_4OVER6_E4M3_USE_256",
                effect="chooses the tensors of 4over6 whose block scales end at 256 instead of 448",
                schemes=("nvfp4",),
                kind="text",
                default="all",
                choices=SCOPES,
                keyword="nvfp4_4over6_e4m3_use_256",
            ),
            Variable(
                name="NVTE_NVFP4_4OVER6_ERR_MODE",
                effect="changes the error that 4over6 makes small",
                schemes=("nvfp4",),
                kind="text",
                default="MAE",
                choices=("MAE", "MSE"),
                keyword="nvfp4_4over6_err_mode",
            ),
            Variable(
                name="NVTE_UNFUSED_FP8_UPDATE",
                effect="updates delayed scales in Python: the last bit can differ, and a zero amax ages the history",
                schemes=("delayed",),
                reads="run",
                kind="number",
            ),
            Variable(
                name="NVTE_USE_FAST_MATH",
                effect="leaves out the rounding to BF16 after the Hadamard transform, so codes differ",
                schemes=("nvfp4",),
                reads="run",
            ),
            Variable(
                name="NVTE_DPA_FP8_RECIPE",
                effect="quantises attention by another recipe than the GEMMs; F16 leaves it in BF16",
                kind="text",
                default="",
                choices=("", "F16", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
                contradicts=("F16",),
                attention=True,
            ),
            Variable(
                name="NVTE_DPA_FP8_FORMAT",
                effect="changes the formats of FP8 attention under an FP4 recipe",
                schemes=("nvfp4",),
                kind="text",
                default="HYBRID",
                choices=("HYBRID", "E4M3", "E5M2"),
                attention=True,
            ),
            Variable(
                name="NVTE_DPA_FP8DS_AMAX_ALGO",
                effect="changes how the delayed scales inside attention are chosen",
                schemes=("tensorwise", "mxfp8", "nvfp4"),
                kind="text",
                default="most_recent",
                choices=("most_recent", "max"),
                attention=True,
            ),
            Variable(
                name="NVTE_DPA_FP8DS_AMAX_HISTLEN",
                effect="changes the history length of the delayed scales inside attention",
                schemes=("tensorwise", "mxfp8", "nvfp4"),
                kind="number",
                default="1",
                attention=True,
            ),
            Variable(
                name="NVTE_DPA_FP8DS_REDUCE_AMAX",
                effect="keeps the delayed scales inside attention local to each rank",
                schemes=("tensorwise", "mxfp8", "nvfp4"),
                default="1",
                attention=True,
            ),
            Variable(
                name="NVTE_FP8_DPA_BWD",
                effect="runs the backward pass of attention in high precision",
                reads="run",
                kind="number",
                default="1",
                contradicts=("0",),
                attention=True,
            ),
            Variable(
                name="NVTE_DPA_FP8CS_O_in_F16",
                effect="keeps the output of attention in FP8 from the forward to the backward pass",
                schemes=("tensorwise", "custom"),
                default="1",
                attention=True,
            ),
            Variable(
                name="NVTE_UnfusedDPA_Emulate_FP8",
                effect="emulates FP8 attention in high precision where no fused kernel runs",
                reads="run",
                attention=True,
            ),
            Variable(
                name="NVTE_FUSED_ATTN",
                effect="takes the fused attention kernels away, which most FP8 attention needs",
                reads="run",
                kind="number",
                default="1",
                attention=True,
            ),
            Variable(
                name="NVTE_NORM_FWD_USE_CUDNN",
                effect="computes norms with cuDNN; the last bit of what a GEMM reads can differ",
                reads="run",
                changes_values=False,
            ),
            Variable(
                name="NVTE_ALLOW_NONDETERMINISTIC_ALGO",
                effect="forbids attention kernels that are not deterministic",
                reads="run",
                kind="number",
                default="1",
                changes_values=False,
            ),
            Variable(
                name="NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
                effect="lets a checkpoint's delayed scales be loaded, which are pickled",
                schemes=("delayed", "custom"),
                reads="run",
                changes_values=False,
            ),
            Variable(
                name="NVTE_APPLY_QK_LAYER_SCALING",
                effect="has to equal Megatron's apply_query_key_layer_scaling",
                reads="run",
                kind="number",
                changes_values=False,
            ),
            Variable(
                name="NVTE_PLUGIN",
                effect="replaces Transformer Engine's compiled module",
                kind="text",
                default="",
                changes_values=False,
            ),
        )
    }
)
"""Variables by name. Source: Transformer Engine 2.20.2 common/recipe/__init__.py:261-574, pytorch/quantization.py:688,
pytorch/attention/dot_product_attention/dot_product_attention.py:403-408, backends.py:234 and :1625, utils.py:609-615,
pytorch/_extra_state.py:85, common/__init__.py:226, pytorch/csrc/quantizer.cpp:2679."""

# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""`measure_round_trips`: the codes, scales and values that change when a weight is quantised again.

    training    q = quantise(w)                   v = dequantised(q)
    bf16        q' = quantise(bf16(v))            the quantised values are stored in BF16
    masters     q' = quantise(bf16(w))            the weights before quantisation are stored in BF16
    blocks      q' = quantise(bf16(dequantised(b(bf16(w)))))
                                                  exported in 128x128 FP32-scaled blocks, loaded

A block of MXFP8 whose largest code is at most 224 after rounding gets a smaller power of two as its
scale the second time: the codes double, and the values stay the same. Values under blockwise
scaling and MXFP8 have at most 4 significant bits, and are BF16 numbers. Values under a scale per
tensor, or under NVFP4's two levels, are rounded to BF16.

Source: Megatron-LM issue 6666 (52 of 1024 MXFP8 scales on a GB300); DeepSeek-V3's
inference/kernel.py for `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from bridge.precision.schemes import COMPARED_SCHEMES
from bridge.runtime.numerics.quantise import quantise
from bridge.runtime.numerics.quantised import Quantised
from bridge.runtime.numerics.spec import EMULATED_SCHEMES, GemmPrecision, QuantSpec

BLOCKWISE_SPEC = QuantSpec(
    scheme="blockwise",
    format="e4m3",
    rowwise_tile=(128, 128),
    columnwise_tile=(128, 128),
    power_of_two_scale=False,
)
STORAGE_FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bf16": lambda _, values_NK: values_NK.bfloat16(),
    "masters": lambda weight_NK, _: weight_NK.bfloat16(),
    "blocks": lambda weight_NK, _: quantise(
        weight_NK.bfloat16(), BLOCKWISE_SPEC, columnwise=False
    ).dequantise(),
}
"""Form of storage -> function that makes the form from the weight and its quantised values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrip:
    """The change of weights under a scheme when they are stored in a form and quantised again."""

    scheme: str
    form: str
    """A key of `STORAGE_FORMS`."""
    codes: int = 0
    """Number of codes."""
    codes_changed: int = 0
    scales: int = 0
    """Number of scales."""
    scales_changed: int = 0
    values_changed: int = 0
    """Number of dequantised values that changed."""
    largest_error: float = 0.0
    """Largest relative error of a nonzero value; the error of a value that became zero is 1."""

    def __add__(self, other: RoundTrip) -> RoundTrip:
        return replace(
            self,
            codes=self.codes + other.codes,
            codes_changed=self.codes_changed + other.codes_changed,
            scales=self.scales + other.scales,
            scales_changed=self.scales_changed + other.scales_changed,
            values_changed=self.values_changed + other.values_changed,
            largest_error=max(self.largest_error, other.largest_error),
        )


def measure_round_trips(weights: Iterable[torch.Tensor]) -> list[RoundTrip]:
    """Return the changes of weights under each scheme of `COMPARED_SCHEMES` through each form.

    Args:
        weights: Matrices (N, K), FP32 or BF16, without NaN and infinity. They are counted together.
    """
    specs: dict[str, QuantSpec] = {}
    sums: dict[tuple[str, str], RoundTrip] = {}
    for name in COMPARED_SCHEMES:
        precision = GemmPrecision(scheme=name, format=EMULATED_SCHEMES[name].formats[0])
        specs[name] = precision.spec("weight")
        for form in STORAGE_FORMS:
            sums[name, form] = RoundTrip(scheme=name, form=form)
    for weight_NK in weights:
        for name, spec in specs.items():
            trained = quantise(weight_NK, spec, columnwise=False)
            values_NK = trained.dequantise(torch.float32)
            for form, stored in STORAGE_FORMS.items():
                again = quantise(stored(weight_NK, values_NK), spec, columnwise=False)
                sums[name, form] += _measure_change(name, form, trained, again, values_NK)
    return list(sums.values())


def _measure_change(
    scheme: str, form: str, before: Quantised, after: Quantised, values_NK: torch.Tensor
) -> RoundTrip:
    """Return the change of a weight between its two quantisations.

    Args:
        scheme: Name of the scheme.
        form: Name of the form.
        before: The first quantisation.
        after: The second quantisation.
        values_NK: FP32, the dequantised values of the first quantisation.
    """
    has_other_code = before.decode_codes() != after.decode_codes()
    has_other_scale = _collect_scales(before) != _collect_scales(after)
    error_NK = (after.dequantise(torch.float32) - values_NK).abs_()
    relative_errors = (error_NK / values_NK.abs())[values_NK != 0]
    largest_error = 0.0
    if relative_errors.numel():
        largest_error = float(relative_errors.max())
    return RoundTrip(
        scheme=scheme,
        form=form,
        codes=has_other_code.numel(),
        codes_changed=int(has_other_code.sum()),
        scales=has_other_scale.numel(),
        scales_changed=int(has_other_scale.sum()),
        values_changed=int((error_NK != 0).sum()),
        largest_error=largest_error,
    )


def _collect_scales(quantised: Quantised) -> torch.Tensor:
    """Return the scales of all tiles in FP32. Under NVFP4 the amax of the tensor follows them."""
    scales = quantised.get_tile_scales().flatten()
    if quantised.spec.scheme == "nvfp4":
        return torch.cat((scales, quantised.amax))
    return scales

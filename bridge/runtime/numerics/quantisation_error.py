# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""`measure_quantisation_error`: noise, underflow and saturation of a quantised tensor.

    noise     x - dequantised(x)
    SQNR      10 log10(sum x^2 / sum noise^2), in dB: 6 dB are one bit
    underflow share of the elements that are not zero and became zero
    saturated share of the elements beyond the format's largest value at their scale

Under blockwise, MXFP8 and NVFP4 scaling only infinity saturates, since the scale of a tile follows
its maximum.

Rounding to m mantissa bits has an SQNR of about 6.02 (m + 1) + 7.4 dB, if the logarithms of the
numbers are spread evenly over a binade. This is 31.5 for E4M3, 25.5 for E5M2 and 19.4 for E2M1. A
tensor under a scale that fits has nearly this SQNR.
"""

import math
from typing import Any

import torch

from bridge.precision.matchers import ModulePrecision
from bridge.precision.schemes import COMPARED_SCHEMES
from bridge.runtime.numerics.operand import GemmOperand, make_operand
from bridge.runtime.numerics.quantise import compute_tensor_scale
from bridge.runtime.numerics.spec import EMULATED_SCHEMES, GemmPrecision
from bridge.runtime.numerics.tiles import iterate_row_chunks

MAX_SAMPLED_VALUES = 2**18
"""The approximate number of elements that are quantised for each scheme of `COMPARED_SCHEMES`."""
BLOCK_ROWS = 128
"""The number of rows that are sampled together, the height of the tallest tile."""


def measure_quantisation_error(source_MK: torch.Tensor, operand: GemmOperand) -> dict[str, Any]:
    """Return the quantisation error of an operand, a column of telemetry per key.

    Args:
        source_MK: The matrix before quantisation, FP32, BF16 or FP16.
        operand: The operand that was made of the matrix, without a Hadamard transform.

    Returns:
        amax: Largest magnitude before quantisation, NaN not counted; NaN if it is not known.
        scale: Scale of the whole tensor, or None for a scheme with a scale per tile.
        underflow, saturated: Shares, 0 to 1.
        sqnr_db: SQNR in dB; infinite without noise, NaN if the tensor has NaN or infinity.
    """
    largest_representable = math.inf
    if operand.tensor_scale is not None:
        largest_representable = operand.spec.element.max / operand.tensor_scale
    sums = torch.zeros(5, dtype=torch.float64)
    for start, end in iterate_row_chunks(source_MK, 1):
        x = source_MK[start:end].float()
        values = operand.values[start:end]
        became_zero = values == 0
        noise = x - values.float().mul_(operand.factor)
        magnitude = x.abs()
        is_nonzero = magnitude != 0
        chunk_sums = [
            x.square_().sum(dtype=torch.float64),
            noise.square_().sum(dtype=torch.float64),
            is_nonzero.sum().double(),
            (is_nonzero & became_zero).sum().double(),
            ((magnitude > largest_representable) | magnitude.isinf()).sum().double(),
        ]
        sums += torch.stack(chunk_sums).cpu()
    signal, noise_power, nonzero, underflow, saturated = sums.tolist()
    amax = math.nan
    if operand.amax is not None:
        amax = operand.amax
    return {
        "amax": amax,
        "scale": operand.tensor_scale,
        "underflow": _compute_share(underflow, nonzero),
        "saturated": _compute_share(saturated, source_MK.numel()),
        "sqnr_db": _compute_sqnr_db(signal, noise_power),
    }


def _compute_share(part: float, total: float) -> float:
    """Return part / total, or 0 if the total is 0."""
    if not total:
        return 0.0
    return part / total


def _compute_sqnr_db(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares in dB."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise)


def compute_what_if_sqnr(
    source_MK: torch.Tensor, role: str, *, fp8_format: str | None, amax: float
) -> dict[str, float]:
    """Return the SQNR in dB that a tensor would have under each scheme of `COMPARED_SCHEMES`.

    The SQNR is measured on a sample of the rows. Stochastic rounding draws from a separate
    generator, so that the random numbers of the training run stay as they are.

    Args:
        source_MK: The tensor, FP32, BF16 or FP16.
        role: input, weight or grad_output.
        fp8_format: The run's `fp8`. A scheme without this format takes its default.
        amax: Largest magnitude of the whole tensor, for schemes with a single scale.
    """
    blocks = torch.split(source_MK, BLOCK_ROWS)
    sampled_blocks = max(1, MAX_SAMPLED_VALUES // max(1, BLOCK_ROWS * source_MK.shape[1]))
    distance = max(1, len(blocks) // sampled_blocks)
    sample_MK = torch.cat(blocks[::distance][:sampled_blocks])
    ratios = {}
    for scheme in COMPARED_SCHEMES:
        precision = ModulePrecision(family=EMULATED_SCHEMES[scheme].family, scheme=scheme)
        format_ = str(precision.resolve_in_run(fp8_format).format)
        spec = GemmPrecision(scheme=scheme, format=format_).spec(role)
        tensor_scale = None
        if spec.has_single_scale:
            tensor_scale = compute_tensor_scale(amax, spec)
        generator = torch.Generator(sample_MK.device).manual_seed(0)
        operand = make_operand(
            sample_MK, spec, role, tensor_scale=tensor_scale, generator=generator
        )
        ratios[scheme] = measure_quantisation_error(sample_MK, operand)["sqnr_db"]
    return ratios

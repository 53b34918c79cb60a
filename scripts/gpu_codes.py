"""Codes and scales of Transformer Engine's kernels against `bridge.runtime.numerics`: the same bits.

The quantizers are made as Transformer Engine's own modules make them, from the recipe that Megatron makes: so the
comparison covers the path from a config to the kernel. Scales are compared where they belong to a tile; Transformer
Engine's padding is left out. Stochastic rounding has no bits to compare and is switched off.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import torch
from gpu_report import Record, skipped_record

from bridge.precision.formats import FORMATS
from bridge.runtime.megatron.te.machine import list_missing_for_te
from bridge.runtime.numerics import (
    GemmPrecision,
    Quantised,
    QuantSpec,
    pad_scales,
    quantise,
    update_scaling_factors,
)

CASES = (
    *product(("delayed", "tensorwise"), ("hybrid", "e4m3")),
    *product(("blockwise", "mxfp8"), ("e4m3", "hybrid")),
    ("nvfp4", "e2m1"),
)
"""Schemes and formats, as Megatron's config has them."""

OPERANDS = {"input": ("forward", 0), "weight": ("forward", 1), "grad_output": ("backward", 0)}
"""Operand -> the pass whose quantizers hold it, and which of them it is."""

DELAYED_SCALE = 24.5
"""A stored scale that is no power of two."""

SHAPES = ((256, 384), (512, 128))

NAN_CODES = {"e4m3": (0x7F, 0xFF), "e5m2": (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)}


def records_of(schemes: list[str] | None = None) -> list[Record]:
    """Compare all operands of all schemes that this machine runs.

    Args:
        schemes: names of schemes; None takes all.
    """
    records: list[Record] = []
    for scheme, number_format in CASES:
        if schemes is not None and scheme not in schemes:
            continue
        missing = list_missing_for_te(scheme)
        if missing:
            records.append(skipped_record("codes", f"{scheme} {number_format}", missing))
            continue
        records += _scheme_records(scheme, number_format)
        if scheme == "delayed":
            records += _update_records(number_format)
    return records


def bits_different(mine: torch.Tensor, theirs: torch.Tensor, nan_codes: tuple[int, ...] = ()) -> int:
    """Return how many elements have different bits; NaN equals NaN of whatever sign and payload.

    Args:
        mine: codes (uint8) or scales (FP32 or uint8).
        theirs: the same dtype; another shape makes every element different.
        nan_codes: codes that stand for NaN.
    """
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return max(mine.numel(), theirs.numel())
    if mine.is_floating_point():
        same = (mine.contiguous().view(torch.int32) == theirs.contiguous().view(torch.int32)) | (
            mine.isnan() & theirs.isnan()
        )
    else:
        codes = torch.tensor(nan_codes, dtype=mine.dtype, device=mine.device)
        same = (mine == theirs) | (torch.isin(mine, codes) & torch.isin(theirs, codes))
    return int((~same).sum().item())


def inputs_of(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return inputs by name: ordinary values, a wide range, zeros, tiny and huge values, ties, infinities and NaN."""
    generator = torch.Generator().manual_seed(sum(shape))
    plain = torch.randn(shape, generator=generator)
    exponents = torch.randint(-20, 21, shape, generator=generator)
    zeros = plain.clone()
    zeros[: shape[0] // 2] = 0.0
    zeros[-1] = -0.0
    special = plain.clone()
    special[0, 0], special[1, 3], special[-1, -1] = torch.inf, torch.nan, -torch.inf
    made = {
        "ordinary": plain,
        "wide": plain * 2.0**exponents,
        "zeros": zeros,
        "all zero": torch.zeros(shape),
        "tiny": plain * 1e-38,
        "huge": plain * 1e37,
        "ties": torch.randint(-64, 65, shape, generator=generator) / 8.0,
        "infinity and NaN": special,
    }
    return {name: x.to(dtype) for name, x in made.items()}


def our_arrays(made: Quantised) -> dict[str, torch.Tensor]:
    """Return a quantised tensor's arrays in Transformer Engine's axes, under the names of `their_arrays`."""
    arrays: dict[str, torch.Tensor] = {}
    for columnwise, suffix in ((False, ""), (True, "_t")):
        codes, scales = made.get_copy(columnwise)
        padded = pad_scales(made, columnwise=columnwise)
        height, width = made.spec.tile(columnwise)
        if made.spec.scheme == "blockwise" and height != width:  # whose padded scales are transposed
            scales = scales.T
        arrays[f"codes{suffix}"] = codes
        arrays[f"scale_inv{suffix}"] = padded[tuple(map(slice, scales.shape))]
    if made.spec.scheme == "nvfp4":
        arrays["amax"] = arrays["amax_t"] = made.amax
        if made.amax_t is not None:
            arrays["amax_t"] = made.amax_t
    return arrays


def their_arrays(made: Any) -> dict[str, torch.Tensor]:
    """Return the arrays of one of Transformer Engine's quantised tensors that are there."""
    if hasattr(made, "_rowwise_data"):
        names = {
            "codes": "_rowwise_data",
            "scale_inv": "_rowwise_scale_inv",
            "codes_t": "_columnwise_data",
            "scale_inv_t": "_columnwise_scale_inv",
            "amax": "_amax_rowwise",
            "amax_t": "_amax_columnwise",
        }
    else:
        names = {"codes": "_data", "scale_inv": "_scale_inv", "codes_t": "_transpose", "scale_inv_t": "_scale_inv"}
    arrays = {ours: getattr(made, theirs, None) for ours, theirs in names.items()}
    if getattr(made, "_transpose_invalid", False):
        arrays["codes_t"] = arrays["scale_inv_t"] = None  # made on demand, or never: this GPU multiplies without it
    return {name: array for name, array in arrays.items() if array is not None}


def compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], spec: QuantSpec) -> list[Record]:
    """Return one record per array that Transformer Engine has: how many elements differ.

    Args:
        ours: what `our_arrays` returned, on any device.
        theirs: what `their_arrays` returned. Scales may be padded.
        spec: how the tensor was quantised.
    """
    records = []
    for name, array in theirs.items():
        mine = ours[name].to(array.device)
        nan_codes: tuple[int, ...] = ()
        if name.startswith("codes"):
            nan_codes = NAN_CODES.get(spec.format, ())
        different = bits_different(mine, _without_padding(array, mine), nan_codes)
        records.append({"array": name, "elements": mine.numel(), "different": different, "ok": different == 0})
    return records


def _without_padding(array: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """Return an array of Transformer Engine as bytes or FP32, cut to the shape of ours where it is larger."""
    if array.dtype.itemsize == 1:
        array = array.view(torch.uint8)
    if array.numel() == mine.numel():
        return array.reshape(mine.shape)
    if array.ndim == mine.ndim:
        return array[tuple(map(slice, mine.shape))]
    return array


def _scheme_records(scheme: str, number_format: str) -> list[Record]:
    """Compare all operands of a scheme, for all shapes, dtypes, inputs and devices."""
    quantizers = _quantizers(scheme, number_format)
    precision = GemmPrecision(scheme=scheme, format=number_format)
    dtypes = [torch.bfloat16]
    if scheme != "nvfp4":
        dtypes.append(torch.float32)
    scale = None
    if scheme == "delayed":
        scale = DELAYED_SCALE
    records = []
    for operand, shape, dtype in product(OPERANDS, SHAPES, dtypes):
        spec = dataclasses.replace(precision.spec(operand), stochastic=False)
        for name, x in inputs_of(shape, dtype).items():
            theirs = their_arrays(_quantised(quantizers[operand], x.cuda()))
            about = {
                "part": "codes",
                "scheme": f"{scheme} {number_format}",
                "operand": operand,
                "input": name,
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
            }
            for device in ("cpu", "cuda"):
                ours = our_arrays(quantise(x.to(device), spec, tensor_scale=scale))
                for record in compare(ours, theirs, spec):
                    records.append({**about, "device": device, **record})
    return records


def recipe_of(scheme: str, number_format: str, *, amax_history_len: int = 1024) -> Any:
    """Return Transformer Engine's recipe object for a scheme, without stochastic rounding."""
    from megatron.core.transformer import TransformerConfig

    from bridge.runtime.megatron.backend import get_te_recipe

    family = "fp8"
    if number_format == "e2m1":
        family = "fp4"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=128,
        num_attention_heads=1,
        **{family: number_format, f"{family}_recipe": scheme},
        fp8_amax_history_len=amax_history_len,
        fp8_amax_compute_algo="max",
    )
    recipe = get_te_recipe(config)
    if scheme == "nvfp4":
        return dataclasses.replace(recipe, disable_stochastic_rounding=True)
    return recipe


def _quantizers(scheme: str, number_format: str) -> dict[str, Any]:
    """Return the quantizers of a linear layer's operands, made as its module makes them."""
    from transformer_engine.pytorch.quantization import RecipeState

    recipe = recipe_of(scheme, number_format)
    made = {}
    for mode, count in (("forward", 3), ("backward", 2)):
        state = RecipeState.create(recipe, mode=mode, num_quantizers=count, device=torch.device("cuda"))
        if scheme == "delayed":
            state.scale.fill_(DELAYED_SCALE)
        made[mode] = state.make_quantizers()
    return {operand: made[mode][slot] for operand, (mode, slot) in OPERANDS.items()}


def _quantised(quantizer: Any, x: torch.Tensor) -> Any:
    quantizer.set_usage(rowwise=True, columnwise=True)
    with torch.no_grad():
        return quantizer(x)


def _update_records(number_format: str) -> list[Record]:
    """Compare the update of delayed scales over a sequence of amaxes, with zero, infinity and extremes among them."""
    import transformer_engine_torch
    from transformer_engine.pytorch.quantization import get_fp8_te_dtype

    amaxes = [0.0, 3.0, 5.5, 0.0, 1e-3, float("inf"), 7.25, 2.0, 1e-42, 3e38, 1.0, 0.0, 0.3]
    records = []
    for algo in ("max", "most_recent"):
        recipe = recipe_of("delayed", number_format)
        history, scale = (torch.zeros(4, 1, device="cuda"), torch.ones(1, device="cuda"))
        mine, my_scale = torch.zeros(4, 1), torch.ones(1)
        maximum = torch.tensor([FORMATS["e4m3"].max])
        different = elements = 0
        for amax in amaxes:
            history[0], mine[0] = amax, amax
            transformer_engine_torch.fused_amax_and_scale_update_after_reduction(
                history[0].clone(), [history], [scale], algo, get_fp8_te_dtype(recipe, fprop_tensor=True), 0
            )
            update_scaling_factors(mine, my_scale, maximum, algo=algo)
            for ours, theirs in ((my_scale, scale), (mine, history)):
                different += bits_different(ours, theirs.cpu())
                elements += ours.numel()
        about = {"scheme": f"delayed {number_format}", "operand": "scale update", "input": algo, "dtype": "float32"}
        result = {"array": "scale, history", "elements": elements, "different": different, "ok": different == 0}
        records.append({"part": "codes", **about, "device": "cpu", **result})
    return records

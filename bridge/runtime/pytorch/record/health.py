# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""Two checks of the tensors behind the formats: a right format can hold a wrong tensor.

- Error: the result of each low-precision module's first fprop GEMM is compared with the GEMM in
  FP32 on the operands before they were quantised, as far as their scales reach, and on the weight
  as it is now. A healthy FP8 linear layer has 0.03 to 0.05; a transposed weight, or one from
  elsewhere, has 1 and more.
- Freshness: the weight's operand is the quantisation of the weight as it is now. A cache that is
  not cleared after an optimizer step has too small an error to be seen otherwise.

Of the tokens the first `TOKENS` are compared.

Shapes: M tokens (all leading axes), K inputs, N outputs.
"""

from typing import Any

import torch

from bridge.precision.formats import FORMATS
from bridge.runtime.audit.record import HealthRow
from bridge.runtime.numerics.operand import GemmOperand, make_operand, stored_operand
from bridge.runtime.numerics.quantise import quantise
from bridge.runtime.pytorch.record.modules import Place
from bridge.runtime.pytorch.record.te import TeGemm, is_quantised

TOKENS = 256


def error_limit(format_: str, scheme: str) -> float:
    """Return the largest healthy error: some four times that of two operands rounded to the format.

    Under delayed scaling values may be far below the reach of the scale, which is from earlier
    steps.
    """
    if scheme == "delayed":
        return 0.5
    return float(2.0 ** -FORMATS[format_].mantissa_bits)


def scale_of(stored: Any) -> float | None:
    """Return the factor that a weight's codes were made with; None where tiles have their own."""
    emulated = getattr(stored, "stored", None)
    if emulated is not None:
        scale_inv = emulated.scale_inv
    else:
        scale_inv = getattr(stored, "_scale_inv", None)
    if not isinstance(scale_inv, torch.Tensor) or not scale_inv.is_floating_point():
        return None
    if scale_inv.numel() != 1:
        return None
    return 1 / float(scale_inv)


def relative_error(
    out: torch.Tensor, x_MK: torch.Tensor, w_NK: torch.Tensor, bias: Any = None
) -> float:
    """Return the Frobenius norm of the error of a result, divided by that of the result in FP32.

    0 for zeros, and where the result in FP32 has no finite norm: the run itself judges values that
    leave the range.
    """
    rows = min(TOKENS, x_MK.shape[0])
    with torch.autocast(out.device.type, enabled=False):
        wanted = x_MK[:rows].float() @ w_NK.float().T
    if bias is not None:
        wanted += bias.float()
    norm = wanted.norm()
    if not (norm > 0 and norm.isfinite()):
        return 0.0
    return float((out[:rows].float() - wanted).norm() / norm)


def in_range(values: torch.Tensor, format_: str, scale: float | None) -> torch.Tensor:
    """Return values as far as a format reaches with a tensor's scale.

    Delayed scaling has the scale from earlier steps. Values that saturate are no fault of the GEMM:
    a run whose values grow that fast ends by its loss or gradients.
    """
    if scale is None:
        return values
    largest = FORMATS[format_].max / scale
    return values.clamp(-largest, largest)


def live_weight(module: torch.nn.Module, name: str = "weight") -> torch.Tensor | None:
    """Return a module's weight as the next quantisation has to read it.

    Weights that are stored quantised are read from the optimizer's master. None: this rank does not
    hold the whole weight.
    """
    weight: torch.Tensor | None = getattr(module, name, None)
    if weight is None:
        return None
    if not is_quantised(weight):
        return weight.detach()
    master: torch.Tensor | None = getattr(weight, "main_param", None)
    if master is None or master.numel() != weight.numel():
        return None
    source_dtype = weight.dtype
    store = getattr(weight, "store", None)  # of an emulated weight
    if store is not None:
        source_dtype = store.source_dtype
    return master.detach().view(weight.shape).to(source_dtype).to(weight.dtype)


def of_emulated(
    module: torch.nn.Module,
    place: Place,
    x_MK: torch.Tensor,
    operands: tuple[GemmOperand, GemmOperand],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
) -> HealthRow | None:
    """Return the health of an emulated layer's fprop GEMM.

    None where the weight is not known here.
    """
    weight = live_weight(module)
    if weight is None:
        return None
    left, operand = operands
    is_fresh = _is_fresh(weight, operand)
    scale = operand.scale
    if operand.amax is None and operand.spec.whole_tensor:
        scale = 1 / operand.factor  # of stored codes, with the scale that they were made with
    x_MK = in_range(x_MK, left.spec.format, left.scale)
    weight = in_range(weight, operand.spec.format, scale)
    error = relative_error(out, x_MK, weight, bias)
    return _row(place, (operand.spec.format, operand.spec.scheme), error, is_fresh=is_fresh)


def _is_fresh(weight: torch.Tensor, operand: GemmOperand) -> bool:
    """Return whether an operand is the quantisation of the weight as it is now.

    Weights that are stored under delayed scaling keep the scale of the step before, and count as
    fresh.
    """
    spec = operand.spec
    if operand.amax is not None:
        fresh = make_operand(
            weight, spec, "weight", columnwise=operand.columnwise, scale=operand.scale
        )
    elif spec.scheme != "delayed":
        fresh = stored_operand(quantise(weight, spec, col=False), "weight")
    else:
        return True
    return torch.equal(fresh.values, operand.values) and fresh.factor == operand.factor


def of_te(
    module: Any, place: Place, arguments: Any, call: TeGemm, format_: tuple[str, str]
) -> HealthRow | None:
    """Return the health of one of Transformer Engine's fprop GEMMs.

    None where its parts are not known here.
    """
    name = "weight"
    if call.part is not None:
        name = f"weight{call.part}"
    weight = live_weight(module, name)
    if weight is None or not arguments:
        return None
    if not isinstance(call.out, torch.Tensor) or is_quantised(call.out):
        return None
    source = arguments[0]
    x_MK = _normed(module, source.detach()).reshape(-1, source.shape[-1])
    if call.part is not None:
        x_MK = torch.split(x_MK, list(call.splits))[call.part]
    out = call.out.detach().reshape(-1, call.out.shape[-1])
    if out.shape[0] > x_MK.shape[0]:  # gathered over the sequence: the rows of this rank
        out = out[torch.distributed.get_rank(module.tp_group) * x_MK.shape[0] :]
    quantizer = getattr(call.right, "_quantizer", None)
    is_stored = is_quantised(getattr(module, name))
    is_fresh = True
    if quantizer is not None and not (is_stored and type(quantizer).__name__ == "Float8Quantizer"):
        with torch.no_grad():
            is_fresh = torch.equal(quantizer(weight).dequantize(), call.right.dequantize())
    x_MK = in_range(x_MK, format_[0], _scale_of_te(call.left))
    weight = in_range(weight, format_[0], _scale_of_te(call.right))
    return _row(place, format_, relative_error(out, x_MK, weight, call.bias), is_fresh=is_fresh)


def _scale_of_te(operand: Any) -> float | None:
    """Return the factor that an operand went in with; None where tiles have their own."""
    scale_inv = getattr(operand, "_scale_inv", None)
    if scale_inv is None:
        return None
    return 1 / float(scale_inv)


def _normed(module: Any, x: torch.Tensor) -> torch.Tensor:
    gain = getattr(module, "layer_norm_weight", None)
    if gain is None:
        return x
    gain = gain.detach().float()
    if module.zero_centered_gamma:
        gain = gain + 1.0
    wide, shape = x.float(), (x.shape[-1],)
    if module.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(wide, shape, gain, module.eps)
    bias = module.layer_norm_bias.detach().float()
    return torch.nn.functional.layer_norm(wide, shape, gain, bias, module.eps)


def _row(place: Place, format_: tuple[str, str], error: float, *, is_fresh: bool) -> HealthRow:
    layer, module = place
    return HealthRow(
        layer=layer,
        module=module,
        error=round(error, 4),
        limit=error_limit(*format_),
        is_fresh=is_fresh,
    )

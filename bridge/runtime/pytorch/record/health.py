# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""Two checks of the tensors that a GEMM multiplied, because a right format can hide a wrong tensor.

- Error. The first fprop GEMM of each low-precision module is computed again in FP32, from the
  tensors before quantisation, and the two results are compared. A healthy FP8 linear layer has a
  relative error of 0.03 to 0.05. A transposed weight, or the weight of another layer, gives an
  error of 1 and more. Values beyond the reach of a scale are saturated first. Only the first
  `MAX_CHECKED_TOKENS` tokens are compared.
- Freshness. The weight's operand is compared with a new quantisation of the weight. The codes of an
  earlier step differ from it, and their error is too small for the first check.

Shapes: M tokens (all leading axes), K inputs, N outputs.
"""

from typing import Any

import torch

from bridge.precision.formats import FORMATS
from bridge.runtime.audit.record import HealthRow
from bridge.runtime.numerics.operand import GemmOperand, make_operand, make_stored_operand
from bridge.runtime.numerics.quantise import quantise
from bridge.runtime.pytorch.record.modules import ModuleLabel
from bridge.runtime.pytorch.record.operand_format import OperandFormat, is_quantised
from bridge.runtime.pytorch.record.te_gemms import TeGemm

MAX_CHECKED_TOKENS = 256
"""The largest number of rows of a result that are computed again."""
DELAYED_ERROR_LIMIT = 0.5
"""Largest healthy error under delayed scaling."""


def get_error_limit(operand: OperandFormat) -> float:
    """Return the largest healthy relative error of a GEMM whose operands have this format.

    It is about four times the error of rounding both operands. Under delayed scaling it is
    `DELAYED_ERROR_LIMIT`: the scale is from earlier steps, and values may be far below its reach.
    """
    if operand.scheme == "delayed":
        return DELAYED_ERROR_LIMIT
    return float(2.0 ** -FORMATS[operand.format].mantissa_bits)


def find_scale(stored: Any) -> float | None:
    """Return the scale of a stored weight's codes, or None for a weight with a scale per tile."""
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


def compute_relative_error(
    out: torch.Tensor, x_MK: torch.Tensor, w_NK: torch.Tensor, bias: Any = None
) -> float:
    """Return |out - (x w^T + bias)| / |x w^T + bias|, in Frobenius norms.

    The error of a reference of zeros is 0. It is also 0 if the reference has no finite norm,
    because other checks of a run find values that leave the range.

    Args:
        out: (M, N), the result of the low-precision GEMM.
        x_MK: Its left operand before quantisation.
        w_NK: The weight before quantisation.
        bias: (N,). None: no bias.
    """
    rows = min(MAX_CHECKED_TOKENS, x_MK.shape[0])
    with torch.autocast(out.device.type, enabled=False):
        reference_MN = x_MK[:rows].float() @ w_NK.float().T
    if bias is not None:
        reference_MN += bias.float()
    norm = reference_MN.norm()
    if not (norm > 0 and norm.isfinite()):
        return 0.0
    return float((out[:rows].float() - reference_MN).norm() / norm)


def clamp_to_range(values: torch.Tensor, format_: str, scale: float | None) -> torch.Tensor:
    """Return values clamped to the range of a format under a tensor's scale.

    Delayed scaling takes its scale from earlier steps, so that values may saturate without a fault
    of the GEMM. A scale of None clamps nothing.
    """
    if scale is None:
        return values
    largest = FORMATS[format_].max / scale
    return values.clamp(-largest, largest)


def get_live_weight(module: torch.nn.Module, name: str = "weight") -> torch.Tensor | None:
    """Return a module's weight as the next quantisation has to read it, (N, K), or None without it.

    A weight that is stored quantised is read from the optimizer's master. The result is None if the
    module has no such weight, or if this rank has only a part of the master.
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
    store = getattr(weight, "store", None)  # an emulated stored weight has it
    if store is not None:
        source_dtype = store.source_dtype
    return master.detach().view(weight.shape).to(source_dtype).to(weight.dtype)


def measure_emulated_health(
    module: torch.nn.Module,
    label: ModuleLabel,
    x_MK: torch.Tensor,
    operands: tuple[GemmOperand, GemmOperand],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
) -> HealthRow | None:
    """Return the health of an emulated layer's fprop GEMM, or None without a weight on this rank.

    Args:
        module: The layer.
        label: Label of its transformer layer, and its name in the plan.
        x_MK: Its input before quantisation.
        operands: The multiplied operands, input and weight.
        out: (M, N), the result before the bias is added.
        bias: (N,). None: no bias.
    """
    weight = get_live_weight(module)
    if weight is None:
        return None
    x_operand, w_operand = operands
    is_fresh = _is_weight_fresh(weight, w_operand)
    w_scale = w_operand.tensor_scale
    if w_operand.has_stored_codes and w_operand.spec.has_single_scale:
        w_scale = 1 / w_operand.factor
    x_MK = clamp_to_range(x_MK, x_operand.spec.format, x_operand.tensor_scale)
    weight = clamp_to_range(weight, w_operand.spec.format, w_scale)
    error = compute_relative_error(out, x_MK, weight, bias)
    weight_format = OperandFormat(format=w_operand.spec.format, scheme=w_operand.spec.scheme)
    return _make_health_row(label, weight_format, error, is_fresh=is_fresh)


def _is_weight_fresh(weight: torch.Tensor, operand: GemmOperand) -> bool:
    """Return whether an operand is the quantisation of the weight as it is now.

    A weight that is stored under delayed scaling counts as fresh. Its codes have the scale of the
    previous step, which is no longer known.
    """
    spec = operand.spec
    if not operand.has_stored_codes:
        fresh = make_operand(
            weight,
            spec,
            "weight",
            columnwise=operand.columnwise,
            tensor_scale=operand.tensor_scale,
        )
    elif spec.scheme != "delayed":
        fresh = make_stored_operand(quantise(weight, spec, columnwise=False), "weight")
    else:
        return True
    return torch.equal(fresh.values, operand.values) and fresh.factor == operand.factor


def measure_te_health(
    module: Any, label: ModuleLabel, arguments: Any, call: TeGemm, input_format: OperandFormat
) -> HealthRow | None:
    """Return the health of a fprop GEMM of Transformer Engine.

    The result is None if this rank does not have the input, the weight or the result.

    Args:
        module: The module of Transformer Engine that multiplied.
        label: Label of its transformer layer, and its name in the plan.
        arguments: Positional arguments of its forward pass.
        input_format: Format of the GEMM's left operand.
    """
    name = "weight"
    if call.part is not None:
        name = f"weight{call.part}"
    weight = get_live_weight(module, name)
    if weight is None or not arguments:
        return None
    if not isinstance(call.out, torch.Tensor) or is_quantised(call.out):
        return None
    x_MK = _make_gemm_input(module, arguments[0], call)
    out = call.out.detach().reshape(-1, call.out.shape[-1])
    is_gathered = out.shape[0] > x_MK.shape[0]  # over the sequence; x has this rank's rows
    if is_gathered:
        out = out[torch.distributed.get_rank(module.tp_group) * x_MK.shape[0] :]
    is_fresh = _is_te_weight_fresh(weight, call, is_stored=is_quantised(getattr(module, name)))
    x_MK = clamp_to_range(x_MK, input_format.format, _get_te_scale(call.left))
    weight = clamp_to_range(weight, input_format.format, _get_te_scale(call.right))
    error = compute_relative_error(out, x_MK, weight, call.bias)
    return _make_health_row(label, input_format, error, is_fresh=is_fresh)


def _make_gemm_input(module: Any, source: torch.Tensor, call: TeGemm) -> torch.Tensor:
    """Return the normed input of a GEMM, or of its part of a group, before quantisation, (M, K)."""
    x_MK = _apply_input_norm(module, source.detach()).reshape(-1, source.shape[-1])
    if call.part is None:
        return x_MK
    return torch.split(x_MK, list(call.splits))[call.part]


def _is_te_weight_fresh(weight: torch.Tensor, call: TeGemm, *, is_stored: bool) -> bool:
    """Return whether the weight's operand of a GEMM is the quantisation of the weight as it is now.

    The operand counts as fresh if it has no quantizer, and if the weight is stored under delayed
    scaling.
    """
    quantizer = getattr(call.right, "_quantizer", None)
    if quantizer is None:
        return True
    if is_stored and type(quantizer).__name__ == "Float8Quantizer":
        return True
    with torch.no_grad():
        return torch.equal(quantizer(weight).dequantize(), call.right.dequantize())


def _get_te_scale(operand: Any) -> float | None:
    """Return the scale of an operand's codes, or None for an operand with a scale per tile."""
    scale_inv = getattr(operand, "_scale_inv", None)
    if scale_inv is None:
        return None
    return 1 / float(scale_inv)


def _apply_input_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the input after the norm of a `LayerNormLinear`. Other modules keep their input."""
    gain = getattr(module, "layer_norm_weight", None)
    if gain is None:
        return x
    gain = gain.detach().float()
    if module.zero_centered_gamma:
        gain = gain + 1.0
    wide = x.float()
    shape = (x.shape[-1],)
    if module.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(wide, shape, gain, module.eps)
    bias = module.layer_norm_bias.detach().float()
    return torch.nn.functional.layer_norm(wide, shape, gain, bias, module.eps)


def _make_health_row(
    label: ModuleLabel, operand: OperandFormat, error: float, *, is_fresh: bool
) -> HealthRow:
    """Return the health of a module from the error of its GEMM."""
    layer, module = label
    return HealthRow(
        layer=layer,
        module=module,
        error=round(error, 4),
        limit=get_error_limit(operand),
        is_fresh=is_fresh,
    )

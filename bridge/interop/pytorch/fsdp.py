"""PyTorch FSDP's mixed-precision policies, both generations.

FP32 shards are cast when they are gathered, so what computes is what Megatron's O2 computes: half-precision weights
that come from FP32 ones at every step. `None` is two different things: as `param_dtype` it means no cast, as
`reduce_dtype` "as param_dtype", which is BF16 reduction that nothing states.
"""

from collections.abc import Mapping
from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder, semantics_of
from bridge.interop.contract import ExportReport, ImportReport, Recognised, System, as_json
from bridge.interop.pytorch.torchao import plain
from bridge.interop.reading.settings import Settings
from bridge.pytorch.loop import compute_dtype, policy_dtypes
from bridge.registry.config import MixedPrecisionConfig

TITLE = "FSDP"
VERSION = "PyTorch 2.13.0"
DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
DTYPE = "must be float32, bfloat16, float16 or None"
USUAL = {"cast_forward_inputs": True, "cast_root_forward_inputs": True, "keep_low_precision_grads": False}
"""Switches without a field -> the default; the first has another one in either generation."""


def import_(payload: object) -> ImportReport:
    """Return what a policy, an object of either class or its fields as a mapping, asks for; None: no policy."""
    top = Settings({} if payload is None else plain(payload), TITLE)
    builder = ImportBuilder(TITLE)
    compute, reduce_ = (top.dtype(name, DTYPE) for name in DTYPES[:2])
    mode = compute or "fp32"
    fields: dict[str, Any] = {mode: True} if mode == "fp32" else {mode: True, "params_dtype": mode}
    builder.fields |= fields
    if top.given("param_dtype"):
        builder.map("param_dtype", **fields)
    else:
        detail = f"None: weights are used in the dtype they have; FP32 was assumed ({VERSION})"
        builder.report("param_dtype", None, "implied default", detail, "Write it down to be sure.")
    if mode != "fp32":
        builder.fields["grad_reduce_in_fp32"] = reduce_ == "fp32"
    if reduce_ is None and mode != "fp32":
        detail = f"None: gradients are reduced in param_dtype, {mode} ({VERSION})"
        builder.report("reduce_dtype", None, "implied default", detail, "Write torch.float32 to reduce in FP32.")
    elif reduce_ is not None and reduce_ not in ("fp32", mode):
        detail = f"gradients of {mode} weights are reduced in {reduce_}"
        builder.report("reduce_dtype", reduce_, "unsupported", detail, "Reduce in FP32 or in the weights' dtype.")
    elif reduce_ is not None:
        builder.map("reduce_dtype", **({} if mode == "fp32" else {"grad_reduce_in_fp32": reduce_ == "fp32"}))
    _rest(builder, top, mode)
    return builder.finish("fp32" if mode == "fp32" else "fsdp_policy")


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the fields of a policy by our names for dtypes; `fsdp_policy_for` makes the object of them."""
    builder = ExportBuilder(config, TITLE)
    mode = config.mode
    compute = builder.exported_mode = compute_dtype(config)
    if semantics_of(config) == "amp_o1":
        detail = "weights are cast as they are gathered, once for all operators, norms and softmax among them"
        remedy = "Use autocast_for with an FP32 policy to keep casting per operator."
        fields = ("autocast_enabled", "autocast_dtype", "params_dtype", mode)
        builder.report_if_stated(fields, "approximated", detail, remedy)
    else:
        builder.map(mode, "param_dtype")
        same = builder.values["params_dtype"] in (None, mode)
        builder.map("params_dtype", *(("param_dtype",) if same else ()))  # else FP32 shards, which FSDP keeps
    if compute != "fp32":
        builder.map("grad_reduce_in_fp32", "reduce_dtype")
    for field in ("fp8", "fp8_recipe", "fp4", "fp4_recipe"):
        if getattr(config, field[:3]) is not None:
            detail = "FSDP shards and reduces; what the GEMMs run in is decided by the layers"
            builder.report_if_stated(field, "unsupported", detail, "Convert the layers, with torchao for one.")
    return builder.finish(policy_dtypes(config))


def _rest(builder: ImportBuilder, top: Settings, mode: str) -> None:
    for name, value in top.values.items():
        if name in DTYPES[:2] or name.startswith("_"):
            continue
        if name not in (*DTYPES, *USUAL):
            rule = "is no field of either policy"
            raise top.wrong(name, rule, value, "Use param_dtype, reduce_dtype, buffer_dtype or output_dtype")
        shown = top.dtype(name, DTYPE) if name in DTYPES else top.switch(name)
        if (name in DTYPES and shown == mode) or value is USUAL.get(name) or name == "cast_forward_inputs":
            builder.map(name)
        else:
            builder.report(name, shown, "unsupported", "no such choice in a recipe", "Check it by hand.")


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    if "param_dtype" in content and "reduce_dtype" in content and not isinstance(content["param_dtype"], Mapping):
        return Recognised(certainty=0.8, evidence="has `param_dtype` and `reduce_dtype`, fields of FSDP's policies")
    return None


SYSTEM = System("fsdp", "PyTorch FSDP", VERSION, import_, export, _recognise, as_json)

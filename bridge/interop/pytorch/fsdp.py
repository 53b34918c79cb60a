"""PyTorch FSDP's mixed-precision policies, both generations.

FP32 shards are cast when they are gathered, so what computes is what Megatron's O2 computes: half-precision weights
that come from FP32 ones at every step. `None` is two different things: as `param_dtype` it means no cast, as
`reduce_dtype` "as param_dtype", which is BF16 reduction that nothing states.
"""

from bridge.interop.builders import ExportBuilder, semantics_of
from bridge.interop.contract import ExportReport, System, as_json
from bridge.pytorch.loop import compute_dtype, policy_dtypes
from bridge.registry.config import MixedPrecisionConfig

TITLE = "FSDP"


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the fields of a policy by our names for dtypes; `fsdp_policy_for` makes the object of them."""
    builder = ExportBuilder(config, TITLE)
    mode = config.mode
    compute = builder.exported_mode = compute_dtype(config)
    if semantics_of(config) == "amp_o1":
        fields = ("autocast_enabled", "autocast_dtype", "params_dtype", mode)
        builder.record_if_stated("pytorch.weights-are-cast-as-they", fields)
    else:
        builder.map(mode, "param_dtype")
        builder.map("params_dtype")  # FP32 shards, which FSDP keeps
        builder.map_dtype("params_dtype", "param_dtype")
    if compute != "fp32":
        builder.map("grad_reduce_in_fp32", "reduce_dtype")
    for field in ("fp8", "fp8_recipe", "fp4", "fp4_recipe"):
        if getattr(config, field[:3]) is not None:
            builder.record_if_stated("pytorch.fsdp-shards-and-reduces", field)
    return builder.finish(policy_dtypes(config))


SYSTEM = System("fsdp", "PyTorch FSDP", "PyTorch 2.13.0", export=export, write=as_json)

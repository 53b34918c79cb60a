"""PyTorch FSDP's mixed-precision policies, both generations.

FP32 shards are cast when they are gathered, so what computes is what Megatron's O2 computes: half-precision weights
that come from FP32 ones at every step. `None` is two different things: as `param_dtype` it means no cast, as
`reduce_dtype` "as param_dtype", which is BF16 reduction that nothing states.
"""

from bridge.interop.builders import ExportBuilder
from bridge.interop.contract import ExportReport, System, as_json
from bridge.interop.pytorch.amp import export_as_cast
from bridge.interop.table import table
from bridge.pytorch.loop import policy_dtypes
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("fsdp")


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the fields of a policy by our names for dtypes; `fsdp_policy_for` makes the object of them."""
    builder = ExportBuilder(config, TABLE.title)
    compute = export_as_cast(builder, "fsdp.weights-are-cast-as-they", "param_dtype")
    builder.map("params_dtype")  # FP32 shards, which FSDP keeps
    if compute != "fp32":
        builder.map("grad_reduce_in_fp32", "reduce_dtype")
    return builder.finish(policy_dtypes(config), TABLE.unwritten)


SYSTEM = System("fsdp", "PyTorch FSDP", TABLE.version, export, write=as_json)

"""torchao's tensorwise FP8 as several trainers have it: the gather of weights under FSDP, and the layers left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.interop.builders import ExportBuilder, ImportBuilder


ROWWISE = "torchao scales each row by itself, with powers of two; Megatron has no such scheme, so no FP8 was written"
ROWWISE_REMEDY = "Choose tensorwise or blockwise scaling by hand."
MODULES = "State first_last_layers_bf16 if you want whole layers."


def import_gather(builder: ImportBuilder, setting: str, gather: bool) -> None:
    """Map the gather of weights in FP8, and report what Megatron does more."""
    builder.map(setting, fp8_param_gather=gather)
    if gather:
        report_gather(builder, setting)


def report_gather(builder: ImportBuilder, setting: str) -> None:
    """Report what Megatron does more than gather weights in FP8."""
    detail = "weights are gathered as FP8 and stored in high precision; Megatron stores them in FP8 too"
    builder.report(setting, True, "approximated", detail, "Turn fp8_param_gather off if that is not meant.")


def export_gather(builder: ExportBuilder) -> None:
    """Report FP8 weights, which torchao has between ranks only."""
    if builder.config.fp8_param_gather:
        detail = "weights are gathered as FP8 under FSDP2 and stored in high precision"
        remedy = "Nothing to do; it acts under FSDP2 only."
        builder.report_if_stated(("fp8_param_gather", "fp8_param"), "approximated", detail, remedy)


def export_layers(builder: ExportBuilder, remedy: str) -> None:
    """Report whole layers in BF16, for which torchao's own choice of modules stands."""
    if builder.config.first_last_layers_bf16:
        detail = "torchao leaves the first and the last nn.Linear out, not whole layers"
        builder.report("first_last_layers_bf16", "approximated", detail, remedy)

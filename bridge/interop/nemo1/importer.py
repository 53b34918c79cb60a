"""NeMo 1.x: `megatron_gpt_config.yaml` and its kin, and the files of models that are not Megatron's.

`trainer.precision` chooses the dtype, `model.megatron_amp_O2` between O2 (half-precision weights, FP32 masters) and O1
(FP32 weights under autocast), and everything called `fp8_*` is ignored unless `model.transformer_engine` is true, or
`model.mcore_gpt` in releases that build Transformer Engine's layers for it anyway. The recipe is delayed scaling
unless a key `fp8_recipe` says otherwise. A model that is not Megatron's is trained by Lightning (`nemo1_trainer`).

Defaults moved: the shipped file had `fp8_hybrid: False`, history 1 and `most_recent` up to 1.21, and has `True`, 1024
and `max` since 1.22; precision 16 and O1 became bf16 and O2 by 2.0. A key that is absent from the composed
configuration has the *code's* default, which is neither for the amax settings under Megatron Core. `nemo_version` says
that the file is a set of overrides over the shipped one of that release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.interop.amp import amp_fields
from bridge.interop.builders import ImportBuilder
from bridge.interop.contract import ContextKey, ImportReport, Recognised, System, Unmapped, as_yaml
from bridge.interop.nemo1.exporter import SCALER, TITLE, export
from bridge.interop.nemo1.file import File, switch
from bridge.interop.nemo1.fp8 import SETTINGS, low_precision
from bridge.interop.nemo1.trainer import trained_by_lightning
from bridge.interop.nemo1.unsupported import report_optimizer, report_quantisation, report_unsupported

if TYPE_CHECKING:
    from bridge.interop.document import Document

__all__ = ["SYSTEM", "export", "import_"]

PRECISIONS = {
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("32", "32-true"), "fp32"),
}
"""Source: NeMo 2.0 nemo/utils/utils.py, `utils_funcs.torch_dtype_from_precision`; anything else raises there."""

NAMES = ("trainer.precision", "model.precision", "precision")
"""Settings that state the precision, the one that decides first."""
READ = ("transformer_engine", "megatron_amp_O2", "precision", "fsdp_grad_reduce_dtype")


def import_(payload: object, *, nemo_version: str | None = None, base: str | None = None) -> ImportReport:
    """Return what a NeMo 1.x configuration asks for.

    Args:
        payload: The composed configuration, or its `model` section.
        nemo_version: The release whose shipped file this one overrides; None: the file is complete.
        base: Of overrides: the file that they go over and that is not read, as a noun.
    """
    if not isinstance(payload, Mapping):
        raise PayloadError(f"nemo1: must be a mapping, got {payload!r:.60}. Give the parsed contents of the file.")
    file = File(payload, nemo_version)
    builder = ImportBuilder(f"{TITLE} ({nemo_version})" if nemo_version else TITLE)
    if not file.is_megatron or _is_lightnings(file):
        imported = trained_by_lightning(file, builder)
        return replace(imported, unmapped=(*imported.unmapped, *_assumed(file)))
    base = None if file.shipped else base
    dtype = _precision(file, builder, base)
    o2 = _weights(file, dtype, builder, base)
    on = low_precision(file, builder)
    _loss_scale(file, dtype, builder)
    _reduction(file, dtype, builder, o2=o2)
    report_unsupported(file, builder, dtype, {*SETTINGS, *SCALER, *READ}, on=on)
    report_optimizer(file, builder)
    is_quantised = report_quantisation(file, builder)
    half = "megatron_o2" if o2 else "fsdp_policy" if file.switch("fsdp") else "amp_o1"
    semantics = "fp32" if dtype == "fp32" else half
    imported = builder.finish(semantics=semantics)
    losses = (*imported.unmapped, *_assumed(file))
    return replace(imported, unmapped=losses, recipe=None if is_quantised else imported.recipe)


def _is_lightnings(file: File) -> bool:
    """Return whether Megatron's models refuse the precision, and no key but `data` is one of theirs."""
    said = file.get("trainer.precision")
    return said in ("bf16-true", "16-true") and not file.has_megatrons_keys(other_than=("data",))


def _assumed(file: File) -> list[Unmapped]:
    """Return the records of environment variables whose defaults were taken."""
    taken, remedy = "the default written with it was taken", "Write the value itself if the variable is set."
    return [
        Unmapped(where, default, "implied default", f"the environment variable {variable} decides; {taken}", remedy)
        for where, (variable, default) in file.references.assumed.items()
    ]


def _precision(file: File, builder: ImportBuilder, base: str | None) -> str:
    """Return fp16, bf16 or fp32."""
    for where in NAMES:
        value = file.get(where)
        if value is not None:
            break
    else:
        where = "trainer.precision"
        value = file.shipped["precision"] if file.shipped else "32"
        if base is not None or (not file.shipped and "trainer" not in file.payload):
            builder.leave_mode(base or "the section trainer of another file")
            return "fp32"
        detail = f"{builder.system} takes {value} where the trainer says nothing"
        dtype = PRECISIONS[value]
        builder.implied(where, value, detail)
        return dtype
    said = str(value).removesuffix(".0")
    if said not in PRECISIONS:
        remedy = "Use 16, 'bf16', 32 or their -mixed forms."
        raise PayloadError(f"{where}: NeMo takes {', '.join(PRECISIONS)}, got {value!r:.60}. {remedy}")
    builder.map(where)
    for other in NAMES[NAMES.index(where) + 1 :]:
        second = file.references.raw(other)
        if second is None or "${" in str(second):  # a reference leads to the one that decides
            continue
        if PRECISIONS.get(str(second).removesuffix(".0")) == PRECISIONS[said]:
            builder.map(other)
        else:
            builder.report(other, second, "dead knob", f"{where} ({value}) decides", "Drop it.")
    return PRECISIONS[said]


def _weights(file: File, dtype: str, builder: ImportBuilder, base: str | None) -> bool:
    """State the mode; return whether it is O2."""
    o2 = file.setting("megatron_amp_O2")
    if base is not None and o2 is None and dtype != "fp32":
        builder.leave_mode(f"megatron_amp_O2 in {base}, which is not read,", default=dtype)
        return False
    if o2 is None and dtype != "fp32":
        o2 = bool(file.shipped and file.shipped["megatron_amp_O2"])
        builder.implied("model.megatron_amp_O2", o2)
    elif o2 is not None:
        o2 = switch(o2, "model.megatron_amp_O2")
        builder.map("model.megatron_amp_O2")
    where = next((name for name in NAMES if name in builder.mapped), "")
    fields: dict[str, Any]
    if dtype == "fp32":
        if o2:
            builder.report("model.megatron_amp_O2", True, "dead knob", "acts in 16 and bf16 only", "Drop it.")
        fields = {} if builder.decided_by else {"fp32": True}
        o2 = False
    elif file.switch("fsdp") and o2:
        detail = "NeMo switches O2 off under torch FSDP"
        builder.report("model.megatron_amp_O2", True, "dead knob", detail, "Drop it.")
        o2 = False
    if dtype != "fp32":
        fields = {dtype: True, "params_dtype": dtype, "pipeline_dtype": dtype} if o2 else amp_fields(dtype)
        if file.switch("fsdp"):  # NLPFSDPStrategy casts FP32 shards; nothing is left to autocast
            fields = {dtype: True, "params_dtype": dtype}
    if where:
        builder.map(where, **fields)
    builder.fields |= fields
    if dtype == "fp16" and o2 and "dist" not in str(file.get("model.optim.name") or file.get("optim.name") or "dist"):
        detail = "NeMo raises on FP16 with O2 without a distributed optimizer"
        builder.report("model.megatron_amp_O2", True, "semantics", detail, "Use optim.name=distributed_fused_adam.")
    return bool(o2)


def _loss_scale(file: File, dtype: str, builder: ImportBuilder) -> None:
    for key, (field, default) in SCALER.items():
        if key in file and dtype == "fp16":
            builder.map(f"model.{key}", **{field: file.setting(key)})
        elif key in file:
            builder.map(f"model.{key}")
        elif dtype == "fp16":
            builder.implied(f"model.{key}", default, **{field: default})
    if dtype == "fp16" and str(file.setting("optim") or "").find("mcore_distributed_optim") >= 0:
        for key in SCALER:
            if key in file:
                detail = "with mcore_distributed_optim it never reaches Megatron Core's scaler"
                builder.report(f"model.{key}", file.setting(key), "dead knob", detail, "Use distributed_fused_adam.")


def _reduction(file: File, dtype: str, builder: ImportBuilder, *, o2: bool) -> None:
    optim = file.setting("optim")
    optim = optim if isinstance(optim, Mapping) else {}
    said = file.follow(optim.get("grad_sync_dtype"), "model.optim.grad_sync_dtype")
    sharded = file.setting("fsdp_grad_reduce_dtype")
    for where, value in (("model.optim.grad_sync_dtype", said), ("model.fsdp_grad_reduce_dtype", sharded)):
        if value is None:
            continue
        if where.endswith("sync_dtype") and file.switch("fsdp"):
            detail = "torch FSDP reduces the gradients, as fsdp_grad_reduce_dtype says"
            builder.report(where, value, "unsupported", detail, "State model.fsdp_grad_reduce_dtype.")
        elif where.endswith("reduce_dtype") and not file.switch("fsdp"):
            if str(value) in ("32", "fp32"):
                builder.map(where)
            else:
                builder.report(where, value, "dead knob", "read under torch FSDP only", "Drop it.")
        else:
            builder.map(where, grad_reduce_in_fp32=str(value).lower() in ("32", "fp32", "float32", "32-true"))
    if dtype != "fp32" and file.switch("fsdp") and "grad_reduce_in_fp32" not in builder.fields:
        detail = f"NeMo's FSDP strategy reduces gradients in {dtype} where nothing states it"
        builder.implied("model.fsdp_grad_reduce_dtype", dtype, detail, grad_reduce_in_fp32=False)
    if dtype != "fp32" and o2 and "grad_reduce_in_fp32" not in builder.fields:
        in_fp32 = dtype == "bf16"
        detail = f"O2 keeps {'FP32' if in_fp32 else 'FP16'} main gradients for {dtype} where nothing states it"
        builder.implied(
            "model.optim.grad_sync_dtype", "fp32" if in_fp32 else "fp16", detail, grad_reduce_in_fp32=in_fp32
        )


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for NeMo 1.x's, or None."""
    top = document.mapping
    model = top.get("model") if isinstance(top.get("model"), Mapping) else top
    marks = (
        "megatron_amp_O2",
        "native_amp_init_scale",
        "native_amp_growth_interval",
        "reduce_amax",
        "mcore_gpt",
        "fp8_e4m3",
    )
    found = [key for key in marks if isinstance(model, Mapping) and key in model]
    if found:
        certainty = 0.95 if len(found) > 1 else 0.8
        return Recognised(certainty, f"has {', '.join(f'`{key}`' for key in found[:3])}, NeMo 1.x's own keys")
    if document.has("trainer.precision", "exp_manager"):
        return Recognised(0.6, "has `trainer.precision` and `exp_manager`")
    return None


SYSTEM = System(
    name="nemo1",
    title="NeMo 1.x",
    version="1.23 to 2.0",
    import_=import_,
    export=export,
    recognise=recognise,
    write=as_yaml,
    context=(
        ContextKey(
            name="nemo_version", meaning="release whose shipped file this one overrides (unsaid: the file is whole)"
        ),
    ),
)

"""Lightning: precision strings and the `trainer:` section of LightningCLI. Its precision plugins are written, not read.

Its "bf16-mixed" is autocast over FP32 weights; the same word is Megatron's O2 in NeMo and in Megatron Bridge, so the
string alone says nothing: it has to be known whose it is.

In Lightning 1 `amp_backend: apex` has NVIDIA's Apex cast instead of torch, at the level `amp_level`: FP32 (O0), FP32
weights and a cast per function (O1), FP16 weights and FP32 masters (O2), FP16 throughout (O3). Lightning 1.2 ignores a
level without the back end, 1.9 refuses it, and 2.0 has neither argument.
Its settings and sentences, with their sources, are `rows/lightning.yaml`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.interop.pytorch.amp import (
    TORCH_SCALER,
    amp_fields,
    assume_torch_scaler,
    export_as_amp,
    export_scaler,
    report_no_scaler,
    report_scaler,
)
from bridge.interop.reading.settings import Settings
from bridge.interop.table import table
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("lightning")
PRECISIONS = TABLE.data["precisions"]
APEX = TABLE.data["apex"]
AMP_PLUGIN = "lightning.pytorch.plugins.MixedPrecision"
TE_PLUGIN = "lightning.pytorch.plugins.TransformerEnginePrecision"
TRAINER = re.compile(r"(pytorch_lightning|lightning|lightning_fabric)(\.\w+)*\.(Trainer|Fabric)")


def import_(payload: object, *, strategy: str | None = None, accelerator: str | None = None) -> ImportReport:
    """Return what Lightning trains in: a precision string or number, or Trainer arguments, under ``trainer`` or not.

    On a CPU Lightning turns 16-mixed into bf16-mixed.
    """
    if payload is None:
        payload = {}
    elif isinstance(payload, str | int) and not isinstance(payload, bool):
        payload = {"precision": payload}
    whole = Settings(payload, TABLE.title)
    top = whole.section("trainer") if isinstance(whole.values.get("trainer"), Mapping) else whole
    builder = ImportBuilder(TABLE.title)
    TABLE.read(builder, top, "trainer")
    if top is not whole:
        others = {key: value for key, value in whole.values.items() if not isinstance(value, list)}
        TABLE.read(builder, Settings(others, TABLE.title), "others")
    given = top.section("strategy") if isinstance(top.values.get("strategy"), Mapping) else Settings({}, TABLE.title)
    given = given.section("init_args") if "class_path" in given else given
    TABLE.read(builder, given, "strategy")
    plugins = top.values.get("plugins")
    listed = plugins if isinstance(plugins, list) else [plugins]
    made = [one for one in listed if isinstance(one, Mapping) and str(one.get("class_path")).endswith("Precision")]
    if made:
        raise TABLE.wrong("plugins-are-not-read", top, "plugins")
    read = _trained(builder, top, strategy, top.values.get("accelerator", accelerator))
    policy_decides = given.given("mixed_precision") or given.given("precision_plugin")
    return replace(read, recipe=None) if policy_decides else read


def export(config: MixedPrecisionConfig, *, strategy: str | None = None) -> ExportReport:
    """Return Trainer arguments; under the strategies fsdp and deepspeed mixed means half-precision weights."""
    plan = Settings({"strategy": strategy}, TABLE.title).word("strategy", ("ddp", "fsdp", "deepspeed"))
    builder = ExportBuilder(config, TABLE.title)
    if config.fp8 is not None and config.fp8_recipe == "delayed" and config.mode != "fp32":
        return _export_te(builder)
    words = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    if plan in ("fsdp", "deepspeed") and config.mode != "fp32" and not config.autocast_enabled:
        builder.map(config.mode, "precision")
        builder.map("params_dtype", "precision")
        if config.grad_reduce_in_fp32:
            builder.record_if_stated("lightning.the-strategy-reduces-in-the-compute", "grad_reduce_in_fp32", plan=plan)
        else:
            builder.map("grad_reduce_in_fp32", "precision")
        compute = config.mode
    else:
        compute = export_as_amp(builder, "precision")
    payload: dict[str, Any] = {"precision": words[compute]}
    usual = all(builder.values[field] == value for field, value in TORCH_SCALER.items() if field != "hysteresis")
    if compute == "fp16" and plan in (None, "ddp") and config.loss_scale is None and not usual:
        arguments = {"device": "cuda", **export_scaler(builder, TABLE.title, "plugins.scaler")}
        scaler = {"class_path": "torch.amp.GradScaler", "init_args": arguments}
        plugin = {"precision": "16-mixed", "device": "cuda", "scaler": scaler}
        payload = {"plugins": [{"class_path": AMP_PLUGIN, "init_args": plugin}]}
    elif compute == "fp16":
        report_scaler(builder, TABLE.title)
    if config.fp8 is not None:
        builder.record_if_stated("lightning.other-schemes-than", ("fp8", "fp8_recipe"))
    return builder.finish(payload)


def _trained(builder: ImportBuilder, top: Settings, strategy: str | None, device: object) -> ImportReport:
    """Return what the Trainer makes of its precision."""
    name, word = top.name("precision"), top.values.get("precision")
    if word is None:
        word = "32-true"
        builder.record("lightning.full-precision-by-default", name, word)
    if isinstance(word, bool) or not isinstance(word, str | int) or str(word)[:40] not in PRECISIONS:
        raise TABLE.wrong("precisions", top, "precision")
    compute, kind = PRECISIONS[str(word)]
    is_fp16 = str(word) in ("16", "16-mixed")
    if top.values.get("amp_backend") == "apex" and is_fp16:
        return _cast_by_apex(builder, top)
    TABLE.read(builder, top, "apex")
    if is_fp16 and device == "cpu":
        builder.record("lightning.lightning-makes-it-bf16", name, word)
        compute = "bf16"
    if kind == "te":
        return _delayed(builder, compute, name, word)
    if compute == "fp64":
        builder.fields["fp32"] = True
        builder.record("lightning.fp64-throughout-fp32", name, word)
        return builder.finish("fp32", is_whole=False)
    if kind == "true":
        builder.map(name, **{compute: True, "params_dtype": compute, "grad_reduce_in_fp32": False})
        builder.record("lightning.without-masters", name, word, compute=compute)
        return builder.finish("true")
    shards = top.values.get("strategy", strategy)
    if isinstance(shards, Mapping):
        shards = shards.get("class_path") or shards.get("_target_")
    plan = "fsdp" if "fsdp" in str(shards).lower() else "deepspeed"
    if plan in str(shards).lower() and compute != "fp32":
        return _sharded(builder, name, plan, compute)
    fields = amp_fields(compute)
    builder.map(name, **fields) if top.given("precision") else builder.fields.update(fields)
    if compute == "fp16":
        assume_torch_scaler(builder, TABLE.title)
    return builder.finish("fp32" if compute == "fp32" else "amp_o1")


def _cast_by_apex(builder: ImportBuilder, top: Settings) -> ImportReport:
    name, level = top.name("amp_level"), top.word("amp_level", tuple(APEX)) or "O2"
    semantics, fields = APEX[level]
    builder.map(top.name("precision"), **fields)
    if top.given("amp_level"):
        builder.map(name, **fields)
    else:
        builder.record("lightning.o2-by-default", name, level)
    builder.record("lightning.apex-casts-instead", top.name("amp_backend"), "apex", level=level)
    if level in ("O1", "O2"):
        builder.fields |= TORCH_SCALER
        builder.record("lightning.apex-scales-the-loss", f"{name}.loss_scale", "dynamic")
    elif level == "O3":
        builder.record("lightning.apex-without-masters", name, level)
    return builder.finish(semantics)


def _sharded(builder: ImportBuilder, name: str, plan: str, compute: str) -> ImportReport:
    """Return the import of mixed precision under a strategy that shards: half-precision weights over FP32 ones."""
    builder.map(name, **{compute: True, "params_dtype": compute})
    builder.fields["grad_reduce_in_fp32"] = False
    reduced = f"{name}.reduce_dtype"
    builder.record("lightning.the-strategy-reduces-gradients", reduced, compute, plan=plan, compute=compute)
    if compute == "fp16" and plan == "deepspeed":
        builder.fields["initial_loss_scale"] = 65536.0
        builder.record("lightning.scale-of-deepspeed", "deepspeed.fp16.initial_scale_power", 16)
    elif compute == "fp16":
        assume_torch_scaler(builder, TABLE.title)
    return builder.finish("megatron_o2" if plan == "deepspeed" else "fsdp_policy")


def _delayed(builder: ImportBuilder, compute: str, name: str, value: object) -> ImportReport:
    """Return the import of delayed scaling with the defaults of Transformer Engine's recipe."""
    fields = {compute: True, "params_dtype": compute, "fp8": "hybrid", "fp8_recipe": "delayed"}
    builder.fields["grad_reduce_in_fp32"] = False
    builder.map(name, **fields)
    TABLE.read(builder, Settings({}, TABLE.title, "recipe"), "recipe")
    builder.record("lightning.te-without-masters", name, value, compute=compute)
    return builder.finish("true")


def _export_te(builder: ExportBuilder) -> ExportReport:
    """Return the export as a Transformer Engine plugin with a mapping for its recipe."""
    config, mode = builder.config, builder.config.mode
    recipe = TABLE.write(builder, "recipe", "recipe")
    arguments = {"weights_dtype": {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[mode], "recipe": recipe}
    builder.map(mode, "weights_dtype")
    builder.map_dtype("params_dtype", "weights_dtype")
    builder.map("fp8_recipe", "recipe")
    if config.grad_reduce_in_fp32:
        builder.record_if_stated("lightning.gradients-of-weights-are", "grad_reduce_in_fp32", mode=mode)
    else:
        builder.map("grad_reduce_in_fp32", "weights_dtype")
    builder.record("lightning.the-optimizer-steps-on-the-weights", "params_dtype")
    report_no_scaler(builder, "the plugin has no scaler", "Prefer BF16 weights.")
    if not config.fp8_wgrad:
        builder.record("lightning.transformer-engine-and-later", "fp8_wgrad")
    return builder.finish({"plugins": [{"class_path": TE_PLUGIN, "init_args": arguments}]})


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    trainer = content.get("trainer")
    target = str((trainer if isinstance(trainer, dict) else content).get("_target_"))
    if TRAINER.fullmatch(target):
        return Recognised(certainty=0.9, evidence=f"makes `{target}`")
    return TABLE.recognise(document)


CONTEXT = (
    ContextKey(
        "strategy", "the Trainer's strategy where the file does not say: fsdp, deepspeed, ddp", use=("import", "export")
    ),
    ContextKey("accelerator", "cpu turns 16-mixed into bf16-mixed"),
)
SYSTEM = System(
    "lightning",
    TABLE.title,
    TABLE.version,
    import_,
    export,
    _recognise,
    lambda payload: as_yaml({"trainer": payload}),
    context=CONTEXT,
)

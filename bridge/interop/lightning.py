"""Lightning: precision strings, the `trainer:` section of LightningCLI, and the two plugins that an export writes.

Its "bf16-mixed" is autocast over FP32 weights; the same word is Megatron's O2 in NeMo and in Megatron Bridge, so the
string alone says nothing: it has to be known whose it is.

In Lightning 1 `amp_backend: apex` has NVIDIA's Apex cast instead of torch, at the level `amp_level`: FP32 (O0), FP32
weights and a cast per function (O1), FP16 weights and FP32 masters (O2), FP16 throughout (O3). Lightning 1.2 ignores a
level without the back end, 1.9 refuses it, and 2.0 has neither argument.
Source: Lightning 2.6.6 fabric/plugins/precision; Lightning 1.2, 1.9 and 2.0 trainer/connectors; Apex amp/frontend.py;
Transformer Engine 2.20 common/recipe.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, as_yaml
from bridge.interop.megatron_lm.flags import bears_on_precision
from bridge.interop.pytorch.amp import (
    TORCH_SCALER,
    amp_fields,
    assume_torch_scaler,
    export_as_amp,
    export_scaler,
    import_scaler,
    report_no_scaler,
    report_scaler,
)
from bridge.interop.reading.settings import Settings
from bridge.interop.table import table
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("lightning")
TITLE = "Lightning"
VERSION = "Lightning 2.6.6"
PRECISIONS = {
    "32": ("fp32", "amp_o1"),
    "32-true": ("fp32", "amp_o1"),
    "16": ("fp16", "amp_o1"),
    "16-mixed": ("fp16", "amp_o1"),
    "bf16": ("bf16", "amp_o1"),
    "bf16-mixed": ("bf16", "amp_o1"),
    "16-true": ("fp16", "true"),
    "bf16-true": ("bf16", "true"),
    "64": ("fp64", "true"),
    "64-true": ("fp64", "true"),
    "transformer-engine": ("bf16", "te"),
    "transformer-engine-float16": ("fp16", "te"),
}
"""Values of `Trainer(precision=)`, case and all -> dtype and kind."""
AMP_PLUGIN = "lightning.pytorch.plugins.MixedPrecision"
TE_PLUGIN = "lightning.pytorch.plugins.TransformerEnginePrecision"
TRAINER = re.compile(r"(pytorch_lightning|lightning|lightning_fabric)(\.\w+)*\.(Trainer|Fabric)")
READ = ("precision", "plugins", "amp_backend", "amp_level")
HALF = {"fp16": True, "params_dtype": "fp16", "grad_reduce_in_fp32": False}
APEX: dict[str, tuple[str, dict[str, Any]]] = {
    "O0": ("fp32", amp_fields("fp32")),
    "O1": ("amp_o1", amp_fields("fp16")),
    "O2": ("megatron_o2", HALF),
    "O3": ("true", HALF | {"loss_scale": 1.0}),
}
GONE = "Lightning refuses it from 2.0 on"


def import_(payload: object, *, strategy: str | None = None, accelerator: str | None = None) -> ImportReport:
    """Return what Lightning trains in: a precision string or number, or Trainer arguments, under ``trainer`` or not.

    A precision plugin stands in ``plugins`` as ``class_path`` and ``init_args``. On a CPU Lightning turns 16-mixed
    into bf16-mixed.
    """
    if payload is None:
        payload = {}
    elif isinstance(payload, str | int) and not isinstance(payload, bool):
        payload = {"precision": payload}
    whole = Settings(payload, TITLE)
    top = whole.section("trainer") if isinstance(whole.values.get("trainer"), Mapping) else whole
    builder = ImportBuilder(TITLE)
    _report_others(builder, whole, top)
    is_written = isinstance(top.values.get("strategy"), Mapping)
    given = top.section("strategy") if is_written else Settings({}, TITLE)
    given = given.section("init_args") if "class_path" in given else given
    TABLE.read(builder, given, "strategy")
    plugins = top.values.get("plugins")
    listed = plugins if isinstance(plugins, list) else [plugins]
    made = [one for one in listed if isinstance(one, Mapping) and str(one.get("class_path")).endswith("Precision")]
    if made and top.given("precision"):
        rule = "must not stand together with a precision plugin"
        raise top.wrong("precision", rule, top["precision"], "Keep one of the two")
    if made:
        report_apex(builder, top)
        return _plugin(builder, Settings(made[0], TITLE, top.name("plugins")))
    read = _trained(builder, top, strategy, top.values.get("accelerator", accelerator))
    policy_decides = given.given("mixed_precision") or given.given("precision_plugin")
    return replace(read, recipe=None) if policy_decides else read


def export(config: MixedPrecisionConfig, *, strategy: str | None = None) -> ExportReport:
    """Return Trainer arguments; under the strategies fsdp and deepspeed mixed means half-precision weights."""
    plan = Settings({"strategy": strategy}, TITLE).word("strategy", ("ddp", "fsdp", "deepspeed"))
    builder = ExportBuilder(config, TITLE)
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
        arguments = {"device": "cuda", **export_scaler(builder, TITLE, "plugins.scaler")}
        scaler = {"class_path": "torch.amp.GradScaler", "init_args": arguments}
        plugin = {"precision": "16-mixed", "device": "cuda", "scaler": scaler}
        payload = {"plugins": [{"class_path": AMP_PLUGIN, "init_args": plugin}]}
    elif compute == "fp16":
        report_scaler(builder, TITLE)
    if config.fp8 is not None:
        builder.record_if_stated("lightning.other-schemes-than", ("fp8", "fp8_recipe"))
    return builder.finish(payload)


def report_apex(builder: ImportBuilder, top: Settings) -> None:
    """Report settings of Apex where it does not cast."""
    detail = "read where amp_backend is apex and the precision 16; Lightning 1.2 ignores it, 1.9 and 2.0 refuse it"
    builder.dead(top, ["amp_level"], detail)
    if top.values.get("amp_backend") == "native":
        builder.map(top.name("amp_backend"))
    else:
        builder.dead(top, ["amp_backend"], f"read where the precision is 16 and no plugin decides; {GONE}")


def _trained(builder: ImportBuilder, top: Settings, strategy: str | None, device: object) -> ImportReport:
    name, word = top.name("precision"), top.values.get("precision")
    if word is None:
        builder.implied(name, "32-true", f"in {VERSION}")
        word = "32-true"
    if isinstance(word, bool) or not isinstance(word, str | int) or str(word)[:40] not in PRECISIONS:
        rule = "must be a precision of Lightning's, letter by letter"
        raise top.wrong("precision", rule, word, "Use 32-true, 16-mixed, bf16-mixed, bf16-true or transformer-engine")
    compute, kind = PRECISIONS[str(word)]
    if top.values.get("amp_backend") == "apex" and str(word) in ("16", "16-mixed"):
        return _cast_by_apex(builder, top)
    report_apex(builder, top)
    if str(word) in ("16", "16-mixed") and device == "cpu":
        builder.record("lightning.lightning-makes-it-bf16", name, word)
        compute = "bf16"
    if kind == "te":
        return _delayed(builder, Settings({}, TITLE, "recipe"), compute, name, word)
    if compute == "fp64":
        builder.fields["fp32"] = True
        builder.record("lightning.fp64-throughout-fp32", name, word)
        return replace(builder.finish("fp32"), recipe=None)
    if kind == "true":
        builder.map(name, **{compute: True, "params_dtype": compute, "grad_reduce_in_fp32": False})
        builder.without_masters(name, word, f"weights, gradients and optimizer state are {compute}, nothing is FP32")
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
        assume_torch_scaler(builder, TITLE)
    return builder.finish("fp32" if compute == "fp32" else "amp_o1")


def _cast_by_apex(builder: ImportBuilder, top: Settings) -> ImportReport:
    name, level = top.name("amp_level"), top.word("amp_level", tuple(APEX)) or "O2"
    semantics, fields = APEX[level]
    builder.map(top.name("precision"), **fields)
    if top.given("amp_level"):
        builder.map(name, **fields)
    else:
        builder.implied(name, level, "in Lightning 1")
    builder.record("lightning.apex-casts-instead", top.name("amp_backend"), "apex", level=level)
    if level in ("O1", "O2"):
        detail = (
            "Apex begins at 65536, doubles after 2000 steps, halves at the first overflow and has no smallest scale"
        )
        builder.implied(f"{name}.loss_scale", "dynamic", detail, **TORCH_SCALER)
    elif level == "O3":
        detail = "weights and gradients are FP16 and the optimizer steps on them, with the loss scaled by 1"
        builder.without_masters(name, level, detail)
    return builder.finish(semantics)


def _sharded(builder: ImportBuilder, name: str, plan: str, compute: str) -> ImportReport:
    """Return the import of mixed precision under a strategy that shards: half-precision weights over FP32 ones."""
    builder.map(name, **{compute: True, "params_dtype": compute})
    builder.fields["grad_reduce_in_fp32"] = False
    builder.record(
        "lightning.the-strategy-reduces-gradients", f"{name}.reduce_dtype", compute, plan=plan, compute=compute
    )
    if compute == "fp16" and plan == "deepspeed":
        detail = f"{VERSION} writes initial_scale_power 16, window 1000, hysteresis 2 and minimum 1"
        builder.implied("deepspeed.fp16.initial_scale_power", 16, detail, initial_loss_scale=65536.0)
    elif compute == "fp16":
        assume_torch_scaler(builder, TITLE)
    return builder.finish("megatron_o2" if plan == "deepspeed" else "fsdp_policy")


def _plugin(builder: ImportBuilder, made: Settings) -> ImportReport:
    kind, given = str(made["class_path"]).rpartition(".")[2], made.section("init_args")
    if kind == "TransformerEnginePrecision":
        compute = given.word("weights_dtype", ("torch.bfloat16", "torch.float16"))
        if compute is None:
            raise given.wrong("weights_dtype", "must be given", None, "Write torch.bfloat16")
        compute = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}[compute]
        builder.map(given.name("weights_dtype"), **{compute: True, "params_dtype": compute})
        for key in ("replace_layers", "fallback_compute_dtype"):
            if given.given(key):
                builder.record("lightning.a-choice-of-modules", given.name(key), str(given[key]))
        return _delayed(builder, given.section("recipe"), compute, given.name("recipe"), compute)
    if kind != "MixedPrecision":
        rule = "must be MixedPrecision or TransformerEnginePrecision, the two that are read"
        raise made.wrong("class_path", rule, made["class_path"], "Give the Trainer's precision instead")
    compute = PRECISIONS[given.word("precision", ("16-mixed", "bf16-mixed")) or "bf16-mixed"][0]
    builder.map(given.name("precision"), **amp_fields(compute))
    if compute == "bf16" and given.given("scaler"):
        raise given.wrong("scaler", "must not be given in BF16", "a scaler", "Drop it: BF16 needs no loss scale")
    lacks = compute == "fp16" and import_scaler(builder, given.section("scaler").section("init_args"), TITLE)
    imported = builder.finish("amp_o1")
    return replace(imported, recipe=None) if lacks else imported


def _delayed(builder: ImportBuilder, recipe: Settings, compute: str, name: str, value: object) -> ImportReport:
    """Return the import of Transformer Engine's delayed scaling, the only recipe that can be written as data."""
    fields = {compute: True, "params_dtype": compute, "fp8": "hybrid", "fp8_recipe": "delayed"}
    builder.fields["grad_reduce_in_fp32"] = False
    builder.map(name, **fields)
    TABLE.read(builder, recipe, "recipe")
    detail = f"weights are {compute} and the optimizer steps on them, without FP32 masters"
    builder.without_masters(name, value, detail)
    return builder.finish("true")


def _export_te(builder: ExportBuilder) -> ExportReport:
    """Return the export as a Transformer Engine plugin with a mapping for its recipe."""
    config, mode = builder.config, builder.config.mode
    recipe = TABLE.write(builder, "recipe", "recipe")
    arguments = {"weights_dtype": {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[mode], "recipe": recipe}
    builder.map(mode, "weights_dtype")
    if builder.values["params_dtype"] in (None, mode):
        builder.map("params_dtype", "weights_dtype")
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


def _report_others(builder: ImportBuilder, whole: Settings, top: Settings) -> None:
    rows = {top.name(key): (value, f"no argument of the Trainer in {VERSION}") for key, value in top.values.items()}
    if whole is not top:
        detail = "nothing of Lightning's reads it, and the program may"
        rows |= {key: (value, detail) for key, value in whole.values.items() if not isinstance(value, Mapping | list)}
    for name, (value, detail) in rows.items():
        key = name.rpartition(".")[2]
        if key in READ or not bears_on_precision(key):
            continue
        if value in (None, False):
            builder.map(name)
        else:
            builder.report(name, value, "unsupported", detail, "Look it up where the program is from.")


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    trainer = content.get("trainer")
    target = str((trainer if isinstance(trainer, dict) else content).get("_target_"))
    if TRAINER.fullmatch(target):
        return Recognised(certainty=0.9, evidence=f"makes `{target}`")
    if isinstance(trainer, dict) and ("precision" in trainer or "plugins" in trainer) and "exp_manager" not in content:
        own = [key for key in ("max_epochs", "accelerator", "strategy", "devices") if key in trainer]
        if own and isinstance(content.get("model"), dict) and "megatron_amp_O2" in content["model"]:
            return None  # NeMo 1.x
        return Recognised(certainty=0.7, evidence="has `trainer.precision`, as LightningCLI writes it")
    return None


CONTEXT = (
    ContextKey(
        "strategy", "the Trainer's strategy where the file does not say: fsdp, deepspeed, ddp", use=("import", "export")
    ),
    ContextKey("accelerator", "cpu turns 16-mixed into bf16-mixed"),
)
SYSTEM = System(
    "lightning",
    TITLE,
    VERSION,
    import_,
    export,
    _recognise,
    lambda payload: as_yaml({"trainer": payload}),
    context=CONTEXT,
)

"""Lightning: precision strings and the `trainer:` section of LightningCLI. Its precision plugins are written, not read.

Its "bf16-mixed" is autocast over FP32 weights; the same word is Megatron's O2 in NeMo and in Megatron Bridge, so the
string alone says nothing: it has to be known whose it is.

In Lightning 1 `amp_backend: apex` has NVIDIA's Apex cast FP16 instead of torch: such a file is refused. Lightning 1.2
ignores an `amp_level` without it, 1.9 refuses that, and 2.0 has neither argument.
Its settings and sentences, with their sources, are `rows/lightning.yaml`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, System, as_yaml
from bridge.interop.pytorch.amp import TORCH_SCALER, assume_torch_scaler, export_as_amp, export_scaler, report_scaler
from bridge.interop.reading.settings import Settings
from bridge.interop.table import table
from bridge.precision.mode import mode_of
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("lightning")
PRECISIONS = TABLE.data["precisions"]
AMP_PLUGIN = "lightning.pytorch.plugins.MixedPrecision"
TE_PLUGIN = "lightning.pytorch.plugins.TransformerEnginePrecision"


def import_(payload: object, *, strategy: str | None = None, accelerator: str | None = None) -> ImportReport:
    """Return what Lightning trains in: a precision string or number, or Trainer arguments, under ``trainer`` or not.

    On a CPU Lightning turns 16-mixed into bf16-mixed.
    """
    if isinstance(payload, str | int | None) and not isinstance(payload, bool):
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
    compute = mode_of(config)
    facts: dict[str, Any] = {"te": config.fp8_recipe == "delayed" and config.fp8 is not None and compute != "fp32"}
    facts |= {"plan": plan, "sharded": plan in ("fsdp", "deepspeed") and not config.autocast_enabled}
    if facts["te"] or (facts["sharded"] and compute != "fp32"):
        setting = "weights_dtype" if facts["te"] else "precision"
        builder.map(compute, setting)
        builder.map_dtype("params_dtype", setting)
        if not config.grad_reduce_in_fp32:
            builder.map("grad_reduce_in_fp32", setting)
    else:
        compute = export_as_amp(builder, "precision")
    payload: dict[str, Any] = {"precision": {"fp32": "32-true"}.get(compute, f"{compute.removeprefix('fp')}-mixed")}
    usual = all(builder.values[field] == value for field, value in TORCH_SCALER.items() if field != "hysteresis")
    if facts["te"]:
        builder.map("fp8_recipe", "recipe")
        weights = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[compute]
        payload = _plugin(TE_PLUGIN, {"weights_dtype": weights, "recipe": TABLE.write(builder, "recipe", "recipe")})
        builder.record("lightning.the-optimizer-steps-on-the-weights", "params_dtype")
    elif compute == "fp16" and plan in (None, "ddp") and config.loss_scale is None and not usual:
        arguments = {"device": "cuda", **export_scaler(builder, TABLE.title, "plugins.scaler")}
        scaler = {"class_path": "torch.amp.GradScaler", "init_args": arguments}
        payload = _plugin(AMP_PLUGIN, {"precision": "16-mixed", "device": "cuda", "scaler": scaler})
    elif compute == "fp16":
        report_scaler(builder, TABLE.title)
    return builder.finish(payload, TABLE.unwritten, **facts)


def _plugin(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"plugins": [{"class_path": name, "init_args": arguments}]}


def _trained(builder: ImportBuilder, top: Settings, strategy: str | None, device: object) -> ImportReport:
    """Return what the Trainer makes of its precision."""
    name, word = top.name("precision"), top.values.get("precision")
    if word is None:
        word = "32-true"
        builder.record("lightning.full-precision-by-default", name, word)
    if isinstance(word, bool) or not isinstance(word, str | int) or str(word)[:40] not in PRECISIONS:
        raise TABLE.wrong("precisions", top, "precision")
    is_fp16 = str(word) in ("16", "16-mixed")
    if top.values.get("amp_backend") == "apex" and is_fp16:
        raise TABLE.wrong("apex", top, "amp_backend")
    TABLE.read(builder, top, "apex")
    if is_fp16 and device == "cpu":
        builder.record("lightning.lightning-makes-it-bf16", name, word)
        word = "bf16-mixed"
    semantics, fields, *sentences = PRECISIONS[str(word)]
    shards = top.values.get("strategy", strategy)
    if isinstance(shards, Mapping):
        shards = shards.get("class_path") or shards.get("_target_")
    compute = str(fields.get("autocast_dtype") or fields.get("params_dtype"))
    plan = next((one for one in ("fsdp", "deepspeed") if one in str(shards).lower() and semantics == "amp_o1"), None)
    if plan is not None:  # half-precision weights over FP32 ones
        semantics = "megatron_o2" if plan == "deepspeed" else "fsdp_policy"
        fields = {compute: True, "params_dtype": compute, "grad_reduce_in_fp32": False}
        builder.record("lightning.the-strategy-reduces-gradients", f"{name}.reduce_dtype", compute, plan=plan)
    builder.map(name, **fields) if top.given("precision") else builder.fields.update(fields)
    for sentence in sentences:
        builder.record(f"lightning.{sentence}", name, word, compute=compute)
    if "fp8" in fields:
        TABLE.read(builder, Settings({}, TABLE.title, "recipe"), "recipe")
    if compute == "fp16" and plan == "deepspeed":
        state = {"initial_loss_scale": 65536.0}
        builder.record("lightning.scale-of-deepspeed", "deepspeed.fp16.initial_scale_power", 16, state)
    elif compute == "fp16" and semantics != "true":
        assume_torch_scaler(builder, TABLE.title)
    return builder.finish(semantics, is_whole="64" not in str(word))


def _write(payload: Any) -> str:
    return as_yaml({"trainer": payload})


CONTEXT = (
    ContextKey(
        "strategy", "the Trainer's strategy where the file does not say: fsdp, deepspeed, ddp", ("import", "export")
    ),
    ContextKey("accelerator", "cpu turns 16-mixed into bf16-mixed"),
)
SYSTEM = System("lightning", TABLE.title, TABLE.version, export, import_, TABLE.recognise, _write, context=CONTEXT)

"""Lightning: precision strings, precision plugins and the `trainer:` section of LightningCLI.

Its "bf16-mixed" is autocast over FP32 weights; the same word is Megatron's O2 in NeMo and in Megatron Bridge, so the
string alone says nothing: it has to be known whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.interop.amp import amp_fields, export_as_amp
from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System
from bridge.interop.lightning.apex import casts_by_apex, import_apex, report_apex
from bridge.interop.lightning.instances import instance, is_trainer
from bridge.interop.lightning.plugins import (
    PRECISIONS,
    export_te,
    import_plugin,
    import_sharded,
    import_te,
    import_true,
)
from bridge.interop.lightning.strategy import import_strategy, policy_decides, report_strategy
from bridge.interop.megatron_lm.flags import bears_on_precision
from bridge.interop.scaler import TORCH_SCALER, assume_torch_scaler, export_scaler, report_scaler
from bridge.interop.settings import Settings

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["SYSTEM", "export", "import_"]

TITLE = "Lightning"
VERSION = "Lightning 2.6.6"
SHARDED = {
    "fsdp": ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"),
    "modelparallel": ("32-true", "16-true", "bf16-true", "bf16-mixed"),
}
"""Strategy -> the precisions it takes, "32" and "bf16" standing for their long forms."""
REFERENCE = re.compile(r"\$\{(\w{1,80})\}")
AMP_PLUGIN = "lightning.pytorch.plugins.MixedPrecision"
READ = ("precision", "plugins", "amp_backend", "amp_level")


def import_(payload: object, *, strategy: str | None = None, accelerator: str | None = None) -> ImportReport:
    """Return what Lightning trains in.

    Args:
        payload: A precision string or number; a mapping of Trainer arguments, or one with them under ``trainer``; or a
            precision plugin, as an object, as ``class_path`` and ``init_args``, or under Hydra's ``_target_``.
        strategy: The Trainer's strategy where the payload does not say: fsdp, deepspeed, ...
        accelerator: Likewise; on "cpu" Lightning turns 16-mixed into bf16-mixed.
    """
    whole = Settings(_arguments(payload), TITLE)
    top = whole.section("trainer") if isinstance(whole.values.get("trainer"), Mapping) else whole
    made = instance(top.values) if is_trainer(top.values) else None
    if made is not None and made.under:
        top = Settings(made.arguments, TITLE, top.name(made.under))
    builder = ImportBuilder(TITLE)
    _report_others(builder, whole, top)
    plugin = _plugin(top)
    plan = _strategy(top, strategy)
    device = top.values.get("accelerator", accelerator)
    if plugin is not None:
        if top.given("precision"):
            rule = "must not stand together with a precision plugin"
            raise top.wrong("precision", rule, top["precision"], "Keep one of the two")
        report_apex(builder, top)
        report_strategy(builder, top)
        read = import_plugin(builder, *plugin)
    else:
        read = _trained(builder, whole, top, plan, device)
    return replace(read, recipe=None) if policy_decides(top) else read


def _trained(builder: ImportBuilder, whole: Settings, top: Settings, plan: str, device: object) -> ImportReport:
    """Return what the Trainer's own `precision` comes to."""
    word = _word(builder, whole, top)
    compute, kind = PRECISIONS[word]
    _check_strategy(top, plan, word)
    if casts_by_apex(top, word):
        return import_apex(builder, top)
    report_apex(builder, top)
    name = top.name("precision")
    if word in ("16", "16-mixed") and device == "cpu":
        detail = f"{VERSION} makes it bf16-mixed on a CPU"
        builder.report(name, word, "semantics", detail, "Write bf16-mixed.")
        compute = "bf16"
    import_strategy(builder, top, plan, compute)
    if kind == "te":
        return import_te(builder, Settings({}, TITLE, "recipe"), compute, name, said=word)
    if kind == "true":
        return import_true(builder, name, word, compute)
    if plan in ("fsdp", "deepspeed") and compute != "fp32":
        return import_sharded(builder, name, plan, compute)
    fields = amp_fields(compute)
    builder.map(name, **fields) if top.given("precision") else builder.fields.update(fields)
    if compute == "fp16":
        assume_torch_scaler(builder, TITLE)
    return builder.finish("fp32" if compute == "fp32" else "amp_o1")


def export(config: MixedPrecisionConfig, *, strategy: str | None = None) -> ExportReport:
    """Return Trainer arguments.

    Args:
        config: What to write.
        strategy: "fsdp" or "deepspeed" where the Trainer will use it, under which mixed means half-precision weights.
    """
    plan = Settings({"strategy": strategy}, TITLE).word("strategy", ("ddp", "fsdp", "deepspeed"))
    builder = ExportBuilder(config, TITLE)
    if config.fp8 is not None and config.fp8_recipe == "delayed" and config.mode != "fp32":
        return export_te(builder)
    words = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    if plan in ("fsdp", "deepspeed") and config.mode != "fp32" and not config.autocast_enabled:
        builder.map(config.mode, "precision")
        builder.map("params_dtype", "precision")
        if config.grad_reduce_in_fp32:
            detail = f"the {plan} strategy reduces in the compute dtype"
            builder.report_if_stated("grad_reduce_in_fp32", "unsupported", detail, "Pass a policy of your own to it.")
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
        detail = "other schemes than delayed scaling need a Transformer Engine recipe object, which no file can hold"
        remedy = "Build TransformerEnginePrecision(recipe=...) in Python."
        builder.report_if_stated(("fp8", "fp8_recipe"), "unsupported", detail, remedy)
    return builder.finish(payload)


def _arguments(payload: object) -> object:
    """Return the payload as Trainer arguments."""
    if payload is None or (isinstance(payload, str | int) and not isinstance(payload, bool)):
        return {} if payload is None else {"precision": payload}
    made = instance(payload)
    if made is not None and not is_trainer(payload) and (made.under or made.name.endswith("Precision")):
        return {"plugins": [payload]}
    if isinstance(payload, Mapping):
        return payload
    return {"plugins": [payload]} if type(payload).__name__.endswith("Precision") else payload


def _plugin(top: Settings) -> tuple[str, Settings] | None:
    """Return class name and arguments of the precision plugin among `plugins`."""
    given = top.values.get("plugins")
    for plugin in given if isinstance(given, list | tuple) else [given]:
        made = instance(plugin)
        arguments: Any
        if made is not None:
            name, arguments = made.name, made.arguments
        elif plugin is not None and hasattr(plugin, "__dict__"):
            name, arguments = type(plugin).__name__, dict(vars(plugin))
        else:
            continue
        if name.endswith("Precision"):
            return name, Settings(arguments, TITLE, f"plugins.{name}")
    return None


def _strategy(top: Settings, strategy: str | None) -> str:
    given = top.values.get("strategy", strategy)
    if isinstance(given, Mapping):
        made = instance(given)
        given = made.target if made is not None else None
    name = (given if isinstance(given, str) else type(given).__name__ if given is not None else "auto").lower()
    for known in ("fsdp", "modelparallel", "model_parallel", "deepspeed"):
        if known in name:
            return known.replace("_", "")
    return name


def _word(builder: ImportBuilder, whole: Settings, top: Settings) -> str:
    value = top.values.get("precision")
    reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if reference is not None:
        value = whole.values.get(reference[1])
        if isinstance(value, bool) or str(value)[:40] not in PRECISIONS:
            rule = "must be a precision; this is a reference to none at the top of the file"
            raise top.wrong("precision", rule, reference[0], "Give the value as it will be")
    if value is None:
        builder.implied(top.name("precision"), "32-true", f"in {VERSION}")
        return "32-true"
    if isinstance(value, bool) or not isinstance(value, str | int) or str(value)[:40] not in PRECISIONS:
        rule = "must be a precision of Lightning's, letter by letter"
        remedy = "Use 32-true, 16-mixed, bf16-mixed, bf16-true or transformer-engine"
        raise top.wrong("precision", rule, value, remedy)
    return str(value)


def _report_others(builder: ImportBuilder, whole: Settings, top: Settings) -> None:
    """Report what looks like precision and is no argument of the Trainer's."""
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


def _check_strategy(top: Settings, plan: str, word: str) -> None:
    full = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}.get(word, word)
    if plan in SHARDED and full not in SHARDED[plan]:
        rule = f"must be one of {', '.join(SHARDED[plan])} under the {plan} strategy"
        raise top.wrong("precision", rule, word, "Choose one of these, or another strategy")


def _recognise(document: Any) -> Recognised | None:
    content = document.mapping
    trainer = content.get("trainer")
    made = instance(content if is_trainer(content) else trainer)
    if made is not None and is_trainer({"_target_": made.target}):
        return Recognised(certainty=0.9, evidence=f"makes `{made.target}`")
    if isinstance(trainer, dict) and ("precision" in trainer or "plugins" in trainer) and "exp_manager" not in content:
        own = [key for key in ("max_epochs", "accelerator", "strategy", "devices") if key in trainer]
        if own and isinstance(content.get("model"), dict) and "megatron_amp_O2" in content["model"]:
            return None  # NeMo 1.x
        return Recognised(certainty=0.7, evidence="has `trainer.precision`, as LightningCLI writes it")
    return None


def _write(payload: Any) -> str:
    import yaml

    text: str = yaml.safe_dump({"trainer": payload}, sort_keys=False)
    return text


SYSTEM = System(
    name="lightning",
    title=TITLE,
    version=VERSION,
    import_=import_,
    export=export,
    recognise=_recognise,
    write=_write,
    context=(
        ContextKey(
            name="strategy",
            meaning="the Trainer's strategy where the file does not say: fsdp, deepspeed, ddp",
            use=("import", "export"),
        ),
        ContextKey(name="accelerator", meaning="cpu turns 16-mixed into bf16-mixed"),
    ),
)

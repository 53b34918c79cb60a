"""NeMo 2.x: the plugin `MegatronMixedPrecision`, in Python or as a mapping, and the names of its recipes.

Half precision is O2 here, under a name that means AMP to Lightning itself ("bf16-mixed"). The plugin's own defaults are
not a recipe's: `params_dtype` is FP32 even for bf16, the FP8 recipe is *delayed*, and a precision it does not know
trains in FP32 without a word. Its MXFP8 recipes changed under their name: hybrid up to 2.5, E4M3 since 2.6.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.builders import DELAYED, ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey, ExportReport, ImportReport, Recognised, System, Unmapped, as_yaml
from bridge.interop.meaning import recipe_named, semantics_of
from bridge.interop.pytorch.amp import report_dropped_autocast
from bridge.interop.reading.document import Document
from bridge.interop.reading.python_calls import Call, program_of
from bridge.interop.reading.settings import named_dtype
from bridge.precision.dtypes import TORCH_NAMES
from bridge.precision.fields import LAYER_COUNTS
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.rules.inert import SCALER_SCHEDULE

TITLE = "NeMo 2.6"
PLUGIN = "MegatronMixedPrecision"
TARGET = "nemo.lightning.pytorch.plugins.mixed_precision.MegatronMixedPrecision"
NO_AUTOCAST = f"{TITLE} copies fields of the same name, and Megatron's is enable_autocast"
"""Why `autocast_enabled` has no effect there. Source: NeMo 2.6.2 lightning/pytorch/plugins/mixed_precision.py."""
MODES = {
    **dict.fromkeys(("fp16", "fp16-mixed", "16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("fp32", "32"), "fp32"),
}
DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")
POSITIONAL = ("precision", *DTYPES, "autocast_enabled", "grad_reduce_in_fp32")
SAME = (
    *("autocast_enabled", "grad_reduce_in_fp32", "fp8", "fp8_recipe", "first_last_layers_bf16", *DELAYED),
    *("fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "fp4", "fp4_recipe"),
    *(*LAYER_COUNTS, "reuse_grad_buf_for_mxfp8_param_ag"),
)
PREFIXED = {f"fp16_{name}": name for name in ("loss_scale", *SCALER_SCHEDULE)}
GATHER = ("fp8_param_gather", "fp8_params")
FIELDS = {**{name: name for name in (*DTYPES, *SAME)}, **PREFIXED, **dict.fromkeys(GATHER, "fp8_param_gather")}
ARGUMENTS = frozenset({"precision", *FIELDS})
SCHEMES = ("mxfp8", "fp8_current_scaling", "fp8_subchannel_scaling")
RECIPES = {
    "bf16_mixed": "bf16_mixed",
    "fp16_mixed": "fp16_mixed",
    "bf16_with_fp8_mixed": "bf16_with_fp8_delayed_scaling_mixed",
    "fp16_with_fp8_mixed": "fp16_with_fp8_delayed_scaling_mixed",
    **{f"{base}_with_{name}_mixed": f"{base}_with_{name}_mixed" for base in ("bf16", "fp16") for name in SCHEMES},
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed": "nanov2_bf16_with_fp8_subchannel_scaling_mixed",
}
"""NeMo 2's recipe -> ours, which means the same as it does since 2.6.

Source: nemo/collections/llm/recipes/precision/mixed_precision.py of NeMo 2.0.0 to 2.7.3, as are the tables below."""
MXFP8_BEFORE = (
    ((2, 4), {"fp8": "hybrid", "fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}),
    ((2, 5), {"fp8": "hybrid", "reuse_grad_buf_for_mxfp8_param_ag": False}),
    ((2, 6), {"fp8": "hybrid"}),
)
"""Before this release the MXFP8 recipes had these values; the first row that applies counts."""
ARGUMENTS_SINCE = {
    **dict.fromkeys(("fp8_recipe", "first_last_layers_bf16", "fp8_param_gather", *LAYER_COUNTS), (2, 3)),
    "reuse_grad_buf_for_mxfp8_param_ag": (2, 5),
    **dict.fromkeys(("fp4", "fp4_recipe"), (2, 6)),
}


def import_(payload: object, *, nemo_version: str | None = None) -> ImportReport:
    """Return what a plugin asks for: its arguments as a mapping, a recipe's name, or Python that calls either."""
    return import_all(payload, nemo_version=nemo_version)[0]


def import_all(payload: object, *, nemo_version: str | None = None) -> tuple[ImportReport, ...]:
    """Return what each plugin or recipe call of a Python file asks for; one for a mapping or a name."""
    release = _release(nemo_version)
    if isinstance(payload, Document):
        return _program(payload, release)
    if isinstance(payload, str):
        return (_recipe(payload.removesuffix("()"), release),)
    if not isinstance(payload, Mapping):
        rule = "must be the plugin's arguments or a recipe's name"
        raise PayloadError(f"nemo2: {rule}, got {payload!r:.60}. Give one of them.")
    for values in _nested(payload):  # a saved run has the plugin under a key
        target = str(values.get("_target_")).rpartition(".")[2]
        if target in RECIPES:
            return (_recipe(target, release),)
        if target == PLUGIN:
            return (_plugin(values, release),)
    return (_plugin(payload, release),)


def _program(document: Document, release: tuple[int, int] | None) -> tuple[ImportReport, ...]:
    """Return what the calls of a Python file ask for; settings assigned afterwards are reported, not followed."""
    names = frozenset({PLUGIN, *RECIPES})
    program = program_of(document.text, document.path, (names | ARGUMENTS).__contains__)
    calls = [call for call in program.calls if call.name in names]
    if not calls:
        rule = f"must call {PLUGIN} or one of NeMo's precision recipes"
        remedy = "Give the file that does."
        raise PayloadError(f"{document.path}: {rule}, and calls neither. {remedy}", path=document.path)
    detail, remedy = "assigned after the constructor, which is not followed", "Give it to the constructor."
    later = [
        Unmapped(target.lstrip("."), written, "unsupported", f"line {line}: {detail}", remedy)
        for line, target, written in program.assignments
        if target.rpartition(".")[0] and target.rpartition(".")[2] in ARGUMENTS
    ]
    found = tuple(_called(call, release) for call in calls)
    return tuple(replace(one, unmapped=(*one.unmapped, *later), recipe=None) for one in found) if later else found


def _release(version: object) -> tuple[int, int] | None:
    if version is None:
        return None
    found = re.match(r"v?(2)\.(\d+)", str(version))
    if found is None:
        raise PayloadError(f"nemo_version: must be a version of NeMo 2, got {version!r}. Write nemo_version=2.5.")
    return int(found[1]), int(found[2])


def _title(release: tuple[int, int] | None) -> str:
    return TITLE if release is None else f"NeMo {release[0]}.{release[1]}"


def _called(call: Call, release: tuple[int, int] | None) -> ImportReport:
    """Return what one call asks for, with the arguments that only the run decides reported."""
    label = f"line {call.line}, {call.name}"
    values, undecided = dict(call.arguments), dict(call.undecided)
    for place, value in enumerate(call.positional if call.name == PLUGIN else ()):
        name = POSITIONAL[place] if place < len(POSITIONAL) else f"argument {place + 1}"
        written = call.written[str(place)]
        if written != "None" and (value is None or place >= len(POSITIONAL)):
            undecided[name] = written
        elif written != "None":
            values.setdefault(name, value)
    if call.name == PLUGIN and values.get("precision") is None and undecided.keys() & {"precision", "**"}:
        source = undecided.get("precision") or f"**{undecided['**']}"
        rule = "precision: must be written out, as only the run decides it"
        raise PayloadError(f"{label}, {rule}, got {source}. Give the value as it will be.")
    imported = _plugin(values, release) if call.name == PLUGIN else _recipe(call.name, release)
    detail, remedy = "only the run decides it", "Give the value as it will be."
    late = (Unmapped(name, source, "unsupported", detail, remedy) for name, source in undecided.items())
    return replace(imported, label=label, unmapped=(*late, *imported.unmapped))


def _nested(value: Any, depth: int = 6) -> list[Mapping[Any, Any]]:
    """Return a mapping and those within it, the outer ones first."""
    if not depth:
        return []
    if isinstance(value, Mapping):
        return [value, *_nested(list(value.values()), depth)]
    if isinstance(value, list):
        return [found for item in value for found in _nested(item, depth - 1)]
    return []


def _recipe(name: str, release: tuple[int, int] | None) -> ImportReport:
    builder = ImportBuilder(_title(release))
    wanted = name.strip().replace("-", "_")
    if wanted not in RECIPES:
        raise PayloadError(f"nemo2: no recipe of NeMo is called {name!r}. Recipes: {', '.join(RECIPES)}.")
    fields = REGISTRY.get(RECIPES[wanted]).to_dict()
    if "mxfp8" in wanted:
        fields |= next((values for until, values in MXFP8_BEFORE if release is not None and release < until), {})
        if fields["fp8"] == "hybrid":
            builder.record("nemo2.recipe-of-this-name-uses", "fp8", "hybrid")
        elif release is None:
            builder.record("nemo2.the-recipe-value-since", "fp8", "e4m3")
    builder.map(wanted, **fields)
    config = MixedPrecisionConfig.from_dict(builder.fields)
    return builder.finish(semantics=semantics_of(config), recipe=recipe_named(config))


def _plugin(arguments: Mapping[Any, Any], release: tuple[int, int] | None) -> ImportReport:
    builder = ImportBuilder(_title(release))
    values = {str(name): value for name, value in arguments.items()}
    mode = _mode(values, builder)
    for name, value in values.items():
        field = FIELDS.get(name)
        if release is not None and release < ARGUMENTS_SINCE.get(name, release):
            builder.record("nemo2.megatronmixedprecision-of-takes-no-such", name, value)
        elif field is not None:
            read = named_dtype(value, name) if name in DTYPES else value
            has_null = name not in DTYPES and getattr(MixedPrecisionConfig, field) is None
            builder.map(name, **({field: read} if read is not None or has_null else {}))
        elif name not in ("precision", "_target_", "_partial_", "_convert_"):
            builder.record("nemo2.megatronmixedprecision-takes-no-such", name, value)
    gather = {name: values[name] for name in GATHER if name in builder.mapped and values[name] is not None}
    if len(gather) > 1 and gather[GATHER[0]] != gather[GATHER[1]]:
        rule = "fp8_params and fp8_param_gather are one setting and NeMo raises where they differ"
        raise PayloadError(f"nemo2: {rule}, got {gather!r:.80}. Give fp8_param_gather alone.")
    fields = builder.fields
    if mode != "fp32" and "params_dtype" not in fields:
        detail = f"{builder.system} creates the weights in FP32 unless it is given"
        builder.implied("params_dtype", "fp32", detail, params_dtype="fp32")
    if mode != "fp32" and "pipeline_dtype" not in fields:
        token = "bf16" if mode == "bf16" else "fp32"
        builder.implied("pipeline_dtype", token, pipeline_dtype=token)
    detail = f"{builder.system} writes 0 over Megatron's own 1"
    builder.imply_scheme(str, in_fp32=None if mode == "fp32" else True, layers=0, why_layers=detail)
    if fields.get("autocast_enabled"):
        builder.record("nemo2.it-runs-without-autocast", "autocast_enabled", True)
    if fields.get("fp8_wgrad") is False and fields.get("fp8"):
        builder.record("nemo2.transformer-engine-and-later", "fp8_wgrad", False)
    return builder.finish(semantics=semantics_of(MixedPrecisionConfig.from_dict(fields)))


def _mode(values: Mapping[str, Any], builder: ImportBuilder) -> str:
    said = values.get("precision")
    if said is None:
        rule = f"{PLUGIN} needs `precision`"
        raise PayloadError(f"nemo2: {rule}, got none. Give 'bf16-mixed', '16-mixed' or '32'.")
    mode = MODES.get(str(said))
    if mode is None:
        builder.record("nemo2.a-precision-that-does-not-know", "precision", said)
        builder.fields["fp32"] = True
        return "fp32"
    builder.map("precision", **{mode: True})
    return mode


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the plugin's arguments, every one that decides written out."""
    builder = ExportBuilder(config, TITLE)
    values, mode = builder.values, config.mode
    precision = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}[mode]
    payload: dict[str, Any] = {"_target_": TARGET, "precision": precision}
    builder.map(mode, "precision")
    for name, field in FIELDS.items():
        if name != "fp8_params":
            payload[name] = f"torch.{TORCH_NAMES[values[field] or mode]}" if name in DTYPES else values[field]
            builder.map(field, name)
    builder.map("fp8_param", "fp8_param_gather")
    if config.first_last_layers_bf16:
        payload.update({name: 1 for name in LAYER_COUNTS if not config.is_stated(name)})
    report_dropped_autocast(builder, NO_AUTOCAST)
    return builder.finish(payload)


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for NeMo 2.x's, or None."""
    if PLUGIN in document.text:
        return Recognised(0.95, f"names `{PLUGIN}`")
    if document.kind == "python" and "nemo" in document.text:
        named = next((name for name in RECIPES if f"{name}(" in document.text), None)
        if named:
            return Recognised(0.85, f"calls NeMo's recipe `{named}`")
    top = document.mapping
    if any(key in top for key in PREFIXED) and "precision" in top:
        return Recognised(0.85, "has `precision` and `fp16_...` keys, the plugin's arguments")
    return None


CONTEXT = (ContextKey("nemo_version", "release that runs it; recipes changed under their names", default="2.6"),)
SYSTEM = System(
    "nemo2",
    "NeMo 2.x",
    "2.6.2",
    import_,
    export,
    recognise,
    as_yaml,
    import_all=import_all,
    read=lambda document: document if document.kind == "python" else document.content,
    context=CONTEXT,
)

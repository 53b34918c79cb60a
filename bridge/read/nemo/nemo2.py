"""NeMo 2.x: the plugin `MegatronMixedPrecision`, in Python or as a mapping, and its recipes.

    MegatronMixedPrecision(precision="bf16-mixed", params_dtype=torch.bfloat16, fp8="hybrid")

"bf16-mixed" means O2 here, although the same name means AMP in Lightning. The defaults of the
plugin differ from NeMo's recipes: `params_dtype` is FP32 even for bf16, and the FP8 recipe is
delayed. For a precision that the plugin does not know, NeMo trains in FP32 without a warning. A
file is read as release 2.6 reads it. Up to release 2.5, NeMo's MXFP8 recipes used hybrid FP8.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import PayloadError
from bridge.precision.coercion import TORCH_NAMES
from bridge.precision.mode import get_mode
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import is_stated
from bridge.read import framework_signs
from bridge.read.foreign.amp import report_dropped_autocast
from bridge.read.foreign.document_signs import Recognition
from bridge.read.foreign.effective_fields import find_equivalent_recipe
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.reports import ExportReport, ImportReport
from bridge.read.foreign.system import System
from bridge.read.foreign.table import load_table
from bridge.read.text.document import Document
from bridge.read.text.python_calls import PythonCall, parse_program
from bridge.read.text.settings import Settings
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY

TABLE = load_table("nemo2")
SETTING_ROWS = TABLE.parts[""].named
PRECISION_DTYPES = TABLE.data["precisions"]
RECIPE_ARGUMENTS = TABLE.data["recipes"]
PLUGIN_CLASS = "MegatronMixedPrecision"
PLUGIN_PATH = f"nemo.lightning.pytorch.plugins.mixed_precision.{PLUGIN_CLASS}"
DTYPE_ARGUMENTS = ("params_dtype", "pipeline_dtype", "autocast_dtype")
POSITIONAL_ARGUMENTS = ("precision", *DTYPE_ARGUMENTS, "autocast_enabled", "grad_reduce_in_fp32")
"""The arguments of the plugin in their order."""
GATHER_ARGUMENTS = ("fp8_param_gather", "fp8_params")
"""Two names of the same argument."""
MAX_MAPPING_DEPTH = 6
"""The most nested mappings and lists in which the plugin of a saved run is looked for."""


def import_(payload: object) -> ImportReport:
    """Return the precision that the plugin, or a recipe of NeMo, states.

    Args:
        payload: The arguments of the plugin as a mapping, the name of a recipe, or a Python file
            that calls the plugin or a recipe.
    """
    return import_all(payload)[0]


def import_all(payload: object) -> tuple[ImportReport, ...]:
    """Return the report of each call of the plugin, or of a recipe, in a Python file.

    For a mapping or a name there is a single report.
    """
    if isinstance(payload, Document):
        return _import_program(payload)
    if isinstance(payload, str):
        return (_import_recipe(payload.removesuffix("()")),)
    if not isinstance(payload, Mapping):
        rule = "must be the plugin's arguments or a recipe's name"
        raise PayloadError(f"nemo2: {rule}, got {payload!r:.60}. Give one of them.")
    for values in _list_nested_mappings(payload):  # a saved run has the plugin under a key
        target = str(values.get("_target_")).rpartition(".")[2]
        if target in RECIPE_ARGUMENTS:
            return (_import_recipe(target),)
        if target == PLUGIN_CLASS:
            return (_import_plugin(values),)
    return (_import_plugin(payload),)


def _import_program(document: Document) -> tuple[ImportReport, ...]:
    """Return the precision of each call in a Python file.

    A setting that is assigned after the call is reported, but has no effect on the result.
    """
    program = parse_program(
        document.text, document.path, {PLUGIN_CLASS, *RECIPE_ARGUMENTS, *SETTING_ROWS}.__contains__
    )
    calls = [call for call in program.calls if call.name not in SETTING_ROWS]
    if not calls:
        rule = f"must call {PLUGIN_CLASS} or one of NeMo's precision recipes, and calls neither"
        raise PayloadError(f"{document.path}: {rule}. Give the file that does.", path=document.path)
    later = ImportBuilder(TABLE.title)
    for assignment in program.assignments:
        holder, _, name = assignment.target.rpartition(".")
        if holder and name in SETTING_ROWS:
            target = assignment.target.lstrip(".")
            line = assignment.line
            later.record(
                "nemo2.assigned-after-the-constructor", target, assignment.written, line=line
            )
    reports = [_import_call(call) for call in calls]
    if later.unmapped:
        for index, report in enumerate(reports):
            unmapped = (*report.unmapped, *later.unmapped)
            reports[index] = replace(report, unmapped=unmapped, recipe=None)
    return tuple(reports)


def _import_call(call: PythonCall) -> ImportReport:
    """Return the precision of a call. Arguments that only the run decides are reported."""
    label = f"line {call.line}, {call.name}"
    values = dict(call.arguments)
    open_values = dict(call.open_values)
    if call.name == PLUGIN_CLASS:
        _name_positional(call, values, open_values)
        is_open = "precision" in open_values or "**" in open_values
        if is_open and values.get("precision") is None:
            source = open_values.get("precision") or f"**{open_values['**']}"
            rule = "precision: must be written out, as only the run decides it"
            raise PayloadError(f"{label}, {rule}, got {source}. Give the value as it will be.")
    if call.name in RECIPE_ARGUMENTS:
        imported = _import_recipe(call.name)
    else:
        imported = _import_plugin(values)
    late = ImportBuilder(TABLE.title)
    for name, source in open_values.items():
        late.record("nemo2.only-the-run-decides", name, source)
    return replace(imported, label=label, unmapped=(*late.unmapped, *imported.unmapped))


def _name_positional(call: PythonCall, values: dict[str, Any], open_values: dict[str, str]) -> None:
    """Put the positional arguments of the plugin under their names."""
    for index, value in enumerate(call.positional):
        written = call.written[str(index)]
        if written == "None":
            continue
        if index >= len(POSITIONAL_ARGUMENTS):
            open_values[f"argument {index + 1}"] = written
        elif value is None:
            open_values[POSITIONAL_ARGUMENTS[index]] = written
        else:
            values.setdefault(POSITIONAL_ARGUMENTS[index], value)


def _list_nested_mappings(value: Any, depth: int = MAX_MAPPING_DEPTH) -> list[Mapping[Any, Any]]:
    """Return a mapping and the mappings within it, outer mappings first."""
    if not depth:
        return []
    if isinstance(value, Mapping):
        return [value, *_list_nested_mappings(list(value.values()), depth)]
    mappings: list[Mapping[Any, Any]] = []
    if isinstance(value, list):
        for item in value:
            mappings += _list_nested_mappings(item, depth - 1)
    return mappings


def _import_recipe(name: str) -> ImportReport:
    """Return the precision of a recipe of NeMo, by its name."""
    builder = ImportBuilder(TABLE.title)
    wanted = name.strip().replace("-", "_")
    if wanted not in RECIPE_ARGUMENTS:
        raise PayloadError(
            f"nemo2: no recipe of NeMo is called {name!r}. Recipes: {', '.join(RECIPE_ARGUMENTS)}."
        )
    config = REGISTRY.get(RECIPE_ARGUMENTS[wanted])
    builder.map(wanted, **config.to_dict())
    if "mxfp8" in wanted:
        builder.record("nemo2.value-of-the-recipe-since-2-6", "fp8", "e4m3")
    return builder.finish(recipe=find_equivalent_recipe(config))


def _import_plugin(arguments: Mapping[Any, Any]) -> ImportReport:
    """Return the precision that the arguments of the plugin state."""
    builder = ImportBuilder(TABLE.title)
    settings = Settings(arguments, "nemo2")
    mode = _map_mode(settings, builder)
    TABLE.read(builder, settings)
    _require_one_gather_value(settings, builder)
    if mode != "fp32" and "params_dtype" not in builder.fields:
        builder.record("nemo2.weights-in-fp32", "params_dtype", "fp32", {"params_dtype": "fp32"})
    if mode != "fp32" and "pipeline_dtype" not in builder.fields:
        stages = "fp32"
        if mode == "bf16":
            stages = "bf16"
        builder.record(
            "nemo2.default-of-the-trainer", "pipeline_dtype", stages, {"pipeline_dtype": stages}
        )
    why = dict.fromkeys(LAYER_COUNTS, f"{builder.system} writes 0 over Megatron's own 1")
    reduces_in_fp32: bool | None = True
    if mode == "fp32":
        reduces_in_fp32 = None
    builder.imply_scheme(str, in_fp32=reduces_in_fp32, layers=0, why=why)
    return builder.finish()


def _require_one_gather_value(settings: Settings, builder: ImportBuilder) -> None:
    """Refuse two names of one argument with different values.

    Raises:
        PayloadError: The values differ.
    """
    written: dict[str, object] = {}
    for name in GATHER_ARGUMENTS:
        if name in builder.mapped and settings.is_written(name):
            written[name] = settings[name]
    if len(written) > 1 and written[GATHER_ARGUMENTS[0]] != written[GATHER_ARGUMENTS[1]]:
        rule = "fp8_params and fp8_param_gather are one setting and NeMo raises where they differ"
        raise PayloadError(f"nemo2: {rule}, got {written!r:.80}. Give fp8_param_gather alone.")


def _map_mode(settings: Settings, builder: ImportBuilder) -> str:
    """Map the mode, and return it. A precision that NeMo does not know means FP32."""
    if not settings.is_written("precision"):
        raise PayloadError(
            f"nemo2: {PLUGIN_CLASS} needs `precision`, got none. Give 'bf16-mixed', '16-mixed' or '32'."
        )
    precision = settings["precision"]
    mode = PRECISION_DTYPES.get(str(precision))
    if mode is None:
        builder.record("nemo2.unknown-precision-is-fp32", "precision", precision)
        builder.fields["fp32"] = True
        return "fp32"
    builder.map("precision", **{mode: True})
    return str(mode)


def export(config: MixedPrecisionConfig) -> ExportReport:
    """Return the plugin's arguments, with every decisive default written out."""
    builder = ExportBuilder(config, TABLE.title)
    mode = get_mode(config)
    precision = {"fp32": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}[mode]
    payload = {"_target_": PLUGIN_PATH, "precision": precision, **TABLE.write(builder, "")}
    for name in DTYPE_ARGUMENTS:
        payload[name] = f"torch.{TORCH_NAMES[payload[name] or mode]}"
    builder.map(mode, "precision")
    builder.map("fp8_param", "fp8_param_gather")
    if config.first_last_layers_bf16:
        for name in LAYER_COUNTS:
            if not is_stated(config, name):
                payload[name] = 1
    report_dropped_autocast(builder)
    return builder.finish(payload)


def recognise(document: Document) -> Recognition | None:
    """Return the recognition of a file of NeMo 2.x. None if it has no sign of NeMo 2."""
    if PLUGIN_CLASS in document.text:
        return Recognition(0.95, f"names `{PLUGIN_CLASS}`")
    if document.kind == "python" and _imports_nemo(document.text):
        for name in RECIPE_ARGUMENTS:
            if f"{name}(" in document.text:
                return Recognition(0.85, f"calls NeMo's recipe `{name}`")
    return TABLE.recognise(document)


def _imports_nemo(text: str) -> bool:
    """Return whether a program imports the package `nemo`."""
    return any(name.split(".")[0] == "nemo" for name in framework_signs.list_imported_modules(text))


def read(document: Document) -> Any:
    """Return the payload of a document: a program as the document itself, else the content."""
    if document.kind == "python":
        return document
    return document.content


SYSTEM = System(
    name="nemo2",
    title="NeMo 2.x",
    version=TABLE.version,
    export=export,
    import_=import_,
    write=as_yaml,
    read=read,
    import_all=import_all,
)

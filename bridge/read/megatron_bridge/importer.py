"""Megatron Bridge as a system of `convert`: `SYSTEM`, with the import of its names, mappings, runs and programs.

The class `MixedPrecisionConfig` of Megatron Bridge, the *peer* of ours, has the same fields and
defaults. It differs in four points:

- A constructor call with `fp8_param=True` reads as False. Only `fp8_param_gather` works in one.
- `first_last_layers_bf16=True` without layer counts keeps 0 layers at either end in BF16. So it has
  no effect.
- Dtypes have two spellings: `{_target_: torch.bfloat16, _call_: false}` in saved runs, and strings in
  overrides.
- A recipe of a NeMo name, such as `16-mixed`, is not registered.

The YAML of our own recipes, and the `config.yaml` of our runs, are read here too. They are recognised
by `modules` or `_recipe_`, which the peer's class does not have. Each of their fields is one of ours,
and no default of the peer's class counts.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeWarning, PayloadError, close_matches, did_you_mean
from bridge.precision.coercion import DTYPE_SPELLINGS
from bridge.precision.mode import MODE_DTYPE_FIELDS
from bridge.precision.precision_config import FIELD_DEFAULTS, MEGATRON_BRIDGE_FIELDS
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import is_stated
from bridge.read import framework_signs
from bridge.read.foreign.document_signs import Recognition
from bridge.read.foreign.effective_fields import compute_effective_fields, find_equivalent_recipe
from bridge.read.foreign.import_builder import MODES, ImportBuilder
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.reports import ImportReport, Unmapped
from bridge.read.foreign.system import ContextKey, System
from bridge.read.megatron_bridge.exporter import (
    OWNER_OF_MEGATRON_FIELD,
    PARAM_FIELD_ALIASES,
    TABLE,
    export,
)
from bridge.read.megatron_bridge.program_precisions import collect_precisions
from bridge.read.megatron_bridge.stated_precision import StatedPrecision
from bridge.read.megatron_lm.flags import OWNERS, reads_as_default, report_model_setting
from bridge.read.megatron_lm.module_recipe.stage_files import LAYOUT_KEYS
from bridge.read.run_keys import PRECISION_KEY
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.settings import parse_named_dtype
from bridge.registry.registry import REGISTRY
from bridge.registry.saved_entry import drop_references

__all__ = ["SYSTEM", "export", "import_"]

REASON_OF_DEFAULT = dict.fromkeys(FIELD_DEFAULTS, "the default of Megatron Core's own class")
MODULES_KEY = "modules"
"""Key of the rows of single modules, which only configurations of this project have."""
RECIPE_KEY = "_recipe_"
"""Key of the recipe that the fields are from, which only configurations of this project have."""
OWNERS_DECIDE = "the model's own settings, as mixed_precision is not set,"
INSTANTIATION_KEYS = ("_target_", "_call_", "_convert_", "_partial_", "_recursive_")
"""Keys of Hydra that describe how an object is made."""
OWNER_OF_REDUCTION = {"grad_reduce_in_fp32": "ddp"}
"""Field of a scheme's defaults -> its section, if that is not the model's."""
AMBIGUOUS_FIELDS = frozenset(("bf16", "fp16"))
"""Fields that are no evidence by themselves. Transformers and Axolotl have them with another meaning."""


def import_(payload: object, *, base: str | None = None) -> ImportReport:
    """Return the precision of a payload.

    Args:
        payload: A recipe's name, a mapping of fields, or the mapping of a run with `mixed_precision`.
        base: Name of a configuration that is not read, if the payload is an override of it.

    Raises:
        PayloadError: The payload is none of them, or a field has a wrong value.
    """
    builder = ImportBuilder(TABLE.title)
    if isinstance(payload, str):
        return _import_named_recipe(payload, builder)
    if not isinstance(payload, Mapping):
        remedy = "Give the parsed contents of the file."
        raise PayloadError(
            f"megatron-bridge: must be a mapping or a recipe's name, got {payload!r:.60}. {remedy}"
        )
    if "mixed_precision" not in payload and not any(name in payload for name in OWNERS):
        return _import_fields(payload, "", builder, base)
    chosen = payload.get("mixed_precision")
    if chosen is None:
        return _import_owners(payload, builder, base)
    if isinstance(chosen, str):
        imported = _import_named_recipe(chosen, builder)
    elif isinstance(chosen, Mapping):
        opens_autocast = bool(get_dotted_value(payload, "model.enable_autocast"))
        imported = _import_fields(
            chosen, "mixed_precision.", builder, base, opens_autocast=opens_autocast
        )
    else:
        rule = "must be a recipe's name or a mapping of fields"
        raise PayloadError(f"mixed_precision: {rule}, got {chosen!r:.60}. Correct it in the file.")
    return _report_overwritten_values(payload, imported, builder)


def import_all(payload: object, *, base: str | None = None) -> tuple[ImportReport, ...]:
    """Return the precision of each function of a Python program, or that of any other payload.

    Raises:
        PayloadError: No function sets a precision; or as for `import_`.
    """
    if not isinstance(payload, Document):
        return (import_(payload, base=base),)
    stated = collect_precisions(payload)
    if not stated:
        rule = "must set the mixed_precision of a run, and no function of it does"
        remedy = "Give the program that does, or the YAML of the run."
        raise PayloadError(f"{payload.path}: {rule}. {remedy}", path=payload.path)
    reports: list[ImportReport] = []
    for program_precision in stated:
        report = import_program(program_precision.precision)
        reports.append(replace(report, label=program_precision.label))
    return tuple(reports)


def import_program(precision: StatedPrecision) -> ImportReport:
    """Return the precision that a function of a Python program states.

    Its open fields, and the functions that may change it, are reported.
    """
    base = precision.decider or None
    if precision.is_absent:
        base = OWNERS_DECIDE
    content = precision.name or precision.values
    imported = import_({PRECISION_KEY: content}, base=base)
    open_report = ImportBuilder(TABLE.title)
    for name, decider in precision.open_fields.items():
        setting = f"{PRECISION_KEY}.{name}"
        open_report.record("megatron_bridge.only-the-run-decides", setting, decider)
    for function in dict.fromkeys(precision.unknown_functions):
        open_report.record(
            "megatron_bridge.given-to-a-stranger", PRECISION_KEY, None, name=function
        )
    if not open_report.unmapped:
        return imported
    kept: list[Unmapped] = []
    for unmapped in imported.unmapped:
        name = unmapped.field.removeprefix(f"{PRECISION_KEY}.")
        if name not in precision.open_fields:  # the default of an open field does not count
            kept.append(unmapped)
    return replace(imported, unmapped=(*kept, *open_report.unmapped), recipe=None)


def _import_named_recipe(name: str, builder: ImportBuilder) -> ImportReport:
    """Return the precision of a recipe by its name, with a record if the name is misleading."""
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        config = REGISTRY.get(name)
    registered = REGISTRY.recipe(name)
    builder.map("mixed_precision", **config.to_dict())
    if "misnamed" in registered.tags:
        builder.record("megatron_bridge.the-name-says-current", "mixed_precision", name)
    return builder.finish(recipe=find_equivalent_recipe(config) or registered.name)


def _import_fields(
    values: Mapping[Any, object],
    prefix: str,
    builder: ImportBuilder,
    base: str | None,
    *,
    opens_autocast: bool = False,
) -> ImportReport:
    """Return the precision of a mapping of fields, each of which counts as stated.

    The fields are those of the peer's class, or ours. With `_target_` the mapping is a constructor
    call of the peer's class. Without it the fields are assigned one by one.

    Args:
        prefix: Beginning of the names of its settings: "mixed_precision." or empty.
        builder: The report.
        base: Name of a configuration that is not read and that the fields override.
        opens_autocast: Whether the model turns autocast on.
    """
    is_ours = RECIPE_KEY in values or MODULES_KEY in values
    is_constructed = "_target_" in values
    if is_constructed and not is_ours:
        _require_precision_class(values["_target_"], prefix)
    stated = drop_references(values)
    for name in values.keys() - stated.keys():
        builder.map(f"{prefix}{name}")
    _map_fields(stated, prefix, builder, is_ours=is_ours)
    has_open_mode = is_ours or base is not None or not (is_constructed or prefix)
    if has_open_mode and not any(stated.get(name) for name in MODES):
        builder.leave_mode(base or "the config that these fields override", default=None)
    elif base is not None and not is_ours:
        builder.record(
            "megatron_bridge.is-not-read-and-decides-the", "mixed_precision", None, base=base
        )
    if is_ours:
        recipe = None
        if stated.get(RECIPE_KEY) in REGISTRY:
            recipe = str(stated[RECIPE_KEY])
        return builder.finish(recipe=recipe)
    _map_param_aliases(stated, prefix, builder, is_constructed=is_constructed)
    if stated.get("autocast_enabled") and not opens_autocast:
        builder.record(
            "megatron_bridge.it-runs-without-autocast", f"{prefix}autocast_enabled", True
        )
    if base is None:
        _imply_defaults(prefix, builder)
    return builder.finish()


def _require_precision_class(target: object, prefix: str) -> None:
    """Refuse a constructor call of another class than the peer's.

    Raises:
        PayloadError: The class is another one.
    """
    if str(target).rpartition(".")[2] != "MixedPrecisionConfig":
        rule = "must name MixedPrecisionConfig"
        raise PayloadError(
            f"{prefix}_target_: {rule}, got {target!r:.80}. Nothing was instantiated."
        )


def _imply_defaults(prefix: str, builder: ImportBuilder) -> None:
    """State the defaults of the peer's class that decide a run."""
    in_fp32 = None
    if builder.fields.get("bf16") or builder.fields.get("fp16"):
        in_fp32 = True
    why_no_layers = f"{TABLE.title} writes 0 over Megatron's own 1, so that no layer is kept"
    why = dict.fromkeys(LAYER_COUNTS, why_no_layers)
    builder.imply_scheme(
        f"{prefix}{{}}".format, fp8_recipe="tensorwise", in_fp32=in_fp32, layers=0, why=why
    )


def _map_fields(
    values: Mapping[Any, object], prefix: str, builder: ImportBuilder, *, is_ours: bool
) -> None:
    """Map the settings that are fields, and report the others.

    `_map_param_aliases` maps the two names of stored weights of the peer's class.
    """
    fields: Collection[str] = MEGATRON_BRIDGE_FIELDS
    sentence = "not-a-field-of-mixedprecisionconfig-megatron"
    if is_ours:
        fields = FIELD_DEFAULTS
        sentence = "no-field"
    reason, detail, remedy = TABLE.sentences[sentence]
    for key, value in values.items():
        name = str(key)
        if name in (*INSTANTIATION_KEYS, RECIPE_KEY):
            builder.map(prefix + name)
        elif name not in fields:
            hint = did_you_mean(close_matches(name, fields))
            builder.report(prefix + name, value, reason, detail, hint or remedy)
        elif name in MODE_DTYPE_FIELDS:
            dtype = parse_named_dtype(value, prefix + name)
            if dtype is None and not is_ours:
                builder.map(prefix + name)
            else:
                builder.map(prefix + name, **{name: dtype})
        elif is_ours or name not in (*PARAM_FIELD_ALIASES, *PARAM_FIELD_ALIASES.values()):
            builder.map(prefix + name, **{name: value})


def _map_param_aliases(
    values: Mapping[Any, object], prefix: str, builder: ImportBuilder, *, is_constructed: bool
) -> None:
    """Map the two names of stored weights as the peer's class reads them.

    The two names are one setting. Of two assignments the last one counts. In a constructor call
    `fp8_param_gather` counts, even if it is not stated.
    """
    for model_name, ddp_name in PARAM_FIELD_ALIASES.items():
        keys = [key for key in values if key in (model_name, ddp_name)]
        if not keys:
            continue
        final_value = values[keys[-1]]
        sentence = "megatron_bridge.assigned-last"
        if is_constructed:
            # A constructor assigns the default of fp8_param_gather last, over fp8_param.
            final_value = values.get(ddp_name, False)
            sentence = "megatron_bridge.constructor-takes-one"
        for key in keys:
            setting = prefix + str(key)
            value = values[key]
            is_same = value in (final_value, None) or (value is False and not final_value)
            if is_same and final_value is None:
                builder.map(setting)
            elif is_same:
                builder.map(setting, **{ddp_name: final_value})
            else:
                builder.record(sentence, setting, value, gather=ddp_name, last=keys[-1])
                builder.fields[ddp_name] = bool(final_value)


def _import_owners(
    payload: Mapping[Any, object], builder: ImportBuilder, base: str | None
) -> ImportReport:
    """Return the precision of a run without `mixed_precision`, which its model, optimizer and DDP state."""
    for path, value in _iterate_owner_settings(payload, builder):
        name = _get_field_name(path)
        if value is None:
            builder.map(path)
        else:
            builder.map(path, **{PARAM_FIELD_ALIASES.get(name, name): value})
    is_half = builder.fields.get("fp16") or builder.fields.get("bf16")
    if base is not None:
        if not is_half:
            builder.leave_mode(base, default=None)
        return builder.finish()
    builder.record("megatron_bridge.without-mixed_precision-the-model", "mixed_precision", None)
    if not is_half:
        builder.fields["fp32"] = True
    in_fp32 = None
    if not builder.fields.get("fp32"):
        in_fp32 = False
    builder.imply_scheme(_format_owner_path, in_fp32=in_fp32, why=REASON_OF_DEFAULT)
    return builder.finish()


def _format_owner_path(field: str) -> str:
    """Return the dotted key of a field in the section that holds it."""
    owner_name = OWNER_OF_REDUCTION.get(field, "model")
    return f"{owner_name}.{field}"


def _report_overwritten_values(
    payload: Mapping[Any, object], imported: ImportReport, builder: ImportBuilder
) -> ImportReport:
    """Return a report with the owners' own values that differ from `mixed_precision`, which overwrites them."""
    values = imported.config.to_dict(full=True)
    acting = compute_effective_fields(imported.config)
    for path, value in _iterate_owner_settings(payload, builder):
        name = _get_field_name(path)
        is_same = value == values[name] or (value in (None, False) and not values[name])
        is_derived = name in MODE_DTYPE_FIELDS and not is_stated(imported.config, name)
        if is_same or is_derived or PARAM_FIELD_ALIASES.get(name, name) not in acting:
            builder.map(path)
        else:
            builder.record(
                "megatron_bridge.written-over", path, value, name=name, held=values[name]
            )
    return builder.finish(semantics=imported.semantics, recipe=imported.recipe)


def _get_field_name(path: str) -> str:
    """Return the field of a precision for an owner's setting."""
    name = path.rpartition(".")[2]
    if name == "enable_autocast":
        return "autocast_enabled"
    return name


def _iterate_owner_settings(
    payload: Mapping[Any, object], builder: ImportBuilder
) -> Iterator[tuple[str, object]]:
    """Yield the owners' settings that have a field of the peer's class, with their values.

    The other settings are mapped or reported.
    """
    for owner_name in OWNERS:
        section = payload.get(owner_name)
        if not isinstance(section, Mapping):
            continue
        for key, value in section.items():
            path = f"{owner_name}.{key}"
            name = _get_field_name(path)
            if name in MODE_DTYPE_FIELDS and name in MEGATRON_BRIDGE_FIELDS:
                yield path, parse_named_dtype(value, path)
            elif name in MEGATRON_BRIDGE_FIELDS:
                yield path, value
            else:
                _map_megatron_setting(owner_name, path, value, builder)


def _map_megatron_setting(
    owner_name: str, path: str, value: object, builder: ImportBuilder
) -> None:
    """Map or report a setting of an owner that is no field of the peer's class.

    Args:
        owner_name: The owner: model, optimizer or ddp.
        path: Dotted key of the setting.
        builder: The report.
    """
    name = _get_field_name(path)
    plain_value = _get_plain_value(value)
    is_field = owner_name == OWNER_OF_MEGATRON_FIELD.get(name)
    if is_field and reads_as_default(name, plain_value):
        builder.map(path)
    elif is_field:
        builder.map(path, **{name: plain_value})
    elif name == "quant_recipe" and MODULES_KEY in builder.fields:
        builder.map(path)  # a sync wrote it from the rows
    elif name == "quant_recipe" and isinstance(value, Mapping):
        builder.record("megatron_bridge.its-numbers-of-layers-count", path, value)
    else:
        report_model_setting(builder, path, name, plain_value)


def _get_plain_value(value: object) -> object:
    """Return a value, or for an object the name of its dtype or class."""
    target = get_dotted_value(value, "_target_")
    if target is None:
        return value
    dtype = str(target).lower().removeprefix("torch.")
    return DTYPE_SPELLINGS.get(dtype, str(target))


def recognise(document: Document) -> Recognition | None:
    """Return the evidence that a document is Megatron Bridge's; None for a document of another system."""
    if document.kind == "python":
        framework = framework_signs.recognise_file(document)
        if framework is None or framework.name != "Megatron Bridge":
            return None
        return Recognition(0.95, framework.evidence)
    recognised = TABLE.recognise(document)
    if recognised is not None:
        return recognised
    top = document.mapping
    inner = top.get("mixed_precision")
    fields = {*MEGATRON_BRIDGE_FIELDS, MODULES_KEY, RECIPE_KEY}
    if isinstance(inner, Mapping) and not fields.isdisjoint(inner):
        return Recognition(0.9, "has `mixed_precision`, a mapping of its fields")
    if isinstance(inner, str) and inner in REGISTRY and "_mixed" in inner.replace("-", "_"):
        return Recognition(0.9, f"has `mixed_precision: {inner}`, one of its recipes")
    for owner_name in OWNERS:
        target = str(get_dotted_value(top, f"{owner_name}._target_"))
        if target.startswith(("megatron.", "bridge.")):
            return Recognition(0.7, "has sections with Megatron's targets, as its run configs do")
    return _recognise_by_fields(top)


def _recognise_by_fields(top: Mapping[Any, object]) -> Recognition | None:
    """Return the evidence in a mapping of fields; None if most of its keys are no fields."""
    names = [name for name in (*MEGATRON_BRIDGE_FIELDS, MODULES_KEY) if name in top]
    if AMBIGUOUS_FIELDS.issuperset(names) or len(names) < 2 or len(names) * 2 < len(top):
        return None
    certainty = 0.4  # other systems have `bf16` and `fp8` too, among other keys
    if len(names) == len(top):
        certainty = 0.6
    shown_names = ", ".join(f"`{name}`" for name in names[:3])
    return Recognition(certainty, f"has {shown_names}, fields of its class")


CONTEXT = (
    ContextKey("shape", "fields, strings (for overrides) or name", use=("export",)),
    ContextKey("bridge_version", "Megatron Bridge of the run", use=("export",)),
    *LAYOUT_KEYS,
)


def read(document: Document) -> object:
    """Return the payload of a document for `import_all`: a program itself, or the content of another file."""
    if document.kind == "python":
        return document
    return document.content


SYSTEM = System(
    name="megatron-bridge",
    title="Megatron Bridge",
    version=TABLE.version,
    export=export,
    import_=import_,
    write=as_yaml,
    read=read,
    context=CONTEXT,
    import_all=import_all,
)

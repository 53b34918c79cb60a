"""Megatron Bridge: recipe names, `MixedPrecisionConfig` mappings, overrides, and the run configs in its checkpoints.

The peer's class has the same fields and defaults as ours, so that nothing is lost, with four traps:

- `MixedPrecisionConfig(fp8_param=True)` reads as False there; only `fp8_param_gather` works in a
  constructor.
- `first_last_layers_bf16=True` alone keeps 0 and 0 layers in BF16: it switches nothing on.
- Dtypes come in two spellings: `{_target_: torch.bfloat16, _call_: false}` in saved runs, strings
  in overrides.
- A recipe of a NeMo name such as `16-mixed` is not registered there.

The YAML of our own recipes and a run's own `config.yaml` are read here too. `modules` and
`_recipe_`, which the peer's class does not have, tell them apart; all fields are ours there, and
none of the peer's defaults decides.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeWarning, PayloadError, close_matches, did_you_mean
from bridge.precision.coercion import DTYPE_SPELLINGS
from bridge.precision.config import FIELD_DEFAULTS, PEER_FIELDS
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.statements import is_stated
from bridge.read import framework_signs
from bridge.read.foreign.document_signs import Recognition
from bridge.read.foreign.effective_fields import compute_effective_fields, find_equivalent_recipe
from bridge.read.foreign.import_builder import MODES, ImportBuilder
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.reports import ImportReport, Unmapped
from bridge.read.foreign.system import ContextKey, System
from bridge.read.megatron_bridge.exporter import (
    DTYPE_FIELDS,
    OWNER_OF_MEGATRON_FIELD,
    PARAM_FIELD_ALIASES,
    TABLE,
    export,
)
from bridge.read.megatron_bridge.program_precisions import collect_precisions
from bridge.read.megatron_bridge.stated_precision import StatedPrecision
from bridge.read.megatron_lm.flags import OWNERS, reads_as_default, report_model_setting
from bridge.read.megatron_lm.stage_files import LAYOUT_KEYS
from bridge.read.run_keys import PRECISION_KEY
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.settings import parse_named_dtype
from bridge.registry.config import drop_references
from bridge.registry.registry import REGISTRY

__all__ = ["SYSTEM", "export", "import_"]

REASON_OF_DEFAULT = dict.fromkeys(FIELD_DEFAULTS, "the default of Megatron Core's own class")
MODULES_KEY = "modules"
"""The rows of single modules, which the configurations of this project alone have."""
RECIPE_KEY = "_recipe_"
"""Key of our own configurations alone, next to `modules`: the recipe that the fields are from."""
OWNERS_DECIDE = "the model's own settings, as mixed_precision is not set,"
INSTANTIATION_KEYS = ("_target_", "_call_", "_convert_", "_partial_", "_recursive_")


def import_(payload: object, *, base: str | None = None) -> ImportReport:
    """Return what a recipe's name, a mapping of fields, or a run's configuration with `mixed_precision` asks for.

    Overrides go over `base`, a noun for the configuration that is not read.
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
    """Return what each function of a Python program asks for; one for any other payload."""
    if not isinstance(payload, Document):
        return (import_(payload, base=base),)
    stated = collect_precisions(payload)
    if not stated:
        rule = "must set the mixed_precision of a run, and no function of it does"
        remedy = "Give the program that does, or the YAML of the run."
        raise PayloadError(f"{payload.path}: {rule}. {remedy}", path=payload.path)
    reports: list[ImportReport] = []
    for run in stated:
        reports.append(replace(import_program(run.precision), label=run.label))
    return tuple(reports)


def import_program(precision: StatedPrecision) -> ImportReport:
    """Return what a function of a Python program asks for."""
    base = precision.decider or None
    if precision.is_absent:
        base = OWNERS_DECIDE
    content = precision.name or precision.values
    imported = import_({PRECISION_KEY: content}, base=base)
    late = ImportBuilder(TABLE.title)
    for name, decider in precision.open_fields.items():
        late.record("megatron_bridge.only-the-run-decides", f"{PRECISION_KEY}.{name}", decider)
    for stranger in dict.fromkeys(precision.unknown_functions):
        late.record("megatron_bridge.given-to-a-stranger", PRECISION_KEY, None, name=stranger)
    if not late.unmapped:
        return imported
    known: list[Unmapped] = []
    for record in imported.unmapped:
        name = record.field.removeprefix(f"{PRECISION_KEY}.")
        if name not in precision.open_fields:  # of an open field, no default is implied
            known.append(record)
    return replace(imported, unmapped=(*known, *late.unmapped), recipe=None)


def _import_named_recipe(name: str, builder: ImportBuilder) -> ImportReport:
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        config = REGISTRY.get(name)
    known = REGISTRY.recipe(name)
    builder.map("mixed_precision", **config.to_dict())
    if "misnamed" in known.tags:
        builder.record("megatron_bridge.the-name-says-current", "mixed_precision", name)
    return builder.finish(recipe=find_equivalent_recipe(config) or known.name)


def _import_fields(
    values: Mapping[Any, Any],
    prefix: str,
    builder: ImportBuilder,
    base: str | None,
    *,
    opens_autocast: bool = False,
) -> ImportReport:
    """Import a mapping of fields, the peer's or ours, of which each counts as stated.

    With `_target_` it is a constructor call of the peer's, without it is assigned key by key.
    """
    is_ours = RECIPE_KEY in values or MODULES_KEY in values
    constructed = "_target_" in values
    if constructed and not is_ours:
        _require_precision_class(values["_target_"], prefix)
    stated = drop_references(values)
    for name in values.keys() - stated.keys():
        builder.map(f"{prefix}{name}")
    _map_fields(stated, prefix, builder, is_ours=is_ours)
    is_open = is_ours or base is not None or not (constructed or prefix)
    if is_open and not any(stated.get(name) for name in MODES):
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
    _map_param_aliases(stated, prefix, builder, constructed=constructed)
    if stated.get("autocast_enabled") and not opens_autocast:
        builder.record(
            "megatron_bridge.it-runs-without-autocast", f"{prefix}autocast_enabled", True
        )
    if base is None:
        _imply_defaults(prefix, builder)
    return builder.finish()


def _require_precision_class(target: object, prefix: str) -> None:
    """Raise PayloadError for another class than the peer's."""
    if str(target).rpartition(".")[2] != "MixedPrecisionConfig":
        rule = "must name MixedPrecisionConfig"
        raise PayloadError(
            f"{prefix}_target_: {rule}, got {target!r:.80}. Nothing was instantiated."
        )


def _imply_defaults(prefix: str, builder: ImportBuilder) -> None:
    """State the defaults of the peer's class that decide a run and that an unstated field leaves open."""
    in_fp32 = None
    if builder.fields.get("bf16") or builder.fields.get("fp16"):
        in_fp32 = True
    why = dict.fromkeys(
        LAYER_COUNTS, f"{TABLE.title} writes 0 over Megatron's own 1, so that no layer is kept"
    )
    builder.imply_scheme(
        f"{prefix}{{}}".format, fp8_recipe="tensorwise", in_fp32=in_fp32, layers=0, why=why
    )


def _map_fields(
    values: Mapping[Any, Any], prefix: str, builder: ImportBuilder, *, is_ours: bool
) -> None:
    """Map the settings that are fields, and report the others.

    Dtypes are read. The peer's two names of stored weights are left to `_map_param_aliases`.
    """
    fields: Collection[str] = PEER_FIELDS
    sentence = "not-a-field-of-mixedprecisionconfig-megatron"
    if is_ours:
        fields = FIELD_DEFAULTS
        sentence = "no-field"
    sentence_row = TABLE.sentences[sentence]
    for key, value in values.items():
        name = str(key)
        if name in (*INSTANTIATION_KEYS, RECIPE_KEY):
            builder.map(prefix + name)
        elif name not in fields:
            near = did_you_mean(close_matches(name, fields))
            builder.report(
                prefix + name,
                value,
                sentence_row.reason,
                sentence_row.detail,
                near or sentence_row.remedy,
            )
        elif name in DTYPE_FIELDS:
            dtype = parse_named_dtype(value, prefix + name)
            if dtype is None and not is_ours:
                builder.map(prefix + name)
            else:
                builder.map(prefix + name, **{name: dtype})
        elif is_ours or name not in (*PARAM_FIELD_ALIASES, *PARAM_FIELD_ALIASES.values()):
            builder.map(prefix + name, **{name: value})


def _map_param_aliases(
    values: Mapping[Any, Any], prefix: str, builder: ImportBuilder, *, constructed: bool
) -> None:
    """Read the two names of stored weights as the peer's class reads them."""
    for model_name, ddp_name in PARAM_FIELD_ALIASES.items():
        keys = [key for key in values if key in (model_name, ddp_name)]
        if not keys:
            continue
        last = values[keys[-1]]
        row = "megatron_bridge.assigned-last"
        if constructed:
            # A constructor assigns the default of fp8_param_gather last, over fp8_param.
            last = values.get(ddp_name, False)
            row = "megatron_bridge.constructor-takes-one"
        for key in keys:
            is_same = values[key] in (last, None) or (values[key] is False and not last)
            if is_same and last is None:
                builder.map(prefix + str(key))
                continue
            if is_same:
                builder.map(prefix + str(key), **{ddp_name: last})
                continue
            builder.record(row, prefix + str(key), values[key], gather=ddp_name, last=keys[-1])
            builder.fields[ddp_name] = bool(last)


def _import_owners(
    payload: Mapping[Any, Any], builder: ImportBuilder, base: str | None
) -> ImportReport:
    """Import a run without `mixed_precision`: its model, optimizer and DDP sections decide by themselves."""
    for where, value in _iterate_owner_settings(payload, builder):
        name = _get_field_name(where)
        if value is None:
            builder.map(where)
        else:
            builder.map(where, **{PARAM_FIELD_ALIASES.get(name, name): value})
    is_half = builder.fields.get("fp16") or builder.fields.get("bf16")
    if base is not None:
        if not is_half:
            builder.leave_mode(base, default=None)
        return builder.finish()
    builder.record("megatron_bridge.without-mixed_precision-the-model", "mixed_precision", None)
    if not is_half:
        builder.fields["fp32"] = True
    in_fp32 = None if builder.fields.get("fp32") else False
    owners = {"grad_reduce_in_fp32": "ddp"}
    builder.imply_scheme(
        lambda field: f"{owners.get(field, 'model')}.{field}",
        in_fp32=in_fp32,
        why=REASON_OF_DEFAULT,
    )
    return builder.finish()


def _report_overwritten_values(
    payload: Mapping[Any, Any], imported: ImportReport, builder: ImportBuilder
) -> ImportReport:
    """Report the owners' own values, which `mixed_precision` overwrites."""
    values = imported.config.to_dict(full=True)
    acting = compute_effective_fields(imported.config)
    for where, value in _iterate_owner_settings(payload, builder):
        name = _get_field_name(where)
        is_same = value == values[name] or (value in (None, False) and not values[name])
        is_derived = name in DTYPE_FIELDS and not is_stated(imported.config, name)
        if is_same or is_derived or PARAM_FIELD_ALIASES.get(name, name) not in acting:
            builder.map(where)
        else:
            builder.record(
                "megatron_bridge.written-over", where, value, name=name, held=values[name]
            )
    return builder.finish(semantics=imported.semantics, recipe=imported.recipe)


def _get_field_name(where: str) -> str:
    name = where.rpartition(".")[2]
    return "autocast_enabled" if name == "enable_autocast" else name


def _iterate_owner_settings(
    payload: Mapping[Any, Any], builder: ImportBuilder
) -> Iterator[tuple[str, Any]]:
    """Yield the owners' settings that have a field of the peer's class, and report the others."""
    for owner in OWNERS:
        section = payload.get(owner)
        if isinstance(section, Mapping):
            for key, value in section.items():
                yield from _map_owner_setting(owner, f"{owner}.{key}", value, builder)


def _map_owner_setting(
    owner: str, where: str, value: Any, builder: ImportBuilder
) -> Iterator[tuple[str, Any]]:
    """Yield a setting that has a field of the peer's class, with its value; report any other."""
    name = _get_field_name(where)
    plain = _get_plain_value(value)
    if name in DTYPE_FIELDS and name in PEER_FIELDS:
        yield where, parse_named_dtype(value, where)
    elif name in PEER_FIELDS:
        yield where, value
    elif owner == OWNER_OF_MEGATRON_FIELD.get(name) and reads_as_default(name, plain):
        builder.map(where)
    elif owner == OWNER_OF_MEGATRON_FIELD.get(name):
        builder.map(where, **{name: plain})
    elif name == "quant_recipe" and MODULES_KEY in builder.fields:
        builder.map(where)  # a sync wrote it from the rows
    elif name == "quant_recipe" and isinstance(value, Mapping):
        builder.record("megatron_bridge.its-numbers-of-layers-count", where, value)
    else:
        report_model_setting(builder, where, name, plain)


def _get_plain_value(value: Any) -> Any:
    """Return a value, or the name of the dtype that an object stands for."""
    target = get_dotted_value(value, "_target_")
    if target is None:
        return value
    return DTYPE_SPELLINGS.get(str(target).lower().removeprefix("torch."), str(target))


def recognise(document: Document) -> Recognition | None:
    """Return why a document is taken for Megatron Bridge's, or None."""
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
    fields = {*PEER_FIELDS, MODULES_KEY, RECIPE_KEY}
    if isinstance(inner, Mapping) and not fields.isdisjoint(inner):
        return Recognition(0.9, "has `mixed_precision`, a mapping of its fields")
    if isinstance(inner, str) and inner in REGISTRY and "_mixed" in inner.replace("-", "_"):
        return Recognition(0.9, f"has `mixed_precision: {inner}`, one of its recipes")
    for owner in OWNERS:
        if str(get_dotted_value(top, f"{owner}._target_")).startswith(("megatron.", "bridge.")):
            return Recognition(0.7, "has sections with Megatron's targets, as its run configs do")
    known = [name for name in (*PEER_FIELDS, MODULES_KEY) if name in top]
    # `bf16` and `fp16` alone say nothing of whose they are: transformers and Axolotl have them with another meaning.
    if not set(known) <= {"bf16", "fp16"} and len(known) > 1 and len(known) * 2 >= len(top):
        # Among other keys `bf16` and `fp8` are other systems' too.
        certainty = 0.6 if len(known) == len(top) else 0.4
        names = ", ".join(f"`{name}`" for name in known[:3])
        return Recognition(certainty, f"has {names}, fields of its class")
    return None


CONTEXT = (
    ContextKey("shape", "fields, strings (for overrides) or name", use=("export",)),
    ContextKey("bridge_version", "Megatron Bridge of the run", use=("export",)),
    *LAYOUT_KEYS,
)


def read(document: Document) -> Any:
    """Return a program as the document itself, and the content of any other."""
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

"""Megatron Bridge: recipe names, `MixedPrecisionConfig` mappings, overrides, and the run configs in its checkpoints.

The peer's class has the same fields and defaults as ours, so that nothing is lost, with four traps:

- `MixedPrecisionConfig(fp8_param=True)` reads as False there; only `fp8_param_gather` works in a constructor.
- `first_last_layers_bf16=True` alone keeps 0 and 0 layers in BF16: it switches nothing on.
- Dtypes come in two spellings: `{_target_: torch.bfloat16, _call_: false}` in saved runs, strings in overrides.
- A recipe of a NeMo name such as `16-mixed` is not registered there.

The YAML of our own recipes and a run's own `config.yaml` are read here too. `modules` and `_recipe_`, which the peer's
class does not have, tell them apart; all fields are ours there, and none of the peer's defaults decides.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeWarning, PayloadError, close_matches, did_you_mean
from bridge.precision.config import FIELD_DEFAULTS, PEER_FIELDS
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.statements import is_stated
from bridge.precision.values import SPELLINGS
from bridge.read import frameworks
from bridge.read.builders import MODES, ImportBuilder
from bridge.read.contract import ContextKey, ImportReport, Recognised, System, as_yaml
from bridge.read.meaning import meaning, recipe_named
from bridge.read.megatron_bridge.exporter import DTYPES, ELSEWHERE, TABLE, TWINS, export
from bridge.read.megatron_bridge.program import ATTRIBUTE, Stated, runs_in
from bridge.read.megatron_lm.flags import OWNERS, reads_as_default, report_other
from bridge.read.megatron_lm.stage_files import LAYOUT
from bridge.read.table import at
from bridge.read.text.document import Document
from bridge.read.text.settings import named_dtype
from bridge.registry.config import without_references
from bridge.registry.registry import REGISTRY

__all__ = ["SYSTEM", "export", "import_"]

OWN = dict.fromkeys(FIELD_DEFAULTS, "the default of Megatron Core's own class")
MODULES = "modules"
"""The rows of single modules, which the configurations of this project alone have."""
MADE_BY = "_recipe_"
"""Key of our own configurations alone, next to `modules`: the recipe that the fields are from."""
INSTANTIATION = ("_target_", "_call_", "_convert_", "_partial_", "_recursive_")


def import_(payload: object, *, base: str | None = None) -> ImportReport:
    """Return what a recipe's name, a mapping of fields, or a run's configuration with `mixed_precision` asks for.

    Overrides go over `base`, a noun for the configuration that is not read.
    """
    builder = ImportBuilder(TABLE.title)
    if isinstance(payload, str):
        return _named(payload, builder)
    if not isinstance(payload, Mapping):
        remedy = "Give the parsed contents of the file."
        raise PayloadError(
            f"megatron-bridge: must be a mapping or a recipe's name, got {payload!r:.60}. {remedy}"
        )
    if "mixed_precision" not in payload and not any(name in payload for name in OWNERS):
        return _fields(payload, "", builder, base)
    chosen = payload.get("mixed_precision")
    if chosen is None:
        return _of_owners(payload, builder, base)
    if isinstance(chosen, str):
        imported = _named(chosen, builder)
    elif isinstance(chosen, Mapping):
        opens_autocast = bool(at(payload, "model.enable_autocast"))
        imported = _fields(chosen, "mixed_precision.", builder, base, opens_autocast=opens_autocast)
    else:
        rule = "must be a recipe's name or a mapping of fields"
        raise PayloadError(f"mixed_precision: {rule}, got {chosen!r:.60}. Correct it in the file.")
    return _report_others(payload, imported, builder)


def import_all(payload: object, *, base: str | None = None) -> tuple[ImportReport, ...]:
    """Return what each function of a Python program asks for; one for any other payload."""
    if not isinstance(payload, Document):
        return (import_(payload, base=base),)
    found = runs_in(payload)
    if not found:
        rule = "must set the mixed_precision of a run, and no function of it does"
        remedy = "Give the program that does, or the YAML of the run."
        raise PayloadError(f"{payload.path}: {rule}. {remedy}", path=payload.path)
    return tuple(replace(import_of_program(run.stated), label=run.label) for run in found)


def import_of_program(stated: Stated) -> ImportReport:
    """Return what a function of a Python program asks for."""
    imported = import_(stated.payload, base=stated.decided_by or None)
    late = ImportBuilder(TABLE.title)
    for name, written in stated.open_fields.items():
        late.record("megatron_bridge.only-the-run-decides", f"{ATTRIBUTE}.{name}", written)
    for name in stated.given_to:
        late.record("megatron_bridge.given-to-a-stranger", ATTRIBUTE, None, name=name)
    if not late.unmapped:
        return imported
    return replace(imported, unmapped=(*imported.unmapped, *late.unmapped), recipe=None)


def _named(name: str, builder: ImportBuilder) -> ImportReport:
    with warnings.catch_warnings(action="ignore", category=BridgeWarning):
        config = REGISTRY.get(name)
    known = REGISTRY.recipe(name)
    builder.map("mixed_precision", **config.to_dict())
    if "misnamed" in known.tags:
        builder.record("megatron_bridge.the-name-says-current", "mixed_precision", name)
    return builder.finish(recipe=recipe_named(config) or known.name)


def _fields(
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
    is_ours, constructed = bool({MADE_BY, MODULES} & values.keys()), "_target_" in values
    if (
        not is_ours
        and constructed
        and str(values["_target_"]).rpartition(".")[2] != "MixedPrecisionConfig"
    ):
        rule = "must name MixedPrecisionConfig"
        raise PayloadError(
            f"{prefix}_target_: {rule}, got {values['_target_']!r:.80}. Nothing was instantiated."
        )
    stated = without_references(values)
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
        return builder.finish(
            recipe=str(stated[MADE_BY]) if stated.get(MADE_BY) in REGISTRY else None
        )
    _twins(stated, prefix, builder, constructed=constructed)
    if stated.get("autocast_enabled") and not opens_autocast:
        builder.record(
            "megatron_bridge.it-runs-without-autocast", f"{prefix}autocast_enabled", True
        )
    if (
        base is None
    ):  # the defaults of the peer's class that decide a run and that an unstated field leaves open
        in_fp32 = True if builder.fields.get("bf16") or builder.fields.get("fp16") else None
        why = dict.fromkeys(
            LAYER_COUNTS, f"{TABLE.title} writes 0 over Megatron's own 1, so that no layer is kept"
        )
        builder.imply_scheme(
            f"{prefix}{{}}".format, fp8_recipe="tensorwise", in_fp32=in_fp32, layers=0, why=why
        )
    return builder.finish()


def _map_fields(
    values: Mapping[Any, Any], prefix: str, builder: ImportBuilder, *, is_ours: bool
) -> None:
    """Map the settings that are fields, dtypes read, but the peer's two names of stored weights; report the others."""
    fields: Collection[str] = FIELD_DEFAULTS if is_ours else PEER_FIELDS
    words = TABLE.sentences[
        "no-field" if is_ours else "not-a-field-of-mixedprecisionconfig-megatron"
    ]
    for name, value in ((str(key), value) for key, value in values.items()):
        if name in (*INSTANTIATION, MADE_BY):
            builder.map(prefix + name)
        elif name not in fields:
            near = did_you_mean(close_matches(name, fields))
            builder.report(prefix + name, value, words.reason, words.detail, near or words.remedy)
        elif is_ours or name not in (*TWINS, *TWINS.values()):
            read = named_dtype(value, prefix + name) if name in DTYPES else value
            builder.map(
                prefix + name,
                **({} if read is None and name in DTYPES and not is_ours else {name: read}),
            )


def _twins(
    values: Mapping[Any, Any], prefix: str, builder: ImportBuilder, *, constructed: bool
) -> None:
    """Read the two names of stored weights as the peer's class reads them."""
    for model_name, ddp_name in TWINS.items():
        keys = [key for key in values if key in (model_name, ddp_name)]
        if not keys:
            continue
        # A constructor assigns the default of fp8_param_gather last, over fp8_param.
        last = values.get(ddp_name, False) if constructed else values[keys[-1]]
        for key in keys:
            if values[key] in (last, None) or (values[key] is False and not last):
                builder.map(prefix + str(key), **({ddp_name: last} if last is not None else {}))
                continue
            row = (
                "megatron_bridge.constructor-takes-one"
                if constructed
                else "megatron_bridge.assigned-last"
            )
            builder.record(row, prefix + str(key), values[key], gather=ddp_name, last=keys[-1])
            builder.fields[ddp_name] = bool(last)


def _of_owners(
    payload: Mapping[Any, Any], builder: ImportBuilder, base: str | None
) -> ImportReport:
    """Import a run without `mixed_precision`: its model, optimizer and DDP sections decide by themselves."""
    for where, value in _owned(payload, builder):
        name = _field(where)
        builder.map(where, **({TWINS.get(name, name): value} if value is not None else {}))
    is_half = builder.fields.get("fp16") or builder.fields.get("bf16")
    if base is not None:
        if not is_half:
            builder.leave_mode(base, default=None)
        return builder.finish()
    builder.record("megatron_bridge.without-mixed_precision-the-model", "mixed_precision", None)
    builder.fields |= {} if is_half else {"fp32": True}
    in_fp32 = None if builder.fields.get("fp32") else False
    owners = {"grad_reduce_in_fp32": "ddp"}
    builder.imply_scheme(
        lambda field: f"{owners.get(field, 'model')}.{field}", in_fp32=in_fp32, why=OWN
    )
    return builder.finish()


def _report_others(
    payload: Mapping[Any, Any], imported: ImportReport, builder: ImportBuilder
) -> ImportReport:
    """Report the owners' own values, which `mixed_precision` overwrites."""
    values, acting = imported.config.to_dict(full=True), meaning(imported.config)
    for where, value in _owned(payload, builder):
        name = _field(where)
        is_same = value == values[name] or (value in (None, False) and not values[name])
        is_derived = name in DTYPES and not is_stated(imported.config, name)
        if is_same or is_derived or TWINS.get(name, name) not in acting:
            builder.map(where)
        else:
            builder.record(
                "megatron_bridge.written-over", where, value, name=name, held=values[name]
            )
    return builder.finish(semantics=imported.semantics, recipe=imported.recipe)


def _field(where: str) -> str:
    name = where.rpartition(".")[2]
    return "autocast_enabled" if name == "enable_autocast" else name


def _owned(payload: Mapping[Any, Any], builder: ImportBuilder) -> Iterator[tuple[str, Any]]:
    """Yield the owners' own settings that have a field of the peer's class, and their values; report the others."""
    owners = [owner for owner in OWNERS if isinstance(payload.get(owner), Mapping)]
    for where, value in (
        (f"{owner}.{key}", value) for owner in owners for key, value in payload[owner].items()
    ):
        name, target = _field(where), at(value, "_target_")
        plain = (
            value
            if target is None
            else SPELLINGS.get(str(target).lower().removeprefix("torch."), str(target))
        )
        if name in PEER_FIELDS:
            yield where, named_dtype(value, where) if name in DTYPES else value
        elif where.partition(".")[0] == ELSEWHERE.get(name):
            builder.map(where, **({} if reads_as_default(name, plain) else {name: plain}))
        elif name == "quant_recipe" and MODULES in builder.fields:
            builder.map(where)  # a sync wrote it from the rows
        elif name == "quant_recipe" and isinstance(value, Mapping):
            builder.record("megatron_bridge.its-numbers-of-layers-count", where, value)
        else:
            report_other(builder, where, name, plain)


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for Megatron Bridge's, or None."""
    if document.kind == "python":
        framework = frameworks.recognise(document)
        is_own = framework is not None and framework.name == "Megatron Bridge"
        return Recognised(0.95, framework.evidence) if framework is not None and is_own else None
    if found := TABLE.recognise(document):
        return found
    top, inner = document.mapping, document.mapping.get("mixed_precision")
    if isinstance(inner, Mapping) and any(
        name in inner for name in (*PEER_FIELDS, MODULES, MADE_BY)
    ):
        return Recognised(0.9, "has `mixed_precision`, a mapping of its fields")
    if isinstance(inner, str) and inner in REGISTRY and "_mixed" in inner.replace("-", "_"):
        return Recognised(0.9, f"has `mixed_precision: {inner}`, one of its recipes")
    if any(
        str(at(top, f"{owner}._target_")).startswith(("megatron.", "bridge.")) for owner in OWNERS
    ):
        return Recognised(0.7, "has sections with Megatron's targets, as its run configs do")
    known = [name for name in (*PEER_FIELDS, MODULES) if name in top]
    # `bf16` and `fp16` alone say nothing of whose they are: transformers and Axolotl have them with another meaning.
    if not set(known) <= {"bf16", "fp16"} and len(known) > 1 and len(known) * 2 >= len(top):
        certainty = (
            0.6 if len(known) == len(top) else 0.4
        )  # among other keys `bf16` and `fp8` are other systems' too
        return Recognised(
            certainty, f"has {', '.join(f'`{name}`' for name in known[:3])}, fields of its class"
        )
    return None


CONTEXT = (
    ContextKey("shape", "fields, strings (for overrides) or name", use=("export",)),
    ContextKey("bridge_version", "Megatron Bridge of the run", use=("export",)),
    *LAYOUT,
)


def read(document: Document) -> Any:
    """Return a program as the document itself, and the content of any other."""
    return document if document.kind == "python" else document.content


SYSTEM = System(
    "megatron-bridge",
    "Megatron Bridge",
    TABLE.version,
    export,
    import_,
    recognise,
    as_yaml,
    read,
    CONTEXT,
    import_all,
)

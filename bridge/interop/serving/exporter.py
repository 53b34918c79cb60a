"""A manifest as the `quantization_config` of a serving system.

    export(manifest, "vllm").payload       # {"quant_method": "fp8", "weight_block_size": [128, 128], ...}

Lists of modules hold whole names. A shorter name, ``mlp.gate`` say, also takes ``mlp.gate_proj`` in a system that looks
for parts of names. The experts of a layer are one entry.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError, listed
from bridge.interop.contract import ExportReport, Unmapped
from bridge.interop.serving.formats import COMPRESSED, SERVED
from bridge.interop.serving.names import BY_TYPE, split
from bridge.interop.serving.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from bridge.interop.serving.manifest import Manifest, ManifestRow
    from bridge.interop.serving.systems import ServingSystem

FORWARD = frozenset({"e4m3", "e2m1"})
"""Formats that serving systems multiply."""


def export(manifest: Manifest, system: str) -> ExportReport:
    """Return the quantisation config of a manifest for a system of `SYSTEMS`; an empty payload: nothing is quantised.

    Raises:
        RunConfigError: The names of modules are not known.
    """
    require_names(manifest)
    target = SYSTEMS[system]
    formed = {row.scheme for row in manifest.rows if _has_form(row)}
    found = [name for name in manifest.schemes if name in formed]
    written = ([name for name in found if name in target.mixed] or found[:1]) if len(found) > 1 else found
    unmapped = list(_differences(manifest, target, written))
    if not written:
        return ExportReport(payload={}, unmapped=tuple(unmapped))
    if len(written) == 1 and written[0] in target.fp8:
        keys = {**SERVED[written[0]].fp8, **target.keys.get(written[0], {})}
        return ExportReport(payload=_fp8(manifest, keys, written[0]), unmapped=tuple(unmapped))
    return ExportReport(payload=_compressed(manifest, written), unmapped=tuple(unmapped))


def require_names(manifest: Manifest) -> None:
    """Refuse a manifest with modules whose names where the model is served are not known."""
    if not manifest.unnamed:
        return
    roles = list(dict.fromkeys(row.role for row in manifest.unnamed))
    rule = f"the Hugging Face names of {listed(roles[:4])} are not known"
    rule += f" in family {manifest.family}" if manifest.family else " from the model's shape alone"
    remedy = f"State one of --model-type {', '.join(BY_TYPE)}, if the model is exported as one of these."
    raise RunConfigError(f"model: {rule}. {remedy}", path="model", rule=rule, remedy=remedy)


def _rows(manifest: Manifest, scheme: str) -> list[ManifestRow]:
    """Return the rows that are written in a scheme."""
    return [row for row in manifest.rows if row.scheme == scheme and _has_form(row) and row.role not in manifest.plain]


def _has_form(row: ManifestRow) -> bool:
    return row.scheme in SERVED and row.format in FORWARD


def _differences(manifest: Manifest, target: ServingSystem, written: list[str]) -> Iterator[Unmapped]:
    """Yield what the config cannot state, and where the system's values differ."""
    for scheme in manifest.schemes:
        rows = [row for row in manifest.rows if row.scheme == scheme]
        has_form = all(map(_has_form, rows))
        if scheme not in written or not has_form:
            why = "reads it where the model has no other scheme" if has_form else "has no form for it"
            detail = f"{target.title} {why}; {len(rows)} rows of the manifest are listed as not quantised"
            yield Unmapped("scheme", scheme, "unsupported", detail, "Serve these modules in high precision.")
        if scheme in written and scheme in target.differences:
            yield Unmapped("scheme", scheme, "semantics", **target.differences[scheme])
    plain = (row.role for row in manifest.rows if row.scheme in written and row.role in manifest.plain)
    for role in dict.fromkeys(plain):
        detail = f"the code of serving systems never quantises {role}, which training does; it is listed as such"
        yield Unmapped("module", role, "semantics", detail, "Keep it in high precision in training.")
    quantised = {row for scheme in written for row in _rows(manifest, scheme)}
    schemes = {name: row.scheme if row in quantised else None for row in manifest.rows for name in row.each()}
    refusals = split(schemes) if target is SYSTEMS["vllm"] else []
    for refused in refusals:
        yield Unmapped("module", "fused", "unsupported", refused.rstrip("."), "Give them one precision in training.")
    for note in manifest.notes:
        yield Unmapped("manifest", manifest.precision, "unsupported", note.rstrip("."), "Compare the two by hand.")


def _fp8(manifest: Manifest, keys: Mapping[str, object], scheme: str) -> dict[str, Any]:
    """Return a config of the fp8 dialect: its keys and the list of modules that are not quantised."""
    written = set(_rows(manifest, scheme))
    kept = (row for row in manifest.rows if row not in written)
    names = dict.fromkeys(name.partition(".*")[0] for row in kept for name in row.served)
    return {**keys, "fmt": "e4m3", "modules_to_not_convert": list(names)}


def _compressed(manifest: Manifest, written: list[str]) -> dict[str, Any]:
    """Return a config of compressed-tensors, a group for each scheme."""
    rows = {scheme: _rows(manifest, scheme) for scheme in written}
    quantised = {row for own in rows.values() for row in own}
    groups = {}
    for number, scheme in enumerate(written):
        served = SERVED[scheme]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(written) == 1 else _patterns(rows[scheme]),
            "weights": dict(served.weights),
            "input_activations": dict(served.inputs),
            "format": served.format,
        }
    return {
        "quant_method": COMPRESSED,
        "format": SERVED[written[0]].format if len(written) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _patterns(row for row in manifest.rows if row not in quantised),
        "kv_cache_scheme": None,
    }


def _patterns(rows: Iterable[ManifestRow]) -> list[str]:
    """Return names as compressed-tensors matches them; those of experts as an expression."""
    names = dict.fromkeys(name for row in rows for name in row.served)
    return [f"re:{re.escape(name)}$".replace(r"\*", r"\d+") if "*" in name else name for name in names]

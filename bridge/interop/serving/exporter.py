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
from bridge.interop.serving.formats import COMPRESSED, SERVED, SYSTEMS
from bridge.interop.serving.names import BY_TYPE, split

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from bridge.interop.serving.formats import ServingSystem
    from bridge.interop.serving.manifest import Manifest, ManifestRow

FORWARD = frozenset({"e4m3", "e2m1"})
"""Formats that serving systems multiply."""


def export(manifest: Manifest, system: str) -> ExportReport:
    """Return the quantisation config of a manifest for a system of `SYSTEMS`; an empty payload: nothing is quantised.

    RunConfigError where the names of modules are not known.
    """
    require_names(manifest)
    target = SYSTEMS[system]
    found = [name for name in manifest.schemes if any(map(_has_form, _in(manifest, name)))]
    chosen = [name for name in found if name in target.mixed] or found[:1] if len(found) > 1 else found
    written = {
        name: [row for row in _in(manifest, name) if _has_form(row) and row.role not in manifest.plain]
        for name in chosen
    }
    quantised = {row for rows in written.values() for row in rows}
    unmapped = (*_differences(manifest, target, chosen), *_fused(manifest, target, quantised))
    notes = [
        Unmapped("manifest", manifest.precision, "unsupported", note.rstrip("."), "Compare the two by hand.")
        for note in manifest.notes
    ]
    kept = [row for row in manifest.rows if row not in quantised]
    payload: dict[str, Any] = {}
    if chosen[1:] or (chosen and chosen[0] not in target.fp8):
        payload = _compressed(written, kept)
    elif chosen:
        names = dict.fromkeys(name.partition(".*")[0] for row in kept for name in row.served)
        keys = {**SERVED[chosen[0]].fp8, **target.keys.get(chosen[0], {})}
        payload = {**keys, "fmt": "e4m3", "modules_to_not_convert": list(names)}
    return ExportReport(payload=payload, unmapped=(*unmapped, *notes))


def require_names(manifest: Manifest) -> None:
    """Refuse a manifest with modules whose names where the model is served are not known."""
    if not manifest.unnamed:
        return
    roles = list(dict.fromkeys(row.role for row in manifest.unnamed))
    rule = f"the Hugging Face names of {listed(roles[:4])} are not known"
    rule += f" in family {manifest.family}" if manifest.family else " from the model's shape alone"
    remedy = f"State one of --model-type {', '.join(BY_TYPE)}, if the model is exported as one of these."
    raise RunConfigError(f"model: {rule}. {remedy}", path="model", rule=rule, remedy=remedy)


def _in(manifest: Manifest, scheme: str) -> list[ManifestRow]:
    return [row for row in manifest.rows if row.scheme == scheme]


def _has_form(row: ManifestRow) -> bool:
    return row.scheme in SERVED and row.format in FORWARD


def _differences(manifest: Manifest, target: ServingSystem, written: list[str]) -> Iterator[Unmapped]:
    """Yield what the config cannot state, and where the system's values differ."""
    for scheme in manifest.schemes:
        rows = _in(manifest, scheme)
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


def _fused(manifest: Manifest, target: ServingSystem, quantised: Collection[ManifestRow]) -> Iterator[Unmapped]:
    """Yield the modules that vLLM loads as one and that the config gives different schemes."""
    if target is SYSTEMS["vllm"]:
        schemes = {name: row.scheme if row in quantised else None for row in manifest.rows for name in row.each()}
        for refused in split(schemes):
            yield Unmapped(
                "module", "fused", "unsupported", refused.rstrip("."), "Give them one precision in training."
            )


def _compressed(written: Mapping[str, list[ManifestRow]], kept: list[ManifestRow]) -> dict[str, Any]:
    """Return a config of compressed-tensors, a group for each scheme."""
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if len(written) == 1 else _patterns(rows),
            "weights": dict(SERVED[scheme].weights),
            "input_activations": dict(SERVED[scheme].inputs),
            "format": SERVED[scheme].format,
        }
        for number, (scheme, rows) in enumerate(written.items())
    }
    return {
        "quant_method": COMPRESSED,
        "format": groups["group_0"]["format"] if len(written) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _patterns(kept),
        "kv_cache_scheme": None,
    }


def _patterns(rows: Iterable[ManifestRow]) -> list[str]:
    """Return names as compressed-tensors matches them; those of experts as an expression."""
    names = dict.fromkeys(name for row in rows for name in row.served)
    return [f"re:{re.escape(name)}$".replace(r"\*", r"\d+") if "*" in name else name for name in names]

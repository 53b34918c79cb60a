"""A manifest as the `quantization_config` of a serving system.

    export(manifest, "vllm").payload       # {"quant_method": "fp8", "weight_block_size": [128, 128], ...}

Lists of modules hold whole names. A shorter name, ``mlp.gate`` say, also takes ``mlp.gate_proj`` in a system that looks
for parts of names. The experts of a layer are one entry.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bridge.convert.serving.formats import COMPRESSED, SERVED, SYSTEMS
from bridge.convert.serving.manifest import Manifest, ManifestRow
from bridge.convert.serving.names import split
from bridge.read.contract import ExportReport, Unmapped


def export(manifest: Manifest, system: str) -> ExportReport:
    """Return the quantisation config of a manifest for a system of `SYSTEMS`; an empty payload: nothing is quantised.

    RunConfigError where the names of modules are not known.
    """
    manifest.require_names()
    target = SYSTEMS[system]
    found = [name for name in manifest.schemes if name in SERVED]
    chosen = (
        found
        if len(found) < 2
        else [name for name in found if name in target.get("mixed", SERVED)] or found[:1]
    )
    written = {
        row: row.scheme
        for row in manifest.rows
        if row.scheme in chosen and row.role not in manifest.plain
    }
    kept = [row for row in manifest.rows if row not in written]
    schemes = {
        name: written.get(row) for row in manifest.rows for name in row.each() if system == "vllm"
    }
    payload: dict[str, Any] = {}
    if chosen[1:] or (chosen and chosen[0] not in target.get("fp8", ())):
        payload = _compressed(
            {name: [row for row in written if row.scheme == name] for name in chosen}, kept
        )
    elif chosen:
        names = dict.fromkeys(name.partition(".*")[0] for row in kept for name in row.served)
        keys = {**SERVED[chosen[0]]["fp8"], **target.get("keys", {}).get(chosen[0], {})}
        payload = {**keys, "fmt": "e4m3", "modules_to_not_convert": list(names)}
    return ExportReport(
        payload=payload, unmapped=tuple(_differences(manifest, target, chosen, split(schemes)))
    )


def _differences(
    manifest: Manifest, target: Mapping[str, Any], chosen: list[str], refused: Iterable[str]
) -> Iterator[Unmapped]:
    """Yield what the config cannot state, where the system's values differ, and why the system refuses it."""
    for scheme in manifest.schemes:
        if scheme not in chosen:
            rows = sum(row.scheme == scheme for row in manifest.rows)
            why = (
                "reads it where the model has no other scheme"
                if scheme in SERVED
                else "has no form for it"
            )
            detail = (
                f"{target['title']} {why}; {rows} rows of the manifest are listed as not quantised"
            )
            yield Unmapped(
                "scheme", scheme, "unsupported", detail, "Serve these modules in high precision."
            )
        elif scheme in target["differences"]:
            yield Unmapped("scheme", scheme, "semantics", **target["differences"][scheme])
    for role in dict.fromkeys(
        row.role for row in manifest.rows if row.scheme in chosen and row.role in manifest.plain
    ):
        detail = f"the code of serving systems never quantises {role}, which training does; it is listed as such"
        yield Unmapped(
            "module", role, "semantics", detail, "Keep it in high precision in training."
        )
    for one in refused:
        yield Unmapped(
            "module",
            "fused",
            "unsupported",
            one.rstrip("."),
            "Give them one precision in training.",
        )
    for note in manifest.notes:
        yield Unmapped(
            "manifest",
            manifest.precision,
            "unsupported",
            note.rstrip("."),
            "Compare the two by hand.",
        )


def _compressed(written: dict[str, list[ManifestRow]], kept: list[ManifestRow]) -> dict[str, Any]:
    """Return a config of compressed-tensors, a group for each scheme."""
    groups: dict[str, Any] = {}
    for scheme, rows in written.items():
        form = SERVED[scheme]
        inner = {
            "weights": dict(form["weights"]),
            "input_activations": dict(form["inputs"]),
            "format": form["format"],
        }
        groups[f"group_{len(groups)}"] = {
            "targets": ["Linear"] if len(written) == 1 else _patterns(rows),
            **inner,
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
    return [
        f"re:{re.escape(name)}$".replace(r"\*", r"\d+") if "*" in name else name for name in names
    ]

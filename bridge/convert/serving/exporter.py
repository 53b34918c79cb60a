"""A manifest as the `quantization_config` of a serving system.

    export(manifest, "vllm").payload       # {"quant_method": "fp8", ...}

Lists of modules hold whole names. A shorter name, ``mlp.gate`` say, also takes ``mlp.gate_proj`` in
a system that looks for parts of names. The experts of a layer are one entry.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bridge.convert.serving.formats import COMPRESSED, SERVED, SYSTEMS
from bridge.convert.serving.manifest import Manifest, ManifestRow
from bridge.convert.serving.names import split
from bridge.read.foreign.reports import ExportReport, Unmapped


def export(manifest: Manifest, system: str) -> ExportReport:
    """Return the quantisation config of a manifest for a system of `SYSTEMS`.

    An empty payload: nothing is quantised.

    RunConfigError where the names of modules are not known.
    """
    manifest.require_names()
    target = SYSTEMS[system]
    chosen = _chosen(manifest, target)
    written: list[ManifestRow] = []
    kept: list[ManifestRow] = []
    of_vllm: dict[str, str | None] = {}
    for row in manifest.rows:
        scheme = None
        if row.scheme in chosen and row.role not in manifest.plain:
            scheme = row.scheme
            written.append(row)
        else:
            kept.append(row)
        if system == "vllm":
            of_vllm.update(dict.fromkeys(row.each(), scheme))
    payload: dict[str, Any] = {}
    if chosen[1:] or (chosen and chosen[0] not in target.get("fp8", ())):
        groups: dict[str, list[ManifestRow]] = {name: [] for name in chosen}
        for row in written:
            groups[str(row.scheme)].append(row)
        payload = _compressed(groups, kept)
    elif chosen:
        names: dict[str, None] = {}
        for row in kept:
            for name in row.served:
                names[name.partition(".*")[0]] = None
        keys = {**SERVED[chosen[0]]["fp8"], **target.get("keys", {}).get(chosen[0], {})}
        payload = {**keys, "fmt": "e4m3", "modules_to_not_convert": list(names)}
    differences = _differences(manifest, target, chosen, split(of_vllm))
    return ExportReport(payload=payload, unmapped=tuple(differences))


def _chosen(manifest: Manifest, target: Mapping[str, Any]) -> list[str]:
    """Return the schemes of a manifest that a config of the system can state together."""
    served = [name for name in manifest.schemes if name in SERVED]
    if len(served) < 2:
        return served
    mixed = target.get("mixed", SERVED)
    return [name for name in served if name in mixed] or served[:1]


def _differences(
    manifest: Manifest, target: Mapping[str, Any], chosen: list[str], refused: Iterable[str]
) -> Iterator[Unmapped]:
    """Yield what the config cannot state, where values differ, and why the system refuses it."""
    for scheme in manifest.schemes:
        if scheme not in chosen:
            rows = sum(row.scheme == scheme for row in manifest.rows)
            why = "has no form for it"
            if scheme in SERVED:
                why = "reads it where the model has no other scheme"
            listed = f"{rows} rows of the manifest are listed as not quantised"
            detail = f"{target['title']} {why}; {listed}"
            remedy = "Serve these modules in high precision."
            yield Unmapped("scheme", scheme, "unsupported", detail, remedy)
        elif scheme in target["differences"]:
            yield Unmapped("scheme", scheme, "semantics", **target["differences"][scheme])
    roles: dict[str, None] = {}
    for row in manifest.rows:
        if row.scheme in chosen and row.role in manifest.plain:
            roles[row.role] = None
    for role in roles:
        never = f"the code of serving systems never quantises {role}, which training does"
        detail = f"{never}; it is listed as such"
        remedy = "Keep it in high precision in training."
        yield Unmapped("module", role, "semantics", detail, remedy)
    for sentence in refused:
        remedy = "Give them one precision in training."
        yield Unmapped("module", "fused", "unsupported", sentence.rstrip("."), remedy)
    for note in manifest.notes:
        remedy = "Compare the two by hand."
        yield Unmapped("manifest", manifest.precision, "unsupported", note.rstrip("."), remedy)


def _compressed(written: dict[str, list[ManifestRow]], kept: list[ManifestRow]) -> dict[str, Any]:
    """Return a config of compressed-tensors, a group for each scheme."""
    groups: dict[str, Any] = {}
    for scheme, rows in written.items():
        form = SERVED[scheme]
        targets = ["Linear"]
        if len(written) > 1:
            targets = _patterns(rows)
        groups[f"group_{len(groups)}"] = {
            "targets": targets,
            "weights": dict(form["weights"]),
            "input_activations": dict(form["inputs"]),
            "format": form["format"],
        }
    whole_format = "mixed-precision"
    if len(written) == 1:
        whole_format = groups["group_0"]["format"]
    return {
        "quant_method": COMPRESSED,
        "format": whole_format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _patterns(kept),
        "kv_cache_scheme": None,
    }


def _patterns(rows: Iterable[ManifestRow]) -> list[str]:
    """Return names as compressed-tensors matches them; those of experts as an expression."""
    patterns: dict[str, str] = {}
    for row in rows:
        for name in row.served:
            patterns[name] = name
            if "*" in name:
                patterns[name] = f"re:{re.escape(name)}$".replace(r"\*", r"\d+")
    return list(patterns.values())

"""`export`: writes a manifest as the `quantization_config` of a serving system.

    export(manifest, "vllm").payload       # {"quant_method": "fp8", ...}

A model with a single scheme is written in the fp8 dialect, if the system reads the scheme in this
dialect. Other models are written in compressed-tensors, with a group for each scheme.

Lists of modules have complete names. A part of a name, such as `mlp.gate`, would also keep
`mlp.gate_proj` in a system that compares parts of names. The experts of a layer are a single entry.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bridge.convert.serving.formats import COMPRESSED_TENSORS, SERVED_SCHEMES, SERVING_SYSTEMS, VLLM
from bridge.convert.serving.manifest import Manifest, ManifestRow
from bridge.convert.serving.module_names import describe_fused_conflicts
from bridge.read.foreign.reports import ExportReport, Unmapped


def export(manifest: Manifest, system: str) -> ExportReport:
    """Return the quantization config of a manifest. The payload is empty if nothing is quantised.

    Args:
        manifest: The linear layers of the trained model.
        system: The system that serves it, a key of `SERVING_SYSTEMS`.

    Raises:
        RunConfigError: The names of modules are not known.
    """
    manifest.require_names()
    target = SERVING_SYSTEMS[system]
    schemes = _list_statable_schemes(manifest, target)
    quantised: list[ManifestRow] = []
    kept: list[ManifestRow] = []
    for row in manifest.rows:
        if _is_quantised(row, manifest, schemes):
            quantised.append(row)
        else:
            kept.append(row)
    payload: dict[str, Any] = {}
    if len(schemes) == 1 and schemes[0] in target.get("fp8", ()):
        payload = _make_fp8_config(schemes[0], target, kept)
    elif schemes:
        payload = _make_compressed_config(schemes, quantised, kept)
    unmapped = list(_list_differences(manifest, target, schemes))
    if system == VLLM:
        unmapped += _list_vllm_refusals(manifest, schemes)
    for note in manifest.notes:
        remedy = "Compare the two by hand."
        detail = note.rstrip(".")
        unmapped.append(Unmapped("manifest", manifest.precision, "unsupported", detail, remedy))
    return ExportReport(payload=payload, unmapped=tuple(unmapped))


def _list_statable_schemes(manifest: Manifest, target: Mapping[str, Any]) -> list[str]:
    """Return the schemes of a manifest that a config of the system can state together."""
    served = [name for name in manifest.schemes if name in SERVED_SCHEMES]
    if len(served) < 2:
        return served
    mixed = target.get("mixed", SERVED_SCHEMES)
    return [name for name in served if name in mixed] or served[:1]


def _list_differences(
    manifest: Manifest, target: Mapping[str, Any], schemes: Sequence[str]
) -> Iterator[Unmapped]:
    """Yield the records of schemes and modules that the config cannot state exactly.

    Args:
        manifest: The linear layers of the trained model.
        target: The row of the serving system.
        schemes: The schemes that the config states.
    """
    for scheme in manifest.schemes:
        if scheme not in schemes:
            yield _make_unwritten_record(manifest, target, scheme)
        elif scheme in target["differences"]:
            yield Unmapped("scheme", scheme, "semantics", **target["differences"][scheme])
    roles: dict[str, None] = {}
    for row in manifest.rows:
        if row.scheme in schemes and row.role in manifest.plain:
            roles[row.role] = None
    for role in roles:
        detail = (
            f"the code of serving systems never quantises {role}, which training does; "
            "it is listed as such"
        )
        remedy = "Keep it in high precision in training."
        yield Unmapped("module", role, "semantics", detail, remedy)


def _make_unwritten_record(manifest: Manifest, target: Mapping[str, Any], scheme: str) -> Unmapped:
    """Return the record of a scheme that the config does not state."""
    count = sum(row.scheme == scheme for row in manifest.rows)
    reason = "has no form for it"
    if scheme in SERVED_SCHEMES:
        reason = "reads it where the model has no other scheme"
    detail = f"{target['title']} {reason}; {count} rows of the manifest are listed as not quantised"
    remedy = "Serve these modules in high precision."
    return Unmapped("scheme", scheme, "unsupported", detail, remedy)


def _is_quantised(row: ManifestRow, manifest: Manifest, schemes: Sequence[str]) -> bool:
    """Return whether the config quantises the modules of a row."""
    return row.scheme in schemes and row.role not in manifest.plain


def _list_vllm_refusals(manifest: Manifest, schemes: Sequence[str]) -> Iterator[Unmapped]:
    """Yield records about groups of modules with several schemes that vLLM loads as one module."""
    scheme_of: dict[str, str | None] = {}
    for row in manifest.rows:
        scheme = None
        if _is_quantised(row, manifest, schemes):
            scheme = row.scheme
        for name in row.iterate_served_names():
            scheme_of[name] = scheme
    for sentence in describe_fused_conflicts(scheme_of):
        remedy = "Give them one precision in training."
        yield Unmapped("module", "fused", "unsupported", sentence.rstrip("."), remedy)


def _make_fp8_config(
    scheme: str, target: Mapping[str, Any], kept: Iterable[ManifestRow]
) -> dict[str, Any]:
    """Return a config of the fp8 dialect, which has one scheme.

    Args:
        target: The row of the serving system.
        kept: The rows that stay in high precision.
    """
    names: dict[str, None] = {}
    for row in kept:
        for name in row.served:
            names[name.partition(".*")[0]] = None
    further_keys = target.get("keys", {}).get(scheme, {})
    return {
        **SERVED_SCHEMES[scheme]["fp8"],
        **further_keys,
        "fmt": "e4m3",
        "modules_to_not_convert": list(names),
    }


def _make_compressed_config(
    schemes: Sequence[str], quantised: Sequence[ManifestRow], kept: Sequence[ManifestRow]
) -> dict[str, Any]:
    """Return a config of compressed-tensors, with a group for each scheme.

    Args:
        kept: The rows that stay in high precision.
    """
    groups: dict[str, Any] = {}
    for number, scheme in enumerate(schemes):
        form = SERVED_SCHEMES[scheme]
        targets = ["Linear"]  # every linear layer; with several schemes, each group lists modules
        if len(schemes) > 1:
            targets = _make_patterns(row for row in quantised if row.scheme == scheme)
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": dict(form["weights"]),
            "input_activations": dict(form["inputs"]),
            "format": form["format"],
        }
    config_format = "mixed-precision"
    if len(schemes) == 1:
        config_format = SERVED_SCHEMES[schemes[0]]["format"]
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": config_format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _make_patterns(kept),
        "kv_cache_scheme": None,
    }


def _make_patterns(rows: Iterable[ManifestRow]) -> list[str]:
    """Return names in the form for compressed-tensors. Names of experts become an expression."""
    patterns: dict[str, None] = {}
    for row in rows:
        for name in row.served:
            pattern = name
            if "*" in name:
                pattern = f"re:{re.escape(name)}$".replace(r"\*", r"\d+")
            patterns[pattern] = None
    return list(patterns)

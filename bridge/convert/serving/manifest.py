"""The manifest of a trained model: the format of each linear layer's forward GEMM, and its name where it is served.

    manifest = Manifest.of(plan, model_type="qwen3_moe")
    manifest.rows[0].served          # ('model.layers.0.self_attn.q_proj', ...)

It is derived from the plan. The record of a run, where there is one, overrules it: that is what the run multiplied.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from bridge.convert.serving.names import BY_TYPE, Family, family_of, place_of
from bridge.errors import RunConfigError, listed
from bridge.plan.precision_plan import LOW, PlanLayer, PlanModule, PrecisionPlan
from bridge.precision import strict_yaml
from bridge.runtime.audit.record import Record

KINDS = frozenset({"linear", "router", "gate", "head"})
"""Kinds of modules that a quantisation config could take: they multiply an input by a weight."""
ATTENTION = "The attention core runs in FP8 in training, which no quantisation config of weights and inputs states."
LARGEST = 64 * 2**20
"""Bytes of the largest manifest or serving config that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestRow:
    """One linear layer of the trained model; the experts of a layer are one row."""

    layer: str
    """Label of the plan: the layer's number from 1, "mtp 1" or "output"."""
    module: str
    """Megatron's name in the whole model."""
    kind: str
    """linear, router, gate or head."""
    scheme: str | None
    """Scaling scheme of its forward GEMM; None: high precision."""
    format: str
    """What the forward GEMM multiplies: e4m3, bf16, ..."""
    copies: int = 1
    """Copies in the layer: one per expert."""
    served: tuple[str, ...] = ()
    """Names in the Hugging Face checkpoint, every expert written ``*``; empty: none is known."""

    @property
    def role(self) -> str:
        """The module's name without its layer: "mlp.router", "self_attention.linear_qkv", "output_layer"."""
        return place_of(self.module)[-1]

    def each(self) -> Iterator[str]:
        """Yield the name of every copy in the checkpoint."""
        for name in self.served:
            yield from (
                name.replace("*", str(number))
                for number in range(self.copies if "*" in name else 1)
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The linear layers of a trained model."""

    precision: str
    mode: str
    """Dtype of what is in high precision: bf16, fp16 or fp32."""
    family: str | None
    """Family of models that names the modules; None: not known."""
    plain: tuple[str, ...] = ()
    """As `Family.plain`."""
    rows: tuple[ManifestRow, ...]
    notes: tuple[str, ...] = ()
    """What the rows do not show, as sentences."""

    @classmethod
    def of(
        cls, plan: PrecisionPlan, *, record: Record | None = None, model_type: str | None = None
    ) -> Self:
        """Return the manifest of a plan; a record of what the run multiplied overrules it.

        The family of the names is that of `model_type`, or the only one that the shape fits. RunConfigError where no
        family has this model type.
        """
        family = family_of(plan.shape, model_type)
        ran = (
            {(row.layer, row.module): row for row in record.gemms if row.gemm == "fprop"}
            if record
            else {}
        )
        rows: list[ManifestRow] = []
        changed = 0
        modules = [
            (layer, one) for layer in plan.layers for one in layer.modules if one.kind in KINDS
        ]
        for layer, module in modules:
            row, found = _planned(plan, family, layer, module), ran.get((layer.label, module.name))
            if found is not None:
                planned, scheme = row, None if found.scheme == "none" else found.scheme
                row = replace(planned, scheme=scheme, format=found.right)
                changed += row != planned
            rows.append(row)
        notes = [*([ATTENTION] if plan.settings.attention else []), *plan.settings.notes]
        notes += (
            [f"The record of the run overrules the plan in {changed} of {len(rows)} rows."]
            if changed
            else []
        )
        return cls(
            precision=plan.label,
            mode=plan.settings.mode,
            family=family.name,
            plain=family.plain,
            rows=tuple(rows),
            notes=tuple(notes),
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the manifest of a file with one as plain data."""
        try:
            found = json.loads(strict_yaml.read_bytes(path, error=RunConfigError, limit=LARGEST))
            rows = tuple(
                ManifestRow(**{**row, "served": tuple(row["served"])}) for row in found.pop("rows")
            )
            lists: dict[str, Any] = {name: tuple(found.pop(name)) for name in ("plain", "notes")}
            return cls(rows=rows, **found, **lists)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            rule, remedy = (
                "must be a folder of a run, or a manifest",
                "Write one with `manifest NAME --json`.",
            )
            raise RunConfigError.of("--run", rule, str(path), remedy) from None

    def require_names(self) -> None:
        """Refuse modules whose names where the model is served are not known."""
        roles = list(dict.fromkeys(row.role for row in self.rows if not row.served))
        if roles:
            rule = f"the Hugging Face names of {listed(roles[:4])} are not known"
            rule += f" in family {self.family}" if self.family else " from the model's shape alone"
            remedy = f"State one of --model-type {', '.join(BY_TYPE)}, if the model is exported as one of these."
            raise RunConfigError(f"model: {rule}. {remedy}", path="model", rule=rule, remedy=remedy)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The scaling schemes of the rows, the most frequent first."""
        counts = Counter(row.scheme for row in self.rows if row.scheme is not None)
        return tuple(scheme for scheme, _ in counts.most_common())


def _planned(
    plan: PrecisionPlan, family: Family, layer: PlanLayer, module: PlanModule
) -> ManifestRow:
    path = plan.paths.path(layer.label, (layer.number or 1) - 1, module.name)
    forward = module.row("fprop") or module.row("forward")
    multiplied = forward.format if forward is not None else plan.settings.mode
    experts = plan.shape.experts if module.name.startswith("experts.") else None
    return ManifestRow(
        layer=layer.label,
        module=path,
        kind=module.kind,
        scheme=module.scheme if multiplied in LOW else None,
        format=multiplied,
        copies=1 if experts is None else experts.num_experts,
        served=family.served(path, plan.shape.num_layers),
    )

"""`Manifest`: the linear layers of a trained model, with their forward formats and served names.

    manifest = Manifest.from_plan(plan, model_type="qwen3_moe")
    manifest.rows[0].served          # ('model.layers.0.self_attn.q_proj', ...)

It is made from the plan. If there is a record of the run, the formats of the record replace the
planned formats, since the run used them.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bridge.convert.serving.module_names import (
    FAMILY_BY_TYPE,
    ROUTER,
    ModelFamily,
    get_family,
    parse_module_path,
)
from bridge.errors import RunConfigError, listed
from bridge.plan.plan_layers import LOW_FORMATS, PlanLayer, PlanModule
from bridge.plan.precision_plan import PrecisionPlan
from bridge.precision import strict_yaml
from bridge.runtime.audit.record import GemmRow, Record

LINEAR_KINDS = frozenset({"linear", "router", "gate", "head"})
"""Kinds of modules that multiply an input by a weight, so that serving could quantise them."""
FP8_ATTENTION_NOTE = (
    "The attention core runs in FP8 in training, "
    "which no quantisation config of weights and inputs states."
)
MAX_SHOWN_ROLES = 4
"""The most modules without a known name that an error lists."""
MAX_FILE_BYTES = 64 * 2**20
"""Bytes of the largest manifest or serving config that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestRow:
    """A linear layer of the trained model. The experts of a layer are a single row."""

    layer: str
    """Label of the plan: the layer's number from 1, "mtp 1" or "output"."""
    module: str
    """Megatron's name in the whole model."""
    kind: str
    """linear, router, gate or head."""
    scheme: str | None
    """Scaling scheme of its forward GEMM; None: high precision."""
    format: str
    """Format of the operands of the forward GEMM: e4m3, bf16, ..."""
    copies: int = 1
    """The number of copies in the layer: a copy for each expert."""
    served: tuple[str, ...] = ()
    """Names in the Hugging Face checkpoint, with `*` for an expert's number. Empty: not known."""

    @property
    def role(self) -> str:
        """The module's name without its layer: "mlp.router", "output_layer"."""
        return parse_module_path(self.module).role

    def iterate_served_names(self) -> Iterator[str]:
        """Yield the name of every copy in the checkpoint."""
        for name in self.served:
            copies = 1
            if "*" in name:
                copies = self.copies
            for number in range(copies):
                yield name.replace("*", str(number))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The linear layers of a trained model."""

    precision: str
    """The label of the precision."""
    mode: str
    """Dtype of high precision: bf16, fp16 or fp32."""
    family: str | None
    """Family of models by which the modules are named; None: not known."""
    plain: tuple[str, ...] = ()
    """Roles that no serving system quantises, as in `ModelFamily.plain`."""
    rows: tuple[ManifestRow, ...]
    notes: tuple[str, ...] = ()
    """Facts that the rows do not show, as sentences."""

    @classmethod
    def from_plan(
        cls, plan: PrecisionPlan, *, record: Record | None = None, model_type: str | None = None
    ) -> Self:
        """Return the manifest of a plan.

        Args:
            plan: The plan of the training.
            record: The record of the run. Its formats replace the planned formats.
            model_type: The `model_type` of the Hugging Face config. None: the family is used that
                alone fits the shape.

        Raises:
            RunConfigError: No family has this model type.
        """
        family = get_family(plan.shape, model_type)
        gemms = _collect_forward_gemms(record)
        rows: list[ManifestRow] = []
        overruled_count = 0
        for layer in plan.layers:
            for module in layer.modules:
                if module.kind not in LINEAR_KINDS:
                    continue
                planned = _make_planned_row(plan, family, layer, module)
                row = _apply_gemm_record(planned, gemms.get((layer.label, module.name)))
                if row != planned:
                    overruled_count += 1
                rows.append(row)
        notes: list[str] = []
        if plan.settings.attention:
            notes.append(FP8_ATTENTION_NOTE)
        notes += plan.settings.notes
        if overruled_count:
            notes.append(
                f"The record of the run overrules the plan in {overruled_count} of {len(rows)} rows."
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
    def from_file(cls, path: Path) -> Self:
        """Return the manifest of a file that `manifest --json` wrote.

        Raises:
            RunConfigError: `manifest --json` did not write the file.
        """
        try:
            content = json.loads(
                strict_yaml.read_bytes(path, error=RunConfigError, limit=MAX_FILE_BYTES)
            )
            rows: list[ManifestRow] = []
            for row in content.pop("rows"):
                rows.append(ManifestRow(**{**row, "served": tuple(row["served"])}))
            for name in ("plain", "notes"):
                content[name] = tuple(content[name])
            return cls(rows=tuple(rows), **content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            rule = "must be a folder of a run, or a manifest"
            remedy = "Write one with `manifest NAME --json`."
            raise RunConfigError.of("--run", rule, str(path), remedy) from None

    def require_names(self) -> None:
        """Refuse a manifest with modules whose names in the checkpoint are not known.

        Raises:
            RunConfigError: The manifest has such modules. The message names some of them.
        """
        roles = list(dict.fromkeys(row.role for row in self.rows if not row.served))
        if not roles:
            return
        names = listed(roles[:MAX_SHOWN_ROLES])
        rule = f"the Hugging Face names of {names} are not known from the model's shape alone"
        if self.family:
            rule = f"the Hugging Face names of {names} are not known in family {self.family}"
        types = self._list_fitting_types()
        remedy = "No known family of models has names for all of its linear layers."
        if types:
            listed_types = ", ".join(types)
            remedy = f"State one of --model-type {listed_types}, if the model is exported as one of these."
        raise RunConfigError(f"model: {rule}. {remedy}", path="model", rule=rule, remedy=remedy)

    def _list_fitting_types(self) -> list[str]:
        """Return the model types whose family has a name for every module.

        A family with experts does not fit a model without a router.
        """
        has_router = any(row.role == ROUTER for row in self.rows)
        types: list[str] = []
        for model_type, family in FAMILY_BY_TYPE.items():
            has_names = all(family.served(row.module, 0) for row in self.rows)
            if has_names and (ROUTER in family.names) is has_router:
                types.append(model_type)
        return types

    @property
    def schemes(self) -> tuple[str, ...]:
        """The scaling schemes of the rows, the most frequent first."""
        counts = Counter(row.scheme for row in self.rows if row.scheme is not None)
        return tuple(scheme for scheme, _ in counts.most_common())


def _collect_forward_gemms(record: Record | None) -> dict[tuple[str, str], GemmRow]:
    """Return (layer, module) -> its forward GEMM in the record. Empty if there is no record."""
    gemms: dict[tuple[str, str], GemmRow] = {}
    if record is not None:
        for row in record.gemms:
            if row.gemm == "fprop":
                gemms[row.layer, row.module] = row
    return gemms


def _apply_gemm_record(planned: ManifestRow, gemm: GemmRow | None) -> ManifestRow:
    """Return a planned row with the format of a recorded GEMM, or unchanged if `gemm` is None."""
    if gemm is None:
        return planned
    scheme = None
    if gemm.scheme != "none":
        scheme = gemm.scheme
    return replace(planned, scheme=scheme, format=gemm.right)


def _make_planned_row(
    plan: PrecisionPlan, family: ModelFamily, layer: PlanLayer, module: PlanModule
) -> ManifestRow:
    """Return the row of a module by the plan."""
    path = plan.paths.path(layer.label, (layer.number or 1) - 1, module.name)
    forward = module.row("fprop") or module.row("forward")
    forward_format = plan.settings.mode
    if forward is not None:
        forward_format = forward.format
    scheme = None
    if forward_format in LOW_FORMATS:
        scheme = module.scheme
    copies = 1
    if module.name.startswith("experts.") and plan.shape.experts is not None:
        copies = plan.shape.experts.num_experts
    return ManifestRow(
        layer=layer.label,
        module=path,
        kind=module.kind,
        scheme=scheme,
        format=forward_format,
        copies=copies,
        served=family.served(path, plan.shape.num_layers),
    )

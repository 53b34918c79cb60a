"""`compute_training_side`: the training side of a comparison with rollout, also without sizes.

A run may state no sizes of its model, since the checkpoint has them. The precision does not depend
on the sizes, except for the number of layers, from which the last layers are counted. So small
models replace the unknown model: a dense model, a model with experts, and, if the rollout names
modules of it, a model with multi-latent attention. They have just enough layers for first, last and
other layers. Their numbers of layers and modules are never shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bridge.convert.rollout.engine import Rollout
from bridge.convert.serving.manifest import Manifest
from bridge.convert.serving.module_names import FAMILY_BY_TYPE, ROUTER
from bridge.errors import RunConfigError
from bridge.plan.precision_plan import PrecisionPlan, make_plan
from bridge.preflight.run import Run

REQUIRED_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
"""Settings without which a model has no plan."""
PRECISION_FIELDS = (
    "bf16",
    "fp16",
    "params_dtype",
    "fp8",
    "fp8_recipe",
    "fp8_param",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "fp4",
    "fp4_recipe",
    "fp4_param",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "moe_router_dtype",
    "quant_recipe",
)
"""Fields that affect the plan of a model. The small models have the run's values of them."""
SUBSTITUTE_SIZES = {
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 4,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "transformer_impl": "transformer_engine",
}
SUBSTITUTE_EXPERTS = {
    "num_moe_experts": 2,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "moe_grouped_gemm": True,
}
SUBSTITUTE_LATENT_ATTENTION = {
    "multi_latent_attention": True,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
}
DENSE_FAMILY = "llama"
MOE_FAMILY = "qwen2_moe"
LATENT_FAMILY = "deepseek_v3"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSide:
    """The training side of a comparison."""

    manifest: Manifest
    plan: PrecisionPlan
    num_layers: int
    first: int
    """First layers that training keeps in high precision."""
    last: int
    """Last layers that training keeps in high precision."""
    is_substitute: bool
    """Whether small models replace a model whose sizes are not stated."""


def compute_training_side(
    run: Run, rollout: Rollout, model_type: str | None = None
) -> TrainingSide:
    """Return the training side of a run.

    Args:
        run: The run, which may state no sizes.
        rollout: The other side. The small models have the layers and modules that it names.
        model_type: The `model_type` of the Hugging Face config, for the names of modules.

    Raises:
        RunConfigError: The run has no plan for another reason than missing sizes.
    """
    absent = [name for name in REQUIRED_SIZES if run.model.get(name) is None]
    if not absent:
        plan = make_plan(run.prediction)
        manifest = Manifest.from_plan(plan, model_type=model_type)
        return _make_from_plan(manifest, plan, is_substitute=False)
    if run.reading.uncertainty.no_plan_reason is not None:
        raise RunConfigError(f"{run.name}: {run.reading.uncertainty.no_plan_reason}")
    return _make_from_substitutes(run, rollout, model_type)


def _make_from_substitutes(run: Run, rollout: Rollout, model_type: str | None) -> TrainingSide:
    """Return the training side of a run without sizes, by small models."""
    at_start, at_end = _count_first_last_layers(run)
    num_layers = max(rollout.first, at_start) + max(rollout.last, at_end) + 1
    dense = _plan_substitute(run, num_layers, {})
    manifests = [Manifest.from_plan(dense, model_type=DENSE_FAMILY)]
    if model_type is None or ROUTER in FAMILY_BY_TYPE[model_type].names:
        with_experts = _plan_substitute(run, num_layers, SUBSTITUTE_EXPERTS)
        manifests.append(Manifest.from_plan(with_experts, model_type=MOE_FAMILY))
    latent = _plan_substitute(run, num_layers, SUBSTITUTE_LATENT_ATTENTION)
    with_latent = Manifest.from_plan(latent, model_type=LATENT_FAMILY)
    if model_type is None:
        has_latent = _has_kept_part(rollout, with_latent, _list_served_names(manifests))
    else:
        has_latent = "self_attention.linear_kv_down_proj" in FAMILY_BY_TYPE[model_type].names
    if has_latent:
        manifests.append(with_latent)
    return _make_from_plan(_merge_manifests(manifests), dense, is_substitute=True)


def _has_kept_part(rollout: Rollout, manifest: Manifest, names: Sequence[str]) -> bool:
    """Return whether the rollout keeps modules of a manifest that none of the other names matches.

    The rollout keeps modules by a part of their names.

    Args:
        names: The names of other modules.
    """
    unmatched = list_unmatched_parts(rollout, names)
    still_unmatched = list_unmatched_parts(rollout, [*names, *_list_served_names([manifest])])
    return still_unmatched != unmatched


def list_unmatched_parts(rollout: Rollout, names: Iterable[str]) -> list[str]:
    """Return the parts of names that the rollout keeps in high precision and that no name has."""
    known_names = list(names)
    unmatched: list[str] = []
    for part in rollout.kept_parts:
        if not any(part in name for name in known_names):
            unmatched.append(part)
    return unmatched


def _list_served_names(manifests: Sequence[Manifest]) -> list[str]:
    """Return the names of all modules of manifests in the checkpoint."""
    names: list[str] = []
    for manifest in manifests:
        for row in manifest.rows:
            names.extend(row.served)
    return names


def _merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Return the first manifest, with the rows of roles that only the other manifests have."""
    rows = list(manifests[0].rows)
    for manifest in manifests[1:]:
        roles = {row.role for row in rows}
        for row in manifest.rows:
            if row.role not in roles:
                rows.append(row)
    return replace(manifests[0], rows=tuple(rows))


def _make_from_plan(
    manifest: Manifest, plan: PrecisionPlan, *, is_substitute: bool
) -> TrainingSide:
    """Return the training side of a plan, with the numbers of first and last layers it keeps."""
    layers = [layer for layer in plan.layers if layer.number is not None and not layer.is_mtp]
    first = 0
    last = 0
    if any(layer.low for layer in layers):
        while not layers[first].low:
            first += 1
        while not layers[-1 - last].low:
            last += 1
    return TrainingSide(
        manifest=manifest,
        plan=plan,
        num_layers=plan.shape.num_layers,
        first=first,
        last=last,
        is_substitute=is_substitute,
    )


def _count_first_last_layers(run: Run) -> tuple[int, int]:
    """Return how many first and last layers the run states to keep in BF16."""
    owner = run.prediction.sections["model"]
    if not owner.get_stated("first_last_layers_bf16"):
        return 0, 0
    counts: list[int] = []
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        count = owner.get_stated(name)
        if count is None:
            count = 1
        counts.append(int(count))
    return counts[0], counts[1]


def _plan_substitute(
    run: Run, num_layers: int, extra_fields: Mapping[str, object]
) -> PrecisionPlan:
    """Return the plan of a small model in the precision of a run.

    Args:
        num_layers: The layers of the small model.
        extra_fields: Fields of the model. They replace fields of `SUBSTITUTE_SIZES`.
    """
    precision = {name: run.model[name] for name in PRECISION_FIELDS if name in run.model}
    model = {**precision, **SUBSTITUTE_SIZES, **extra_fields, "num_layers": num_layers}
    sections = {**run.sections, "model": model, "peft": None}
    uncertainty = replace(run.reading.uncertainty, unread_options=())
    reading = replace(run.reading, uncertainty=uncertainty)
    return make_plan(replace(run, sections=sections, reading=reading).prediction)

"""Precision of single modules: rows and matchers that do not select what they say, and payloads without effect."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bridge.precision.matchers import EVALUATION, TRAINING, Effect, payload_faults, quant_recipes
from bridge.precision.module_schemes import stage_recipes
from bridge.precision.schemes import SCHEMES
from bridge.rules import selected_modules
from bridge.rules.context import RuleContext
from bridge.rules.factories import why_not_found
from bridge.rules.rule import Rule, mcore, owners_rule, target_rule
from bridge.rules.versions import dotted

MATCHING = "megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py, models/gpt/gpt_model.py"
PAYLOAD = "megatron-core 0.16.1 and 0.19.2 extensions/transformer_engine.py TEQuantizationRecipe"
MADE_FOR_ROW = re.compile(r"row_(\d+)(?:_\d+)?")
"""Name of a matcher that `bridge.precision.module_schemes` makes for a row."""


def _acts_nowhere(s: RuleContext) -> dict[str, Any] | None:
    """Return the rows without FP8 and FP4 of a run without either, unless a later row chooses one of them."""
    rows = selected_modules.own_rows(s)
    if s.is_low or not rows or any(row.precision.family is not None for row in rows):
        return None
    return {"value": [str(row) for row in rows][: selected_modules.MOST]}


def _effects(s: RuleContext) -> list[tuple[str, Effect]]:
    """Return (row or matcher, effect in training) of each matcher that is on; the chunks' recipes share payloads."""
    found: dict[str, Effect] = {}
    for recipe in quant_recipes(s.model.quant_recipe):
        for matcher in recipe.matchers:
            if matcher.training is not None:
                found.setdefault(_stated_name(s, matcher.name), matcher.training)
    return list(found.items())


def _stated_name(s: RuleContext, matcher: str) -> str:
    """Return the pattern of the row that a matcher was made for; a foreign matcher's own name."""
    made, rows = MADE_FOR_ROW.fullmatch(matcher), selected_modules.own_rows(s)
    return str(rows[int(made[1])]) if made is not None and int(made[1]) < len(rows) else matcher


def _without_effect(s: RuleContext) -> dict[str, Any] | None:
    """Return the schemes of a recipe that changes nothing, since the run enters no FP8 or FP4 context."""
    low = [effect for _, effect in _effects(s) if effect.family is not None]
    if s.is_low or not low or any(effect.chooses_in_high for effect in low):
        return None
    return {"schemes": ", ".join(dict.fromkeys(str(effect.scheme) for effect in low)), "value": len(low)}


def _stale(s: RuleContext) -> dict[str, Any] | None:
    acting = [name for name, effect in _effects(s) if effect.chooses_in_high]
    if s.is_low or not acting or s.is_emulated or s.model.disable_parameter_transpose_cache:
        return None
    return selected_modules.about(s, ", ".join(acting))


def _beyond_the_gpu(s: RuleContext) -> list[dict[str, Any]]:
    """Return the schemes of single modules that the GPU cannot run; PB602 and PB603 are about that of the run."""
    if s.capability is None or not s.has_gpu or s.is_emulated:
        return []
    chosen = {effect.scheme for _, effect in _effects(s) if effect.acts(is_low=s.is_low)} - {s.scheme}
    found = []
    for row in SCHEMES:
        least, limit = row.min_compute_capability, row.below_compute_capability
        needs = [f"{dotted(least)} or later"] if least is not None and s.capability < least else []
        needs += [f"below {dotted(limit)}"] if limit is not None and s.capability >= limit else []
        if row.name in chosen and needs:
            found.append(selected_modules.about(s, row.name, needs=" and ".join(needs), has=dotted(s.capability)))
    return found


def _stored(s: RuleContext) -> dict[str, Any] | None:
    names = [name for name, effect in _effects(s) if effect.stored]
    return selected_modules.about(s, ", ".join(names)) if names else None


def _differing_chunks(s: RuleContext) -> dict[str, Any] | None:
    """Return the stages whose model chunks have recipes of their own."""
    held = s.model.quant_recipe
    files = list(getattr(held, "files", held) or ()) if not isinstance(held, Mapping | str) else []
    stages = s.model.pipeline_model_parallel_size or 1
    if len(files) <= stages or len(files) % stages:
        return None
    differing = [stage for stage, file in enumerate(stage_recipes(files, stages)) if file is None]
    if not differing:
        return None
    rows = [str(row) for row in selected_modules.own_rows(s) if row.names_layers]
    return {"value": rows, "stages": ", ".join(map(str, differing)), "chunks": len(files) // stages}


def _off(s: RuleContext) -> list[dict[str, Any]]:
    held = s.model.quant_recipe
    matchers = held.get("matchers") if isinstance(held, Mapping) else None
    return [
        {"name": name, "value": row.get("pattern")}
        for name, row in (matchers.items() if isinstance(matchers, Mapping) else ())
        if isinstance(row, Mapping) and "enabled" not in row
    ]


def _missing_factories(s: RuleContext) -> list[dict[str, Any]]:
    """Return the quantizer factories, of the run and of single modules, that are not found on this machine."""
    if s.is_emulated:  # which refuses every factory
        return []
    factories = [row.get("custom_recipe_factory") for _, row in _payloads(s)]
    paths = [selected_modules.about(s, factory) for factory in factories if factory]
    for family in ("fp8", "fp4"):
        name = f"{family}_quantizer_factory"
        if s.is_custom and getattr(s, family) and getattr(s.model, name):
            paths.append({"path": name, "value": getattr(s.model, name)})
    return [{**one, "why": why} for one in paths if (why := why_not_found(str(one["value"]))) is not None]


def next_to_stored_weights(s: RuleContext) -> dict[str, Any] | None:
    """Return the patterns of a hybrid model's recipes in a run that stores its weights in FP8 or FP4.

    A GPT reads no fp8_param of a payload (PB289).
    """
    recipes = quant_recipes(s.model.quant_recipe) if s.is_hybrid and (s.gathers_fp8 or s.gathers_fp4) else ()
    return selected_modules.about(s, [matcher.select for matcher in recipes[0].matchers]) if recipes else None


def wrong_payloads(s: RuleContext) -> list[dict[str, str]]:
    """Return what Transformer Engine's per-module recipes refuse."""
    return [{"key": key, "what": fault} for key, row in _payloads(s) for fault in payload_faults(row)]


def _payloads(s: RuleContext) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name.part, recipe) of each payload; the chunks' recipes share them."""
    for recipe in quant_recipes(s.model.quant_recipe)[:1]:
        for name, body in recipe.configs.items():
            for part in (TRAINING, EVALUATION) if isinstance(body, Mapping) else ():
                if isinstance(body.get(part), Mapping):
                    yield f"{name}.{part}", body[part]


RULES = (
    owners_rule(
        heading="PB281: a choice per module that takes nothing",
        sync="strict",
        predicate=selected_modules.empty,
        error="model.quant_recipe: {noun} {name} takes no linear layer of this model{reason}",
        remedies=("use a name that `precision-bridge modules` lists{near}", "drop it"),
        verified=MATCHING,
        explanation="Transformer Engine's linear layers read a per-module recipe. Embeddings, norms, the router and "
        "the output layer do not, and compute in the dtype of the run.",
    ),
    Rule(
        heading="PB282: a choice per module behind an earlier one",
        predicate=selected_modules.hidden,
        warning="model.quant_recipe: {noun} {name} decides for no module: each that it selects is taken before, by "
        "{noun} {by}",
        remedies=("put it before {noun} {by}", "drop it"),
        verified=MATCHING,
    ),
    Rule(
        heading="PB283: FP8 or FP4 for modules that have none",
        predicate=selected_modules.unread,
        warning="model.quant_recipe: {noun} {name} asks for {precision} in {modules} too, which read no per-module "
        "recipe and stay in {s.mode}",
        remedies=("name the linear layers, *.linear_* say",),
        verified=MATCHING,
    ),
    Rule(
        heading="PB284: a per-module file that depends on the pipeline",
        predicate=selected_modules.elsewhere,
        warning="model.quant_recipe: matcher {name} chooses {precision} for {here} under PP={s.pp}, and for {there} "
        "under PP={stages}: its numbers count within a stage",
        remedies=("state the layers in mixed_precision.modules, whose numbers count over the model",),
        verified=MATCHING,
    ),
    owners_rule(
        heading="PB285: model chunks that need recipes of their own",
        sync="reported",
        predicate=_differing_chunks,
        warning="modules: the {chunks} chunks of stage {stages} need different recipes, and Megatron gives all chunks "
        "of a stage one: a trainer that does not hand each chunk its own stops when it builds the model",
        remedies=(
            "train with scripts/train.py, which does",
            "build each chunk with model.quant_recipe.of_chunk(number)",
            "use virtual_pipeline_model_parallel_size=None",
            "state rows without layers",
        ),
        verified=MATCHING,
        gate="precision",
        explanation="Megatron's matcher sees the path of a module within its chunk, which is the same in every chunk, "
        "and all chunks of a stage share one config.",
    ),
    owners_rule(
        heading="PB286: per-module FP8 without effect",
        sync="reported",
        predicate=_without_effect,
        warning="model.quant_recipe: has no effect: {schemes} is chosen for modules of a run without FP8 and FP4, and "
        "no payload says override_nonquantized_autocast",
        remedies=(
            "state override_nonquantized_autocast: true in the payloads",
            "choose a recipe with FP8 or FP4",
            "drop it",
        ),
        verified=PAYLOAD,
    ),
    target_rule(
        heading="PB287: stale FP8 weights",
        predicate=_stale,
        error="model.quant_recipe: modules in FP8 of a run without FP8 keep the quantised weights of the first step: "
        "Megatron renews them only where fp8 or fp4 is on",
        remedies=(
            "use megatron-core 0.19",
            "set model.disable_parameter_transpose_cache=True",
            "choose a recipe with FP8 and the modules that stay in BF16",
        ),
        verified="megatron-core 0.16.1 transformer/module.py:110 set_is_first_microbatch; NVIDIA/Megatron-LM issues "
        "5641 and 5642",
        versions=(mcore(until="0.19"),),
    ),
    owners_rule(
        heading="PB288: weights stored per module in an old Megatron",
        sync="reported",
        predicate=_stored,
        error="model.quant_recipe: a payload with fp8_param or fp4_param is refused when the model is built",
        remedies=("use megatron-core 0.18", "drop fp8_param and fp4_param there"),
        verified=f"{PAYLOAD}: the keys are absent from 0.17.1 and there in 0.18.0",
        versions=(mcore(until="0.18"),),
    ),
    Rule(
        heading="PB289: weights stored per module in a GPT",
        predicate=lambda s: not s.is_hybrid and _stored(s),
        warning="model.quant_recipe: fp8_param and fp4_param of a payload have no effect in a GPT: its layers are "
        "built without the names that payloads are matched by",
        remedies=("state fp8_param_gather for the whole run", "drop it"),
        verified="Megatron-LM main of 2026-08-22 transformer/transformer_block.py, extensions/transformer_engine.py",
        versions=(mcore(since="0.18"),),
    ),
    Rule(
        heading="PB290: a matcher that is off",
        predicate=_off,
        warning="model.quant_recipe: matcher {name} is off: it has no `enabled`",
        remedies=("write enabled: true", "write enabled: false, to say so"),
        verified=MATCHING,
    ),
    target_rule(
        heading="PB291: scheme of a module that the GPU does not run",
        predicate=_beyond_the_gpu,
        error="model.quant_recipe: {value} of single modules needs compute capability {needs}, and the target has "
        "{has}",
        remedies=("choose another scheme for them", "use other GPUs"),
        verified="Transformer Engine 2.20 pytorch/quantization.py",
    ),
    owners_rule(
        heading="PB292: a layer in which a choice per module takes nothing",
        sync="refused",
        predicate=selected_modules.missed_layers,
        error="model.quant_recipe: {noun} {name} takes nothing in {layers}: {reason}",
        remedies=("{remedy}",),
        verified=MATCHING,
        gate="precision",
    ),
    owners_rule(
        heading="PB293: rows in the run's dtype of a run without FP8 and FP4",
        sync="reported",
        predicate=_acts_nowhere,
        warning="modules: the rows have no effect: every module computes in {s.mode} without them",
        remedies=("choose a recipe with FP8 or FP4", "drop the rows"),
        verified=MATCHING,
        gate="precision",
    ),
    owners_rule(
        heading="PB294: the path of a per-module file",
        predicate=lambda s: isinstance(s.model.quant_recipe, str) and s.model.quant_recipe,
        error="model.quant_recipe: is the content of a file of configs and matchers, not its path",
        remedies=("write the content", "show it with `precision-bridge modules --file {s.model.quant_recipe}`"),
        verified=MATCHING,
    ),
    target_rule(
        heading="PB295: a quantizer factory that is not found",
        predicate=_missing_factories,
        warning="fp8_quantizer_factory: the factory is not found on this machine: {why}",
        remedies=("correct the import path", "install the package where the run starts"),
        verified="megatron-core 0.16.1 fp8_utils._get_custom_recipe, which imports it when the model is built",
    ),
    Rule(
        heading="PB296: stored weights in another scheme",
        predicate=selected_modules.in_another_scheme,
        error="model.quant_recipe: {noun} {name} asks for {other} on weights that the run stores in {s.scheme}, which "
        "Transformer Engine refuses in the first step",
        remedies=("store the weights in {s.mode} (fp8_param_gather=False, fp4_param_gather=False)", "choose bf16"),
        verified="Transformer Engine 2.20 pytorch/module/base.py _check_weight_tensor_recipe_correspondence",
    ),
)

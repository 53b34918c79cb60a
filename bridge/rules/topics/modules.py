"""Precision of single modules: rows and matchers that do not select what they say, and payloads without effect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.errors import close_matches, listed
from bridge.precision.module_names import LINEAR_NAMES, takes_a_linear_layer
from bridge.precision.module_recipe import stage_recipes
from bridge.precision.modules import module_rows
from bridge.precision.quant_recipe import EVALUATION, TRAINING, QuantRecipe, quant_recipes
from bridge.precision.schemes import SCHEMES
from bridge.rules.fields import whole_number
from bridge.rules.rule import Rule, mcore, owners_rule, target_rule
from bridge.rules.versions import dotted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.precision.quant_recipe import ModuleEffect
    from bridge.rules.context import RuleContext

PATH = "model.quant_recipe"
MATCHING = "megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py, models/gpt/gpt_model.py"
PAYLOAD = "megatron-core 0.16.1 and 0.19.2 extensions/transformer_engine.py TEQuantizationRecipe"
MADE_FOR_ROW = re.compile(r"row_(\d+)(?:_\d+)?")
"""Name of a matcher that `bridge.precision.module_recipe` makes for a row."""
MOST = 6
"""Names that a message lists."""


def _place(s: RuleContext) -> dict[str, Any]:
    """Return where the choices of the run are stated."""
    if s.precision is not None and s.precision.is_stated("modules"):
        return {"path": "modules", "noun": "row"}
    return {"path": PATH, "noun": "matcher"}


def _empty(s: RuleContext) -> list[dict[str, Any]]:
    """Return the rows and matchers that take no linear layer; rows of layers beyond the model are PB292's."""
    if not s.is_whole:
        return _misspelt(s)
    found = []
    for row in s.selection.empty if s.selection is not None else ():
        if row.missed and all(_is_beyond(number, s.selection.num_layers) for number in row.missed):
            continue
        only = ", ".join(dict.fromkeys(one.module for one in row.unread))
        reason = f": it takes {only} alone, which read no per-module recipe" if only else ""
        severity = {"severity": "warning"} if s.selection.is_foreign else {}  # a file may serve several models
        place = _place(s)
        words = {"row": f"{place['noun']} {row.name}", "reason": reason, "near": _near(row.nearest)}
        found.append({**place, **severity, **words, "value": row.pattern})
    return found


def _misspelt(s: RuleContext) -> list[dict[str, Any]]:
    """Return the rows that take no linear layer of any Megatron model, for a sync, which has no plan."""
    found = []
    for number, row in enumerate(module_rows(s.stated.get("modules"))):
        if takes_a_linear_layer(row):
            continue
        last = (row.select or row.module).rpartition(".")[2].strip("*")
        names = dict.fromkeys(name.rpartition(".")[2] for name in LINEAR_NAMES)
        words = {"row": f"row {number}", "reason": "", "near": _near(close_matches(last, names))}
        found.append({**_place(s), **words, "value": str(row)})
    return found


def _near(names: Sequence[str]) -> str:
    return f" (did you mean {listed(names)}?)" if names else ""


def _is_beyond(number: int, num_layers: int) -> bool:
    return not -num_layers <= number < num_layers


def _missed(s: RuleContext) -> list[dict[str, Any]]:
    """Return the rows that name layers in which they take nothing."""
    if not s.is_whole:
        return _beyond_the_model(s, whole_number(s.model.num_layers) or 0)
    if s.selection is None or s.selection.is_foreign:
        return []
    found = _beyond_the_model(s, s.selection.num_layers)
    for row in s.selection.rows:
        missed = [number for number in row.missed if not _is_beyond(number, s.selection.num_layers)]
        if missed and row not in s.selection.empty:
            words = {"row": f"row {row.name}", "layers": _numbers(tuple(missed)), "value": row.pattern}
            reason, remedy = "there is no such module there", "drop these numbers"
            found.append({**_place(s), **words, "reason": reason, "remedy": remedy, "severity": "warning"})
    return found


def _beyond_the_model(s: RuleContext, num_layers: int) -> list[dict[str, Any]]:
    """Return the rows that name layers which the model does not have; none where its layers are not known."""
    is_hybrid = s.model.is_hybrid_model or s.model.hybrid_override_pattern or s.model.hybrid_layer_pattern
    if num_layers < 1 or (is_hybrid and not s.is_whole):  # a pattern counts a hybrid model's layers
        return []
    found = []
    for number, row in enumerate(module_rows(s.stated.get("modules"))):
        beyond = row.layers_beyond(num_layers)
        if beyond:
            words = {"row": f"row {number}", "layers": _numbers(beyond), "value": str(row)}
            reason = f"the model's layers are 0 to {num_layers - 1}"
            found.append({**_place(s), **words, "reason": reason, "remedy": "correct these numbers"})
    return found


def _hidden(s: RuleContext) -> list[dict[str, Any]]:
    rows, place = s.selection.hidden if s.selection is not None else (), _place(s)
    return [
        {**place, "name": row.name, "value": row.pattern, "by": f"{place['noun']} {' and '.join(row.by)}"}
        for row in rows
    ]


def _beyond(s: RuleContext) -> list[dict[str, Any]]:
    rows = s.selection.beyond if s.selection is not None else ()
    return [
        {**_place(s), "name": row.name, "value": row.pattern, "precision": row.precision, "what": _names(row.unread)}
        for row in rows
    ]


def _names(modules: Any) -> str:
    names = list(dict.fromkeys(one.module for one in modules))
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def _elsewhere(s: RuleContext) -> list[dict[str, Any]]:
    found = []
    for name, stages, here, there in s.selection.layers_elsewhere if s.selection is not None else ():
        row = next(row for row in s.selection.rows if row.name == name)
        words = {
            "name": name,
            "value": row.pattern,
            "precision": row.precision,
            "here": _numbers(here),
            "there": _numbers(there),
            "stages": stages,
            "pp": s.pp,
        }
        found.append(words)
    return found


def _numbers(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "no layer"
    more = ", ..." if len(numbers) > MOST else ""
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:MOST]))}{more}"


def _high_in_high(s: RuleContext) -> dict[str, Any] | None:
    """Return the rows without FP8 and FP4 of a run without either, unless a later row chooses one of them."""
    rows = module_rows(s.stated.get("modules"))
    if s.is_low or not rows or any(row.precision.family is not None for row in rows):
        return None
    return {"path": "modules", "value": [str(row) for row in rows][:MOST]}


def _is_path(s: RuleContext) -> dict[str, Any] | None:
    held = s.model.quant_recipe
    return {"value": held} if isinstance(held, str) and held else None


def _recipes(s: RuleContext) -> tuple[QuantRecipe, ...]:
    return quant_recipes(s.model.quant_recipe)


def _effects(s: RuleContext) -> list[tuple[str, ModuleEffect]]:
    """Return (matcher's name, effect in training) of each matcher that is on; the chunks' recipes share payloads."""
    found: dict[str, ModuleEffect] = {}
    for recipe in _recipes(s):
        for matcher in recipe.matchers:
            effect = recipe.effect_of(matcher.config)
            if effect is not None:
                found.setdefault(_stated_name(s, matcher.name), effect)
    return list(found.items())


def _stated_name(s: RuleContext, matcher: str) -> str:
    """Return the pattern of the row that a matcher was made for; a foreign matcher's own name."""
    rows = module_rows(s.stated.get("modules"))
    made = MADE_FOR_ROW.fullmatch(matcher)
    return str(rows[int(made[1])]) if made is not None and int(made[1]) < len(rows) else matcher


def _without_effect(s: RuleContext) -> dict[str, Any] | None:
    """Return the schemes of a recipe that changes nothing, since the run enters no FP8 or FP4 context."""
    low = [effect for _, effect in _effects(s) if effect.family is not None]
    if s.is_low or not low or any(effect.in_high for effect in low):
        return None
    return {"schemes": ", ".join(dict.fromkeys(str(effect.scheme) for effect in low)), "value": len(low)}


def _stale(s: RuleContext) -> dict[str, Any] | None:
    acting = [name for name, effect in _effects(s) if effect.family is not None and effect.in_high]
    if s.is_low or not acting or s.is_emulated or s.model.disable_parameter_transpose_cache:
        return None
    return {**_place(s), "value": ", ".join(acting)}


def _beyond_the_gpu(s: RuleContext) -> list[dict[str, Any]]:
    """Return the schemes of single modules that the GPU cannot run; PB602 and PB603 are about that of the run."""
    if s.capability is None or not s.has_gpu or s.is_emulated:
        return []
    found: dict[str, dict[str, Any]] = {}
    for _, effect in _effects(s):
        row = next((row for row in SCHEMES if row.name == effect.scheme and row.name != s.scheme), None)
        if row is None or not effect.acts(is_low=s.is_low):
            continue
        least, limit = row.min_compute_capability, row.below_compute_capability
        needs = [f"{dotted(least)} or later"] if least is not None and s.capability < least else []
        needs += [f"below {dotted(limit)}"] if limit is not None and s.capability >= limit else []
        if needs:
            words = {"scheme": row.name, "needs": " and ".join(needs), "has": dotted(s.capability)}
            found[row.name] = {**_place(s), **words, "value": row.name}
    return list(found.values())


def _stored(s: RuleContext) -> dict[str, Any] | None:
    names = [name for name, effect in _effects(s) if effect.stored]
    return {**_place(s), "value": ", ".join(names)} if names else None


def _unexpressed(s: RuleContext) -> dict[str, Any] | None:
    """Return the stages whose model chunks need recipes of their own."""
    held = s.model.quant_recipe
    files = list(getattr(held, "files", held) or ()) if not isinstance(held, Mapping | str) else []
    stages = s.model.pipeline_model_parallel_size or 1
    if len(files) <= stages or len(files) % stages:
        return None
    wrong = [stage for stage, file in enumerate(stage_recipes(files, stages)) if file is None]
    if not wrong:
        return None
    rows = [str(row) for row in module_rows(s.stated.get("modules")) if row.names_layers]
    return {"path": "modules", "value": rows, "stages": ", ".join(map(str, wrong)), "chunks": len(files) // stages}


def _off(s: RuleContext) -> list[dict[str, Any]]:
    held = s.model.quant_recipe
    matchers = held.get("matchers") if isinstance(held, Mapping) else None
    if not isinstance(matchers, Mapping):
        return []
    return [
        {"name": name, "value": row.get("pattern")}
        for name, row in matchers.items()
        if isinstance(row, Mapping) and "enabled" not in row
    ]


def next_to_stored_weights(s: RuleContext) -> dict[str, Any] | None:
    """Return the patterns of per-module recipes in a run that stores its weights in FP8 or FP4."""
    patterns = [matcher.pattern for recipe in _recipes(s)[:1] for matcher in recipe.matchers]
    if not s.is_hybrid:  # PB289: a GPT reads no fp8_param of a payload
        return None
    return {**_place(s), "value": patterns} if _recipes(s) and (s.gathers_fp8 or s.gathers_fp4) else None


def wrong_payloads(s: RuleContext) -> list[dict[str, str]]:
    """Return what Transformer Engine's per-module recipes refuse."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for key, row in _payloads(s):
        scheme, fp4 = row.get("fp8_quantization_recipe"), row.get("fp4_quantization_recipe")
        faults = (
            (scheme == "delayed", "delayed scaling cannot be chosen per module"),
            (bool(scheme and fp4), "a module has either an FP8 or an FP4 recipe"),
            (
                "custom" in (scheme, fp4) and not row.get("custom_recipe_factory"),
                "a custom recipe needs custom_recipe_factory",
            ),
        )
        for is_wrong, what in faults:
            if is_wrong:
                found[key, what] = {"key": key, "what": what}
    return list(found.values())


def _payloads(s: RuleContext) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (f"{name}.{part}", body[part])
        for recipe in _recipes(s)[:1]
        for name, body in recipe.configs.items()
        if isinstance(body, Mapping)
        for part in (TRAINING, EVALUATION)
        if isinstance(body.get(part), Mapping)
    ]


RULES = (
    owners_rule(
        heading="PB281: a choice per module that takes nothing",
        sync="strict",
        predicate=_empty,
        error="model.quant_recipe: {row} takes no linear layer of this model{reason}",
        remedies=("use a name that `precision-bridge modules` lists{near}", "drop it"),
        verified=MATCHING,
        explanation="Transformer Engine's linear layers read a per-module recipe. Embeddings, norms, the router and "
        "the output layer do not, and compute in the dtype of the run.",
    ),
    Rule(
        heading="PB282: a choice per module behind an earlier one",
        predicate=_hidden,
        warning="model.quant_recipe: {noun} {name} decides for no module: each that it selects is taken before, by "
        "{by}",
        remedies=("put it before {by}", "drop it"),
        verified=MATCHING,
    ),
    Rule(
        heading="PB283: FP8 or FP4 for modules that have none",
        predicate=_beyond,
        warning="model.quant_recipe: {noun} {name} asks for {precision} in {what} too, which read no per-module "
        "recipe and stay in {s.mode}",
        remedies=("name the linear layers, *.linear_* say",),
        verified=MATCHING,
    ),
    Rule(
        heading="PB284: a per-module file that depends on the pipeline",
        predicate=_elsewhere,
        warning="model.quant_recipe: matcher {name} chooses {precision} for {here} under PP={s.pp}, and for {there} "
        "under PP={stages}: its numbers count within a stage",
        remedies=("state the layers in mixed_precision.modules, whose numbers count over the model",),
        verified=MATCHING,
    ),
    owners_rule(
        heading="PB285: one recipe for several model chunks",
        sync="refused",
        predicate=_unexpressed,
        error="modules: the rows choose layers of single model chunks, and the {chunks} chunks of stage {stages} "
        "share one quant_recipe",
        remedies=("use virtual_pipeline_model_parallel_size=None", "state rows without layers"),
        verified=MATCHING,
        gate="precision",
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
        verified="megatron-core 0.16.1 transformer/module.py set_is_first_microbatch; NVIDIA/Megatron-LM issues 5641 "
        "and 5642",
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
        error="model.quant_recipe: {scheme} of single modules needs compute capability {needs}, and the target has "
        "{has}",
        remedies=("choose another scheme for them", "use other GPUs"),
        verified="Transformer Engine 2.20 pytorch/quantization.py",
    ),
    owners_rule(
        heading="PB292: a layer in which a choice per module takes nothing",
        sync="refused",
        predicate=_missed,
        error="model.quant_recipe: {row} takes nothing in {layers}: {reason}",
        remedies=("{remedy}",),
        verified=MATCHING,
        gate="precision",
    ),
    owners_rule(
        heading="PB293: rows in the run's dtype of a run without FP8 and FP4",
        sync="reported",
        predicate=_high_in_high,
        warning="modules: the rows have no effect: every module computes in {s.mode} without them",
        remedies=("choose a recipe with FP8 or FP4", "drop the rows"),
        verified=MATCHING,
        gate="precision",
    ),
    owners_rule(
        heading="PB294: the path of a per-module file",
        predicate=_is_path,
        error="model.quant_recipe: is the content of a file of configs and matchers, not its path",
        remedies=("write the content", "show it with `precision-bridge modules --file {value}`"),
        verified=MATCHING,
    ),
)

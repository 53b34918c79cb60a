"""Precision of single modules: rows and matchers that do not select what they say, and payloads without effect."""

from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from itertools import product
from symtable import symtable
from typing import Any

from bridge.errors import close_matches, listed
from bridge.precision.matchers import EVALUATION, TRAINING, Effect, matchers_in, payload_faults, quant_recipes
from bridge.precision.module_schemes import row_matchers, stage_recipes
from bridge.precision.schemes import SCHEMES
from bridge.rules import selected_modules
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.rule import error, mcore, no_effect, warning
from bridge.rules.violation import Violation, all_of
from bridge.target.versions import dotted

ELSEWHERE = "transformer_engine"
"""The package of factories that are missing on every machine without a GPU."""


def why_not_found(path: str) -> str | None:
    """Return why an import path, package.module.function, leads nowhere; None where it leads to a name of a module.

    A module without Python source counts as having the name.
    """
    *packages, name = path.split(".")
    if not packages or not all(part.isidentifier() for part in (*packages, name)):
        return "it is no import path such as package.module.function"
    module = packages[0]
    spec = find_spec(module)
    for part in packages[1:]:
        places = spec.submodule_search_locations if spec is not None else None
        if places is None:
            break
        module = f"{module}.{part}"
        spec = PathFinder.find_spec(module, places)
    if spec is None or module != ".".join(packages):
        return None if packages[0] == ELSEWHERE else f"there is no module {'.'.join(packages)!r}"
    names = _names_of(spec)
    if names is None or name in names:
        return None
    near = close_matches(name, names)
    return f"module {module!r} has no {name!r}" + (f" (did you mean {listed(near)}?)" if near else "")


def _names_of(spec: ModuleSpec) -> set[str] | None:
    """Return the names that a module binds; None where that is not known."""
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
    if source is None or "import *" in source:
        return None
    try:
        symbols = symtable(source, spec.name, "exec").get_symbols()
    except SyntaxError:
        return set()
    return {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}


MATCHING = "megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py, models/gpt/gpt_model.py"
PAYLOAD = "megatron-core 0.16.1 and 0.19.2 extensions/transformer_engine.py TEQuantizationRecipe"


def _acts_nowhere(run: RuleContext) -> list[Violation]:
    """Return the rows without FP8 and FP4 of a run without either, unless a later row chooses one of them."""
    rows = selected_modules.own_rows(run)
    if not rows or any(row.precision.family is not None for row in rows):
        return []
    return [Violation(value=[str(row) for row in rows][: selected_modules.MOST])]


def _effects(run: RuleContext) -> list[tuple[str, Effect]]:
    """Return (row or matcher, effect in training) of each row, or of each foreign matcher that is on."""
    rows = selected_modules.own_rows(run)
    matchers = row_matchers(rows, 0, run=run.fp8 or run.fp4).matchers if rows else matchers_in(run.model.quant_recipe)
    found: dict[str, Effect] = {}
    for matcher in matchers:
        if matcher.training is not None:
            found.setdefault(matcher.select if rows else matcher.name, matcher.training)
    return list(found.items())


def _without_effect(run: RuleContext) -> list[Violation]:
    """Return the schemes of a recipe that changes nothing, since the run enters no FP8 or FP4 context."""
    low = [effect for _, effect in _effects(run) if effect.family is not None]
    if not low or any(effect.chooses_in_high for effect in low):
        return []
    return [Violation(value=len(low), schemes=", ".join(dict.fromkeys(str(effect.scheme) for effect in low)))]


def _stale(run: RuleContext) -> list[Violation]:
    acting = [name for name, effect in _effects(run) if effect.chooses_in_high]
    return [selected_modules.about(run, ", ".join(acting))] if acting else []


def _beyond_the_gpu(run: RuleContext) -> list[Violation]:
    """Return the schemes of single modules that the GPU cannot run; PB602 and PB603 are about that of the run."""
    if run.capability is None or not run.has_gpu or run.is_emulated:
        return []
    chosen = {effect.scheme for _, effect in _effects(run) if effect.acts(is_low=run.is_low)} - {run.scheme}
    found = []
    for row in SCHEMES:
        least, limit = row.min_compute_capability, row.below_compute_capability
        needs = [f"{dotted(least)} or later"] if least is not None and run.capability < least else []
        needs += [f"below {dotted(limit)}"] if limit is not None and run.capability >= limit else []
        if row.name in chosen and needs:
            found.append(selected_modules.about(run, row.name, needs=" and ".join(needs), has=dotted(run.capability)))
    return found


def _stored(run: RuleContext) -> list[Violation]:
    names = [name for name, effect in _effects(run) if effect.stored]
    return [selected_modules.about(run, ", ".join(names))] if names else []


def _differing_chunks(run: RuleContext) -> list[Violation]:
    """Return the stages whose model chunks have recipes of their own."""
    held = run.model.quant_recipe if run.precision is not None else None
    parts = getattr(held, "files", held)
    files = list(parts) if isinstance(parts, list | tuple) else []
    stages = run.model.pipeline_model_parallel_size or 1
    if len(files) <= stages or len(files) % stages:
        return []
    differing = [str(stage) for stage, file in enumerate(stage_recipes(files, stages)) if file is None]
    rows = [str(row) for row in selected_modules.own_rows(run) if row.layer_numbers]
    if not differing:
        return []
    return [Violation(value=rows, stages=", ".join(differing), chunks=len(files) // stages)]


def _off(run: RuleContext) -> list[Violation]:
    held = run.model.quant_recipe
    matchers = held.get("matchers") if isinstance(held, Mapping) else None
    rows = matchers.items() if isinstance(matchers, Mapping) else ()
    off = [(name, row) for name, row in rows if isinstance(row, Mapping) and row.get("enabled") is None]
    return [Violation(value=row.get("pattern"), name=name) for name, row in off]


def _missing_factories(run: RuleContext) -> list[Violation]:
    """Return the quantizer factories, of the run and of single modules, that are not found on this machine."""
    factories = [row.get("custom_recipe_factory") for _, row in _payloads(run)]
    paths = [(selected_modules.about(run, None).path, factory) for factory in factories if factory]
    for family in FAMILIES:
        name = f"{family}_quantizer_factory"
        if run.scheme == "custom" and getattr(run, family) and getattr(run.model, name):
            paths.append((name, getattr(run.model, name)))
    return [Violation(path, value=factory, why=why) for path, factory in paths if (why := why_not_found(str(factory)))]


def next_to_stored_weights(run: RuleContext) -> list[Violation]:
    """Return the patterns of a hybrid model's recipes in a run that stores its weights in FP8 or FP4.

    A GPT reads no fp8_param of a payload (PB289).
    """
    is_stored = run.is_low and run.shape.is_hybrid and (run.gathers_fp8 or run.gathers_fp4)
    recipes = quant_recipes(run.model.quant_recipe)[:1] if is_stored else ()
    return [selected_modules.about(run, [matcher.select for matcher in one.matchers]) for one in recipes]


def wrong_payloads(run: RuleContext) -> list[Violation]:
    """Return what Transformer Engine's per-module recipes refuse."""
    return [Violation(key=key, what=fault) for key, row in _payloads(run) for _, fault in payload_faults(row)]


def _payloads(run: RuleContext) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name.part, recipe) of each payload; the chunks' recipes share them."""
    for recipe in quant_recipes(run.model.quant_recipe)[:1]:
        bodies = [(name, body) for name, body in recipe.configs.items() if isinstance(body, Mapping)]
        for (name, body), part in product(bodies, (TRAINING, EVALUATION)):
            if isinstance(body.get(part), Mapping):
                yield f"{name}.{part}", body[part]


RULES = (
    error(
        id="PB281",
        title="a choice per module that takes nothing",
        setting="model.quant_recipe",
        sync="strict",
        when=selected_modules.empty,
        message="{noun} {name} takes no linear layer of this model{reason}",
        remedies=("use a name that `precision-bridge modules` lists{near}", "drop it"),
        source=MATCHING,
        explanation="Transformer Engine's linear layers read a per-module recipe. Embeddings, norms, the router and "
        "the output layer do not, and compute in the dtype of the run.",
    ),
    warning(
        id="PB282",
        title="a choice per module behind an earlier one",
        setting="model.quant_recipe",
        when=selected_modules.hidden,
        message="{noun} {name} decides for no module: each that it selects is taken before, by {noun} {by}",
        remedies=("put it before {noun} {by}", "drop it"),
        source=MATCHING,
    ),
    warning(
        id="PB283",
        title="FP8 or FP4 for modules that have none",
        setting="model.quant_recipe",
        when=selected_modules.unread,
        message="{noun} {name} asks for {precision} in {modules} too, which read no per-module recipe and stay in "
        "{run.mode}",
        remedies=("name the linear layers, *.linear_* say",),
        source=MATCHING,
    ),
    warning(
        id="PB284",
        title="a per-module file that depends on the pipeline",
        setting="model.quant_recipe",
        when=selected_modules.elsewhere,
        message="matcher {name} chooses {precision} for {here} under PP={run.parallel.pipeline}, and for {there} under "
        "PP={stages}: its numbers count within a stage",
        remedies=("state the layers in mixed_precision.modules, whose numbers count over the model",),
        source=MATCHING,
    ),
    warning(
        id="PB285",
        title="model chunks that need recipes of their own",
        setting="modules",
        sync="reported",
        when=_differing_chunks,
        message="the {chunks} chunks of stage {stages} need different recipes, and Megatron gives all chunks of a "
        "stage one: a trainer that does not hand each chunk its own stops when it builds the model",
        remedies=(
            "train with scripts/train.py, which does",
            "build each chunk with model.quant_recipe.of_chunk(number)",
            "use virtual_pipeline_model_parallel_size=None",
            "state rows without layers",
        ),
        source=MATCHING,
        explanation="Megatron's matcher sees the path of a module within its chunk, which is the same in every chunk, "
        "and all chunks of a stage share one config.",
    ),
    no_effect(
        id="PB286",
        title="per-module FP8 without effect",
        setting="model.quant_recipe",
        when=all_of("not is_low", find=_without_effect),
        message="has no effect: {schemes} is chosen for modules of a run without FP8 and FP4, and no payload says "
        "override_nonquantized_autocast",
        remedies=(
            "state override_nonquantized_autocast: true in the payloads",
            "choose a recipe with FP8 or FP4",
            "drop it",
        ),
        source=PAYLOAD,
    ),
    error(
        id="PB287",
        title="stale FP8 weights",
        setting="model.quant_recipe",
        versions=(mcore(until="0.19"),),
        when=all_of("not is_low", "not is_emulated", "not model.disable_parameter_transpose_cache", find=_stale),
        message="modules in FP8 of a run without FP8 keep the quantised weights of the first step: Megatron renews "
        "them only where fp8 or fp4 is on",
        remedies=(
            "use megatron-core 0.19",
            "set model.disable_parameter_transpose_cache=True",
            "choose a recipe with FP8 and the modules that stay in BF16",
        ),
        source="megatron-core 0.16.1 transformer/module.py:110 set_is_first_microbatch; NVIDIA/Megatron-LM issues "
        "5641 and 5642",
    ),
    error(
        id="PB288",
        title="weights stored per module in an old Megatron",
        setting="model.quant_recipe",
        sync="reported",
        versions=(mcore(until="0.18"),),
        when=_stored,
        message="a payload with fp8_param or fp4_param is refused when the model is built",
        remedies=("use megatron-core 0.18", "drop fp8_param and fp4_param there"),
        source=f"{PAYLOAD}: the keys are absent from 0.17.1 and there in 0.18.0",
    ),
    warning(
        id="PB289",
        title="weights stored per module in a GPT",
        setting="model.quant_recipe",
        versions=(mcore(since="0.18"),),
        when=all_of("not shape.is_hybrid", find=_stored),
        message="fp8_param and fp4_param of a payload have no effect in a GPT: its layers are built without the names "
        "that payloads are matched by",
        remedies=("state fp8_param_gather for the whole run", "drop it"),
        source="Megatron-LM main of 2026-08-22 transformer/transformer_block.py, extensions/transformer_engine.py",
    ),
    warning(
        id="PB290",
        title="a matcher that is off",
        setting="model.quant_recipe",
        when=_off,
        message="matcher {name} is off: it has no `enabled`",
        remedies=("write enabled: true", "write enabled: false, to say so"),
        source=MATCHING,
    ),
    error(
        id="PB291",
        title="scheme of a module that the GPU does not run",
        setting="model.quant_recipe",
        when=_beyond_the_gpu,
        message="{value} of single modules needs compute capability {needs}, and the target has {has}",
        remedies=("choose another scheme for them", "use other GPUs"),
        source="Transformer Engine 2.20 pytorch/quantization.py",
    ),
    error(
        id="PB292",
        title="a layer in which a choice per module takes nothing",
        setting="model.quant_recipe",
        sync="refused",
        when=selected_modules.missed_layers,
        message="{noun} {name} takes nothing in {layers}: {reason}",
        remedies=("{remedy}",),
        source=MATCHING,
    ),
    no_effect(
        id="PB293",
        title="rows in the run's dtype of a run without FP8 and FP4",
        setting="modules",
        when=all_of("not is_low", find=_acts_nowhere),
        message="the rows have no effect: every module computes in {run.mode} without them",
        remedies=("choose a recipe with FP8 or FP4", "drop the rows"),
        source=MATCHING,
    ),
    error(
        id="PB294",
        title="the path of a per-module file",
        setting="model.quant_recipe",
        when=all_of(lambda run: isinstance(run.model.quant_recipe, str) and run.model.quant_recipe),
        message="is the content of a file of configs and matchers, not its path",
        remedies=("write the content", "show it with `precision-bridge modules --file {run.model.quant_recipe}`"),
        source=MATCHING,
    ),
    warning(
        id="PB295",
        title="a quantizer factory that is not found",
        setting="fp8_quantizer_factory",
        when=all_of("not is_emulated", find=_missing_factories),  # the emulated backend refuses every factory
        message="the factory is not found on this machine: {why}",
        remedies=("correct the import path", "install the package where the run starts"),
        source="megatron-core 0.16.1 fp8_utils._get_custom_recipe, which imports it when the model is built",
    ),
    error(
        id="PB296",
        title="stored weights in another scheme",
        setting="model.quant_recipe",
        when=selected_modules.in_another_scheme,
        message="{noun} {name} asks for {other} on weights that the run stores in {run.scheme}, which Transformer "
        "Engine refuses in the first step",
        remedies=("store the weights in {run.mode} ({unstored})", "choose bf16"),
        source="Transformer Engine 2.20 pytorch/module/base.py _check_weight_tensor_recipe_correspondence",
    ),
    error(
        id="PB297",
        title="no module left in low precision",
        setting="modules",
        when=selected_modules.all_high,
        message="no linear layer is left in {run.scheme}: the {noun}s keep all of them in {run.mode}",
        remedies=("leave some in {run.scheme}", "choose a recipe without FP8 and FP4"),
        source="this project: bridge.plan.precision_plan, 2026-11",
    ),
)

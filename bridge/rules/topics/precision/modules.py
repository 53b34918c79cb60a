"""Rules about the precision of single modules: wrong selections, and payloads without effect."""

from collections.abc import Iterator, Mapping

from bridge.precision.matchers import ModulePrecision, list_matchers
from bridge.precision.module_schemes import make_row_matchers, make_stage_recipes
from bridge.precision.schemes import SCHEMES, Scheme
from bridge.rules.context import RuleContext
from bridge.rules.facts.module_violations import (
    MAX_LISTED,
    find_choices_for_unread_modules,
    find_empty_rows,
    find_rows_in_another_stored_scheme,
    find_rows_leaving_no_module,
    find_shadowed_rows,
    find_stage_dependent_matchers,
    find_unmatched_layers,
    get_stated_rows,
    make_module_violation,
)
from bridge.rules.facts.payloads import find_factories_of_later_te, find_missing_factories
from bridge.rules.rule import error, mcore, no_effect, sync_error, sync_warning, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.versions import format_dotted

MATCHING_SOURCE = (
    "megatron-core 0.16.1 and 0.19.2 quantization/quant_config.py, models/gpt/gpt_model.py"
)
PAYLOAD_SOURCE = (
    "megatron-core 0.16.1 and 0.19.2 extensions/transformer_engine.py TEQuantizationRecipe"
)


def find_rows_without_effect(context: RuleContext) -> Violation | None:
    """Return a violation if a run without FP8 and FP4 has rows and no row chooses FP8 or FP4."""
    if context.is_low_precision:
        return None
    rows = get_stated_rows(context)
    if not rows:
        return None
    for row in rows:
        if row.precision.family is not None:
            return None
    return Violation(value=[str(row) for row in rows[:MAX_LISTED]])


def _get_training_precisions(context: RuleContext) -> dict[str, ModulePrecision]:
    """Return row, or foreign matcher that is on -> its precision in training."""
    rows = get_stated_rows(context)
    precisions: dict[str, ModulePrecision] = {}
    if rows:
        for matcher in make_row_matchers(rows, 0, run=context.fp8 or context.fp4).matchers:
            if matcher.training is not None:
                precisions.setdefault(matcher.select, matcher.training)
    else:
        for matcher in list_matchers(context.model.quant_recipe):
            if matcher.training is not None:
                precisions.setdefault(matcher.name, matcher.training)
    return precisions


def find_schemes_without_effect(context: RuleContext) -> Violation | None:
    """Return a violation if the run has no FP8 or FP4 context for the schemes of its modules."""
    if context.is_low_precision:
        return None
    low = [
        effect for effect in _get_training_precisions(context).values() if effect.family is not None
    ]
    if not low or any(effect.chooses_in_high_precision for effect in low):
        return None
    schemes = dict.fromkeys(str(effect.scheme) for effect in low)
    return Violation(value=len(low), schemes=", ".join(schemes))


def find_stale_weights(context: RuleContext) -> Violation | None:
    """Return a violation if rows in FP8 keep their first quantised weights, in a run without FP8."""
    if (
        context.is_low_precision
        or context.is_emulated
        or context.model.disable_parameter_transpose_cache
    ):
        return None
    acting = [
        name
        for name, effect in _get_training_precisions(context).items()
        if effect.chooses_in_high_precision
    ]
    if acting:
        return make_module_violation(context, ", ".join(acting))
    return None


def find_schemes_unsupported_by_gpu(context: RuleContext) -> Iterator[Violation]:
    """Yield the schemes of single modules that the GPU cannot run.

    PB602 and PB603 are about the scheme of the run.
    """
    if context.target.capability is None or not context.has_gpu or context.is_emulated:
        return
    chosen = set()
    for effect in _get_training_precisions(context).values():
        if effect.acts_in_layer(is_low=context.is_low_precision):
            chosen.add(effect.scheme)
    chosen.discard(context.scheme)
    has = format_dotted(context.target.capability)
    for row in SCHEMES:
        needs = _format_needed_capabilities(row, context.target.capability)
        if row.name in chosen and needs:
            yield make_module_violation(context, row.name, needs=" and ".join(needs), has=has)


def _format_needed_capabilities(row: Scheme, capability: tuple[int, int]) -> list[str]:
    """Return text with the compute capabilities that a scheme needs and the GPU does not have."""
    least, limit = row.min_compute_capability, row.below_compute_capability
    needs = []
    if least is not None and capability < least:
        needs.append(f"{format_dotted(least)} or later")
    if limit is not None and capability >= limit:
        needs.append(f"below {format_dotted(limit)}")
    return needs


def find_weights_stored_by_payload(context: RuleContext) -> Violation | None:
    """Return a violation if the payload of rows or matchers stores weights in FP8 or FP4."""
    names = [name for name, effect in _get_training_precisions(context).items() if effect.stored]
    if names:
        return make_module_violation(context, ", ".join(names))
    return None


def find_gpt_weights_stored_by_payload(context: RunContext) -> Violation | None:
    """Return a violation if the payload of rows or matchers stores weights of a GPT."""
    if context.shape.is_hybrid:
        return None
    return find_weights_stored_by_payload(context)


def find_stages_with_chunk_recipes(context: RuleContext) -> Violation | None:
    """Return a violation if the model chunks of a stage have different recipes."""
    if context.precision is None:
        return None
    recipe = context.model.quant_recipe
    parts = getattr(recipe, "files", recipe)
    if not isinstance(parts, list | tuple):
        return None
    stages = context.model.pipeline_model_parallel_size or 1
    if len(parts) <= stages or len(parts) % stages:
        return None
    differing = []
    for stage, file in enumerate(make_stage_recipes(list(parts), stages)):
        if file is None:
            differing.append(str(stage))
    if not differing:
        return None
    rows = [str(row) for row in get_stated_rows(context) if row.layer_numbers]
    return Violation(value=rows, stages=", ".join(differing), chunks=len(parts) // stages)


def find_disabled_matchers(context: RuleContext) -> Iterator[Violation]:
    """Yield the matchers of a foreign recipe that do not state `enabled`."""
    recipe = context.model.quant_recipe
    if not isinstance(recipe, Mapping):
        return
    matchers = recipe.get("matchers")
    if not isinstance(matchers, Mapping):
        return
    for name, row in matchers.items():
        if isinstance(row, Mapping) and row.get("enabled") is None:
            yield Violation(value=row.get("pattern"), name=name)


def is_recipe_text(context: RuleContext) -> bool:
    """Return whether the per-module recipe is text, for example the path of its file."""
    recipe = context.model.quant_recipe
    return isinstance(recipe, str) and recipe != ""


RULES = (
    sync_error(
        id="PB281",
        title="a choice per module that takes nothing",
        setting="model.quant_recipe",
        sync="last",
        when=find_empty_rows,
        message="{noun} {name} takes no linear layer of this model{reason}",
        remedies=("use a name that `precision-bridge plan --modules` lists{near}", "drop it"),
        source=MATCHING_SOURCE,
        explanation="Transformer Engine's linear layers read a per-module recipe. Embeddings, "
        "norms, the router and the output layer do not, and compute in the dtype of the run.",
    ),
    warning(
        id="PB282",
        title="a choice per module behind an earlier one",
        setting="model.quant_recipe",
        when=find_shadowed_rows,
        message="{noun} {name} decides for no module: each that it selects is "
        "taken before, by {noun} {by}",
        remedies=("put it before {noun} {by}", "drop it"),
        source=MATCHING_SOURCE,
    ),
    warning(
        id="PB283",
        title="FP8 or FP4 for modules that have none",
        setting="model.quant_recipe",
        when=find_choices_for_unread_modules,
        message="{noun} {name} asks for {precision} in {modules} too, which read no per-module "
        "recipe and stay in {run.mode}",
        remedies=("name the linear layers, *.linear_* say",),
        source=MATCHING_SOURCE,
    ),
    warning(
        id="PB284",
        title="a per-module file that depends on the pipeline",
        setting="model.quant_recipe",
        when=find_stage_dependent_matchers,
        message="matcher {name} chooses {precision} for {here} under PP={run.parallel.pipeline}, "
        "and for {there} under PP={stages}: its numbers count within a stage",
        remedies=(
            "state the layers in mixed_precision.modules, whose numbers count over the model",
        ),
        source=MATCHING_SOURCE,
    ),
    sync_warning(
        id="PB285",
        title="model chunks that need recipes of their own",
        setting="modules",
        sync="reported",
        when=find_stages_with_chunk_recipes,
        message="the {chunks} chunks of stage {stages} need different recipes, and Megatron gives "
        "all chunks of a stage one: a trainer that does not hand each chunk its own stops "
        "when it builds the model",
        remedies=(
            "train with scripts/train.py, which does",
            "build each chunk with model.quant_recipe.of_chunk(number)",
            "use virtual_pipeline_model_parallel_size=None",
            "state rows without layers",
        ),
        source=MATCHING_SOURCE,
        explanation="Megatron's matcher sees the path of a module within its chunk, which is the "
        "same in every chunk, and all chunks of a stage share one config.",
    ),
    no_effect(
        id="PB286",
        title="per-module FP8 without effect",
        setting="model.quant_recipe",
        when=find_schemes_without_effect,
        message="has no effect: {schemes} is chosen for modules of a run without FP8 and FP4, and "
        "no payload says override_nonquantized_autocast",
        remedies=(
            "state override_nonquantized_autocast: true in the payloads",
            "choose a recipe with FP8 or FP4",
            "drop it",
        ),
        source=PAYLOAD_SOURCE,
    ),
    error(
        id="PB287",
        title="stale FP8 weights",
        setting="model.quant_recipe",
        versions=(mcore(until="0.19"),),
        when=find_stale_weights,
        message="modules in FP8 of a run without FP8 keep the quantised weights of the first "
        "step: Megatron renews them only where fp8 or fp4 is on",
        remedies=(
            "use megatron-core 0.19",
            "set model.disable_parameter_transpose_cache=True",
            "choose a recipe with FP8 and the modules that stay in BF16",
        ),
        source="megatron-core 0.16.1 transformer/module.py:110 set_is_first_microbatch; "
        "NVIDIA/Megatron-LM issues 5641 and 5642",
    ),
    sync_error(
        id="PB288",
        title="weights stored per module in an old Megatron",
        setting="model.quant_recipe",
        sync="reported",
        versions=(mcore(until="0.18"),),
        when=find_weights_stored_by_payload,
        message="a payload with fp8_param or fp4_param is refused when the model is built",
        remedies=("use megatron-core 0.18", "drop fp8_param and fp4_param there"),
        source=f"{PAYLOAD_SOURCE}: the keys are absent from 0.17.1 and there in 0.18.0",
    ),
    warning(
        id="PB289",
        title="weights stored per module in a GPT",
        setting="model.quant_recipe",
        versions=(mcore(since="0.18"),),
        when=find_gpt_weights_stored_by_payload,
        message="fp8_param and fp4_param of a payload have no effect in a GPT: its layers are "
        "built without the names that payloads are matched by",
        remedies=("state fp8_param_gather for the whole run", "drop it"),
        source="Megatron-LM main of 2026-08-22 transformer/transformer_block.py, "
        "extensions/transformer_engine.py",
    ),
    warning(
        id="PB290",
        title="a matcher that is off",
        setting="model.quant_recipe",
        when=find_disabled_matchers,
        message="matcher {name} is off: it has no `enabled`",
        remedies=("write enabled: true", "write enabled: false, to say so"),
        source=MATCHING_SOURCE,
    ),
    error(
        id="PB291",
        title="scheme of a module that the GPU does not run",
        setting="model.quant_recipe",
        when=find_schemes_unsupported_by_gpu,
        message="{value} of single modules needs compute capability {needs}, "
        "and the target has {has}",
        remedies=("choose another scheme for them", "use other GPUs"),
        source="Transformer Engine 2.20 pytorch/quantization.py",
    ),
    sync_error(
        id="PB292",
        title="a layer in which a choice per module takes nothing",
        setting="model.quant_recipe",
        sync="refused",
        when=find_unmatched_layers,
        message="{noun} {name} takes nothing in {layers}: {reason}",
        remedies=("{remedy}",),
        source=MATCHING_SOURCE,
    ),
    no_effect(
        id="PB293",
        title="rows in the run's dtype of a run without FP8 and FP4",
        setting="modules",
        when=find_rows_without_effect,
        message="the rows have no effect: every module computes in {run.mode} without them",
        remedies=("choose a recipe with FP8 or FP4", "drop the rows"),
        source=MATCHING_SOURCE,
    ),
    error(
        id="PB294",
        title="the path of a per-module file",
        setting="model.quant_recipe",
        when=is_recipe_text,
        message="is the content of a file of configs and matchers, not its path",
        remedies=(
            "write the content",
            "show it with `precision-bridge plan --modules --file {run.model.quant_recipe}`",
        ),
        source=MATCHING_SOURCE,
    ),
    warning(
        id="PB295",
        title="a quantizer factory that is not found",
        setting="fp8_quantizer_factory",
        when=find_missing_factories,
        message="the factory is not found on this machine: {why}",
        remedies=("correct the import path", "install the package where the run starts"),
        source="megatron-core 0.16.1 fp8_utils._get_custom_recipe, which imports "
        "it when the model is built",
    ),
    error(
        id="PB296",
        title="stored weights in another scheme",
        setting="model.quant_recipe",
        when=find_rows_in_another_stored_scheme,
        message="{noun} {name} asks for {other} on weights that the run stores in {run.scheme}, "
        "which Transformer Engine refuses in the first step",
        remedies=("store the weights in {run.mode} ({unstored})", "choose bf16"),
        source="Transformer Engine 2.20 pytorch/module/base.py "
        "_check_weight_tensor_recipe_correspondence",
    ),
    error(
        id="PB297",
        title="no module left in low precision",
        setting="modules",
        when=find_rows_leaving_no_module,
        message="no linear layer is left in {run.scheme}: the {noun}s keep "
        "all of them in {run.mode}",
        remedies=("leave some in {run.scheme}", "choose a recipe without FP8 and FP4"),
        source="this project: bridge.plan.precision_plan, 2026-11",
    ),
    error(
        id="PB298",
        title="a factory of a later Transformer Engine",
        setting="fp8_quantizer_factory",
        when=find_factories_of_later_te,
        message="Transformer Engine {te} has no such factory, and the import fails when the model is built",
        remedies=("use Transformer Engine 2.20", "choose a named scheme"),
        source="Transformer Engine v2.10 to v2.18 and 2.20.2 pytorch/custom_recipes",
    ),
)

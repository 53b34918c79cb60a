"""The rules of scripts/train.py: fields and values that its build does not support.

A check evaluates them for the whole run. The build evaluates them for its configs before it makes a
model. Both report the same message with the same id. `train_script_fields.py` lists the supported
fields. Every other field is refused if it differs from Megatron's default. The values and layouts
below are refused because Megatron would silently train a wrong model, or because only another
backend supports them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from bridge.errors import close_matches, did_you_mean
from bridge.model.attention_variants import DELTA_NET_VARIANTS, SPARSE_VARIANT
from bridge.model.hybrid_pattern import HybridPattern
from bridge.rules.rule import error
from bridge.rules.run_context import RunContext
from bridge.rules.topics.system.train_script_fields import (
    FIELDS_WITHOUT_NUMERIC_EFFECT,
    NEED_TE_LAYERS,
    NEED_TE_ON_A_GPU,
    SUPPORTED_FIELDS,
    UNSUPPORTED_IN_HYBRIDS,
)
from bridge.rules.violation import Violation
from bridge.target.fields import OWNER_DEFAULTS, is_different

TE_BACKENDS = ("te", "te_cpu")
"""Backends with the linear layers of Transformer Engine."""
ALL_TO_ALL = "alltoall"
SUPPORTED_LAYER_LETTERS = frozenset("M*-E")
"""Letters of the layers of a hybrid model that megatron-core 0.16.1 has."""

AllowedValues = Mapping[str, tuple[Any, ...]]
"""Field -> the only values that a run can have."""
SUPPORTED_VALUES: Mapping[str, AllowedValues] = {
    "model": {
        "position_embedding_type": ("rope", "learned_absolute", "none"),
        "moe_token_dispatcher_type": ("allgather", "alltoall"),
        "transformer_impl": ("transformer_engine", "local"),
        "normalization": ("LayerNorm", "RMSNorm"),
        "rope_type": ("rope", "yarn"),
        "experimental_attention_variant": (*DELTA_NET_VARIANTS, SPARSE_VARIANT),
    },
    "optimizer": {"optimizer": ("adam", "sgd")},
    "ddp": {},
}
SUPPORTED_VALUES_WITHOUT_TE: AllowedValues = {"attention_backend": ("auto", "local", "unfused")}
"""Further restrictions of a model without the layers of Transformer Engine."""

CONTEXT_PARALLEL_TE_CPU: AllowedValues = {
    "cp_comm_type": ("all_gather", "a2a"),
    "attention_dropout": (0.0,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
}
CONTEXT_PARALLEL_WITHOUT_TE: AllowedValues = {
    **CONTEXT_PARALLEL_TE_CPU,
    "cp_comm_type": ("all_gather",),
    "apply_query_key_layer_scaling": (False,),
    "attention_softmax_in_fp32": (True,),
}
"""The restrictions of a model under context parallelism without a GPU."""

NOT_HONOURED, WRONG_VALUE, WRONG_LAYOUT = "PB701", "PB702", "PB703"
_REMOVE = "Remove it, or run it in Megatron-LM or Megatron Bridge"


def find_unsupported_fields(
    section: str, values: Mapping[str, Any], *, backend: str | None
) -> Iterator[Violation]:
    """Yield the fields of a section that differ from their default and are not supported.

    Args:
        section: model, optimizer or ddp.
        values: Field -> value. A missing field has its default.
        backend: te, te_cpu, emulated or local. None: it is not known, and a field that any backend
            supports is accepted.
    """
    for name, value in values.items():
        if name not in OWNER_DEFAULTS[section] or not is_different(
            value, OWNER_DEFAULTS[section][name]
        ):
            continue
        if name in SUPPORTED_FIELDS[section] or name in FIELDS_WITHOUT_NUMERIC_EFFECT[section]:
            continue
        clause, remedy = "scripts/train.py does not honour it", _REMOVE
        if name in NEED_TE_LAYERS[section]:
            if backend in (*TE_BACKENDS, None):
                continue
            clause += f" with precision_backend={backend}"
            remedy = "Remove it, or set precision_backend=te_cpu"
        elif name in NEED_TE_ON_A_GPU[section]:
            if backend in ("te", None):
                continue
            clause += f" with precision_backend={backend}"
            remedy = "Remove it, or run with Transformer Engine on a GPU"
        path = f"{section}.{name}"
        yield Violation(
            path,
            value=getattr(value, "name", value),
            rests_on=(path,),
            clause=clause,
            remedy=remedy,
        )


def find_unsupported_values(
    section: str, values: Mapping[str, Any], *, backend: str | None
) -> Iterator[Violation]:
    """Yield the values of a section that no run can have.

    Args:
        section: See `find_unsupported_fields`.
        values: See `find_unsupported_fields`.
        backend: See `find_unsupported_fields`.
    """
    accepted = dict(SUPPORTED_VALUES[section])
    if section == "model" and backend not in (*TE_BACKENDS, None):
        accepted |= SUPPORTED_VALUES_WITHOUT_TE
    for name, known in accepted.items():
        value = values.get(name, OWNER_DEFAULTS[section][name])
        if (
            is_different(value, OWNER_DEFAULTS[section][name])
            and str(getattr(value, "name", value)) not in known
        ):
            hint = did_you_mean(close_matches(str(value), known)) or "Choose one of them."
            yield _make_violation(
                f"{section}.{name}", value, f"must be one of {', '.join(known)}", hint
            )


def find_context_parallel_faults(
    model: Mapping[str, Any], *, backend: str | None
) -> Iterator[Violation]:
    """Yield the reasons why a backend has no context parallelism for the attention of a model."""
    model = {**OWNER_DEFAULTS["model"], **model}
    path, size = "model.context_parallel_size", model["context_parallel_size"]
    if size == 1:
        return
    if model["experimental_attention_variant"] == SPARSE_VARIANT:
        rule = (
            "must be 1 for sparse attention: that of megatron-core 0.16.1 has no context "
            "parallelism"
        )
        yield _make_violation(path, size, rule, "Leave it at 1")
        return
    if backend in ("te", None):
        return
    accepted = CONTEXT_PARALLEL_WITHOUT_TE
    if backend == "te_cpu":
        accepted = CONTEXT_PARALLEL_TE_CPU
    for name, known in accepted.items():
        values = [model[name]]
        if name == "cp_comm_type" and isinstance(model[name], list):
            values = model[name]  # a value for each layer
        if any(getattr(value, "name", value) not in known for value in values):
            setting = f"model.{name}={' or '.join(map(str, known))}"
            yield _make_violation(
                path,
                size,
                f"needs {setting} with precision_backend={backend}",
                f"Set model.{name}={known[0]}",
            )


def _find_dropped_fields(context: RunContext, backend: str | None) -> Iterator[Violation]:
    """Yield the fields that the build would leave out."""
    for section in SUPPORTED_FIELDS:
        yield from find_unsupported_fields(section, context.views[section].values, backend=backend)
        for name, value in context.sections[section].newer_fields.items():
            yield _make_violation(
                f"{section}.{name}", value, "scripts/train.py does not honour it", _REMOVE
            )
    pattern = HybridPattern.from_model(context.views["model"].values)
    if pattern is None or pattern.faults:
        return
    for name in sorted(UNSUPPORTED_IN_HYBRIDS["model"]):
        value = getattr(context.model, name)
        # Selective recomputation works within a layer. So hybrid models support it too.
        if value and value != "selective":
            clause = "scripts/train.py does not honour it in a hybrid model"
            yield _make_violation(f"model.{name}", value, clause, _REMOVE)


def _find_refused_values(context: RunContext, backend: str | None) -> Iterator[Violation]:
    """Yield the values that no run can have."""
    for section in SUPPORTED_VALUES:
        yield from find_unsupported_values(section, context.views[section].values, backend=backend)
    model = context.model
    pattern = HybridPattern.from_model(context.views["model"].values)
    if pattern is not None and not pattern.faults and not _can_build_layers(pattern):
        rule = (
            "a run builds layers of M, *, - and E; Megatron Core has |, / and other layers "
            "from 0.17 on"
        )
        yield _make_model_violation(context, pattern.field, rule, "Write those alone")
    experts = model.num_moe_experts
    if experts and not 1 <= model.moe_router_topk <= experts:
        yield _make_model_violation(
            context, "moe_router_topk", f"must be from 1 to the {experts} experts", "Correct it"
        )
    if (
        experts and model.add_bias_linear and backend not in (*TE_BACKENDS, None)
    ):  # local experts add their biases in place
        rule = "experts have no biases without Transformer Engine's layers"
        yield _make_model_violation(
            context, "add_bias_linear", rule, "Set model.add_bias_linear=false"
        )
    if (
        model.experimental_attention_variant == SPARSE_VARIANT
        and model.dsa_indexer_loss_coeff is None
    ):
        rule = (
            "must be stated for sparse attention: Megatron Core multiplies the indexer's loss by it"
        )
        yield _make_model_violation(
            context, "dsa_indexer_loss_coeff", rule, "Set it to 0.01, for example"
        )


def _can_build_layers(pattern: HybridPattern) -> bool:
    """Return whether a run can build the layers of a hybrid model's pattern."""
    return (
        SUPPORTED_LAYER_LETTERS.issuperset(pattern.layers)
        and not pattern.chunks
        and not pattern.depths
    )


def _find_refused_layouts(context: RunContext, backend: str | None) -> Iterator[Violation]:
    """Yield the fields of a layout that no backend supports, or that would train another model."""
    model, parallel = context.model, context.parallel
    if model.virtual_pipeline_model_parallel_size is not None and parallel.pipeline < 2:
        rule = (
            f"interleaves the stages of a pipeline, and there is {parallel.pipeline} "
            "(pipeline_model_parallel_size)"
        )
        yield _make_model_violation(
            context, "virtual_pipeline_model_parallel_size", rule, "Leave it at None"
        )
    if parallel.context > 1:
        yield from find_context_parallel_faults(context.views["model"].values, backend=backend)
    if parallel.tensor > 1:
        yield from _find_tensor_parallel_faults(context, backend)
    is_spread = model.num_moe_experts and parallel.expert > 1 and parallel.expert_tensor > 1
    if is_spread and model.moe_token_dispatcher_type == ALL_TO_ALL and backend not in ("te", None):
        rule = (
            "must be 1 where experts are on several ranks without a GPU: gloo gathers equal "
            "numbers of tokens alone"
        )
        remedy = "Set it to 1, or model.moe_token_dispatcher_type=allgather"
        yield _make_violation(
            "model.expert_tensor_parallel_size", parallel.expert_tensor, rule, remedy
        )


def _find_tensor_parallel_faults(context: RunContext, backend: str | None) -> Iterator[Violation]:
    """Yield the fields with which Megatron trains another model under tensor parallelism."""
    model, has_te_layers = context.model, backend in (*TE_BACKENDS, None)
    if model.num_moe_experts and not model.sequence_parallel:
        rule = (
            "must be on for experts under tensor parallelism, without which Megatron Core "
            "does not train them"
        )
        yield _make_model_violation(
            context, "sequence_parallel", rule, "Set model.sequence_parallel=true"
        )
    if model.multi_latent_attention and not model.sequence_parallel:
        remedy = (
            "Without it Megatron Core's gradients of the rotary key and of the latent's norm are "
            "not those of the model. Set model.sequence_parallel=true"
        )
        yield _make_model_violation(
            context,
            "sequence_parallel",
            "must be on for latent attention under tensor parallelism",
            remedy,
        )
    if model.sequence_parallel and model.enable_autocast and not has_te_layers:
        rule = (
            "must be off under autocast without Transformer Engine's layers: the backward pass of "
            "Megatron Core's own would reduce gradients in half precision into an FP32 "
            "tensor, which is an error"
        )
        yield _make_model_violation(
            context, "sequence_parallel", rule, "Set model.sequence_parallel=false"
        )
    if model.experimental_attention_variant == SPARSE_VARIANT and not has_te_layers:
        rule = (
            "must be 1 for sparse attention without Transformer Engine's layers: its indexer "
            "is whole on every rank"
        )
        yield _make_model_violation(context, "tensor_model_parallel_size", rule, "Set it to 1")


def _make_model_violation(context: RunContext, name: str, clause: str, remedy: str) -> Violation:
    """Return the violation of a field of the model."""
    return _make_violation(f"model.{name}", getattr(context.model, name), clause, remedy)


def _make_violation(path: str, value: object, clause: str, remedy: str) -> Violation:
    return Violation(
        path, value=getattr(value, "name", value), clause=clause, remedy=remedy.removesuffix(".")
    )


def _restrict_to_our_script(
    find: Callable[[RunContext, str | None], Iterator[Violation]],
) -> Callable[[RunContext], list[Violation]]:
    def find_violations(context: RunContext) -> list[Violation]:
        if not context.program.is_train_script:
            return []
        backend = context.backend
        if backend is None and context.target.gpu is not None:
            backend = "te" if context.has_gpu else "emulated"
        return list(find(context, backend))

    return find_violations


_SOURCE = "bridge/rules/topics/system/train_script_fields.py: megatron-core 0.16.1, its readers of each field"
_build_rule = partial(error, setting="model", message="{clause}", remedies=("{remedy}",))

RULES = (
    _build_rule(
        id=NOT_HONOURED,
        title="field that the run does not honour",
        when=_restrict_to_our_script(_find_dropped_fields),
        source=_SOURCE,
        explanation="The build of scripts/train.py would leave the field out and train another "
        "model. Which fields it honours depends on the layers: Transformer Engine's, its "
        "Python on a "
        "CPU, or the emulated ones.",
    ),
    _build_rule(
        id=WRONG_VALUE,
        title="value that the run cannot have",
        when=_restrict_to_our_script(_find_refused_values),
        source=_SOURCE,
        explanation="The build of scripts/train.py has no such value, or Megatron would end in a "
        "traceback for it.",
    ),
    _build_rule(
        id=WRONG_LAYOUT,
        title="layout that trains another model",
        when=_restrict_to_our_script(_find_refused_layouts),
        source="Runs of megatron-core 0.16.1 over gloo, compared with one process",
    ),
)

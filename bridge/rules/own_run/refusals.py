"""Refusals of the build of a run: fields that it does not honour, and values that Megatron misreads.

The build asks before it makes a model, and `check` asks through the rules at the end. Both get the
same sentence and the same id.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, RunConfigError, close_matches, did_you_mean
from bridge.precision.fields import default_of
from bridge.precision.values import dtype_token
from bridge.rules.context import RuleContext
from bridge.rules.fields import DEFAULTS, FIELDS, differ
from bridge.rules.own_run.fields import (
    ACCEPTED,
    ACCEPTED_WITHOUT_TE,
    BETWEEN,
    BUILT,
    BUILT_LAYERS,
    COMMUNICATION,
    KNOWN,
    PLAIN_ATTENTION,
    PLAIN_LOCAL_ATTENTION,
    REFUSED,
    REFUSED_OF_HYBRIDS,
    REFUSED_ON_CPU,
    REFUSED_WITHOUT_TE,
    UNKNOWN,
    WITH_TE,
)
from bridge.rules.rule import error, remedy_of
from bridge.rules.section import read_section
from bridge.rules.shape.hybrid import HybridPattern
from bridge.rules.shape.parallel import Parallel, sent_between_stages
from bridge.rules.shape.variants import SPARSE
from bridge.rules.topics.mode import RECEIVED
from bridge.rules.topics.parallel import TWO_STAGES
from bridge.rules.versions import installed
from bridge.rules.violation import Predicate, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Values = Mapping[str, Any]

NOT_HONOURED, WRONG_VALUE, WRONG_LAYOUT = "PB701", "PB702", "PB703"
"""Ids of the rules."""


def require_honoured(model: Any, optimizer: Any, ddp: Any, *, backend: str) -> None:
    """Refuse a run whose configs ask for something that would silently be left out.

    Args:
        model: A `GPTConfig`.
        optimizer: An `OptimizerConfig`.
        ddp: A `DistributedDataParallelConfig`.
        backend: te, te_cpu, emulated or local: the implementation of the linear layers.

    Raises:
        RunConfigError: Such fields, all of them; or layers that cannot be split over the pipeline stages.
    """
    faults = run_faults(model, optimizer, ddp, backend=backend)
    if faults:
        raise RunConfigError("\n".join(f"{fault.id} {fault}" for fault in faults))
    Parallel.of(model).places(model.num_layers)


def run_faults(model: Any, optimizer: Any, ddp: Any, *, backend: str) -> list[Finding]:
    """Return every field and value that the build of a run refuses; arguments as for `require_honoured`."""
    sections = {"model": model, "optimizer": optimizer, "ddp": ddp}
    defaults = {name: class_defaults(config) for name, config in sections.items()}
    values = {name: {key: getattr(config, key) for key in defaults[name]} for name, config in sections.items()}
    return refusals(values, defaults, backend=backend)


def refusals(sections: Mapping[str, Values], defaults: Mapping[str, Values], *, backend: str | None) -> list[Finding]:
    """Return every field and value that the build of a run refuses.

    Args:
        sections: model, optimizer and ddp, each with all of its fields.
        defaults: The same sections with the defaults of Megatron's classes.
        backend: te, te_cpu, emulated or local; None: not known, so that only refusals of all of them count.
    """
    found = [one for name in REFUSED for one in unhonoured(name, sections[name], defaults[name], backend=backend)]
    model = sections["model"]
    kinds = [*_wrong_hybrid(model), *_wrong_variant(model, backend)]
    return [*found, *_wrong_values(model, backend), *kinds, *_wrong_layouts(model, backend)]


def unhonoured(section: str, values: Values, defaults: Values, *, backend: str | None) -> Iterator[Finding]:
    """Yield the fields of a section that a run would not honour.

    Args:
        section: model, optimizer or ddp.
        values: Field -> value; fields that are not there have their default.
        defaults: Field -> default of Megatron's class, and of ours.
        backend: As for `refusals`.
    """
    reasons = REFUSED[section]
    if backend not in ("te", None):
        reasons = reasons | (REFUSED_ON_CPU if backend == "te_cpu" else REFUSED_WITHOUT_TE)[section]
    has_te_layers = section != "model" or backend in (*WITH_TE, None)
    accepted = ACCEPTED[section] | ({} if has_te_layers else ACCEPTED_WITHOUT_TE)
    for name, default in defaults.items():
        value = values.get(name, default)
        path = f"{section}.{name}"
        if not differ(value, default):
            continue
        if name in accepted and str(getattr(value, "name", value)) not in accepted[name]:
            hint = did_you_mean(close_matches(str(value), accepted[name])) or "Choose one of them."
            yield _fault(WRONG_VALUE, path, f"must be one of {', '.join(accepted[name])}", value, hint)
        elif name in reasons or name not in KNOWN[section]:
            rule = f"this run does not honour it: {reasons.get(name, UNKNOWN)}"
            yield _fault(NOT_HONOURED, path, rule, value, f"Leave it at {getattr(default, 'name', default)!r}.")
    if section == "model":
        yield from _unhonoured_context({**defaults, **values}, backend)


def _unhonoured_context(model: Values, backend: str | None) -> Iterator[Finding]:
    """Yield the fault of context parallelism that the attention of a backend has not."""
    size, stated = model["context_parallel_size"], model["cp_comm_type"]
    if size == 1:
        return
    if model["experimental_attention_variant"] == SPARSE:
        rule = "this run does not honour it: the sparse attention of megatron-core 0.16.1 has no context parallelism"
        yield _fault(NOT_HONOURED, "model.context_parallel_size", rule, size, "Leave it at 1.")
        return
    kinds = COMMUNICATION.get(backend or "te", ("all_gather",))
    asked = stated if isinstance(stated, list) else [stated or "p2p"]
    found = {*map(str, asked)} - {*kinds}
    plain = PLAIN_ATTENTION | ({} if backend == "te_cpu" else PLAIN_LOCAL_ATTENTION)
    wanted = {} if backend in ("te", None) else plain
    others = [name for name, value in wanted.items() if getattr(model[name], "name", model[name]) != value]
    if not found and not others:
        return
    causes = [*(f"by {kind}" for kind in sorted(found)), *(f"with {name}" for name in others)]
    steps = [f"model.cp_comm_type={' or '.join(kinds)}"] if found else []
    steps += [f"model.{name}={wanted[name]}" for name in others]
    rule = f"this run does not honour it: the backend {backend} has no context parallelism {', '.join(causes)}"
    also = " precision_backend=te_cpu has a2a." if "a2a" in found else ""
    yield _fault(NOT_HONOURED, "model.context_parallel_size", rule, size, f"Set {', '.join(steps)}.{also}")


def _wrong_values(model: Values, backend: str | None) -> Iterator[Finding]:
    """Yield the values of a model that Megatron would build a model with, or end in a traceback for."""
    for name, least, most in BETWEEN:
        value = model.get(name)
        if value is not None and not least <= value <= most:
            limits = f"must be at least {least}" if most == math.inf else f"must be from {least} to {most}"
            yield _wrong(WRONG_VALUE, model, name, limits, "Correct it.")
    experts, ranks = model["num_moe_experts"], model["expert_model_parallel_size"]
    if not experts:
        return
    if not 1 <= model["moe_router_topk"] <= experts:
        yield _wrong(WRONG_VALUE, model, "moe_router_topk", f"must be from 1 to the {experts} experts", "Correct it.")
    if experts % ranks:
        rule = f"must be a multiple of expert_model_parallel_size {ranks}"
        yield _wrong(WRONG_VALUE, model, "num_moe_experts", rule, "Change one of them.")
    if model["add_bias_linear"] and model["moe_shared_expert_intermediate_size"]:
        rule = "shared experts have no biases"
        yield _wrong(WRONG_VALUE, model, "add_bias_linear", rule, "Set model.add_bias_linear=false.")
    elif model["add_bias_linear"] and backend not in (*WITH_TE, None):  # local experts add them in place: no autograd
        rule = "experts have no biases without Transformer Engine's layers"
        yield _wrong(WRONG_VALUE, model, "add_bias_linear", rule, "Set model.add_bias_linear=false.")


def _wrong_variant(model: Values, backend: str | None) -> Iterator[Finding]:
    """Yield what DeepSeek sparse attention of Megatron Core ends in a traceback for."""
    if model["experimental_attention_variant"] != SPARSE:
        return
    if model["dsa_indexer_loss_coeff"] is None:
        rule = "must be stated for sparse attention: Megatron Core multiplies the indexer's loss by it"
        yield _wrong(WRONG_VALUE, model, "dsa_indexer_loss_coeff", rule, "Set it to 0.01, for example.")
    if model["recompute_granularity"] == "selective" and "core_attn" in (model["recompute_modules"] or ["core_attn"]):
        rule = "must not name core_attn for sparse attention, which Megatron Core recomputes without its hidden states"
        yield _wrong(WRONG_VALUE, model, "recompute_modules", rule, "Recompute whole layers, or other modules.")
    if model["mtp_num_layers"]:
        rule = (
            "must be unset for sparse attention: megatron-core 0.16.1 keeps indexers' losses of the other layers alone"
        )
        yield _wrong(WRONG_VALUE, model, "mtp_num_layers", rule, "Leave it at None.")
    if model["tensor_model_parallel_size"] > 1 and backend not in (*WITH_TE, None):
        rule = "must be 1 for sparse attention without Transformer Engine's layers: its indexer is whole on every rank"
        yield _wrong(WRONG_LAYOUT, model, "tensor_model_parallel_size", rule, "Set it to 1.")


def _wrong_hybrid(model: Values) -> Iterator[Finding]:
    pattern = HybridPattern.of(model)
    if pattern is None or pattern.faults:
        return
    for name, reason in REFUSED_OF_HYBRIDS.items():
        if model[name] and model[name] != "selective":  # the recomputation of a part of a layer, which is the layer's
            rule = f"this run does not honour it: {reason}"
            yield _wrong(NOT_HONOURED, model, name, rule, "Leave it at its default.")
    if {*pattern.layers} - BUILT_LAYERS or pattern.chunks or pattern.depths:
        rule = "a run builds layers of M, *, - and E; Megatron Core has |, / and other layers from 0.17 on"
        yield _wrong(WRONG_VALUE, model, pattern.field, rule, "Write those alone.")


def _wrong_layouts(model: Values, backend: str | None) -> Iterator[Finding]:
    """Yield the fields of a layout with which Megatron ends in a traceback, or trains another model."""
    yield from _wrong_context(model)
    yield from _wrong_pipeline(model, backend)
    if model["tensor_model_parallel_size"] > 1 and not model["sequence_parallel"]:
        yield from _wrong_without_sequence_parallelism(model)
    elif model["tensor_model_parallel_size"] > 1 and model["enable_autocast"] and backend not in (*WITH_TE, None):
        rule = (
            "must be off under autocast without Transformer Engine's layers: the backward pass of Megatron Core's own "
            "would reduce gradients in half precision into an FP32 tensor, which is an error"
        )
        yield _wrong(WRONG_LAYOUT, model, "sequence_parallel", rule, "Set model.sequence_parallel=false.")
    parts = model["expert_tensor_parallel_size"] or model["tensor_model_parallel_size"]
    dispatcher = model["moe_token_dispatcher_type"]
    sends_unevenly = model["expert_model_parallel_size"] > 1 and dispatcher == "alltoall"
    if model["num_moe_experts"] and parts > 1 and sends_unevenly and backend not in ("te", None):
        rule = "must be 1 where experts are on several ranks without a GPU: gloo gathers equal numbers of tokens alone"
        remedy = "Set it to 1, or model.moe_token_dispatcher_type=allgather."
        yield _fault(WRONG_LAYOUT, "model.expert_tensor_parallel_size", rule, parts, remedy)


def _wrong_context(model: Values) -> Iterator[Finding]:
    ranks, tensor = model["context_parallel_size"], model["tensor_model_parallel_size"]
    if ranks == 1:
        return
    if model["seq_length"] % (2 * ranks):
        rule = f"must be a multiple of 2 x context_parallel_size = {2 * ranks}"
        yield _wrong(WRONG_LAYOUT, model, "seq_length", rule, "Change one of them.")
    for name in ("num_attention_heads", "num_query_groups"):
        if "a2a" in str(model["cp_comm_type"]) and model[name] and model[name] % (tensor * ranks):
            rule = f"must be a multiple of tensor x context ranks = {tensor * ranks} with cp_comm_type=a2a"
            remedy = "Use cp_comm_type=all_gather, or change one of them."
            yield _wrong(WRONG_LAYOUT, model, name, rule, remedy)


def _wrong_pipeline(model: Values, backend: str | None) -> Iterator[Finding]:
    """Yield the settings of a pipeline that interleave what is not there, or send another dtype than is received."""
    chunks, stages = model["virtual_pipeline_model_parallel_size"], model["pipeline_model_parallel_size"]
    if chunks is not None and stages < 2:
        rule = f"interleaves the stages of a pipeline, and there is {stages} (pipeline_model_parallel_size)"
        yield _wrong(WRONG_LAYOUT, model, "virtual_pipeline_model_parallel_size", rule, "Leave it at None.")
    if chunks is not None and stages == 2 and not model["overlap_p2p_comm"]:
        yield _wrong(TWO_STAGES.id, model, "overlap_p2p_comm", TWO_STAGES.message, remedy_of(TWO_STAGES.remedies))
    received = model["pipeline_dtype"]
    if model["enable_autocast"] and stages > 1 and received is not None:
        values = read_section("model", model).values
        sent = sent_between_stages(values, installed("mcore"), is_local=backend not in WITH_TE)
        if dtype_token(received) != sent:
            rule, remedy = (text.format(sent=sent) for text in (RECEIVED.message, remedy_of(RECEIVED.remedies)))
            yield _fault(RECEIVED.id, "model.pipeline_dtype", rule, dtype_token(received), remedy)


def _wrong_without_sequence_parallelism(model: Values) -> Iterator[Finding]:
    """Yield what Megatron trains wrong under tensor parallelism alone."""
    if model["num_moe_experts"]:
        rule = "must be on for experts under tensor parallelism, without which Megatron Core does not train them"
        yield _wrong(WRONG_LAYOUT, model, "sequence_parallel", rule, "Set model.sequence_parallel=true.")
    if model["multi_latent_attention"]:
        rule = "must be on for latent attention under tensor parallelism"
        remedy = (
            "Without it Megatron Core's gradients of the rotary key and of the latent's norm are not those of the "
            "model. Set model.sequence_parallel=true."
        )
        yield _wrong(WRONG_LAYOUT, model, "sequence_parallel", rule, remedy)


def _wrong(rule: str, model: Values, name: str, clause: str, remedy: str) -> Finding:
    return _fault(rule, f"model.{name}", clause, model[name], remedy)


def _fault(rule: str, path: str, clause: str, value: object, remedy: str) -> Finding:
    return Finding(id=rule, path=path, rule=clause, value=getattr(value, "name", value), remedy=remedy)


def class_defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of the fields that a config, or its class, declares."""
    return {field.name: default_of(field) for field in dataclasses.fields(config) if not field.name.startswith("_")}


_DEFAULTS = {
    role: {name: DEFAULTS[role][name] for name, row in FIELDS[role].items() if row.is_megatron or name in BUILT}
    for role in ("model", "optimizer", "ddp")
}
SOURCE = "bridge/rules/own_run/fields.py: megatron-core 0.16.1, its readers of each field"


def _refused(rule: str) -> Predicate:
    def predicate(run: RuleContext) -> list[Violation]:
        if not run.is_own:
            return []
        backend = run.backend
        if backend is None and run.target.gpu is not None:
            backend = "te" if run.has_gpu else "emulated"
        sections = {role: vars(run.views[role]) for role in _DEFAULTS}
        return [
            Violation(one.path, value=one.value, clause=one.rule, remedy=one.remedy.removesuffix("."))
            for one in refusals(sections, _DEFAULTS, backend=backend)
            if one.id == rule
        ]

    return predicate


_row = partial(error, setting="model", message="{clause}", remedies=("{remedy}",))
"""A row whose findings have the words of the refusals."""

RULES = (
    _row(
        id=NOT_HONOURED,
        title="field that the run does not honour",
        when=_refused(NOT_HONOURED),
        source=SOURCE,
        explanation="The build of scripts/train.py would leave the field out and train another model. Which fields it "
        "honours depends on the layers: Transformer Engine's, its Python on a CPU, or the emulated ones.",
    ),
    _row(
        id=WRONG_VALUE,
        title="value that the run cannot have",
        when=_refused(WRONG_VALUE),
        source=SOURCE,
        explanation="The build of scripts/train.py has no such value, or Megatron would end in a traceback for it.",
    ),
    _row(
        id=WRONG_LAYOUT,
        title="layout that trains another model",
        when=_refused(WRONG_LAYOUT),
        source="Runs of megatron-core 0.16.1 over gloo, compared with one process",
    ),
)

"""The sections of a run that Megatron-LM's arguments describe: its model, optimizer, DDP and batch, by field.

The precision is the importer's. An argument becomes the field of the same name, and `RENAMED`, `IMPLIED` and
`DEFAULTS` hold the others. Source: Megatron-LM 0.20 training/arguments.py, `core_transformer_config_from_args` and
`validate_args`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from bridge.errors import WrongValueError
from bridge.interop.launch.launches import Launch
from bridge.interop.launch.variables import is_unknown
from bridge.interop.megatron_lm.arguments import argument_groups
from bridge.interop.megatron_lm.flags import BY_NAME, dest
from bridge.precision.fields import coerce
from bridge.rules.fields import FIELDS, whole_number

RENAMED = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
IMPLIED: dict[str, dict[str, Any]] = {
    "swiglu": {"gated_linear_unit": True, "activation_func": "silu"},
    "squared_relu": {"activation_func": "squared_relu"},
    "disable_bias_linear": {"add_bias_linear": False},
    "untie_embeddings_and_output_weights": {"share_embeddings_and_output_weights": False},
    "use_rotary_position_embeddings": {"position_embedding_type": "rope"},
    "recompute_activations": {"recompute_granularity": "selective"},
}
"""Switch -> fields of the model that it sets."""
DEFAULTS = {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}
"""Field of the model -> Megatron-LM's default where it is not that of the class."""
SHARED = ("use_distributed_optimizer", "overlap_param_gather")
LISTS = ("recompute_modules", "offload_modules", "cuda_graph_modules")
BATCH = ("micro_batch_size", "global_batch_size")
ROLES = ("model", "optimizer", "ddp")


@dataclass
class RunSections:
    """The sections of one run."""

    sections: dict[str, dict[str, Any]] = field(default_factory=lambda: {role: {} for role in (*ROLES, "train")})
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of Transformer Engine's that the file sets."""
    unread: list[str] = field(default_factory=list)
    """Arguments whose values only the run decides, or that cannot be read."""


def sections_of(given: Launch | Mapping[str, Any]) -> RunSections:
    """Return the sections that a launch, or a mapping of arguments, ``MODEL_ARGS`` in it or not, describes."""
    made = RunSections()
    arguments = dict(_of_mapping(given) if isinstance(given, Mapping) else _of_words(given))
    model = made.sections["model"]
    model |= DEFAULTS
    variables = given.get("ENV_VARS") or {} if isinstance(given, Mapping) else given.environment
    made.environment = {name: str(value) for name, value in variables.items() if name.startswith("NVTE_")}
    for name, value in arguments.items():
        if name in IMPLIED:
            if value not in (False, "false"):
                model |= IMPLIED[name]
        elif name not in BY_NAME:
            _put(made, RENAMED.get(name, name), value)
    if not arguments.get("group_query_attention"):
        model.pop("num_query_groups", None)
    each = whole_number(arguments.get("num_layers_per_virtual_pipeline_stage"))
    layers, stages = (whole_number(model.get(name)) for name in ("num_layers", "pipeline_model_parallel_size"))
    if each and layers and stages:
        model["virtual_pipeline_model_parallel_size"] = layers // stages // each
    return made


def _put(made: RunSections, name: str, value: Any) -> None:
    """Write an argument into each section that has a field of its name."""
    for role in (*ROLES, "train"):
        row = FIELDS[role].get(name) if role in ROLES else None
        if row is None and not (role == "train" and name in BATCH):
            continue
        if value is None or (isinstance(value, str) and is_unknown(value)):
            made.unread.append(name)
            return
        if name in LISTS and isinstance(value, str):  # "[a b]" in a file of arguments
            value = value.strip("[]").split()
        kind = row.kind if row is not None else "int"
        try:
            made.sections[role][name] = value if kind in ("any", "dtype") else coerce(value, kind)
        except WrongValueError:
            made.unread.append(name)
        if name not in SHARED:
            return


def _of_mapping(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    groups = argument_groups(given)
    for name, value in (groups[0][1] if groups else given).items():
        yield dest(str(name)), value


def _of_words(launch: Launch) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each option: True where no value follows, the first of several but for `LISTS`."""
    words = launch.arguments
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        following = list(takewhile(lambda word: not word.startswith("--"), words[place + 1 :]))
        if equals or not following:
            yield dest(name), value if equals else True
        else:
            yield dest(name), " ".join(following) if dest(name) in LISTS else following[0]

"""Megatron-LM's arguments by the names that its own code has for them, and the sections of a run that they become.

An argument becomes the field of the same name in every config that has one, as `core_transformer_config_from_args`,
`get_megatron_optimizer_config` and `get_megatron_ddp_config` do it. `FIELD_OF` and `SETS` hold the others.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from bridge.errors import WrongValueError
from bridge.interop.launch.word import Word, joined
from bridge.interop.megatron_lm.flags import BY_NAME, SWITCH, dest
from bridge.precision.fields import NO, YES, coerce, number_of_text
from bridge.rules.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.interop.launch.launches import Launch

OWNERS = ("model", "optimizer", "ddp")
BATCH = ("micro_batch_size", "global_batch_size")
SPELLED = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush",
    "cuda_graph_scope": "cuda_graph_modules",
    "hybrid_override_pattern": "hybrid_layer_pattern",
    "use_nccl_ub": "nccl_ub",
    "tensor_parallel_weight_shards": "tensor_parallel_num_weight_shards",
}
"""Option -> the argument that it sets, where their names differ."""
SWITCHED_OFF = {
    "disable_bias_linear": "add_bias_linear",
    "no_rope_fusion": "apply_rope_fusion",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
    "no_initialization": "perform_initialization",
    "no_check_for_nan_in_loss_and_grad": "check_for_nan_in_loss_and_grad",
    "no_bias_gelu_fusion": "bias_gelu_fusion",
    "no_bias_swiglu_fusion": "bias_swiglu_fusion",
    "disable_mamba_mem_eff_path": "use_mamba_mem_eff_path",
    "muon_no_split_qkv": "muon_split_qkv",
}
"""Option that switches an argument off -> that argument; `no_` and `disable_` before a switch's name need no row."""
FIELD_OF: dict[str, tuple[str, ...]] = {
    "num_experts": ("model.num_moe_experts",),
    "encoder_num_layers": ("model.num_layers",),
    "padded_vocab_size": ("model.vocab_size",),
    "num_virtual_stages_per_pipeline_rank": ("model.virtual_pipeline_model_parallel_size",),
    "decoder_first_pipeline_num_layers": ("model.num_layers_in_first_pipeline_stage",),
    "decoder_last_pipeline_num_layers": ("model.num_layers_in_last_pipeline_stage",),
    "fp8_param_gather": ("model.fp8_param", "ddp.fp8_param_gather"),
    "fp4_param_gather": ("model.fp4_param", "ddp.fp4_param_gather"),
    "autocast_enabled": ("model.enable_autocast",),
    "check_for_nan_in_loss_and_grad": ("ddp.check_for_nan_in_grad", "train.check_for_nan_in_loss"),
}
"""Argument -> the fields that it becomes, where none has its name; `ddp_` before the name of a field needs no row."""
SETS: dict[str, dict[str, Any]] = {
    "swiglu": {"gated_linear_unit": True, "activation_func": "silu"},
    "quick_geglu": {"gated_linear_unit": True, "activation_func": "quick_gelu"},
    "squared_relu": {"activation_func": "squared_relu"},
    "untie_embeddings_and_output_weights": {"share_embeddings_and_output_weights": False},
    "use_rotary_position_embeddings": {"position_embedding_type": "rope"},
    "recompute_activations": {"recompute_granularity": "selective"},
    "enable_cuda_graph": {"cuda_graph_impl": "local"},
    "external_cuda_graph": {"cuda_graph_impl": "transformer_engine"},
}
"""Switch -> fields of the model that it sets."""
LISTS = {
    "recompute_modules": "name",
    "offload_modules": "name",
    "cuda_graph_modules": "name",
    "cp_comm_type": "name",
    "moe_router_load_balancing_type": "name",
    "moe_aux_loss_coeff": "float",
    "mrope_section": "int",
    "hierarchical_context_parallel_sizes": "int",
}
"""Argument that takes several values -> what each of them is."""
ONE_FOR_ALL = ("cp_comm_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""Those of them whose only value counts for all layers, and stands without a list."""
MEMBERS = {"attention_backend": ("flash", "fused", "unfused", "local", "auto")}
"""Argument whose enum a checkpoint saves as a number, from 1 -> the names of its members."""
SLIP = 0.75
"""Likeness of a word with a slip to the word that was meant."""
VARIABLE = re.compile(r"\$\{?\w")
ENUM = re.compile(r"\A[A-Z]\w*\.(\w+)\Z|<\w+\.(\w+): [^>]*>")
"""A member of an enum as it is printed, by itself or in a list."""


@dataclass(kw_only=True, slots=True)
class Arguments:
    """The arguments of one run."""

    values: dict[str, Any] = field(default_factory=dict)
    """Argument -> its value; True for a switch."""
    unread: dict[str, str] = field(default_factory=dict)
    """Argument whose value only the run decides -> its value as it is written."""

    def take(self, option: str, value: Any) -> None:
        """Take an option as it is written; a switch with a value that says no is as if it were absent."""
        flag = BY_NAME.get(option)
        if flag is not None and flag.kind != "value":
            if _says_yes(value):
                self.set(flag.field, flag.sets if flag.sets is not None else flag.kind == "on")
            return
        switch = _switched_off(option)
        if switch is not None:
            if _says_yes(value):
                self.set(switch, value=False)
            return
        self.set(flag.field if flag is not None else SPELLED.get(option, option), value)

    def set(self, name: str, value: Any) -> None:
        """Set an argument by the name that Megatron-LM's code has for it."""
        self.unread.pop(name, None)
        if isinstance(value, str) and ((isinstance(value, Word) and value.is_unknown) or VARIABLE.search(value)):
            self.values.pop(name, None)
            self.unread[name] = str(value)
        else:
            self.values[name] = str(value) if isinstance(value, Word) else value

    def on(self, name: str) -> bool:
        """Return whether a switch is on."""
        return name in self.values and _says_yes(self.values[name])


def arguments_of_launch(launch: Launch) -> Arguments:
    """Return the arguments of a launch: True where no value follows, the first of several but for `LISTS`."""
    made, words = Arguments(), launch.arguments
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, value = word.option()
        following = list(takewhile(lambda word: not word.startswith("--"), words[place + 1 :]))
        if value is not None:
            made.take(dest(name), value)
        elif not following or _is_switch(name):
            made.take(dest(name), value=True)
        else:
            made.take(dest(name), joined(following) if dest(name) in LISTS else following[0])
    return made


def arguments_of_mapping(given: Mapping[Any, Any]) -> Arguments:
    """Return the arguments of a mapping: options as they are written, or names as Megatron-LM's code has them."""
    made = Arguments()
    for key, value in given.items():
        if str(key).startswith("--"):
            made.take(dest(str(key)), value)
        else:
            made.set(_name_in_code(str(key)), value)
    return made


def arguments_printed(block: Mapping[str, Any]) -> Arguments:
    """Return arguments as a run printed or saved them: all of them, with their defaults and without nothing."""
    made = Arguments()
    for name, value in block.items():
        if value is not None and name != "grad_reduce_in_bf16":
            made.set(_name_in_code(name), _plain(name, value))
    return made


def _plain(name: str, value: Any) -> Any:
    """Return a printed value with the name of a member in the place of an enum."""
    members = MEMBERS.get(name, ())
    if isinstance(value, int) and 0 < value <= len(members):
        return members[value - 1]
    return ENUM.sub(lambda found: found[1] or found[2], value) if isinstance(value, str) else value


def sections_of(arguments: Arguments) -> dict[str, dict[str, Any]]:
    """Return the sections that arguments become; a value that cannot be read is left to `arguments.unread`."""
    made: dict[str, dict[str, Any]] = {role: {} for role in (*OWNERS, "train")}
    for name, value in arguments.values.items():
        if name in SETS and _says_yes(value):
            made["model"] |= SETS[name]
    for name, value in arguments.values.items():
        for path in fields_of(name):
            role, _, attribute = path.partition(".")
            try:
                made[role][attribute] = _value(attribute, FIELDS[role][attribute].kind, value)
            except WrongValueError:
                arguments.unread[name] = str(value)
    if not (arguments.on("group_query_attention") and "num_query_groups" in made["model"]):
        made["model"].pop("num_query_groups", None)
    if "hybrid_layer_pattern" in made["model"]:
        made["model"]["is_hybrid_model"] = True
    return made


def fields_of(name: str) -> tuple[str, ...]:
    """Return the fields that an argument becomes, as section.field; none for one that is no setting of a config."""
    if name in FIELD_OF:
        return FIELD_OF[name]
    if name in BATCH:
        return (f"train.{name}",)
    short = name.removeprefix("ddp_")
    if short != name and short in FIELDS["ddp"]:
        return (f"ddp.{short}",)
    return tuple(f"{role}.{name}" for role in OWNERS if name in FIELDS[role])


def misspelt(arguments: Arguments) -> dict[str, str]:
    """Return each argument that is not known -> the one that it is but for a slip in one word, where there is one."""
    known = {*BY_NAME, *SPELLED, *SPELLED.values(), *FIELD_OF, *SETS, *SWITCHED_OFF, *BATCH}
    known |= {flag.field for flag in BY_NAME.values()}
    known |= {name for role in OWNERS for name in FIELDS[role]}
    given = {**arguments.values, **arguments.unread}.keys() - known
    near = {name: [one for one in known if _is_a_slip(name, one)] for name in sorted(given)}
    return {name: min(ones) for name, ones in near.items() if ones}


def _is_a_slip(one: str, other: str) -> bool:
    """Return whether two names differ in one word alone, and in that by a letter or two behind the first."""
    pairs = list(zip(one.split("_"), other.split("_"), strict=False))
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    if one.count("_") != other.count("_") or len(differing) != 1:
        return False
    (mine, theirs) = differing[0]
    return mine[:1] == theirs[:1] and SequenceMatcher(None, mine, theirs).ratio() >= SLIP


def _name_in_code(name: str) -> str:
    """Return the name that this project has for an argument of Megatron-LM's code."""
    flag = BY_NAME.get(name)
    return flag.field if flag is not None and flag.kind != "off" else SPELLED.get(name, name)


def _value(name: str, kind: str, value: Any) -> Any:
    """Return the value of a field; WrongValueError for one that is none."""
    if name in LISTS:
        given = value if isinstance(value, list) else re.sub(r"[\[\],'\"]", " ", str(value)).split()
        several = [coerce(one, LISTS[name]) for one in given]
        return several[0] if name in ONE_FOR_ALL and len(several) == 1 else several
    if kind in ("any", "dtype"):
        return number_of_text(value) if isinstance(value, str) else value
    return coerce(value, kind)


def _switched_off(option: str) -> str | None:
    """Return the argument that an option switches off, None where it is no such option."""
    if option in SWITCHED_OFF:
        return SWITCHED_OFF[option]
    for prefix in ("no_", "disable_"):
        name = option.removeprefix(prefix)
        if name != option and any(_kind(one) == "bool" for one in fields_of(name)):
            return name
    return None


def _kind(path: str) -> str:
    role, _, name = path.partition(".")
    return FIELDS[role][name].kind


def _is_switch(option: str) -> bool:
    """Return whether an option takes no value."""
    name = dest(option)
    flag = BY_NAME.get(name)
    if flag is not None:
        return flag.kind != "value"
    is_bool = any(_kind(path) == "bool" for path in fields_of(SPELLED.get(name, name)))
    return is_bool or name in SETS or _switched_off(name) is not None or SWITCH.fullmatch(option) is not None


def _says_yes(value: Any) -> bool:
    """Return whether a value behind a switch leaves it on; a word that says neither is a word of its own."""
    text = str(value).lower()
    return text in YES or text not in NO

"""Options of Megatron-LM's command line as they are written, which of them are switches, and the fields they set.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from bridge.interop.megatron_lm.flags import BY_NAME, OTHER_SETTINGS, SWITCH, dest
from bridge.rules.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bridge.interop.launch.word import Word

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
SLIP = 0.75
"""Likeness of a word with a slip to the word that was meant."""
PARALLELISM = frozenset(
    {"use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "deepspeed"}
)
"""Switches that bear on precision, and have no field of it."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it is written."""

    name: str
    """With its dashes on a command line; empty for what stands there before the first option."""
    value: Any = None
    """Behind `=`, or in a mapping."""
    following: Sequence[Word] = ()
    """The words up to the next option."""
    is_key: bool = False
    """It is a key of a mapping, whose value stands in it."""


def options_of(words: Sequence[Word]) -> Iterator[Option]:
    """Yield the options of a command line."""
    places = [place for place, word in enumerate(words) if word.startswith("--") and len(word) > 2]
    if words and places[:1] != [0]:
        yield Option("", following=words[: places[0] if places else len(words)])
    for place, end in zip(places, (*places[1:], len(words)), strict=False):
        yield Option(*words[place].option(), words[place + 1 : end])


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


def switched_off(option: str) -> str | None:
    """Return the argument that an option switches off, None where it is no such option."""
    if option in SWITCHED_OFF:
        return SWITCHED_OFF[option]
    for prefix in ("no_", "disable_"):
        name = option.removeprefix(prefix)
        if name != option and any(_kind_of(one) == "bool" for one in fields_of(name)):
            return name
    return None


def _kind_of(path: str) -> str:
    role, _, name = path.partition(".")
    return FIELDS[role][name].kind


def is_switch(option: str) -> bool:
    """Return whether an option takes no value."""
    name = dest(option)
    flag = BY_NAME.get(name)
    if flag is not None:
        return flag.kind != "value"
    if name in PARALLELISM or (name in OTHER_SETTINGS and OTHER_SETTINGS[name].harmless[0] is False):
        return True
    is_bool = any(_kind_of(path) == "bool" for path in fields_of(SPELLED.get(name, name)))
    return is_bool or name in SETS or switched_off(name) is not None or SWITCH.fullmatch(option) is not None


def misspelt(given: Iterable[str]) -> dict[str, str]:
    """Return each name that no argument has -> the one that is meant, where only one word has a slip."""
    known = {*BY_NAME, *SPELLED, *SPELLED.values(), *FIELD_OF, *SETS, *SWITCHED_OFF, *BATCH}
    known |= {flag.field for flag in BY_NAME.values()}
    known |= {name for role in OWNERS for name in FIELDS[role]}
    near = {name: [one for one in known if _is_a_slip(name, one)] for name in sorted({*given} - known)}
    return {name: min(ones) for name, ones in near.items() if ones}


def _is_a_slip(one: str, other: str) -> bool:
    """Return whether two names differ in one word alone, and in that by a letter or two behind the first."""
    pairs = list(zip(one.split("_"), other.split("_"), strict=False))
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    if one.count("_") != other.count("_") or len(differing) != 1:
        return False
    (mine, theirs) = differing[0]
    return mine[:1] == theirs[:1] and SequenceMatcher(None, mine, theirs).ratio() >= SLIP

"""Whether a document is Megatron-LM's: a launch script with its flags, or one of the argument files its users write."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.interop.contract import Recognised
from bridge.interop.megatron_lm.arguments import argument_groups
from bridge.interop.megatron_lm.flags import BY_NAME, OTHER_SETTINGS, dest
from bridge.interop.megatron_lm.printed import EVIDENCE, START, SUFFIX

if TYPE_CHECKING:
    from bridge.interop.document import Document


STRONG = re.compile(
    r"--(?:num-layers|hidden-size|num-attention-heads|micro-batch-size|global-batch-size|tensor-model-parallel-size"
    r"|pipeline-model-parallel-size|seq-length|train-iters|train-samples|fp8-format|fp4-format|fp8-recipe"
    r"|accumulate-allreduce-grads-in-fp32|initial-loss-scale|use-mcore-models|transformer-impl)\b"
)
ARGUMENTS = frozenset(
    re.findall(
        r"\S+",
        """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length
    max_position_embeddings position_embedding_type rotary_base normalization norm_epsilon layernorm_epsilon swiglu
    untie_embeddings_and_output_weights disable_bias_linear micro_batch_size global_batch_size train_iters train_samples
    eval_iters eval_interval exit_interval lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_fraction
    lr_warmup_iters lr_warmup_samples weight_decay adam_beta1 adam_beta2 clip_grad init_method_std save_interval
    log_interval tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size sequence_parallel use_distributed_optimizer tokenizer_type tokenizer_model data_path
    split num_workers vocab_size make_vocab_size_divisible_by num_experts moe_router_topk transformer_impl
    """,
    )
)
"""Names of Megatron-LM's arguments that other systems have too: several of them are its, one says nothing."""
OTHERS = frozenset(
    re.findall(
        r"\S+",
        """
    model trainer training optimizer data dataset datasets base_model architectures model_type torch_dtype dtype
    num_hidden_layers output_dir model_name_or_path per_device_train_batch_size per_device_eval_batch_size
    num_train_epochs learning_rate mixed_precision zero_optimization pipe_parallel_size model_parallel_size
    train_micro_batch_size_per_gpu gradient_accumulation_steps exp_manager defaults _target_ recipe fsdp deepspeed
    encoder_seq_length megatron_amp_O2 precision converters
    """,
    )
)
"""Keys at the top of other systems' files."""
SEVERAL = 4
MANY = 12
"""Where none of them bears on precision: four names of a model's sizes are anybody's."""
KEYS = (
    "tensor_model_parallel_size",
    "micro_batch_size",
    "accumulate_allreduce_grads_in_fp32",
    "fp8_format",
    "num_layers",
)


def recognise(document: Document) -> Recognised | None:
    """Return why a document is taken for Megatron-LM's, or None."""
    is_text = document.kind in ("shell", "text", "env")
    certainty, evidence = _of_text(document) if is_text else _of_mapping(document)
    return Recognised(certainty=certainty, evidence=evidence) if certainty else None


def _of_text(document: Document) -> tuple[float, str]:
    """Return the certainty, 0 for none, and the evidence of a script or a log."""
    if START.search(document.text):
        is_saved = document.path.endswith(SUFFIX)
        return 0.97, "is a checkpoint with the arguments of Megatron-LM" if is_saved else EVIDENCE
    found = sorted(set(STRONG.findall(document.text)))
    if found:
        return min(0.95, 0.5 + 0.15 * len(found)), f"has {', '.join(found[:3])}, which Megatron-LM's parser reads"
    is_switched = re.search(r"\s--(bf16|fp16)\b(?! +(?:(?i:true|false)))", document.text)
    if document.kind == "shell" and is_switched:
        return 0.35, "is a shell script with --bf16 or --fp16 as Megatron-LM takes them"
    return 0.0, ""


def _of_mapping(document: Document) -> tuple[float, str]:
    """Return the certainty, 0 for none, and the evidence of an argument file."""
    top = document.mapping
    if document.has("language_model", "model_parallel"):
        return 0.95, "has `language_model` and `model_parallel`, as files for --yaml-cfg do"
    groups = argument_groups(top)
    if groups:
        return 0.9, f"has `{groups[0][0]}`, a mapping of Megatron-LM's arguments"
    keys = list(map(str, top))
    if top and all(key.startswith("--") for key in keys):
        return 0.8, "every key is a command-line flag"
    found = [f"`{key}`" for key in KEYS if key in top]
    if len(found) > 1:
        return 0.7, f"has {' and '.join(found[:2])}, Megatron-LM's arguments"
    own = [f"`{key}`" for key in keys if key in ARGUMENTS]
    plain = not any(isinstance(value, dict) for value in top.values())
    wanted = SEVERAL if any(dest(key) in BY_NAME or dest(key) in OTHER_SETTINGS for key in keys) else MANY
    if len(own) >= wanted and 2 * len(own) > len(top) and plain and not OTHERS & set(keys):
        return 0.6, f"has {', '.join(own[:3])} and more of Megatron-LM's arguments, bare"
    return 0.0, ""

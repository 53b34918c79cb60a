"""Options that are not read: those that may bear on the layout, the layers or the bytes are told by their words."""

import pytest

from bridge.read.megatron_lm.flags import load_known_arguments
from bridge.read.megatron_lm.unread_options import UNREAD_ARGUMENTS, WORD_GROUPS, find_unread_options, is_known_option
from bridge.target.fields import OWNER_FIELDS

BEARING = {
    "zero_stage": "optimizer.use_distributed_optimizer",
    "moe_expert_parallel_size": "model.expert_model_parallel_size",
    "ds_sequence_parallel_size": "model.context_parallel_size",
    "pad_vocab_to_multiple": "model.vocab_size",
    "allow_padding_num_layers": "model.num_layers",
    "checkpoint_activations": "model.recompute_granularity",
    "activations_checkpoint_method": "model.recompute_granularity",
    "checkpoint_in_cpu": "model.recompute_granularity",
    "pp_partition_method": "model.num_layers_in_first_pipeline_stage",
    "num_key_value_heads": "model.num_query_groups",
    "use_gated_attention": "model.ffn_hidden_size",
    "glu_activation": "model.gated_linear_unit",
    "geglu": "model.gated_linear_unit",
    "max_tokens_per_gpu": "train.micro_batch_size",
    "offload_optimizer": "optimizer.optimizer_cpu_offload",
    "cpu_optimizer": "optimizer.optimizer_cpu_offload",
    "weight_int4_format": "model.fp8",
    "my_fp8_recipe": "model.fp8",
    "lora_rank": "model.num_layers",
    "extra_vocab_size": "model.vocab_size",
    "intermediate_size": "model.ffn_hidden_size",
    "disable_bias_attn_fc": "model.num_layers",
    "use_llama2_rotary_position_embeddings": "model.num_layers",
    "padding_free": "train.micro_batch_size",
    "attention_head_type": "model.num_query_groups",
    "use_checkpoint_args": "model.num_layers",
    "use_legacy_models": "model.num_layers",
}
HARMLESS = (
    *("rollout_batch_size", "rollout_num_gpus_per_engine", "sglang_expert_parallel_size", "vllm_tensor_parallel_size"),
    *("log_optimizer_states_to_tensorboard", "data_impl", "train_tokens", "lr_decay_tokens", "hf_checkpoint"),
    *("moe_loss_coeff", "eval_prompt_data", "custom_generate_function_path", "prompt_data", "no_offload_train"),
    *(
        "max_padding_length",
        "opd_teacher_urls",
        "filter_zero_reward_samples",
        "partition_id",
        "rotary_position_embeddings_theta",
    ),
    *(
        "pad_vocab_size_to",
        "no_query_key_layer_scaling",
        "universal_checkpoint",
        "advantage_estimator",
        "temperature",
        "wandb_group",
    ),
)


@pytest.mark.parametrize(("name", "setting"), BEARING.items())
def test_an_option_that_bears_on_the_bytes_is_found_by_its_words(name: str, setting: str) -> None:
    assert setting in find_unread_options({name: "8", "num_experts": "16"})[name]


def test_options_about_experts_bear_on_nothing_without_any() -> None:
    for experts in ({}, {"num_experts": "1"}):
        assert find_unread_options({"moe_expert_parallel_size": "8", "moe_min_capacity": "4"} | experts) == {}


def test_options_of_other_parts_of_a_program_bear_on_nothing() -> None:
    assert find_unread_options(dict.fromkeys(HARMLESS, "8")) == {}


def test_an_option_that_is_off_changes_nothing() -> None:
    neutral = {
        "zero_stage": "0",
        "ds_sequence_parallel_size": "1",
        "checkpoint_activations": False,
        "offload_x": "none",
    }
    assert find_unread_options(neutral) == {}
    assert list(find_unread_options({"zero_stage": "1"})) == ["zero_stage"]


def test_the_arguments_of_megatron_lm_are_known() -> None:
    names = ("num_layers", "tensor_model_parallel_size", "use_distributed_optimizer", "moe_grouped_gemm", "spec")
    assert {
        "num_layers",
        "tp_comm_overlap",
        "ckpt_fully_parallel_save",
        "te_precision_config_file",
    } <= load_known_arguments()
    assert all(map(is_known_option, (*names, "no_rope_fusion", "disable_bias_linear", "no_load_optim")))
    assert not any(map(is_known_option, ("zero_stage", "moe_expert_parallel_size")))


def test_the_settings_that_an_option_may_change_are_settings() -> None:
    paths = {path for _, opened in WORD_GROUPS for path in opened} | {
        path for opened in UNREAD_ARGUMENTS.values() for path in opened
    }
    for path in paths:
        section, _, name = path.partition(".")
        assert name in OWNER_FIELDS[section], path

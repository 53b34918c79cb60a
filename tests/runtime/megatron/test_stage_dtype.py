"""The dtype that Megatron's own pipeline stages send, and the rule about the dtype that the next one receives."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.fusions import fused_bias_dropout
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from bridge.model.layout import get_sent_dtype
from bridge.model.section import read_section
from bridge.precision.coercion import parse_dtype
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.runtime.megatron.process.training_process import training_process
from bridge.target.target import Target
from bridge.target.versions import get_installed_version

MCORE = get_installed_version("mcore")
HALF = {"bf16": True, "params_dtype": torch.bfloat16}
AUTOCAST = {"enable_autocast": True, "autocast_dtype": torch.bfloat16}
PLAIN = {"add_bias_linear": False}
EXPERTS = {**PLAIN, "num_moe_experts": 2, "moe_token_dispatcher_type": "allgather", "moe_ffn_hidden_size": 32}
STAGES = (
    {**PLAIN},
    {**HALF},
    {**AUTOCAST, **PLAIN},
    {**AUTOCAST},
    {**AUTOCAST, **EXPERTS},
    {**AUTOCAST, **EXPERTS, "moe_shared_expert_intermediate_size": 32},
    {**AUTOCAST, **PLAIN, "fp32_residual_connection": True},
)
"""Fields of a Megatron config with local layers."""


def config_of(fields: dict, **more: object) -> TransformerConfig:
    plain = {"transformer_impl": "local", "use_cpu_initialization": True, "gradient_accumulation_fusion": False}
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**{**sizes, **plain, "persist_layer_norm": False, **fields, **more})


def output_of_a_stage(config: TransformerConfig) -> torch.dtype:
    """Return the dtype of the output of a first stage, in the context in which Megatron's schedules run it."""
    with training_process(config, seed=1):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=64,
            max_sequence_length=8,
            position_embedding_type="rope",
            post_process=False,
        ).to(config.params_dtype)
        tokens = torch.arange(8)[None]
        autocast = functools.partial(torch.autocast, "cpu", dtype=config.autocast_dtype)
        with autocast() if config.enable_autocast else contextlib.nullcontext():
            return model(tokens, tokens, None).dtype


def values_of(config: Any) -> Mapping[str, Any]:
    return read_section("model", config).values


def is_refused(config: TransformerConfig) -> bool:
    found = check(Run.from_configs(None, model=config, target=Target(mcore=MCORE))).findings
    return "PB109" in {one.id for one in found}


def test_a_stage_is_refused_unless_the_next_one_receives_what_it_sends():
    for fields in STAGES:
        sent = output_of_a_stage(config_of(fields))
        assert get_sent_dtype(values_of(config_of(fields)), MCORE, is_local=True) == parse_dtype(sent), fields
        for received in (torch.float32, torch.bfloat16):
            config = config_of(fields, pipeline_model_parallel_size=2, pipeline_dtype=received)
            assert is_refused(config) is (config.pipeline_dtype != sent), (fields, received)


def test_the_residual_decides_as_in_megatrons_own_sum():
    model = values_of({**HALF, "fp32_residual_connection": True})
    output, residual = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    added = fused_bias_dropout._bias_dropout_add_func((output, None), residual, 0.0, True)
    assert get_sent_dtype(model, MCORE, is_local=False) == parse_dtype(added.dtype)
    assert get_sent_dtype(model, None, is_local=False) is None

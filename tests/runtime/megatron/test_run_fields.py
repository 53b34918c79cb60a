"""Every field of Megatron's configs: honoured, refused by name, or listed as without effect."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 torch's own abbreviation
import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from bridge.errors import RunConfigError, TrainingError
from bridge.front.container import build_container, require_startable
from bridge.front.loader import load_run
from bridge.preflight.rule_check import check
from bridge.rules.topics.system.train_script import find_unsupported_fields
from bridge.rules.topics.system.train_script_fields import (
    FIELDS_WITHOUT_NUMERIC_EFFECT,
    NEED_TE_LAYERS,
    NEED_TE_ON_A_GPU,
    SUPPORTED_FIELDS,
)
from bridge.runtime.megatron.model.gpt import GPTConfig
from bridge.target.fields import OWNER_FIELDS
from bridge.target.versions import get_installed_version, is_at_least
from bridge.training.loop import pretrain
from bridge.training.unsupported_settings import find_rule_errors, require_supported_settings
from tests.training.loop_tiny import tiny, trace

CLASSES: dict[str, Any] = {"model": GPTConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False}
CONTEXT = {"context_parallel_size": 2, "attention_dropout": 0.0, "cp_comm_type": "all_gather"}
NO_OTHER_VALUE = ("grad_norm_skip_threshold",)
"""A field of megatron-core 0.19 that is infinite where nothing states it."""
TABLES = (SUPPORTED_FIELDS, FIELDS_WITHOUT_NUMERIC_EFFECT, NEED_TE_LAYERS, NEED_TE_ON_A_GPU)
ANYWHERE = "scripts/train.py does not honour it, got {!r}. Remove it, or run it in Megatron-LM or Megatron Bridge."
LAYERS = (
    "scripts/train.py does not honour it with precision_backend={}, got {!r}. "
    "Remove it, or set precision_backend=te_cpu."
)
KERNELS = (
    "scripts/train.py does not honour it with precision_backend={}, got {!r}. "
    "Remove it, or run with Transformer Engine on a GPU."
)


@pytest.mark.parametrize("section", CLASSES)
def test_each_field_of_the_allow_list_is_a_field_of_megatron_and_stands_once(section):
    named = [name for table in TABLES for name in table[section]]
    assert len(named) == len(set(named))
    assert set(named) <= set(OWNER_FIELDS[section])


# -- refused ----------------------------------------------------------------------------------------------------------


def other_value(section: str, name: str) -> Any:
    """Return a value that is not the default of a field."""
    default = next(field.default for field in dataclasses.fields(CLASSES[section]) if field.name == name)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if default is None:
        return {"bool": True, "int": 3, "float": 0.5}.get(OWNER_FIELDS[section][name].kind, "another")
    return "another"


def made(section: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CLASSES[section](**(SHAPE if section == "model" else {}))


def refused(section: str, config: Any, *, backend: str, rule: str = "PB701") -> list[str]:
    """Return the sentences on the fields of a config that a run would not honour."""
    configs = SimpleNamespace(**{**{name: made(name) for name in CLASSES}, section: config})
    return [str(one) for one in find_rule_errors(configs, backend=backend, rules=[rule])]


def expected(section: str, name: str, value: Any, backend: str) -> list[str]:
    """Return the sentences that the allow list asks for."""
    if name in SUPPORTED_FIELDS[section] | FIELDS_WITHOUT_NUMERIC_EFFECT[section]:
        return []
    sentence = ANYWHERE.format(value)
    if name in NEED_TE_LAYERS[section]:
        if backend in ("te", "te_cpu"):
            return []
        sentence = LAYERS.format(backend, value)
    if name in NEED_TE_ON_A_GPU[section]:
        if backend == "te":
            return []
        sentence = KERNELS.format(backend, value)
    return [f"{section}.{name}: {sentence}"]


@pytest.mark.parametrize("section", CLASSES)
def test_a_field_is_refused_unless_the_allow_list_has_it(section):
    assert refused(section, made(section), backend="local") == []
    for name in [field.name for field in dataclasses.fields(CLASSES[section])]:
        if name not in OWNER_FIELDS[section] or OWNER_FIELDS[section][name].kind == "dtype" or name in NO_OTHER_VALUE:
            continue
        value = other_value(section, name)
        for backend in ("te", "te_cpu", "emulated"):
            config = made(section)
            setattr(config, name, value)
            found = [one for one in refused(section, config, backend=backend) if "hybrid model" not in one]
            assert found == expected(section, name, value, backend)


def test_a_field_of_a_newer_megatron_is_refused_where_it_is_not_at_its_default():
    newer = dataclasses.make_dataclass("Newer", [("sparse_mlp", bool, False)], bases=(OptimizerConfig,))
    newer.__module__ = "megatron.core.optimizer"
    assert refused("optimizer", newer(), backend="te") == []
    assert refused("optimizer", newer(sparse_mlp=True), backend="te") == [
        f"optimizer.sparse_mlp: {ANYWHERE.format(True)}"
    ]


@pytest.mark.parametrize("name", ["moe_deepep_num_sms", "moe_hybridep_num_sms"])
@pytest.mark.parametrize("backend", ["te_cpu", "emulated"])
def test_a_field_that_megatron_computes_of_another_refuses_no_run(backend, name):
    """Megatron-core 0.19.2 copies the number into `moe_flex_dispatcher_num_sms`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTConfig(**SHAPE, **{name: 16})
    assert refused("model", model, backend=backend) == []


def test_a_tuple_is_the_default_that_the_table_has_as_a_list():
    name = "param_name_patterns_for_fp32_local_accumulation"  # of megatron-core 0.17.1
    assert list(find_unsupported_fields("ddp", {name: ()}, backend="te")) == []
    assert len(list(find_unsupported_fields("ddp", {name: ("*.norm",)}, backend="te"))) == 1


@pytest.mark.parametrize(
    ("backend", "fields", "faults"),
    [
        ("te", {"cp_comm_type": None, "attention_dropout": 0.1}, []),
        ("te_cpu", {}, []),
        ("te_cpu", {"cp_comm_type": "a2a", "attention_softmax_in_fp32": False}, []),
        ("te_cpu", {"cp_comm_type": None}, ["cp_comm_type=all_gather or a2a"]),
        (
            "te_cpu",
            {"cp_comm_type": ["p2p", "a2a"], "window_size": (8, 0)},
            ["cp_comm_type=all_gather or a2a", "window_size=None"],
        ),
        ("emulated", {}, []),
        (
            "emulated",
            {"cp_comm_type": "a2a", "attention_dropout": 0.1},
            ["cp_comm_type=all_gather", "attention_dropout=0.0"],
        ),
        ("local", {"attention_softmax_in_fp32": False}, ["attention_softmax_in_fp32=True"]),
    ],
)
def test_context_parallelism_is_refused_where_the_attention_has_none(backend, fields, faults):
    model = GPTConfig(**{**SHAPE, **CONTEXT, **fields})
    head = "model.context_parallel_size: needs model."
    sentences = []
    for setting in faults:
        first = setting.partition(" or ")[0]
        sentences.append(f"{head}{setting} with precision_backend={backend}, got 2. Set model.{first}.")
    assert refused("model", model, backend=backend, rule="PB703") == sentences


WRONG = """
{num_moe_experts: 4, moe_router_topk: 5}
PB702 model.moe_router_topk: must be from 1 to the 4 experts, got 5. Correct it.

{num_moe_experts: 4, add_bias_linear: true}
PB702 model.add_bias_linear: experts have no biases without Transformer Engine's layers, got True. Set
  model.add_bias_linear=false.

{context_parallel_size: 2, attention_dropout: 0.0, cp_comm_type: all_gather, seq_length: 66}
PB408 model.seq_length: does not divide by two chunks on each of CP 2: each rank has to get the same part, got 66.
  Choose a multiple; or change the parallel sizes.

{virtual_pipeline_model_parallel_size: 2}
PB703 model.virtual_pipeline_model_parallel_size: interleaves the stages of a pipeline, and there is 1
  (pipeline_model_parallel_size), got 2. Leave it at None.

{virtual_pipeline_model_parallel_size: 2, pipeline_model_parallel_size: 2, overlap_p2p_comm: false}
PB407 model.overlap_p2p_comm: two interleaved pipeline stages send activations and gradients between the same two
  ranks in one batch, where they are taken for each other: the run goes on, and does not learn, got False. Set
  overlap_p2p_comm=True and batch_p2p_comm=False; or use more than two stages; or do not interleave.

{num_layers: 3, pipeline_model_parallel_size: 2}
model.num_layers: must be a multiple of the 2 pipeline stages, got 3. Change the number of layers or of stages, or state
  how many layers the first and the last stage have.

{multi_latent_attention: true, tensor_model_parallel_size: 2}
PB703 model.sequence_parallel: must be on for latent attention under tensor parallelism, got False. Without it
  Megatron Core's gradients of the rotary key and of the latent's norm are not those of the model. Set
  model.sequence_parallel=true.

{enable_autocast: true, tensor_model_parallel_size: 2, sequence_parallel: true}
PB703 model.sequence_parallel: must be off under autocast without Transformer Engine's layers: the backward pass of
  Megatron Core's own would reduce gradients in half precision into an FP32 tensor, which is an error, got True. Set
  model.sequence_parallel=false.

{enable_autocast: true, autocast_dtype: torch.bfloat16, add_bias_linear: false, pipeline_model_parallel_size: 2,
  pipeline_dtype: torch.float32}
PB109 model.pipeline_dtype: a pipeline stage receives its input in this dtype, and the stage before it sends bf16, got
  'fp32'. State pipeline_dtype='bf16'.

{num_moe_experts: 4, tensor_model_parallel_size: 2}
PB703 model.sequence_parallel: must be on for experts under tensor parallelism, without which Megatron Core does not
  train them, got False. Set model.sequence_parallel=true.

{num_moe_experts: 4, tensor_model_parallel_size: 2, sequence_parallel: true, expert_model_parallel_size: 2,
  expert_tensor_parallel_size: 2, moe_token_dispatcher_type: alltoall}
PB703 model.expert_tensor_parallel_size: must be 1 where experts are on several ranks without a GPU: gloo gathers
  equal numbers of tokens alone, got 2. Set it to 1, or model.moe_token_dispatcher_type=allgather.

{experimental_attention_variant: dsa, tensor_model_parallel_size: 2, sequence_parallel: true}
PB702 model.dsa_indexer_loss_coeff: must be stated for sparse attention: Megatron Core multiplies the indexer's loss
  by it, got None. Set it to 0.01, for example.
PB703 model.tensor_model_parallel_size: must be 1 for sparse attention without Transformer Engine's layers: its
  indexer is whole on every rank, got 2. Set it to 1.

{hybrid_layer_pattern: 'M*', num_layers: 2, recompute_granularity: full, account_for_loss_in_pipeline_split: true,
  qk_layernorm: true}
PB701 model.account_for_loss_in_pipeline_split: scripts/train.py does not honour it in a hybrid model, got True. Remove
  it, or run it in Megatron-LM or Megatron Bridge.
PB701 model.qk_layernorm: scripts/train.py does not honour it in a hybrid model, got True. Remove it, or run it in
  Megatron-LM or Megatron Bridge.
PB701 model.recompute_granularity: scripts/train.py does not honour it in a hybrid model, got 'full'. Remove it, or run
  it in Megatron-LM or Megatron Bridge.

{hybrid_layer_pattern: 'M+', num_layers: 2}
PB702 model.hybrid_layer_pattern: a run builds layers of M, *, - and E; Megatron Core has |, / and other layers from
  0.17 on, got 'M+'. Write those alone.

{position_embedding_type: yarn, qk_clip: true}
PB701 model.qk_clip: scripts/train.py does not honour it, got True. Remove it, or run it in Megatron-LM or Megatron
  Bridge.
PB702 model.position_embedding_type: must be one of rope, learned_absolute, none, got 'yarn'. Choose one of them.
"""
"""Fields of a model, and below them each sentence of the refusal; an indented line continues the one before."""


SENT_IN_FP32 = is_at_least(get_installed_version("mcore"), "0.17")
"""Whether a stage under autocast sends FP32, so that no stage receives another dtype than PB109 says."""


def wrong_values() -> Iterator[tuple[dict[str, Any], list[str]]]:
    for block in WRONG.replace("\n  ", " ").strip().split("\n\n"):
        head, *sentences = block.splitlines()
        if not (SENT_IN_FP32 and sentences[0].startswith("PB109")):
            yield {name: given(value) for name, value in yaml.safe_load(head).items()}, sentences


def given(value: Any) -> Any:
    """Return a value of a table, where a name of torch's is the dtype."""
    return getattr(torch, value[6:]) if str(value).startswith("torch.") else value


@pytest.mark.parametrize(("fields", "sentences"), [*wrong_values()])
def test_wrong_values_are_one_sentence_each(fields, sentences):
    model = made("model")
    for name, value in fields.items():
        setattr(model, name, value)
    configs = SimpleNamespace(model=model, optimizer=made("optimizer"), ddp=made("ddp"))
    with pytest.raises(RunConfigError) as raised:
        require_supported_settings(configs, [model], backend="local")
    assert str(raised.value).splitlines() == sentences


OWN = (
    ["model.qk_clip=true", "optimizer.decoupled_lr=0.1", "model.position_embedding_type=mrope"],
    ["model.num_moe_experts=4", "model.moe_router_topk=5", "model.add_bias_linear=true"],
    [
        "model.virtual_pipeline_model_parallel_size=2",
        "model.tensor_model_parallel_size=2",
        "model.multi_latent_attention=true",
    ],
    ["model.hybrid_layer_pattern='M+-/+'", "model.mtp_num_layers=1", "model.qk_layernorm=true"],
    ["model.hybrid_layer_pattern='M*|-'", "model.qk_layernorm=true"],
    ["ddp.use_megatron_fsdp=true", "model.fp32_residual_connection=true", "model.context_parallel_size=2"],
)


@pytest.mark.parametrize("words", OWN)
def test_a_check_of_a_run_says_what_the_run_says(words):
    run = load_run(["model=gpt_tiny", "precision_backend=emulated", *words], strict=False)
    report = check(run)
    checked = {f"{one.id} {one}" for one in report.findings if one.id.startswith("PB7")}
    with pytest.raises(RunConfigError) as raised:
        require_startable(build_container(run), run)
    refused = {line.strip() for line in str(raised.value).splitlines() if line.strip().startswith("PB7")}
    assert checked == refused
    assert len(checked) >= 2
    foreign = {key: value for key, value in run.sections.items() if key != "precision_backend"}
    others = check(dataclasses.replace(run, sections=foreign)).findings
    assert [one for one in others if one.id.startswith("PB7")] == []


# -- honoured, and without effect ------------------------------------------------------------------------------------

BASES: dict[str, dict[str, Any]] = yaml.safe_load("""
dense: {hidden_dropout: 0.1, attention_dropout: 0.1, num_layers: 3}
gated: {gated_linear_unit: true}
experts: {num_moe_experts: 4, moe_shared_expert_intermediate_size: 64, moe_aux_loss_coeff: 0.01,
          gated_linear_unit: true}
prediction: {mtp_num_layers: 1}
hybrid: {hybrid_layer_pattern: M*-M, num_layers: 4, mamba_num_heads: 8, mamba_head_dim: 16, mamba_num_groups: 2,
         mamba_state_dim: 16, position_embedding_type: none}
latent: &latent {multi_latent_attention: true, q_lora_rank: 32, kv_lora_rank: 32, qk_head_dim: 16,
                 qk_pos_emb_head_dim: 16, v_head_dim: 16}
delta: {experimental_attention_variant: gated_delta_net, linear_attention_freq: 2, linear_num_key_heads: 2,
        linear_key_head_dim: 8, linear_num_value_heads: 4, linear_value_head_dim: 8, activation_func: silu}
sparse: {<<: *latent, experimental_attention_variant: dsa, dsa_indexer_n_heads: 4, dsa_indexer_head_dim: 32,
         dsa_indexer_topk: 8, dsa_indexer_loss_coeff: 0.1}
""")
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
PADDED = {"low": "tensorwise", "moe_token_dispatcher_type": "alltoall"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def constant(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.constant_(weight, 0.01)


ALONE = """
dense:
  {num_layers: 2, hidden_size: 128, ffn_hidden_size: 64, num_attention_heads: 2, num_query_groups: 2, kv_channels: 8,
   vocab_size: 512, seq_length: 32, make_vocab_size_divisible_by: 96, position_embedding_type: learned_absolute,
   rotary_base: 100, rotary_percent: 0.5, rotary_interleaved: true, no_rope_freq: 3,
   share_embeddings_and_output_weights: true, hidden_dropout: 0.3, attention_dropout: 0.3, layernorm_epsilon: 0.1,
   normalization: LayerNorm, qk_layernorm: true, qk_l2_norm: true, add_bias_linear: true, add_qkv_bias: true,
   gated_linear_unit: true, attention_output_gate: true, softmax_scale: 0.5, softmax_type: learnable,
   apply_query_key_layer_scaling: true, attention_softmax_in_fp32: false, init_method_std: 0.1,
   embedding_init_method_std: 0.1, perform_initialization: false, multi_latent_attention: true,
   deterministic_mode: true}
gated:
  {glu_linear_offset: 1.0, activation_func_clamp_value: 0.001}
latent:
  {q_lora_rank: 16, kv_lora_rank: 16, qk_head_dim: 32, qk_pos_emb_head_dim: 32, v_head_dim: 32, rope_type: rope,
   rotary_scaling_factor: 10, original_max_position_embeddings: 64, beta_fast: 4, mscale: 2.0, mscale_all_dim: 0.5}
experts:
  {num_moe_experts: 8, moe_layer_freq: 2, moe_ffn_hidden_size: 64, moe_shared_expert_intermediate_size: 32,
   moe_shared_expert_gate: true, moe_router_load_balancing_type: seq_aux_loss, moe_router_topk: 3,
   moe_router_pre_softmax: true, moe_router_score_function: sigmoid, moe_router_dtype: fp32,
   moe_router_force_load_balancing: true, moe_aux_loss_coeff: 0.5, moe_z_loss_coeff: 0.1, moe_input_jitter_eps: 0.1,
   moe_token_dispatcher_type: alltoall, moe_expert_capacity_factor: 0.5, moe_layer_recompute: true}
prediction:
  {mtp_num_layers: 2, mtp_loss_scaling_factor: 0.5}
hybrid:
  {hybrid_layer_pattern: 'MM*-', mamba_num_heads: 16, mamba_head_dim: 8, mamba_num_groups: 4, mamba_state_dim: 32,
   use_mamba_mem_eff_path: false}
delta:
  {experimental_attention_variant: null, linear_attention_freq: 1, linear_conv_kernel_dim: 2,
   linear_key_head_dim: 16, linear_value_head_dim: 16, linear_num_key_heads: 4, linear_num_value_heads: 8}
sparse:
  {dsa_indexer_n_heads: 8, dsa_indexer_head_dim: 64, dsa_indexer_topk: 4, dsa_indexer_loss_coeff: 0.2,
   dsa_indexer_use_sparse_loss: true}
"""
"""Kind of model -> fields with another value than they have there."""
MODEL: dict[str, tuple[str, dict[str, Any], Any]] = {
    name: (kind, {}, value) for kind, fields in yaml.safe_load(ALONE).items() for name, value in fields.items()
} | {
    "activation_func": ("dense", {}, F.relu),
    "window_size": ("dense", {}, (8, 0)),
    "window_attn_skip_freq": ("dense", {"window_size": (8, 0)}, 2),
    "init_method": ("dense", {}, constant),
    "output_layer_init_method": ("dense", {}, constant),
    "embedding_init_method": ("dense", {}, constant),
    "beta_slow": ("latent", {"original_max_position_embeddings": 64}, 8),
    "moe_router_num_groups": (
        "experts",
        {"num_moe_experts": 8, "moe_router_group_topk": 1, "moe_router_num_groups": 4},
        2,
    ),
    "moe_router_group_topk": ("experts", {"moe_router_group_topk": 1, "moe_router_num_groups": 2}, 2),
    "moe_router_topk_scaling_factor": ("experts", {"moe_router_pre_softmax": True}, 2.0),
    "moe_router_enable_expert_bias": ("experts", {"moe_router_score_function": "sigmoid"}, True),
    "moe_router_bias_update_rate": ("experts", SIGMOID, 0.5),
    "moe_router_padding_for_quantization": ("experts", PADDED, True),
    "moe_router_padding_for_fp8": ("experts", PADDED, True),
    "moe_pad_expert_input_to_capacity": ("experts", {"moe_expert_capacity_factor": 0.5}, True),
    "moe_token_drop_policy": ("experts", {"moe_expert_capacity_factor": 0.5}, "position"),
    "moe_apply_probs_on_input": ("experts", {"moe_router_topk": 1, "moe_router_pre_softmax": True}, True),
    "is_hybrid_model": ("dense", {}, BASES["hybrid"]),
    "hybrid_override_pattern": ("hybrid", {"hybrid_layer_pattern": None, "hybrid_override_pattern": "M*-M"}, "MM*-"),
    "recompute_granularity": ("dense", {}, RECOMPUTED),
    "recompute_method": ("dense", RECOMPUTED, {"recompute_method": "block"}),
    "recompute_num_layers": ("dense", RECOMPUTED | {"recompute_method": "block"}, 2),
    "recompute_modules": ("dense", {"recompute_granularity": "selective"}, ["mlp"]),
}
"""Field -> the kind of model, further fields of it, and another value than the one it has there."""
BETWEEN_PROCESSES = """
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size sequence_parallel
context_parallel_size cp_comm_type expert_model_parallel_size expert_tensor_parallel_size
num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split microbatch_group_size_per_vp_stage variable_seq_lengths overlap_p2p_comm
batch_p2p_comm batch_p2p_sync overlap_p2p_comm_warmup_flush deallocate_pipeline_outputs distribute_saved_activations
tp_only_amax_red
"""
"""Fields that nothing shows of in one process: Megatron's own process groups, schedules and messages read them."""
OF_THE_PRECISION = """
fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype fp8 fp8_recipe fp8_param fp8_margin
fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 num_layers_at_start_in_bf16
num_layers_at_end_in_bf16 fp4 fp4_recipe fp4_param quant_recipe
fp8_dot_product_attention fp8_multi_head_attention fp8_quantizer_factory fp4_quantizer_factory
"""
"""Fields of a recipe, which the tests of recipes and of backends change."""


def measured(kind: str, fields: dict[str, Any], tmp_path: Any) -> Any:
    """Return all that two steps show: parameters, losses, gradient norms, tensors, and the modules that were run."""
    ran: Counter[str] = Counter()

    def note(module: torch.nn.Module, _inputs: Any) -> None:
        ran[type(module).__name__] += 1
        ran[type(getattr(module, "token_dispatcher", None)).__name__] += 1

    fields = dict(fields)
    config = tiny(
        low=fields.pop("low", None), model={**BASES[kind], **fields}, train={"train_iters": 2, "eval_iters": 0}
    )
    config.logging.quantisation_interval = 0
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        summary = pretrain(config, run_dir=tmp_path)
    except TrainingError as error:
        return str(error)
    finally:
        hook.remove()
    return summary.parameters, trace(tmp_path), summary.census, ran


def test_every_honoured_field_of_the_model_is_measured_somewhere():
    lists = (BETWEEN_PROCESSES.split(), OF_THE_PRECISION.split(), list(MODEL))
    named = [name for names in lists for name in names]
    assert sorted(named) == sorted(SUPPORTED_FIELDS["model"])


QUICK = ("softmax_scale", "num_moe_experts", "moe_router_dtype", "mtp_num_layers", "q_lora_rank", "recompute_modules")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODEL]
)
def test_an_honoured_field_changes_something_that_is_measured(name, tmp_path):
    kind, fields, value = MODEL[name]
    changed = value if isinstance(value, dict) else {name: value}
    before = measured(kind, fields, tmp_path / "before")
    assert measured(kind, fields, tmp_path / "again") == before
    assert measured(kind, {**fields, **changed}, tmp_path / "after") != before


OTHER = {
    "cuda_graph_scope": "attn",
    "moe_flex_dispatcher_backend": "hybridep",
    "cross_entropy_fusion_impl": "te",
    "attention_backend": "unfused",
    "transformer_impl": "local",
}
"""Field that changes no number -> another value, where it is no number and no switch."""
NOT_TRIED = {
    *("timers", "apply_rope_fusion", "moe_enable_deepep", "cuda_graph_modules", "inference_cuda_graph_scope"),
}
"""Fields whose other values Megatron's config refuses here or computes, and `timers`, which its schedules call."""


@pytest.mark.slow
def test_a_field_without_effect_changes_nothing_that_is_measured(tmp_path):
    kinds = {"moe": "experts", "mtp": "prediction", "bia": "experts"}
    before = {kind: measured(kind, {}, tmp_path / kind) for kind in ("dense", "experts", "prediction")}
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(GPTConfig)}
    for name in sorted(FIELDS_WITHOUT_NUMERIC_EFFECT["model"] - NOT_TRIED):
        if name not in defaults:  # a field of another release
            continue
        kind, default = kinds.get(name[:3], "dense"), defaults[name]
        value: Any
        if name in OTHER:
            value = OTHER[name]
        elif isinstance(default, bool):
            value = not default
        else:
            value = (default or 0) + 1
        assert measured(kind, {name: value}, tmp_path / name) == before[kind], name

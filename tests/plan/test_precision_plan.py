"""The precision plan, against the rules of the installed Megatron Core wherever it has them as functions."""

import dataclasses
import re

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from bridge.errors import BridgeError, RunConfigError, UnknownFieldError
from bridge.model.layout import ParallelLayout
from bridge.plan.alignment import build_alignment_report
from bridge.plan.memory_report import build_memory_report
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.precision_plan import format_ranges, precision_plan
from bridge.plan.workload import Workload
from bridge.precision.schemes import FP8_SCHEMES
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.registry.synchronize import synchronize
from bridge.sync.prediction import predict
from bridge.target.target import Target
from bridge.target.versions import Version
from tests.model.test_shape import DEEPSEEK_V3, DENSE, HYBRID
from tests.plan.fields_of_megatron import READ
from tests.work import calls

SIX = {**DENSE, "num_layers": 6}
CURRENT = "bf16_with_fp8_current_scaling_mixed"
GEMMS = ("fprop", "dgrad", "wgrad")


def plan(recipe, model=SIX, **owners):
    precision = REGISTRY.get(recipe) if isinstance(recipe, str) else recipe
    return precision_plan(precision, model, **owners)


# -- which layers -----------------------------------------------------------------------------------------------------


def test_current_scaling_keeps_the_first_and_the_last_of_six_layers():
    found = plan(CURRENT)
    assert found.low_precision_layers() == (2, 3, 4, 5)
    assert found.linears() == (16, 25)
    assert [found.format_of(2, "linear_qkv", gemm) for gemm in GEMMS] == ["e4m3", "e5m2 x e4m3", "e5m2 x e4m3"]
    assert [found.format_of(1, "linear_qkv", gemm) for gemm in GEMMS] == ["bf16"] * 3
    assert found.format_of(2, "self_attention.linear_qkv") == found.format_of("2", "linear_qkv")


@pytest.mark.parametrize("recipe", [CURRENT, "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed"])
@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 1), (0, 3), (2, 0), (3, 3), (4, 4)])
def test_first_and_last_layers_follow_megatrons_own_function(recipe, start, end, megatron_owners):
    precision = REGISTRY.get(recipe).override(
        first_last_layers_bf16=True, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end
    )
    config = megatron_owners(**SIX)["model"]
    config.first_last_layers_bf16 = True
    config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16 = start, end
    wanted = tuple(number for number in range(1, 7) if not is_first_last_bf16_layer(config, number - 1))
    assert plan(precision).low_precision_layers() == wanted


def test_unstated_counts_are_megatrons_one_and_one_and_a_models_own_setting_is_kept():
    mxfp8 = REGISTRY.get("bf16_with_mxfp8_mixed")
    assert plan(mxfp8).low_precision_layers() == (1, 2, 3, 4, 5, 6)
    assert plan(mxfp8, {**SIX, "first_last_layers_bf16": True}).low_precision_layers() == (2, 3, 4, 5)
    own = {**SIX, "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2}
    assert plan(mxfp8, own).low_precision_layers() == (3, 4, 5)
    stated = mxfp8.override(first_last_layers_bf16=False)
    assert plan(stated, own).low_precision_layers() == (1, 2, 3, 4, 5, 6)


def test_prediction_layers_are_always_fp8_and_never_fp4():
    model = {**SIX, "mtp_num_layers": 1}
    everything = REGISTRY.get(CURRENT).override(num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=3)
    found = plan(everything, model)
    assert found.low_precision_layers() == ()
    assert found.format_of("mtp 1", "eh_proj") == "e4m3"
    assert plan("bf16_with_nvfp4_mixed", model).format_of("mtp 1", "linear_fc1") == "bf16"


# -- where ------------------------------------------------------------------------------------------------------------

LAYOUTS = [
    {"pipeline_model_parallel_size": 4},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
    {
        "pipeline_model_parallel_size": 4,
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 3,
    },
    {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 2},
    {"pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True, "num_layers": 11},
    {
        "pipeline_model_parallel_size": 2,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
        "num_layers": 10,
    },
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layers_are_on_the_stages_that_megatron_puts_them_on(layout, megatron_owners):
    import torch

    model = {**DENSE, "num_layers": 12, **layout}
    config = megatron_owners(**model, pipeline_dtype=torch.float32)["model"]
    wanted = {}
    for stage in range(config.pipeline_model_parallel_size):
        for chunk in range(config.virtual_pipeline_model_parallel_size or 1):
            vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
            first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=stage)
            count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=stage)
            wanted.update(dict.fromkeys(range(first + 1, first + count + 1), (stage, chunk)))
    found = {layer.number: (layer.stage, layer.chunk) for layer in plan(CURRENT, model).layers if layer.number}
    assert found == wanted


@pytest.mark.parametrize(
    "text", ["Ettt|(tt|)*2t*5,L", "Et|*2t*4|(tt|)*2t,tmL", [["embedding", "decoder"], ["decoder", "loss"]]]
)
def test_a_custom_layout_is_read_as_megatron_reads_it(text):
    given = PipelineParallelLayerLayout(text, pipeline_model_parallel_size=2)
    layers = given.flatten_layout.count(LayerType.decoder)
    parallel = ParallelLayout.from_model({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": text})
    found = {(place.stage, place.chunk): place for place in parallel.split_layers(layers)}
    for stage, chunks in enumerate(given.layout):
        for chunk, parts in enumerate(chunks):
            place = found[stage, chunk]
            assert len(place.layers) == parts.count(LayerType.decoder)
            assert (place.embedding, place.mtp, place.output) == tuple(
                part in parts for part in (LayerType.embedding, LayerType.mtp, LayerType.loss)
            )


@pytest.mark.parametrize("text", ["t*99999999999999999999", "E(t|)*99999999L", "((t*1000)*1000)*1000"])
def test_a_layout_of_too_many_parts_is_refused_before_it_is_written_out(text):
    with pytest.raises(RunConfigError, match="pipeline_model_parallel_layout: must name at most 100000 parts"):
        ParallelLayout.from_model({"pipeline_model_parallel_layout": text})


def test_layers_that_cannot_be_split_are_refused_and_planned_as_evenly_as_they_can_be():
    uneven = plan(CURRENT, {**SIX, "pipeline_model_parallel_size": 4})
    assert [layer.stage for layer in uneven.layers if layer.number is not None] == [0, 0, 1, 1, 2, 3]
    with pytest.raises(RunConfigError) as raised:
        ParallelLayout.from_model({"pipeline_model_parallel_size": 4}).split_layers(6)
    assert str(raised.value) == (
        "model.num_layers: must be a multiple of the 4 pipeline stages, got 6. Change the number of layers or of "
        "stages, or state how many layers the first and the last stage have."
    )
    stages = {"pipeline_model_parallel_size": 4}
    for fields, rule in (
        ({"num_layers_in_first_pipeline_stage": 1}, "must leave a multiple of the 3 other stages, and leaves 5"),
        (
            {"account_for_loss_in_pipeline_split": True},
            "must be, with embedding and output layer 7, a multiple of the 4 pipeline stages",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "must give each stage a multiple of its 2 model chunks, and gives [3, 3]",
        ),
    ):
        with pytest.raises(RunConfigError, match=re.escape(f"model.num_layers: {rule}, got 6. Change the number")):
            ParallelLayout.from_model({**stages, **fields}).split_layers(6)


# -- what -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [name for name in FP8_SCHEMES if name != "custom"])
def test_only_linears_are_low_whatever_the_scheme(scheme):
    precision = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe=scheme)
    found = plan(precision, {**DEEPSEEK_V3, "mtp_num_layers": 1, "moe_router_dtype": "fp32"})
    kinds = {
        module.kind for layer in found.layers for module in layer.modules for row in module.rows if "e4m3" in row.format
    }
    assert kinds == {"linear"}
    assert found.format_of(4, "mlp.experts.local_experts.3.linear_fc1") == found.format_of(4, "experts.linear_fc1")
    assert found.format_of(4, "router") == "fp32"
    assert found.format_of("output", "output_layer") == "bf16"
    assert (
        found.row(4, "experts.linear_fc1", "input").scale
        == {"tensorwise": "tensor", "delayed": "tensor", "blockwise": "1x128 / 128x1", "mxfp8": "1x32 / 32x1"}[scheme]
    )


def test_attention_runs_in_fp8_where_the_scheme_knows_it():
    def core(scheme, **more):
        precision = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe=scheme, **more)
        return plan(precision)

    both = {"fp8_dot_product_attention": True, "fp8_multi_head_attention": True}
    delayed = core("delayed", **both)
    assert [delayed.format_of(1, "core_attention", item) for item in ("qk", "softmax", "pv", "output")] == [
        "e4m3",
        "fp32",
        "e4m3",
        "e4m3",
    ]
    current = core("tensorwise", **both)
    assert current.format_of(1, "core_attention", "output") == "bf16"
    assert core("blockwise", **both).format_of(1, "core_attention", "qk") == "bf16"


def test_hybrid_layers_count_one_by_one():
    found = plan("nemotron_h_bf16_with_fp8_current_scaling_mixed", HYBRID)
    assert found.low_precision_layers() == (3,)
    assert found.format_of(3, "in_proj", "dgrad") == "e5m2 x e4m3"
    assert found.format_of(3, "conv1d", "forward") == "bf16"


@pytest.mark.parametrize(
    ("recipe", "owners", "wanted"),
    [
        ("fp32", {}, ("fp32", "itself", "fp32", "fp32", "fp32")),
        ("bf16_mixed", {}, ("bf16", "fp32", "fp32", "fp32", "bf16 + fp32 master")),
        ("fp16_mixed", {}, ("fp16", "fp32", "fp16", "fp16", "fp16 + fp32 master")),
        (CURRENT, {}, ("e4m3", "fp32", "fp32", "fp32", "bf16 + fp32 master")),
        ("bf16_with_fp8_subchannel_scaling_mixed", {}, ("bf16", "fp32", "fp32", "fp32", "bf16 + fp32 master")),
        (
            "bf16_mixed",
            {"optimizer": {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}},
            ("bf16", "fp32 as 16-bit remainder (sharded)", "fp32", "fp32", "bf16 + fp32 master"),
        ),
        (
            CURRENT,
            {"optimizer": {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}},
            ("e4m3", "fp32 (sharded)", "fp32", "fp32", "bf16 + fp32 master"),
        ),
    ],
)
def test_a_weights_storage_master_gradient_reduction_and_checkpoint(recipe, owners, wanted):
    row = plan(recipe, **owners).row(2, "linear_fc1", "weight")
    assert (row.storage, row.master, row.gradient, row.reduction, row.checkpoint) == wanted


def test_the_optimizers_states_follow_the_recipe():
    states = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16", "main_params_dtype": "fp16"}
    recipe = REGISTRY.get("bf16_mixed").override(use_precision_aware_optimizer=True, **states)
    sharded = {"optimizer": {"use_distributed_optimizer": True}}
    settings = plan(recipe, **sharded).settings
    assert (settings.exp_avg, settings.exp_avg_sq, settings.master) == ("fp8", "bf16", "fp16")
    before, after = (build_memory_report(plan(one, **sharded)).ranks[0].bytes_of for one in ("bf16_mixed", recipe))
    weights = before["weights"] / 2
    assert (before["master weights"], before["optimizer state"]) == (4 * weights, 8 * weights)
    assert (after["master weights"], after["optimizer state"]) == (2 * weights, 3 * weights)


def test_without_a_recipe_the_configs_own_settings_count():
    model = {**SIX, "bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    found = plan(None, model)
    assert found.low_precision_layers() == (2, 3, 4, 5)
    assert found.row(2, "linear_fc1").gradient == "bf16"  # Megatron's default, not the recipes'
    assert plan("bf16_mixed", model).low_precision_layers() == ()


OPEN = MixedPrecisionConfig(bf16=True, fp8="e4m3")


@pytest.mark.parametrize(
    ("precision", "model", "optimizer", "ddp", "wanted"),
    [
        (OPEN, {}, {"fp8_recipe": "mxfp8"}, {}, {"scheme": "mxfp8", "low_parameters": False}),
        (OPEN, {}, {}, {"fp8_param_gather": True}, {"scheme": "tensorwise", "low_parameters": True}),
        (
            OPEN,
            {"fp8_recipe": "mxfp8", "fp8_param": True},
            {"reuse_grad_buf_for_mxfp8_param_ag": True},
            {},
            {"unused_weight_buffer": True},
        ),
        ("mxfp8", {}, {}, {"use_megatron_fsdp": True}, {"unused_weight_buffer": False, "distributed": True}),
        (
            "bf16_mixed",
            {},
            {"use_distributed_optimizer": False},
            {"use_distributed_optimizer": True},
            {"distributed": True},
        ),
    ],
    ids=["scheme of the optimizer", "weights of DDP", "buffer of the optimizer", "FSDP", "sharded in DDP alone"],
)
def test_what_one_owner_has_of_its_own_is_planned_as_it_is_synchronised(precision, model, optimizer, ddp, wanted):
    config = REGISTRY.get(precision) if isinstance(precision, str) else precision
    given = {"model": {**SIX, **model}, "optimizer": optimizer, "ddp": ddp}
    settings = PlanSettings.from_prediction(predict(config, given, target=Target(mcore=Version("0.16.1"))))
    assert {name: getattr(settings, name) for name in wanted} == wanted


# -- as a whole -------------------------------------------------------------------------------------------------------


def test_equal_layers_are_folded_and_rows_are_not():
    found = plan(CURRENT)
    assert [format_ranges([layer.label for layer in layers]) for layers, _ in found.folded()] == [
        "embedding",
        "1, 6",
        "2-5",
        "output",
    ]
    assert len({(row["layer"], row["module"], row["item"]) for row in found.rows()}) == sum(1 for _ in found.rows())
    assert found.to_dict()["groups"][2]["layers"] == ["2", "3", "4", "5"]


def test_plans_are_compared_cell_by_cell():
    before, after = plan(CURRENT), plan(REGISTRY.get(CURRENT).override(fp8="e4m3"))
    rows = before.diff(after)
    assert {row.layers for row in rows} == {("2", "3", "4", "5")}
    assert {(row.item, row.column, row.before, row.after) for row in rows} == {
        ("dgrad", "format", "e5m2 x e4m3", "e4m3"),
        ("wgrad", "format", "e5m2 x e4m3", "e4m3"),
        ("grad_output", "format", "e5m2", "e4m3"),
    }
    assert before.diff(plan(CURRENT)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, "linear_qkv"), "plan: no such layer, got '7'."),
        ((1, "linear_qvk"), "plan: no such module of layer 1, got 'linear_qvk'. Did you mean 'linear_qkv',"),
        ((1, "linear_qkv", "fwd"), "plan: no such GEMM or tensor of linear_qkv, got 'fwd'."),
    ],
)
def test_an_unknown_row_is_answered_with_what_there_is(arguments, message):
    with pytest.raises(UnknownFieldError) as raised:
        plan(CURRENT).format_of(*arguments)
    assert str(raised.value).startswith(message)


def test_the_plan_of_a_large_model_is_little_work():
    recipe, rows = REGISTRY.get("bf16_with_fp8_subchannel_scaling_mixed"), []
    assert calls(lambda: rows.extend(plan(recipe, DEEPSEEK_V3).rows())) < 3_000_000
    assert len(rows) > 4000


def answered(model):
    found = plan(CURRENT, model)
    build_memory_report(found, workload=Workload(seq_length=64))
    build_alignment_report(found, Workload(seq_length=64))


def test_whatever_a_config_holds_the_answer_is_a_plan_or_one_clear_error():
    latent = {"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 16}
    experts = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 32, "mtp_num_layers": 1}
    for base in (SIX, HYBRID, {**SIX, **latent, **experts}):
        answered(base)
        for name in READ.split():
            for value in ("x", -1, 0, 3, 1.5, [], [1, "a"], None):
                try:
                    answered({**base, name: value})
                except BridgeError as error:
                    assert str(error).startswith("model")


def test_labels_are_written_as_ranges():
    assert format_ranges(["1", "2", "3", "5", "output"]) == "1-3, 5, output"
    assert format_ranges([str(number) for number in range(1, 20, 2)]) == "1, 3, 5, 7, 9, ... 19 (10 layers)"


# -- the settings and the sync ----------------------------------------------------------------------------------------

WRITTEN = [
    (CURRENT, {}, {}, {}, {}),
    ("bf16_mixed", {}, {"enable_autocast": True, "autocast_dtype": torch.float16}, {}, {}),
    ("bf16_autocast_mixed", {}, {}, {}, {}),
    ("fp16_mixed", {"grad_reduce_in_fp32": False}, {}, {"use_distributed_optimizer": True}, {}),
    ("bf16_with_mxfp8_mixed", {}, {}, {}, {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}),
    ("bf16_with_mxfp8_mixed", {"fp8_param_gather": True}, {"num_layers_at_end_in_bf16": 2}, {}, {}),
    (CURRENT, {"num_layers_at_start_in_bf16": 0}, {"num_layers_at_end_in_bf16": 0}, {}, {}),
    ("bf16_with_nvfp4_mixed", {}, {"first_last_layers_bf16": True}, {}, {}),
    ("fp32", {}, {"bf16": True, "params_dtype": torch.bfloat16}, {}, {}),
]
"""Recipe, fields stated over it, fields of model, optimizer and DDP config."""


@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_settings_are_what_the_sync_writes_into_megatrons_configs(case):
    name, stated, model, optimizer, ddp = case
    precision = REGISTRY.get(name).override(**stated)
    shape = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "use_cpu_initialization": True}
    owners = {
        "model": TransformerConfig(**shape, **model),
        "optimizer": OptimizerConfig(**optimizer),
        "ddp": DistributedDataParallelConfig(**ddp),
    }
    synchronize(precision, **owners)
    planned = PlanSettings.from_prediction(
        predict(precision, {"model": {**shape, **model}, "optimizer": optimizer, "ddp": ddp})
    )
    written = PlanSettings.from_prediction(predict(None, owners))
    assert dataclasses.replace(planned, notes=()) == dataclasses.replace(written, notes=())


def test_megatron_fsdp_keeps_gradients_in_its_own_dtypes_from_0_19_on():
    ddp = {"use_megatron_fsdp": True, "grad_reduce_in_fp32": True}
    dtypes = {"megatron_fsdp_main_grads_dtype": "fp32", "megatron_fsdp_grad_comm_dtype": "bf16"}
    for given, version, expected in (
        (ddp, "0.18", ("fp32", "fp32")),
        (ddp, "0.19", ("bf16", "bf16")),
        (ddp | dtypes, "0.19", ("fp32", "bf16")),
    ):
        settings = precision_plan(None, DENSE | {"bf16": True}, ddp=given, mcore=Version(version)).settings
        assert (settings.grad_reduce, settings.grad_sent) == expected


def test_the_text_of_a_plan_is_one_line_with_its_counts():
    assert str(plan(CURRENT)) == f"{CURRENT}: 6 layers, 16 of 25 linear layers in FP8 or FP4, 16 in tensorwise"

"""Every field of Megatron's model config: read by the plan, refused by it, or without influence on the modules."""

import contextlib
import dataclasses
import warnings
from typing import Any, ClassVar

import pytest
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from bridge.errors import RunConfigError
from bridge.model.attention_variants import UNPLANNED_FIELDS, UNPLANNED_REMEDY
from bridge.model.layout import ParallelLayout
from bridge.model.section import Section, read_section
from bridge.model.shape_reader import require_shape
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.runtime.megatron.process.training_process import training_process
from bridge.sync.prediction import predict
from bridge.target.fields import OWNER_FIELDS
from bridge.target.versions import Version
from tests.plan.fields_of_megatron import READ, WITHOUT_MODULES

DENSE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
EXPERTS = {**DENSE, "num_moe_experts": 4, "moe_shared_expert_intermediate_size": 32, "add_bias_linear": False}
HYBRID = {**DENSE, "hybrid_layer_pattern": "M-*E/*E", "num_moe_experts": 4}
LATENT = {**DENSE, "multi_latent_attention": True}
PIPELINE = {**DENSE, "pipeline_model_parallel_size": 2, "recompute_granularity": "full"}
ROTARY = {**DENSE, "kv_channels": 3, "position_embedding_type": "rope", "rotary_percent": 0.5}
DELTA = {**DENSE, "experimental_attention_variant": "gdn", "linear_attention_freq": 2}
INDEXER = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 4}
SPARSE = {**LATENT, **INDEXER, "experimental_attention_variant": "dsa"}
COMPRESSED = {
    **LATENT,
    **INDEXER,
    "experimental_attention_variant": "dsv4_hybrid",
    "csa_compress_ratios": [0, 4, 128, 4],
    "enable_hyper_connections": True,
}
STREAMS = {**DENSE, "enable_mhc_connections": True}
FUSED_LOSS = {**DENSE, "cross_entropy_loss_fusion": True}
MODELS = (
    DELTA,
    SPARSE,
    COMPRESSED,
    STREAMS,
    FUSED_LOSS,
    DENSE,
    ROTARY,
    EXPERTS,
    HYBRID,
    {**HYBRID, "hybrid_layer_pattern": "M-*E"},
    LATENT,
    PIPELINE,
)
LOW = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}
DELAYED = {**LOW, "fp8": "hybrid", "fp8_recipe": "delayed"}
SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "bf16": ({}, True),
    "fp16": ({}, True),
    "enable_autocast": ({"bf16": True}, True),
    "autocast_dtype": ({"bf16": True, "enable_autocast": True}, "fp16"),
    "fp32_residual_connection": ({"bf16": True}, True),
    "moe_router_dtype": ({}, "fp32"),
    "first_last_layers_bf16": (LOW, True),
    "num_layers_at_start_in_bf16": ({**LOW, "first_last_layers_bf16": True}, 2),
    "num_layers_at_end_in_bf16": ({**LOW, "first_last_layers_bf16": True}, 2),
    "fp8": ({"bf16": True}, "hybrid"),
    "fp8_recipe": (LOW, "blockwise"),
    "fp8_param": (LOW, True),
    "fp8_amax_history_len": (DELAYED, 16),
    "fp8_output_proj": (LOW, True),
    "keep_fp8_weight_transpose_cache": (LOW, False),
    "fp8_dot_product_attention": (LOW, True),
    "fp8_multi_head_attention": (DELAYED, True),
    "fp4": ({"bf16": True}, "e2m1"),
    "fp4_recipe": ({"bf16": True, "fp4": "e2m1"}, "custom"),
    "fp4_param": ({"bf16": True, "fp4": "e2m1"}, True),
    "freeze_language_model": ({"bf16": True}, True),
}
"""Precision field -> a model, and a value of the field that changes what the plan says about it."""


class Asked(Section):
    """A section that notes which of its fields are asked for."""

    names: ClassVar[set[str]] = set()

    def get_stated(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get_stated(name, default)


class Values(dict):
    """The values of such a section."""

    def __getitem__(self, name: str) -> Any:
        Asked.names.add(name)
        return super().__getitem__(name)


def asked_section(model: dict[str, Any]) -> Asked:
    section = read_section("model", model)
    return Asked(values=Values(section.values), stated=section.stated)


def without_modules() -> list[str]:
    return [name for names in WITHOUT_MODULES.values() for name in names.split()]


def test_each_field_of_each_known_release_is_in_one_place():
    placed = [*READ.split(), *UNPLANNED_FIELDS, *without_modules()]
    assert len(placed) == len(set(placed))
    assert set(placed) == set(OWNER_FIELDS["model"])


def test_each_field_of_the_installed_classes_is_known():
    installed = {field.name for cls in (TransformerConfig, MLATransformerConfig) for field in dataclasses.fields(cls)}
    assert {name for name in installed if not name.startswith("_")} <= set(OWNER_FIELDS["model"])


def test_the_fields_that_are_read_are_those_that_the_plan_asks_for():
    Asked.names.clear()
    for model in MODELS:
        section = asked_section(model)
        require_shape(section)
        ParallelLayout.from_model(section)
        Workload.from_sections(section)
    read = set(READ.split())
    assert Asked.names - set(UNPLANNED_FIELDS) == read - set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_field_of_the_precision_that_is_read_changes_the_settings(name):
    model, value = SETTINGS[name]
    changed = {**model, name: value}
    assert PlanSettings.from_prediction(predict(None, {"model": model})) != PlanSettings.from_prediction(
        predict(None, {"model": changed})
    )


@pytest.mark.parametrize("name", UNPLANNED_FIELDS)
def test_a_field_that_the_plan_does_not_know_is_refused(name):
    value = {"experimental_attention_variant": "gdn2"}.get(name)
    kind = OWNER_FIELDS["model"][name].kind
    value = value or (True if kind == "bool" else 2)
    with pytest.raises(RunConfigError) as raised:
        precision_plan(None, {**DENSE, name: value})
    why = UNPLANNED_FIELDS[name].format(kind="the second gated delta net")
    assert str(raised.value) == f"model.{name}: cannot plan: {why}, got {value!r}. {UNPLANNED_REMEDY}"
    for default in (OWNER_FIELDS["model"][name].default, None):
        assert precision_plan(None, {**DENSE, name: default}).linears()[1] == 17


def test_a_field_of_a_newer_megatron_is_refused_where_it_is_not_at_its_default():
    newer = dataclasses.make_dataclass("TransformerConfig", [("sparse_mlp", bool, False)], bases=(TransformerConfig,))
    newer.__module__ = "megatron.core.transformer.transformer_config"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, changed = newer(**DENSE), newer(**DENSE, sparse_mlp=True)
    assert precision_plan(None, plain).linears()[1] == 17
    with pytest.raises(RunConfigError) as raised:
        precision_plan(None, changed)
    assert str(raised.value) == (
        "model.sparse_mlp: cannot plan: the field is newer than the releases that the plan knows, got True. "
        f"{UNPLANNED_REMEDY}"
    )


def parameters_of(model: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """The parameters of a real model, or None where this Megatron or this machine refuses its config."""
    with contextlib.suppress(Exception):
        config = TransformerConfig(**model)
        config.use_cpu_initialization = True
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        gpt = GPTModel(config, spec, vocab_size=64, max_sequence_length=8)
        return {name: tuple(parameter.shape) for name, parameter in gpt.named_parameters()}
    return None


@pytest.mark.filterwarnings("ignore")
def test_a_switch_without_influence_leaves_the_parameters_of_a_real_model_as_they_are():
    base = {**EXPERTS, "num_layers": 1, "bf16": True}
    built = []
    with training_process(TransformerConfig(**base), seed=1):
        plain = parameters_of(base)
        for name in without_modules():
            row = OWNER_FIELDS["model"][name]
            if row.kind != "bool" or name not in TransformerConfig.__dataclass_fields__:
                continue
            found = parameters_of({**base, name: not row.default})
            if found is not None:
                assert found == plain, name
                built.append(name)
    assert len(built) > 50


# -- versions ---------------------------------------------------------------------------------------------------------


def test_a_field_that_the_target_does_not_have_counts_as_not_set():
    mxfp8 = {**DENSE, **LOW, "fp8_output_proj": True, "fp8_dot_product_attention": True}
    old, new = (precision_plan(None, mxfp8, mcore=Version(version)) for version in ("0.16.1", "0.18.2"))
    assert (old.format_of("output", "output_layer"), new.format_of("output", "output_layer")) == ("bf16", "e4m3")
    assert (old.format_of(1, "core_attention", "qk"), new.format_of(1, "core_attention", "qk")) == ("bf16", "e4m3")
    note = (
        "model.fp8_output_proj has no effect in megatron-core 0.16.1, which has no such field "
        "(megatron-core from 0.18.2)."
    )
    assert (old.settings.notes, new.settings.notes) == ((note,), ())


def test_a_stated_field_that_the_target_does_not_have_is_written_nowhere():
    nvfp4 = REGISTRY.get("bf16_with_nvfp4_mixed")
    with_attention = MixedPrecisionConfig(**{**nvfp4.to_dict(), "fp8_dot_product_attention": True})
    old, new = (precision_plan(with_attention, DENSE, mcore=Version(version)) for version in ("0.16.1", "0.17.1"))
    assert (old.format_of(1, "core_attention", "qk"), new.format_of(1, "core_attention", "qk")) == ("bf16", "e4m3")


def test_a_version_that_does_not_repeat_prediction_layers_builds_each():
    model = {**DENSE, "mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    labels = [layer.label for layer in precision_plan(None, model, mcore=Version("0.16.1")).layers if layer.is_mtp]
    assert labels == ["mtp 1", "mtp 2"]
    assert read_section("model", model).find_absent_fields("model", Version("0.17.1")) == {}


def test_attention_under_mxfp8_is_scaled_by_blocks_and_under_current_scaling_by_tensor():
    """Source: Transformer Engine main of 2026-08-22 attention/dot_product_attention/utils.py, lines 2716-2731."""
    model = {**DENSE, **LOW, "fp8_dot_product_attention": True}
    plan = precision_plan(None, model)
    assert {plan.row(1, "core_attention", item).scale for item in ("qk", "pv", "backward")} == {"1x32 / 32x1"}
    tensorwise = precision_plan(None, {**model, "fp8_recipe": "tensorwise"})
    assert tensorwise.row(1, "core_attention", "qk").scale == "tensor"

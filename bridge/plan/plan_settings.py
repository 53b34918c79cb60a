"""`PlanSettings`: the settings that a plan depends on, with their values after the sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError
from bridge.model.compressed_attention import COMPRESSED_HYBRID
from bridge.model.layout import get_sent_dtype
from bridge.model.section import find_switched_on
from bridge.precision.matchers import (
    ModulePrecision,
    QuantRecipe,
    list_matchers,
    parse_quant_recipes,
)
from bridge.precision.operand_copies import (
    LayerCopies,
    apply_backward_override,
    apply_nvfp4_options,
    make_scheme_copies,
)
from bridge.precision.precision_config import list_scheme_fields
from bridge.precision.quantizer_factories import find_shipped_factory
from bridge.precision.schemes import Scheme, find_scheme
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.rules.environment_variables import collect_recipe_keywords, list_scheme_variables
from bridge.sync.prediction import Prediction
from bridge.target.fields import FUSED_ADAM_RECIPES, get_gradient_dtypes
from bridge.target.versions import Version, is_at_least

if TYPE_CHECKING:
    from bridge.precision.debug_features import LayerChanges

FP8_ATTENTION_RELEASES = {"mxfp8": "0.18", "nvfp4": "0.17"}
"""Scheme -> first megatron-core that passes the fields about FP8 attention to it."""
HYBRID_FP4_RELEASE = "0.17"
"""First megatron-core whose hybrid blocks enter the FP4 context."""
FSDP_MASTERS_RELEASE = "0.17"
"""First megatron-core whose Megatron-FSDP reads `megatron_fsdp_main_params_dtype`."""
FSDP_DECOUPLED_RELEASE = "0.18"
"""First megatron-core whose Megatron-FSDP leaves the gradients' dtype to the optimizer.

This is only true for the precision-aware optimizer.
"""
FSDP_UNITS_RELEASE = "0.20"
"""First megatron-core whose Megatron-FSDP makes units under every strategy that shards."""
ABSORBED_RELEASE = "0.17"
"""First megatron-core whose sparse attention multiplies by the key-value up projection's weight."""

MAPPED_WEIGHTS_RELEASE = "0.17"
"""First megatron-core that maps the BF16 weights of an MXFP8 model into their buffer.

MXFP8 weights have no such buffer: they are gathered through the buffer of the gradients.

Source: distributed/param_and_grad_buffer.py. 0.17.0 tests ``not is_mxfp8tensor(param)``, and 0.16.1
does not.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Every setting that decides in which format something is computed, kept or sent."""

    mode: str
    """fp32, fp16 or bf16: the dtype of weights and activations."""
    autocast: str | None = None
    """The dtype that torch.autocast casts matrix multiplications to. None: autocast is off."""
    family: str | None = None
    """fp8 or fp4. None: both are off."""
    format: str | None = None
    """The format of the family. None: FP8 and FP4 are off."""
    scheme: str | None = None
    """The scaling scheme. None: FP8 and FP4 are off."""
    factory: str | None = None
    """The import path of the quantizer factory of the scheme `custom`. None: there is no factory."""
    te_options: tuple[tuple[str, object], ...] = ()
    """Keywords of Transformer Engine's recipe classes that environment variables change."""
    start: int = 0
    """The number of first layers that are kept in the mode's dtype."""
    end: int = 0
    """The number of last layers that are kept in the mode's dtype."""
    attention: bool = False
    """Whether the attention core runs in FP8."""
    multi_head_attention: bool = False
    """Whether tensors between the attention core and its projections are in FP8."""
    output_layer: bool = False
    """Whether the output layer runs in MXFP8. A GPTModel can do so from megatron-core 0.18 on."""
    reaches_layers: bool = True
    """Whether the model's blocks enter the low-precision context.

    The blocks of a hybrid model enter the FP4 context from 0.17 on.
    """
    are_experts_grouped: bool = False
    """Whether the experts of a layer are one layer of Transformer Engine, `GroupedLinear`."""
    absorbs: bool = True
    """Whether sparse attention multiplies by the weight of the key-value up projection itself.

    No linear layer computes this product.
    """
    low_parameters: bool = False
    """Whether the weights are stored in FP8 or FP4."""
    keeps_weight_transposes: bool = True
    """Whether linear layers keep the transposes of FP8 weights of one scale from GEMM to GEMM.

    Only Transformer Engine of ROCm can be told otherwise (`keep_fp8_weight_transpose_cache`).
    """
    unused_weight_buffer: bool = False
    """Whether the BF16 weights of an MXFP8 model are not in the buffer that Megatron allocates."""
    grad_reduce: str = "fp32"
    """The dtype that gradients are accumulated in."""
    grad_sent: str = "fp32"
    """The dtype that gradients are reduced in."""
    reduce_in_fp32: bool = False
    """Whether narrow gradients are summed in FP32 (reduce_scatter_with_fp32_accumulation)."""
    fp32_residual: bool = False
    """Whether the residual stream is in FP32."""
    sent: tuple[str | None, ...] = ()
    """Dtypes of the activations that a pipeline stage can send.

    Layers of Transformer Engine may send another dtype than Megatron's local layers.
    """
    router: str | None = None
    """The dtype of the router's GEMM. None: the dtype of the mode."""
    distributed: bool = False
    """Whether masters and optimizer state are sharded over the data-parallel ranks."""
    fsdp: bool = False
    """Whether Megatron-FSDP shards the tensors of its strategy."""
    has_units: bool = True
    """Whether each layer is a unit of Megatron-FSDP, which may leave parameters unsharded."""
    owns_masters: bool = False
    """Whether the fused Adam of the precision-aware optimizer keeps the masters."""
    casts_gradients: bool = True
    """Whether the step of the optimizer casts narrower gradients to FP32."""
    master: str | None = "fp32"
    """The dtype of the optimizer's copy of the weights. None: it updates the weights directly."""
    exp_avg: str = "fp32"
    """The dtype of the first moment."""
    exp_avg_sq: str = "fp32"
    """The dtype of the second moment."""
    remainders: bool = False
    """Whether the masters are kept as the 16 bits that a BF16 weight lacks."""
    is_hybrid_device: bool = False
    """Whether HybridDeviceOptimizer is used (optimizer_cpu_offload). It updates only in FP32."""
    offload_share: float = 0.0
    """The share of masters and optimizer state that HybridDeviceOptimizer keeps on the host."""
    optimizer: str = "adam"
    """Megatron's name of the optimizer."""
    layer_wise: bool = False
    """Whether each data-parallel rank has masters and states of whole parameters (dist_muon)."""
    amax_history: int = 0
    """The steps of amax history that delayed scaling keeps. 0: another scheme."""
    changes: LayerChanges | None = None
    """The changes of a layer by Transformer Engine's debugger. None: the debugger is off."""
    recipes: tuple[QuantRecipe, ...] = field(default=(), compare=False)
    """Per-module recipes: a recipe for all model chunks, or for each chunk in execution order."""
    notes: tuple[str, ...] = ()
    """Sentences about fields that this Megatron Core does not have, and about frozen weights."""

    @property
    def scheme_row(self) -> Scheme | None:
        """The row of the scheme in the table of schemes. None: nothing is quantised."""
        return find_scheme(self.scheme, self.family)

    def copies(self, *, is_grouped: bool = False) -> LayerCopies | None:
        """Return the copies of the operands of a linear layer, or of grouped experts.

        None if FP8 and FP4 are off.
        """
        copies = self._copies_in_forward(is_grouped=is_grouped)
        if copies is None:
            return None
        override = dict(self.te_options).get("backward_override")
        # The recipe class of delayed scaling refuses `backward_override`.
        if override is not None and self.scheme != "delayed":
            copies = apply_backward_override(copies, str(override))
        if self.changes is not None:
            copies = self.changes.apply_to(copies)
        return copies

    def _copies_in_forward(self, *, is_grouped: bool) -> LayerCopies | None:
        """Return the copies without `backward_override`."""
        if self.scheme == "custom":
            factory = find_shipped_factory(self.factory)
            if factory is not None:
                return factory.copies(is_grouped=is_grouped)
        if self.scheme_row is None:
            return None
        copies = make_scheme_copies(self.scheme_row, self.format or "")
        if self.scheme == "nvfp4":
            return apply_nvfp4_options(copies, dict(self.te_options))
        return copies

    def stored_format(self, *, is_grouped: bool) -> str:
        """Return the format of a weight that is stored in FP8 or FP4.

        It is "custom" if the copies of the weight have two formats.
        """
        copies = self._copies_in_forward(is_grouped=is_grouped)
        if copies is None:
            return self.mode
        rowwise, columnwise = copies.weight.row, copies.weight.column
        if rowwise.format != columnwise.format:
            return "custom"
        return rowwise.format or self.mode

    @property
    def in_fp32(self) -> PlanSettings:
        """The settings of modules whose parameters are in FP32. Such parameters have no masters."""
        return replace(
            self,
            mode="fp32",
            autocast=None,
            family=None,
            format=None,
            scheme=None,
            grad_reduce="fp32",
            grad_sent="fp32",
            master=None,
            remainders=False,
        )

    def find_scheme_row(self, scheme: str) -> Scheme | None:
        """Return the row of a module's scheme, by its name."""
        if scheme == self.scheme:
            return self.scheme_row
        return find_scheme(scheme)

    def is_low_precision_layer(self, index: int, num_layers: int) -> bool:
        """Return whether a layer enters the low-precision context, by its number from 0."""
        return (
            self.family is not None
            and self.reaches_layers
            and self.start <= index < num_layers - self.end
        )

    def for_module(self, effect: ModulePrecision | None, *, low: bool) -> tuple[PlanSettings, bool]:
        """Return the settings of a module under a per-module recipe, and whether it is low."""
        if effect is None or not effect.acts_in_layer(is_low=low):
            return self, low
        if effect.family is None:
            return self, False
        settings = replace(
            self,
            family=effect.family,
            format=effect.format,
            scheme=effect.scheme,
            factory=effect.factory,
        )
        return settings, True

    @classmethod
    def from_prediction(cls, run: Prediction) -> PlanSettings:
        """Return the settings of a run after the sync, as its Megatron Core reads them."""
        optimizer = run.read("optimizer")
        ddp = run.read("ddp")
        mcore = run.target.mcore
        settings = _read_model_settings(run)
        settings = _add_gradient_settings(settings, ddp, mcore)
        settings = _add_sharding_settings(settings, optimizer, ddp, mcore)
        settings = _add_state_settings(settings, optimizer)
        settings = _add_fsdp_settings(settings, optimizer, ddp, mcore)
        notes = (
            *_list_notes(run),
            *_list_factory_notes(run, settings.scheme, settings.mode),
            *_list_variable_notes(run, settings.scheme),
        )
        return replace(settings, notes=notes)


def _read_model_settings(run: Prediction) -> PlanSettings:
    """Return the settings that fields of the model decide, and defaults for the others."""
    model, mcore = run.read("model"), run.target.mcore
    mode = find_switched_on(model, ("bf16", "fp16")) or "fp32"
    family = find_switched_on(model, ("fp8", "fp4"))
    is_hybrid_model = run.shape_and_faults[0].is_hybrid
    recipe = model["quant_recipe"]
    if isinstance(recipe, str) and recipe:
        rule = "is the content of a file of configs and matchers, not its path"
        raise RunConfigError.of("model.quant_recipe", rule, recipe, "Write the content.")
    autocast = None
    if model["enable_autocast"]:
        autocast = model["autocast_dtype"] or mode
    reaches_layers = True
    if is_hybrid_model and family == "fp4":
        reaches_layers = is_at_least(mcore, HYBRID_FP4_RELEASE) is not False
    sent: dict[str | None, None] = {}
    for is_local in (False, True):
        sent[get_sent_dtype(model, mcore, is_local=is_local)] = None
    settings = PlanSettings(
        mode=mode,
        autocast=autocast,
        te_options=collect_recipe_keywords(run.environment),
        are_experts_grouped=bool(model["moe_grouped_gemm"]),
        reaches_layers=reaches_layers,
        absorbs=is_at_least(mcore, ABSORBED_RELEASE) is not False,
        fp32_residual=bool(model["fp32_residual_connection"]),
        sent=tuple(sent),
        router=model["moe_router_dtype"],
        recipes=parse_quant_recipes(recipe),
    )
    if family is None:
        return settings
    settings = replace(settings, family=family, scheme=str(model[f"{family}_recipe"]))
    return _add_scheme_settings(settings, model, mcore, is_hybrid_model=is_hybrid_model)


def _add_scheme_settings(
    settings: PlanSettings,
    model: Mapping[str, Any],
    mcore: Version | None,
    *,
    is_hybrid_model: bool,
) -> PlanSettings:
    """Return the settings with those of a run in FP8 or FP4."""
    family, scheme = settings.family, settings.scheme
    runs_output_layer = scheme == "mxfp8" and bool(model["fp8_output_proj"])
    settings = replace(
        settings,
        format=str(model[str(family)]),
        output_layer=runs_output_layer and not is_hybrid_model,
        low_parameters=bool(model[f"{family}_param"]),
        keeps_weight_transposes=bool(model["keep_fp8_weight_transpose_cache"]),
    )
    if scheme == "custom":
        settings = replace(settings, factory=model[f"{family}_quantizer_factory"])
    if scheme == "delayed":
        settings = replace(settings, amax_history=model["fp8_amax_history_len"] or 0)
    if model["first_last_layers_bf16"]:
        start, end = LAYER_COUNTS
        settings = replace(settings, start=model[start] or 0, end=model[end] or 0)
    scheme_row = settings.scheme_row
    if _is_attention_field_read("fp8_dot_product_attention", scheme_row, mcore):
        settings = replace(settings, attention=bool(model["fp8_dot_product_attention"]))
    if _is_attention_field_read("fp8_multi_head_attention", scheme_row, mcore):
        settings = replace(settings, multi_head_attention=bool(model["fp8_multi_head_attention"]))
    return settings


def _is_attention_field_read(name: str, scheme: Scheme | None, mcore: Version | None) -> bool:
    """Return whether a version of Megatron Core passes a field about attention to a scheme."""
    if scheme is None or name not in list_scheme_fields(scheme):
        return False
    first = FP8_ATTENTION_RELEASES.get(scheme.name)
    return first is None or is_at_least(mcore, first) is not False


def _add_gradient_settings(
    settings: PlanSettings, ddp: Mapping[str, Any], mcore: Version | None
) -> PlanSettings:
    """Return the settings with the dtypes of the gradients."""
    accumulated, reduced = get_gradient_dtypes(ddp, settings.mode, mcore)
    return replace(
        settings,
        grad_reduce=accumulated,
        grad_sent=reduced,
        reduce_in_fp32=bool(ddp["reduce_scatter_with_fp32_accumulation"]),
    )


def _add_sharding_settings(
    settings: PlanSettings,
    optimizer: Mapping[str, Any],
    ddp: Mapping[str, Any],
    mcore: Version | None,
) -> PlanSettings:
    """Return the settings, with the settings of the distributed optimizer added."""
    if ddp["use_megatron_fsdp"]:
        return replace(settings, distributed=True)
    is_distributed = optimizer["use_distributed_optimizer"] or ddp["use_distributed_optimizer"]
    leaves_weights_out = (
        settings.scheme == "mxfp8" and is_at_least(mcore, MAPPED_WEIGHTS_RELEASE) is False
    )
    reuses_buffer = bool(ddp["reuse_grad_buf_for_mxfp8_param_ag"])
    return replace(
        settings,
        distributed=bool(is_distributed),
        unused_weight_buffer=leaves_weights_out and reuses_buffer,
    )


def _add_state_settings(settings: PlanSettings, optimizer: Mapping[str, Any]) -> PlanSettings:
    """Return the settings, with masters and moments of Megatron's optimizers without FSDP added."""
    name = str(optimizer["optimizer"])
    is_hybrid_device = bool(optimizer["optimizer_cpu_offload"])
    is_aware = bool(optimizer["use_precision_aware_optimizer"])
    main = _get_state_dtype(optimizer["main_params_dtype"])
    is_fused = main != "fp32" or optimizer["fp8_recipe"] in FUSED_ADAM_RECIPES or is_hybrid_device
    owns_masters = is_aware and is_fused
    is_layer_wise = bool(optimizer.get("use_layer_wise_distributed_optimizer"))
    settings = replace(
        settings,
        optimizer=name,
        is_hybrid_device=is_hybrid_device,
        layer_wise=is_layer_wise or name.startswith("dist_"),
        owns_masters=owns_masters,
        casts_gradients=not owns_masters,
        master="fp32",
    )
    if is_hybrid_device:
        fraction = float(optimizer["optimizer_offload_fraction"] or 0)
        settings = replace(settings, offload_share=min(1.0, fraction))
    elif is_aware:
        settings = replace(
            settings,
            exp_avg=_get_state_dtype(optimizer["exp_avg_dtype"]),
            exp_avg_sq=_get_state_dtype(optimizer["exp_avg_sq_dtype"]),
        )
        if owns_masters:
            keeps_remainders = bool(optimizer["store_param_remainders"])
            are_remainders = keeps_remainders and settings.mode == "bf16" and main == "fp32"
            settings = replace(settings, master=main, remainders=are_remainders)
    if settings.mode == "fp32":
        settings = replace(settings, master=None)
    return settings


def _add_fsdp_settings(
    settings: PlanSettings,
    optimizer: Mapping[str, Any],
    ddp: Mapping[str, Any],
    mcore: Version | None,
) -> PlanSettings:
    """Return the settings, with the settings of Megatron-FSDP added.

    Megatron-FSDP keeps masters of FP32 weights too.
    """
    if not ddp["use_megatron_fsdp"]:
        return settings
    master = None
    if is_at_least(mcore, FSDP_MASTERS_RELEASE) is not False:
        master = ddp["megatron_fsdp_main_params_dtype"]
    elif ddp["preserve_fp32_weights"]:
        master = "fp32"
    is_decoupled = False
    if optimizer["use_precision_aware_optimizer"]:
        is_decoupled = is_at_least(mcore, FSDP_DECOUPLED_RELEASE) is not False
    return replace(
        settings,
        fsdp=True,
        has_units=is_at_least(mcore, FSDP_UNITS_RELEASE) is not False,
        master=master,
        remainders=False,
        offload_share=0.0,
        casts_gradients=not is_decoupled,
    )


def _get_state_dtype(dtype: str) -> str:
    """Return the dtype of an optimizer's state. A state of the dtype uint8 is FP8."""
    if dtype == "uint8":
        return "fp8"
    return dtype


def _list_absent_fields(run: Prediction) -> Iterator[str]:
    """Yield a sentence about each stated field that the run's Megatron Core does not have."""
    for role in ("model", "optimizer", "ddp"):
        for name, versions in run.absent[role].items():
            yield (
                f"{role}.{name} has no effect in megatron-core {run.target.mcore}, which has no such "
                f"field ({versions})."
            )


def _list_notes(run: Prediction) -> Iterator[str]:
    """Yield sentences about fields without effect, frozen weights and unreleased models."""
    if not run.has_assumed_release:
        yield from _list_absent_fields(run)
    model = run.values["model"]
    if model["keep_mtp_spec_in_bf16"] and (model["fp8"] or model["fp4"]):
        yield (
            "model.keep_mtp_spec_in_bf16 has no effect: neither Megatron Bridge nor Megatron Core "
            "reads it."
        )
    if model["experimental_attention_variant"] == COMPRESSED_HYBRID:
        yield (
            f"model.experimental_attention_variant={COMPRESSED_HYBRID} is in Megatron-LM's "
            "development branch alone (dev of 2026-08-21): no release of Megatron Core builds this "
            "model."
        )
    if model["freeze_language_model"]:
        yield (
            "The language model is frozen (model.freeze_language_model): none of its weights is "
            "trained."
        )
    if model["freeze_moe_router"] and model["num_moe_experts"]:
        yield "The routers of the experts are frozen (model.freeze_moe_router): they are not trained."


def _list_factory_notes(run: Prediction, scheme: str | None, mode: str) -> Iterator[str]:
    """Yield a sentence about each quantizer factory, of the run or of a module.

    The plan does not know the formats that a factory makes.
    """
    model = run.values["model"]
    factories: list[str | None] = []
    if scheme == "custom":
        for family in ("fp8", "fp4"):
            if model[family]:
                factories.append(model[f"{family}_quantizer_factory"])
    for matcher in list_matchers(model["quant_recipe"]):
        for effect in matcher.effects:
            factories.append(effect.factory)
    for path in dict.fromkeys(factories):
        if not path:
            continue
        shipped = find_shipped_factory(path)
        if shipped is None:
            yield (
                f"{path} is code that is not read: which quantizers it makes cannot be known, so "
                "its GEMMs are custom."
            )
        elif shipped.quantises_attention:
            yield (
                f"{shipped.name} quantises no attention: Megatron makes its CustomRecipe without "
                f"fp8_dpa, so attention stays in {mode}."
            )


def _list_variable_notes(run: Prediction, scheme: str | None) -> Iterator[str]:
    """Yield a sentence about each environment variable of the run that changes its scheme."""
    if scheme is None:
        return
    for variable, text in list_scheme_variables(scheme, run.environment, attention=False):
        if variable.keyword and variable.is_active(text) and scheme not in variable.refused_by:
            yield f"{variable.name}={text}: it {variable.effect}."

"""`PlanSettings`: the settings that a plan depends on, with their values after the sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError
from bridge.model.compressed_attention import COMPRESSED_HYBRID
from bridge.model.layout import get_sent_dtype
from bridge.model.section import find_switched_on
from bridge.precision.config import list_scheme_fields
from bridge.precision.fields import LAYER_COUNTS
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
from bridge.precision.quantizer_factories import find_shipped_factory
from bridge.precision.schemes import Scheme, find_scheme
from bridge.rules.variables import collect_recipe_keywords, list_scheme_variables
from bridge.sync.prediction import Prediction
from bridge.target.fields import FUSED_ADAM_RECIPES, get_gradient_dtypes
from bridge.target.versions import Version, is_at_least

if TYPE_CHECKING:
    from bridge.precision.debug_features import LayerChanges

FP8_ATTENTION_FIELDS = ("fp8_dot_product_attention", "fp8_multi_head_attention")
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
    """Dtype that torch.autocast casts matrix multiplications to. None: autocast is off."""
    family: str | None = None
    """fp8 or fp4. None: both are off."""
    format: str | None = None
    scheme: str | None = None
    factory: str | None = None
    """Import path of the quantizer factory, under the scheme `custom`."""
    te_options: tuple[tuple[str, object], ...] = ()
    """Keywords of Transformer Engine's recipe classes that environment variables change."""
    start: int = 0
    """The number of first layers that stay in the mode's dtype. `end` counts the last layers."""
    end: int = 0
    attention: bool = False
    multi_head_attention: bool = False
    """Whether tensors between the attention core and its projections are in FP8."""
    output_layer: bool = False
    """Whether the output layer runs in MXFP8. A GPTModel can do so from megatron-core 0.18 on."""
    reaches_layers: bool = True
    """Whether the blocks of the model enter the low-precision context.

    The blocks of a hybrid model enter the FP4 context from 0.17 on.
    """
    are_experts_grouped: bool = False
    """Whether the experts of a layer are a single layer of Transformer Engine, `GroupedLinear`."""
    absorbs: bool = True
    """Whether sparse attention itself multiplies by the weight of the key-value up projection.

    Then no linear layer runs this product.
    """
    low_parameters: bool = False
    unused_weight_buffer: bool = False
    """Whether other weights of an MXFP8 model are not in the buffer that Megatron allocates."""
    grad_reduce: str = "fp32"
    """Dtype that gradients are accumulated in."""
    grad_sent: str = "fp32"
    """Dtype that gradients are reduced in."""
    reduce_in_fp32: bool = False
    """Whether narrow gradients are summed in FP32 (reduce_scatter_with_fp32_accumulation)."""
    fp32_residual: bool = False
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
    """Whether the optimizer's step makes FP32 gradients from narrower gradients."""
    master: str | None = "fp32"
    """The dtype of the optimizer's copy of the weights. None: it updates the weights directly."""
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    remainders: bool = False
    """Whether a master is kept as the 16 bits that a BF16 weight lacks."""
    is_hybrid_device: bool = False
    """Whether HybridDeviceOptimizer is used (optimizer_cpu_offload). It updates only in FP32."""
    offload_share: float = 0.0
    """Share of masters and optimizer state that HybridDeviceOptimizer keeps on the host."""
    optimizer: str = "adam"
    layer_wise: bool = False
    """Whether each data-parallel rank has masters and states of whole parameters (dist_muon)."""
    amax_history: int = 0
    """Steps of amax history that delayed scaling keeps. 0: another scheme."""
    changes: LayerChanges | None = None
    """Changes of a layer by Transformer Engine's debugger."""
    recipes: tuple[QuantRecipe, ...] = field(default=(), compare=False)
    """Per-module recipes: a recipe for all model chunks, or for each chunk in execution order."""
    notes: tuple[str, ...] = ()
    """Sentences about fields that this Megatron Core does not have, and about frozen weights."""

    @property
    def row(self) -> Scheme | None:
        """The row of the scheme in the table of schemes."""
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
        if self.row is None:
            return None
        copies = make_scheme_copies(self.row, self.format or "")
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
        row, column = copies.weight.row, copies.weight.column
        if row.format != column.format:
            return "custom"
        return row.format or self.mode

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

    def row_of(self, scheme: str) -> Scheme | None:
        """Return the row of a module's scheme, by its name."""
        if scheme == self.scheme:
            return self.row
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
        of_model = _read_model_settings(run)
        mode, scheme = of_model["mode"], of_model["scheme"]
        is_mapped = scheme != "mxfp8" or is_at_least(mcore, MAPPED_WEIGHTS_RELEASE) is not False
        notes = [
            *_list_notes(run),
            *_list_factory_notes(run, scheme, mode),
            *_list_variable_notes(run, scheme),
        ]
        states = _read_state_settings(optimizer, mode)
        states.update(_read_fsdp_settings(optimizer, ddp, mcore))
        return cls(
            **of_model,
            notes=tuple(notes),
            **_read_gradient_settings(ddp, mode, mcore),
            **_read_sharding_settings(optimizer, ddp, is_mapped=is_mapped),
            **states,
        )


def _read_model_settings(run: Prediction) -> dict[str, Any]:
    """Return the settings that fields of the model decide."""
    model, mcore = run.read("model"), run.target.mcore
    mode = find_switched_on(model, ("bf16", "fp16")) or "fp32"
    family = find_switched_on(model, ("fp8", "fp4"))
    scheme = None
    if family is not None:
        scheme = str(model[f"{family}_recipe"])
    is_hybrid = run.shape_and_faults[0].is_hybrid
    recipe = model["quant_recipe"]
    if isinstance(recipe, str) and recipe:
        rule = "is the content of a file of configs and matchers, not its path"
        raise RunConfigError.of("model.quant_recipe", rule, recipe, "Write the content.")
    autocast = None
    if model["enable_autocast"]:
        autocast = model["autocast_dtype"] or mode
    reaches_layers = True
    if is_hybrid and family == "fp4":
        reaches_layers = is_at_least(mcore, HYBRID_FP4_RELEASE) is not False
    sent: dict[str | None, None] = {}
    for is_local in (False, True):
        sent[get_sent_dtype(model, mcore, is_local=is_local)] = None
    settings = {
        "mode": mode,
        "autocast": autocast,
        "family": family,
        "format": None,
        "scheme": scheme,
        "te_options": collect_recipe_keywords(run.environment),
        "are_experts_grouped": bool(model["moe_grouped_gemm"]),
        "reaches_layers": reaches_layers,
        "absorbs": is_at_least(mcore, ABSORBED_RELEASE) is not False,
        "fp32_residual": bool(model["fp32_residual_connection"]),
        "sent": tuple(sent),
        "router": model["moe_router_dtype"],
        "recipes": parse_quant_recipes(recipe),
    }
    if family is not None and scheme is not None:
        settings.update(_read_scheme_settings(model, family, scheme, mcore, is_hybrid=is_hybrid))
    return settings


def _read_scheme_settings(
    model: Mapping[str, Any], family: str, scheme: str, mcore: Version | None, *, is_hybrid: bool
) -> dict[str, Any]:
    """Return the settings of a run in FP8 or FP4."""
    settings: dict[str, Any] = {
        "format": str(model[family]),
        "output_layer": scheme == "mxfp8" and bool(model["fp8_output_proj"]) and not is_hybrid,
        "low_parameters": bool(model[f"{family}_param"]),
    }
    if scheme == "custom":
        settings["factory"] = model[f"{family}_quantizer_factory"]
    if scheme == "delayed":
        settings["amax_history"] = model["fp8_amax_history_len"] or 0
    if model["first_last_layers_bf16"]:
        start, end = LAYER_COUNTS
        settings["start"] = model[start] or 0
        settings["end"] = model[end] or 0
    for name, field_name in zip(
        ("attention", "multi_head_attention"), FP8_ATTENTION_FIELDS, strict=True
    ):
        if _is_attention_field_read(field_name, find_scheme(scheme, family), mcore):
            settings[name] = bool(model[field_name])
    return settings


def _is_attention_field_read(name: str, row: Scheme | None, mcore: Version | None) -> bool:
    """Return whether a version of Megatron Core passes a field about attention to a scheme."""
    if row is None or name not in list_scheme_fields(row):
        return False
    first = FP8_ATTENTION_RELEASES.get(row.name)
    return first is None or is_at_least(mcore, first) is not False


def _read_gradient_settings(
    ddp: Mapping[str, Any], mode: str, mcore: Version | None
) -> dict[str, Any]:
    accumulated, reduced = get_gradient_dtypes(ddp, mode, mcore)
    in_fp32 = bool(ddp["reduce_scatter_with_fp32_accumulation"])
    return {"grad_reduce": accumulated, "grad_sent": reduced, "reduce_in_fp32": in_fp32}


def _read_sharding_settings(
    optimizer: Mapping[str, Any], ddp: Mapping[str, Any], *, is_mapped: bool
) -> dict[str, Any]:
    """Return the settings of sharding. With `is_mapped`, every weight is in Megatron's buffer."""
    if ddp["use_megatron_fsdp"]:
        return {"distributed": True, "unused_weight_buffer": False}
    distributed = optimizer["use_distributed_optimizer"] or ddp["use_distributed_optimizer"]
    is_unused = not is_mapped and bool(ddp["reuse_grad_buf_for_mxfp8_param_ag"])
    return {"distributed": bool(distributed), "unused_weight_buffer": is_unused}


def _read_fsdp_settings(
    optimizer: Mapping[str, Any], ddp: Mapping[str, Any], mcore: Version | None
) -> dict[str, Any]:
    """Return the settings of Megatron-FSDP. It keeps masters itself, even for FP32 weights."""
    if not ddp["use_megatron_fsdp"]:
        return {}
    if is_at_least(mcore, FSDP_MASTERS_RELEASE) is False:
        master = "fp32" if ddp["preserve_fp32_weights"] else None
    else:
        master = ddp["megatron_fsdp_main_params_dtype"]
    is_decoupled = False
    if optimizer["use_precision_aware_optimizer"]:
        is_decoupled = is_at_least(mcore, FSDP_DECOUPLED_RELEASE) is not False
    return {
        "fsdp": True,
        "has_units": is_at_least(mcore, FSDP_UNITS_RELEASE) is not False,
        "master": master,
        "remainders": False,
        "offload_share": 0.0,
        "casts_gradients": not is_decoupled,
    }


def _read_state_settings(optimizer: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return the settings of masters and moments of Megatron's optimizers without FSDP."""
    name = str(optimizer["optimizer"])
    is_hybrid = bool(optimizer["optimizer_cpu_offload"])
    is_aware = bool(optimizer["use_precision_aware_optimizer"])
    main = _get_state_dtype(optimizer["main_params_dtype"])
    owns_masters = is_aware and (
        main != "fp32" or optimizer["fp8_recipe"] in FUSED_ADAM_RECIPES or is_hybrid
    )
    layer_wise = bool(optimizer.get("use_layer_wise_distributed_optimizer"))
    settings: dict[str, Any] = {
        "optimizer": name,
        "is_hybrid_device": is_hybrid,
        "layer_wise": layer_wise or name.startswith("dist_"),
        "owns_masters": owns_masters,
        "casts_gradients": not owns_masters,
        "master": "fp32",
    }
    if is_hybrid:
        fraction = float(optimizer["optimizer_offload_fraction"] or 0)
        settings["offload_share"] = min(1.0, fraction)
    elif is_aware:
        settings["exp_avg"] = _get_state_dtype(optimizer["exp_avg_dtype"])
        settings["exp_avg_sq"] = _get_state_dtype(optimizer["exp_avg_sq_dtype"])
        if owns_masters:
            settings["master"] = main
            keeps_remainders = bool(optimizer["store_param_remainders"])
            settings["remainders"] = keeps_remainders and mode == "bf16" and main == "fp32"
    if mode == "fp32":
        settings["master"] = None
    return settings


def _get_state_dtype(dtype: str) -> str:
    """Return the dtype of an optimizer's state. A state of the dtype uint8 is FP8."""
    return "fp8" if dtype == "uint8" else dtype


def _list_notes(run: Prediction) -> Iterator[str]:
    """Yield sentences about fields without effect, frozen weights and unreleased models."""
    for role in ("model", "optimizer", "ddp"):
        for name, versions in run.absent[role].items():
            yield (
                f"{role}.{name} has no effect in megatron-core {run.target.mcore}, which has no such "
                f"field ({versions})."
            )
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
    for row, value in list_scheme_variables(scheme, run.environment, attention=False):
        if row.keyword and row.is_active(value) and scheme not in row.refused_by:
            yield f"{row.name}={value}: it {row.effect}."
